"""LLaVA-1.5, LLaVA-1.6 (LLaVA-NeXT), LLaVA-Interleave and LLaVA-OneVision."""
