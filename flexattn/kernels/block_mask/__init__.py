"""The kernel that finds which blocks a mask keeps."""
