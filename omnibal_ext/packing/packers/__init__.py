"""Samples to packs within budgets, and the choice of the budgets."""
