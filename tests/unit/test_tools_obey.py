"""What our tools are asked for reaches what it is for: every flag of the planner, and of the choice of budgets."""

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omnibal_ext.costs.profile import Profile
from omnibal_ext.layout import command as planner
from omnibal_ext.layout import sweep as sweeping
from omnibal_ext.layout import tower_layout
from omnibal_ext.packing import command as packer
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.command import pack_parser
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packers import budgets
from omnibal_ext.sizes import Sizes
from tests.unit.layout.instances import make_profile
from tools import plan_layout

SIZES = Sizes.from_arrays(np.random.default_rng(0).integers(1, 5, 200), np.random.default_rng(1).integers(4, 60, 200))


class CaughtError(Exception):
    """The arguments of what was called, by name, those that were left out too."""

    def __init__(self, function: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        super().__init__()
        bound = inspect.signature(function).bind(*arguments, **named)
        bound.apply_defaults()
        self.given = bound.arguments


def given_to(function: Any, module: Any, run: Callable[[], object]) -> dict[str, Any]:
    def catch(*arguments: Any, **named: Any) -> None:
        raise CaughtError(function, arguments, named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function.__name__, catch)
        with pytest.raises(CaughtError) as caught:
            run()
    return dict(caught.value.given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile, sizes, and packs of some twenty iterations of four."""
    folder = tmp_path_factory.mktemp("inputs")
    make_profile().save(folder / "profile.json")
    SIZES.save(folder / "sizes.npz")
    build_index(SIZES, folder / "packs", PackOptions("isf", 4, 128, micro_batches=4, seed=1))
    return folder


def planned(words: str, folder: Path) -> Namespace:
    text = words.replace("PACKS", str(folder / "packs")).replace("SIZES", str(folder / "sizes.npz"))
    text = text.replace("PROFILE", str(folder / "profile.json"))
    return planner.plan_parser().parse_args([*text.split(), "--output", "plan.json"])


A_PLAN = "--profile PROFILE --pipeline-model-parallel-size 2 --num-microbatches 4"
OF_A_PLAN: dict[str, tuple[str, str, Any]] = {
    "pipeline_model_parallel_size": ("--pipeline-model-parallel-size 3", "ranks", 3),
    "virtual_pipeline_model_parallel_size": ("--virtual-pipeline-model-parallel-size 2", "chunks", 2),
    "num_microbatches": ("--num-microbatches 6", "microbatches", 6),
    "memory_gib": ("--memory-gib 7.5", "memory_bytes", 7.5 * 2**30),
    "schedule": ("--schedule zb_h1", "schedule_name", "zb_h1"), "method": ("--method bmp", "method", "bmp"),
    "tower": ("--tower auto", "tower", "auto"), "recompute": ("--recompute full", "recompute", "full"),
    "radius": ("--radius 3", "radius", 3), "top_k": ("--top-k 5", "top_k", 5),
    "seconds": ("--seconds 0.5", "seconds", 0.5),
}  # fmt: skip
"""Of each flag words, what it is for, and what that then is."""


def given_for(words: str, folder: Path) -> dict[str, Any]:
    """What the planner is asked: the problem's fields, and the search's."""
    profile, arguments = Profile.load(folder / "profile.json"), planned(words, folder)
    found = given_to(tower_layout.plan_tower, planner, lambda: planner.planned(profile, arguments))
    return vars(found.pop("problem")) | found


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 1000, None])
def test_layouts_are_judged_on_as_many_iterations_as_are_asked_for(count: int | None, folder: Path) -> None:
    """From the middle of equal parts of the epoch, all where there are no more; four unless told."""
    words = f"{A_PLAN} --packs PACKS" + (f" --pack-iterations {count}" if count else "")
    found = given_for(words, folder)["packs"]
    there = -(-PackedIndex.open(folder / "packs").num_packs // 4)
    assert there > 8
    assert found.tiles.shape == (min(count or 4, there), 1, 4)


A_SWEEP = "--sweep --gpus 8 --global-batch-samples 64 --sizes SIZES"
ANALYTIC = f"{A_SWEEP} --analytic h100 --model tiny --budgets 9x4096"
OF_A_SWEEP: dict[str, tuple[str, str, Any]] = {
    "gpus": ("--gpus 16", "gpus", 16), "tensor_sizes": ("--tensor-sizes 2,4", "tensor_sizes", [2, 4]),
    "pipeline_sizes": ("--pipeline-sizes 2", "pipeline_sizes", [2]), "chunks": ("--chunks 3", "chunks", [3]),
    "schedules": ("--schedules zb_h1,zb_v", "schedules", ["zb_h1", "zb_v"]),
    "budgets": ("--budgets 5x512,6x640", "budgets", [(5, 512), (6, 640)]),
    "expert_sizes": ("--expert-sizes 2", "expert_sizes", [2]),
    "global_batch_samples": ("--global-batch-samples 128", "global_batch", 128),
    "memory_gib": ("--memory-gib 7.5", "memory_bytes", 7.5 * 2**30),
    "method": ("--method layers", "method", "layers"), "seconds": ("--seconds 0.5", "seconds", 0.5),
}  # fmt: skip


def swept(words: str, folder: Path) -> dict[str, Any]:
    """What is asked of the sweep, and for the settings that it goes over."""
    ran, asked = (given_to(function, plan_layout, lambda: plan_layout._swept(planned(words, folder)))
                  for function in (sweeping.sweep, sweeping.settings))  # fmt: skip
    return ran | asked


ASKED: dict[str, tuple[Callable[[str, Path], dict[str, Any]], str, dict[str, tuple[str, str, Any]]]] = {
    "plan": (given_for, A_PLAN, OF_A_PLAN), "sweep": (swept, ANALYTIC, OF_A_SWEEP)
}  # fmt: skip


@pytest.mark.parametrize(("way", "name"), [(way, name) for way, (_, _, table) in ASKED.items() for name in table])
def test_every_flag_of_the_planner_reaches_what_it_is_for_and_nothing_else(way: str, name: str, folder: Path) -> None:
    ask, base, table = ASKED[way]
    words, what, value = table[name]
    before, found = ask(base, folder), ask(f"{base} {words}", folder)
    assert found[what] == value != before[what]
    assert {other for other in table if (it := table[other][1]) != what and found[it] != before[it]} == set()
    assert before["packs"] is None if way == "plan" else found["sizes"].tokens.tolist() == SIZES.tokens.tolist()


def test_the_planner_has_no_other_flags() -> None:
    """But those that say where things lie, what prices them, and how it is told."""
    others = {
        "profile", "packs", "pack_iterations", "sweep", "sizes", "analytic", "model", "output", "json",
        "audio_budget", "film_budget",
    }  # fmt: skip
    assert {*OF_A_PLAN, *OF_A_SWEEP, *others} == set(vars(planner.plan_parser().parse_args(["--output", "plan.json"])))


A_CHOICE = ["--sizes", "SIZES", "--output-dir", "packs"]
OF_BUDGETS: dict[str, tuple[list[str], Any]] = {
    "vit_budget": (["--vit-budget", "7"], 7), "llm_budget": (["--llm-budget", "640"], 640),
    "max_llm_budget": (["--max-llm-budget", "512"], 512), "samples_per_pack": (["--samples-per-pack", "9"], 9),
    "seed": (["--seed", "3"], 3),
}  # fmt: skip


def packed(words: list[str]) -> Namespace:
    arguments: Namespace = pack_parser().parse_args([*A_CHOICE, *words])
    return arguments


@pytest.mark.parametrize("name", OF_BUDGETS)
def test_every_flag_of_the_choice_of_budgets_reaches_it(name: str) -> None:
    words, value = OF_BUDGETS[name]
    corpus: Any = SimpleNamespace(sizes=SIZES)
    usual, found = (given_to(budgets.choose_budgets, packer,
                             lambda given=given: packer.settle_budgets(corpus, packed(given)))
                    for given in ([], words))  # fmt: skip
    assert usual == {"sizes": SIZES, "vit_budget": None, "llm_budget": None, "max_llm_budget": None,
                     "samples_per_pack": 4, "seed": 0}  # fmt: skip
    assert found == usual | {name: value}


def test_chosen_budgets_are_packed_with_and_given_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus: Any = SimpleNamespace(sizes=SIZES)
    trial = budgets.BudgetTrial(11, 222, 1.0, 0.0, 4.0)
    monkeypatch.setattr(packer, "choose_budgets", lambda *_, **__: (trial, [trial]))
    for words, wanted in (
        ([], (11, 222)),
        (["--vit-budget", "5", "--llm-budget", "99"], (5, 99)),
        (["--method", "random"], (int(SIZES.tiles.max()), int(SIZES.tokens.max()))),
        (["--method", "random", "--vit-budget", "5"], (5, int(SIZES.tokens.max()))),
        (["--method", "random", "--llm-budget", "99"], (int(SIZES.tiles.max()), 99)),
    ):
        arguments = packed(words)
        packer.settle_budgets(corpus, arguments)
        assert (arguments.vit_budget, arguments.llm_budget) == wanted


def test_packs_like_others_have_the_budgets_that_those_were_asked_for(tmp_path: Path) -> None:
    """Not those that samples in packs of their own came to; every other option too."""
    sizes = Sizes.from_arrays([1, 2, 9, 1], [10, 20, 90, 30])
    options = PackOptions(vit_budget=5, llm_budget=64, oversize="alone", seed=3, wait=0.01, micro_batches=2)
    index, _ = build_index(sizes, tmp_path / "packs", options)
    assert (index.vit_budget, index.llm_budget) == (9, 90)
    found = packer.options_of(index)
    for name, value in asdict(options).items():
        assert found[name] == (list(value.items()) if name == "budgets" else 1 if name == "epochs" else value), name
