"""Pytest plugin: an example that fails is enough, hypothesis need not look for the smallest one."""

from hypothesis import Phase, settings

settings.register_profile("no shrinking", settings.default, phases=(Phase.explicit, Phase.reuse, Phase.generate))
settings.load_profile("no shrinking")
