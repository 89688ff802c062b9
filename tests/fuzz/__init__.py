"""Damaged and made-up files for every reader: `python -m tests.fuzz`."""
