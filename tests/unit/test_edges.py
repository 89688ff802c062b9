"""Bounds hold where they are said to: what is at the edge passes, what is one beyond is refused.

Each case is a bound and a function of how far beyond it something is: -1 under, 0 at, 1 over. Bounds of memory and disk
are tried in preflight/test_checks.py, of flags in flags/test_numbers.py, of files in reading/test_reading.py.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.vlm.data.media import images
from megatron.vlm.data.rejects import RejectCount
from megatron.vlm.monitoring import bad_samples
from megatron.vlm.monitoring.bad_samples import BadSamples, BadSteps, Hosts
from megatron.vlm.preprocessing import chat, record_media
from omnibal_ext.costs.operations import EFFICIENCIES, _device
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.llava import tiling as llava
from omnibal_ext.families.media import VIDEO_RULES
from omnibal_ext.families.towers import tiling as native
from omnibal_ext.families.towers import video_rules
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.build import build_index, reject_reasons
from omnibal_ext.packing.command import check_rejects
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packers.budgets import choose_budgets
from omnibal_ext.plan import Plan
from omnibal_ext.reading.checks import text
from omnibal_ext.reading.document import read_lines
from omnibal_ext.sizes import Sizes
from omnibal_ext.units import GIB
from tests.chains import layer_chain
from tests.unit.layout.instances import make_profile
from tools import launch

SIZES = Sizes.from_arrays(np.array([1, 2, 4, 0]), np.array([10, 20, 30, 40]))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder; limits that are large are made small."""
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 50)
    monkeypatch.setattr(images, "MAX_SIDE", 40)
    monkeypatch.setattr(bad_samples, "print_rank_0", lambda _: None)
    monkeypatch.setattr(bad_samples.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(bad_samples.dist, "all_gather_object", lambda out, mine: out.__setitem__(0, mine))
    return tmp_path


def picture(place: Path, width: int, height: int, most: int) -> None:
    Image.new("RGB", (width, height)).save(place / "a.png")
    images.image_size(place / "a.png", most)


def index(place: Path) -> PackedIndex:
    return build_index(SIZES, place / "index", PackOptions("isf", 4, 64, micro_batches=2))[0]


def talk(characters: int) -> None:
    turns = [{"from": "human", "value": "a" * (characters - 1)}, {"from": "gpt", "value": "b"}]
    chat.parse_conversation({"conversations": turns}, ())


def frames(count: int, **said: Any) -> None:
    record = {"video": [f"{number}.png" for number in range(count)], **said}
    record_media.media_of(
        record_media.VIDEOS, record, [{"from": "human", "value": "<video>"}, {"from": "gpt", "value": "b"}]
    )


def broken_samples(count: int) -> None:
    found = BadSamples("data", 3)
    found.found = dict.fromkeys(range(count), "gone")
    found.exchange()


def bad_steps(count: int) -> None:
    steps = BadSteps(2, Hosts())
    for _ in range(count):
        steps.skip("here", "lower --lr")


def rejected(count: int) -> None:
    seen = RejectCount()
    seen.add([{"file": "f", "line": 1, "reason": "bad_roles", "detail": ""}] * count)
    seen.check(5, 100, Path("rejected.jsonl"))


def left_out(limit: int) -> None:
    check_rejects(Corpus.of(SIZES), PackOptions("isf", 2, 30), limit)


def planned_memory(more: int) -> None:
    plan = Plan.from_cuts(layer_chain(1, 1), (), predicted={"stage_peak_bytes": [8 * GIB + more]})
    launch._check_memory(plan, argparse.Namespace(device_gib=8.0))  # type: ignore[arg-type]


def fits(short: float) -> None:
    problem, layout = LayoutProblem(make_profile(), 1, 2), Layout((0, 10), ((),))
    if not replace(problem, memory_bytes=problem.stage_peak_bytes(layout)[0] - short).fits(layout):
        raise UserError("over the limit")


def efficiency(share: float) -> None:
    _device("a100", {"efficiencies": dict.fromkeys(EFFICIENCIES, share)})


def line_of(place: Path, length: int) -> None:
    (place / "lines").write_bytes(b'"' + b"a" * (length - 3) + b'"\n')
    list(read_lines(place / "lines", text, "write it again", 40))


LONGER = native.MOST_TIMES_LONGER
BOUNDS: dict[str, Callable[[Path, int], object]] = {
    "characters of a conversation": lambda place, more: talk(50 + more),
    "pixels of an image": lambda place, more: picture(place, 10, 10, 100 - more),
    "pixels of a side": lambda place, more: picture(place, 40 + more, 1, 1000),
    "sides of a picture": lambda place, more: native.square_grid(28 * LONGER + more, 28, 14, 1, 10**9),
    "pixels of a canvas": lambda place, more: llava.within(llava.MAX_CANVAS + more, "it"),
    "frames of a video": lambda place, more: video_rules.choose_frames(
        VIDEO_RULES["qwen-vl"], [float(n) for n in range(video_rules.FRAMES - more)], 1.0
    ),
    "frames a second": lambda place, more: frames(3, fps=record_media.MOST_A_SECOND + more),
    "seconds of a film": lambda place, more: frames(3, times=[0, 1, record_media.LONGEST + more]),
    "broken samples": lambda place, more: broken_samples(3 + more),
    "bad steps in a row": lambda place, more: bad_steps(2 + more),
    "rejected lines": lambda place, more: rejected(5 + more),
    "samples left out": lambda place, more: left_out(2 - more),
    "tiles of a sample": lambda place, more: None if not reject_reasons(SIZES, PackOptions("isf", 4 - more, 99)).any()
    else (_ for _ in ()).throw(UserError("too many tiles")),
    "tokens of a sample": lambda place, more: None if not reject_reasons(SIZES, PackOptions("isf", 9, 40 - more)).any()
    else (_ for _ in ()).throw(UserError("too many tokens")),
    "longest sample of budgets": lambda place, more: choose_budgets(SIZES, max_llm_budget=40 - more),
    "tiles that were profiled": lambda place, more: packs_of_index(
        index(place), replace(make_profile(), budgets={"tiles": 4 - more, "tokens": 128}), 2
    ),
    "tokens that were profiled": lambda place, more: packs_of_index(
        index(place), replace(make_profile(), budgets={"tiles": 4, "tokens": 64 - more}), 2
    ),
    "memory of a device": lambda place, more: planned_memory(more),
    "memory of a layout": lambda place, more: fits(more * 1e-6),
    "layers of a chain": lambda place, more: LayoutProblem(make_profile(), 10 + more, 2),
    "share of a peak": lambda place, more: efficiency(1.0 + more * 1e-9),
    "weight of a source": lambda place, more: Corpus(SIZES, (CorpusSource("a", 4, (0.5, 1e-300, 0.0)[1 + more]),)),
    "microbatches": lambda place, more: PackOptions("isf", 4, 64, micro_batches=1 - more),
    "seconds of packing": lambda place, more: PackOptions("isf", 4, 64, seconds=-1e-9 * more),
    "bytes of a line": lambda place, more: line_of(place, 40 + more),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_at_a_bound_things_pass_and_beyond_it_they_are_refused(name: str, place: Path) -> None:
    BOUNDS[name](place, -1)
    BOUNDS[name](place, 0)
    with pytest.raises((UserError, Rejected)) as caught:
        BOUNDS[name](place, 1)
    assert "\n" not in str(caught.value)
