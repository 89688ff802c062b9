"""LLaVA with an encoder of tables."""
