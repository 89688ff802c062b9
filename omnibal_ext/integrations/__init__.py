"""Balanced packs inside other people's trainers, a module each; none imports torch or its trainer until it is used."""
