"""Stands in for flash-linear-attention, as far as transformers asks for it: torch's way, sample by sample."""
