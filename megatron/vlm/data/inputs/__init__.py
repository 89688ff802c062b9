"""From samples of a dataset to what encoders read of a pack; a module for each encoder, found in `registry`."""
