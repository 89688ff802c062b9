"""From pixels to image tokens: ViTs, and what brings their features to the language model's width."""
