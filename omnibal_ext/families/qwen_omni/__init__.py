"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: what they see and read; what they hear is not trained yet."""
