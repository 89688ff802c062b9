"""Stages of the layer chain, the tensors that travel between them, and the executor of a schedule."""
