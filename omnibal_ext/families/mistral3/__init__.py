"""Mistral Small 3.1 and 3.2, Ministral 3."""
