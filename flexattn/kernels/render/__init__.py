"""From a problem and a config to a kernel's source, a real file that anyone can open and run."""
