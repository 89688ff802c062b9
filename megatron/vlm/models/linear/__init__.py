"""Linear attention: layers that carry a state from token to token, in each sample of a pack by itself."""
