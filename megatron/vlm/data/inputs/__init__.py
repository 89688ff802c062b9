"""Inputs of encoders: what they read of a pack, from samples of a dataset. A module each, found in `registry`."""
