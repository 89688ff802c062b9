"""Sounds, as mel frames: how an encoder hears them."""
