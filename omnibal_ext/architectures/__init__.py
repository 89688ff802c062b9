"""Models as plain data: what they are, those we know, and Hugging Face's config.json read as one."""
