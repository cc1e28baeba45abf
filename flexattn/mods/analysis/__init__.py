"""analysis: what a mod's expression says before it runs. A mask's is one value: mask_form."""
