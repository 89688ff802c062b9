"""Measurement of the seconds and bytes of layers, pipeline actions and transfers."""
