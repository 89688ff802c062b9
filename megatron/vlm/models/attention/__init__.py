"""Attention of a pack: no sample sees another, heads fill up ranks, queries and keys turn."""
