"""DeepSeek-VL."""
