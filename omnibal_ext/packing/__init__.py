"""Samples to packs, packs to iterations."""

from omnibal_ext.packing.build import METHODS, PackOptions, Summary, build_index, pack
from omnibal_ext.packing.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index import PackedIndex, write_index
from omnibal_ext.packing.packs import Packs, pack_loads

__all__ = [
    "METHODS",
    "PackOptions",
    "PackStream",
    "PackedIndex",
    "Packs",
    "Summary",
    "build_index",
    "epoch_iterations",
    "pack",
    "pack_loads",
    "write_index",
]
