"""The deciding half of OmniBal: packing, layouts, schedules, simulation. Needs numpy and numba, never torch."""
