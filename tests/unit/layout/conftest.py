"""Compiling on the first call takes longer than hypothesis allows an example."""

from hypothesis import settings

settings.register_profile("compiling", settings.default, deadline=None)
settings.load_profile("compiling")
