"""Modules of the model: each element of the layer chain (embedding, layer, projector, head) is built here."""
