"""Modules of the model: each layer of the layer chain (embedding, layer, projector, head) is built here."""
