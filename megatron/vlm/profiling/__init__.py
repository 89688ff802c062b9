"""Measuring what training costs: layers, actions, transfers; seconds and bytes."""
