"""Hugging Face weights in and out, a tensor at a time."""
