"""What packing, plans and runs note for each other and for users: damaged notes, orders, lists of sizes and records."""

import copy
import fcntl
import json
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from megatron.vlm.data.manifest import read_media
from megatron.vlm.hf import convert
from megatron.vlm.hf.peft_config import PeftExtras
from megatron.vlm.preflight.saving import check_run_folder
from omnibal_ext.costs.operations import EFFICIENCIES, measured_device
from omnibal_ext.files import locks
from omnibal_ext.launch.folder import is_made
from omnibal_ext.launch.longest import longest_sample
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.command import load_corpus
from omnibal_ext.packing.comparison import Order
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex, refuse_other
from omnibal_ext.packing.index.rebalanced import RankLayout, read_rebalanced, rebalance, write_rebalanced
from omnibal_ext.packing.index.why import why
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.report.packing import PackingView
from omnibal_ext.run_metrics import noted_inputs
from omnibal_ext.sizes import Sizes, sizes_files
from tests.fuzz.reader import Reader, true_hashes

LAYOUT = RankLayout(1, 2, "drop")


def readers(folder: Path) -> dict[str, Reader]:
    """The readers by name; whole files are made in the folder."""
    return {
        "order": _order(), "sizes-list": _sizes_list(), "levelled": _levelled(folder / "levelled"),
        "run-notes": _run_notes(), "lock": _lock(), "card": _card(), "media": _media(),
        "export": _export(),
        "packing-report": _packing_report(folder / "reported"), "longest": _longest(folder / "longest"),
    }  # fmt: skip


def _line(*values: Any) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def _order() -> Reader:
    files = {"plain.jsonl": _line([[0, 1], [2]], [[3], [4, 5]]), "parts.jsonl": _line([[[0], [1]], [[2, 3], []]])}

    def read(folder: Path) -> None:
        for name in files:
            Order.read(folder / name, 6)

    return Reader(files, read)


def _sizes_list() -> Reader:
    rows = [{"vit_num": 3, "token_num": 800}, {"vit_num": 0, "token_num": 12}]
    files = {
        "corpus.json": json.dumps({"a": {"token_lengths": "a.json"}, "b": {}}).encode(),
        "a.json": json.dumps(rows).encode(),
    }

    def read(folder: Path) -> None:
        for path in sizes_files([folder / "corpus.json"]):
            if path.resolve().parent == folder.resolve():
                Sizes.load(path)

    return Reader(files, read)


def _index(folder: Path, too_long: int = 0) -> PackedIndex:
    generator = np.random.default_rng(0)
    tiles, tokens = generator.integers(0, 5, 40), generator.integers(5, 90, 40)
    sizes = Sizes.from_arrays([*tiles, *[0] * too_long], [*tokens, *[900] * too_long])
    build_index(sizes, folder, PackOptions(vit_budget=9, llm_budget=200, micro_batches=2, seconds=0.0))
    return PackedIndex.open(folder)


def _levelled(folder: Path) -> Reader:
    index = _index(folder)
    write_rebalanced(index, LAYOUT, rebalance(index, PackStream(index, *LAYOUT).order, LAYOUT))

    def read(folder: Path) -> None:
        read_rebalanced(_moved(index, folder), LAYOUT)
        refuse_other(folder, index.manifest)

    names = (LAYOUT.path(index).name, "manifest.json")
    return Reader({name: (folder / name).read_bytes() for name in names}, read, true_hashes)


def _run_notes() -> Reader:
    """What a run's folder says of the run."""
    asked = {"model": "tiny", "budgets": [4, 64]}
    files = {
        "inputs.json": json.dumps({"data": "/data", "flags": {"model": "tiny"}}).encode(),
        "made.json": json.dumps(asked).encode(),
    }

    def read(folder: Path) -> None:
        is_made(folder / "made.json", asked)
        noted_inputs(folder)
        args = Namespace(metrics_file=str(folder / "made.json"), tensorboard_dir=None, save=None)
        check_run_folder(args, folder)

    return Reader(files, read)


def _lock() -> Reader:
    """What a lock that another process holds says of it."""

    def read(folder: Path) -> None:
        with (folder / "job.lock").open("a") as held, patch.object(locks, "PATIENCE_SECONDS", 0.0):
            fcntl.flock(held, fcntl.LOCK_EX)
            with locks.only_job(folder / "job.lock", "the job"):
                raise AssertionError("two processes have one lock")

    return Reader({"job.lock": json.dumps({"process": 1, "host": "a", "job": "x"}).encode()}, read)


def _card() -> Reader:
    record = {"efficiencies": dict.fromkeys(EFFICIENCIES, 0.5)}
    return Reader({"h100.json": json.dumps(record).encode()}, lambda folder: measured_device("h100", folder))


def _packing_report(folder: Path) -> Reader:
    index = _index(folder, too_long=1)
    rows = [{"sample": number, "reason": "too_long", "detail": "x"} for number in (0, 1, 40)]

    def read(folder: Path) -> None:
        view = PackingView(index=_moved(index, folder), sizes=None)
        _ = view.rejects, view.reasons
        why(view.index, "40")

    return Reader({"rejected.jsonl": _line(*rows)}, read)


def _moved(index: PackedIndex, folder: Path) -> PackedIndex:
    """The index, as if it lay in another folder."""
    moved = copy.copy(index)
    moved.folder = folder
    return moved


def _media() -> Reader:
    image = {"path": "a.png", "columns": 1, "rows": 2, "thumbnail": True, "width": 64, "height": 32, "crcs": [7]}
    sound = {"path": "a.wav", "samples": 16000, "frames": 100, "tokens": 25, "place": [], "crcs": [7]}
    lists = {"images": [image], "sounds": [sound]}
    older = {f"{name}.json": json.dumps(listed).encode() for name, listed in lists.items()}

    def read(folder: Path) -> None:
        read_media({"media": (folder / "media.json").read_bytes()})
        read_media({name: (folder / f"{name}.json").read_bytes() for name in lists})

    return Reader({"media.json": json.dumps(lists).encode(), **older}, read)


def _export() -> Reader:
    """What a converted checkpoint keeps of the folder it was made from."""
    files = {
        convert.LISTING: json.dumps({"a": ["model.safetensors", "BF16", [2, 3]]}).encode(),
        PeftExtras.FIELDS: json.dumps({"lora_dropout": 0.1, "use_rslora": True}).encode(),
    }

    def read(folder: Path) -> None:
        PeftExtras.of(folder)
        convert._listing(folder)

    return Reader(files, read)


def _longest(folder: Path) -> Reader:
    index = _index(folder)
    sizes = Sizes.from_arrays([1] * 39 + [400], [50] * 40)
    sizes.save(folder / "sizes.npz", frames=np.zeros(40, np.int64))
    manifest = {"tiling": {"max_tiles": 400}, "tile_size": 14}
    manifest |= {"sources": [{"file": "a.jsonl", "samples": 40, "weight": 1.0}]}
    files = {"sizes.npz": (folder / "sizes.npz").read_bytes(), "manifest.json": json.dumps(manifest).encode()}

    def read(folder: Path) -> None:
        longest_sample(folder, index, is_native=True, is_limited=False)
        load_corpus(Namespace(data=str(folder), sizes=None, weights=None, separate_sources=False, group_by=None,
                              held_out=0, held_out_of=None, seed=0, budgets=()))  # fmt: skip

    return Reader(files, read)
