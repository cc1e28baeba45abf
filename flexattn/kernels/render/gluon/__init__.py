"""Rendering for the warp-specialised Hopper template, whose language is Gluon."""
