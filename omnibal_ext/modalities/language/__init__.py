"""Words: the language model."""
