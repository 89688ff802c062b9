"""Samples to packs: the packers, and the budgets they keep."""
