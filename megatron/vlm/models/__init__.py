"""Modules of the model: each link of the layer chain (embedding, layer, projector, head) is built here."""
