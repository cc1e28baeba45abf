"""visual: a mod as a picture, for lengths whose square fits nowhere."""

from flexattn.visual.look import visualize
from flexattn.visual.picture import Picture

__all__ = ["Picture", "visualize"]
