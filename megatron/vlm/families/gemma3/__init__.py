"""Gemma 3 (arXiv 2503.19786)."""
