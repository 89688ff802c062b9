"""Checks of a run before its ranks start: inputs, weights, machine. No model is built."""
