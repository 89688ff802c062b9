"""Qwen3.5 and Qwen3.6, dense and with experts."""
