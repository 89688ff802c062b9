"""Packs to iterations in which ranks hardly wait and whose samples look like the corpus."""
