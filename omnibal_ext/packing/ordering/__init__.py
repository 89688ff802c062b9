"""Packs to iterations: even packs, level ranks, an order in which every iteration looks like the corpus."""
