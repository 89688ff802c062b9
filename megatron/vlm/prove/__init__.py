"""Are packs isolated? Any collator's batches against transformers' model on their samples alone."""
