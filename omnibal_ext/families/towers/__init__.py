"""Towers that several families have: language models, ViTs of tiles."""
