"""Gemma 4 without towers."""
