"""Megatron's flags: three lists of those that may be given or are set, with what they need; all others are refused."""
