"""Checkpoints that can be believed: which saves are whole, of what run they are, and how they are read safely."""
