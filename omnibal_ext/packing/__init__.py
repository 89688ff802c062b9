"""Samples to packs, packs to iterations."""
