"""integrations: flexattn inside other libraries, which are imported when they are asked for."""
