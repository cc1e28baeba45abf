"""Which of several configs serves: the first that builds, loads, and whose loops spill little."""
