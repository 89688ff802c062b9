"""Costs of layers: measured, or counted from operations."""
