"""Schemas in which datasets list what encoders read; a module for each modality, found in `registry`."""
