"""The files that people keep conversations in: each format is cut into parts of a few hundred rows, and read again."""
