"""Planning of layouts: where the layer chain is cut, which layers are recomputed, in which order ranks act."""
