"""Attention over a pack: samples isolated, heads padded for tensor parallelism, queries and keys rotated."""
