"""Torch modules that one family of models has alone."""
