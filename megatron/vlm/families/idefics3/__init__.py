"""Idefics 3 and SmolVLM."""
