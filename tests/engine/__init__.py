"""What stands in for Transformer Engine: its published signatures and arithmetic, on any device."""
