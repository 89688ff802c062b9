"""What can be known of a run before its first rank starts: inputs, weights, machine. No model is built."""
