"""Thinkers of Qwen2.5-Omni and Qwen3-Omni: what they read, see and hear."""
