"""Checkpoints: which saves are complete, which run they belong to, and loading without running code from them."""
