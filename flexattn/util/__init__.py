"""Small tools that know nothing of attention."""
