"""Samples to packs, packs to iterations."""

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, Source
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.epoch import pack
from omnibal_ext.packing.index import PackedIndex, write_index
from omnibal_ext.packing.options import METHODS, PackOptions
from omnibal_ext.packing.packs import Packs, pack_loads
from omnibal_ext.packing.sampler import PackBatchSampler
from omnibal_ext.packing.summary import Summary

__all__ = [
    "METHODS",
    "Corpus",
    "PackBatchSampler",
    "PackCosts",
    "PackOptions",
    "PackStream",
    "PackedIndex",
    "Packs",
    "Source",
    "Summary",
    "build_index",
    "epoch_iterations",
    "pack",
    "pack_loads",
    "write_index",
]
