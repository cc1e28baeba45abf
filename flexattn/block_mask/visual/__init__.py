"""visual: a mod as a picture, for lengths whose square fits nowhere."""

from flexattn.block_mask.visual.look import visualize
from flexattn.block_mask.visual.picture import Picture

__all__ = ["Picture", "visualize"]
