"""Formats of input files: each is cut into parts of a few hundred rows, which are then read one by one."""
