"""Linear layers and norms."""
