"""ViTs, which make features of pixels, and projectors, which make image tokens of these."""
