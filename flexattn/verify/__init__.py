"""The accuracy gate, and the check of a kernel before its first result is used."""
