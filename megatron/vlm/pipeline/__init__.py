"""Stages of the layer chain, how tensors travel between them, and the executor of a schedule."""
