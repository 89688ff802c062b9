"""The deciding half of OmniBal: packing, layouts, schedules, simulation. Needs numpy and numba, never torch."""

from pathlib import Path as _Path

from omnibal_ext.compiled import forget_stale

forget_stale(_Path(__file__).parent)
