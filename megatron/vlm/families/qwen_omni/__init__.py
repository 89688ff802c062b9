"""Qwen2.5-Omni and Qwen3-Omni: what their thinkers hear."""
