"""The parts of the model, each a link of the layer chain."""
