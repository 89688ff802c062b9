"""Random numbers for compiled loops: a function of seed and position, equal on all machines."""

import numba
import numpy as np


@numba.njit(cache=True)
def hash_bits(seed: int, position: int) -> np.uint64:
    """Return 64 random bits for a seed and a position (the finaliser of SplitMix64)."""
    bits = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@numba.njit(cache=True)
def below(limit: int, seed: int, position: int) -> int:
    """Return a random integer from 0 to `limit` - 1, always the same for a seed and a position."""
    return int(np.int64(hash_bits(seed, position) % np.uint64(limit)))
