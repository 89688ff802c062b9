"""PaliGemma (arXiv 2407.07726)."""
