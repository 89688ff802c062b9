"""Where the layer chain is cut and which layers are recomputed."""
