"""What is kept from an earlier start is used until something has changed that it was made from: each input alone."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.vlm import platform
from megatron.vlm.profiling import profiler
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.costs.states import AWARE, DTYPES, state_words
from omnibal_ext.errors import UserError
from omnibal_ext.launch import conversations, planning
from omnibal_ext.launch.planning import Planning
from omnibal_ext.layout.command import plan_and_show
from omnibal_ext.modalities.modality import budget_fields
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.command import pack_and_show
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.profile_flags import profile_parser
from omnibal_ext.sizes import Sizes
from tests.languages import with_layers
from tools import launch, profile_layers

TINY = preset("tiny")
BUDGETS = (40, 320)
Calls = list[tuple[str, dict[str, Any]]]


def pack(folder: Path, costs: PackCosts | None = None, built_from: Mapping[str, Any] | None = None,
         **options: Any) -> PackedIndex:  # fmt: skip
    sizes = Sizes.from_arrays(np.random.default_rng(0).integers(1, 9, 60), np.full(60, 40))
    values: dict[str, Any] = {"vit_budget": BUDGETS[0], "llm_budget": BUDGETS[1], "micro_batches": 4}
    return build_index(sizes, folder, PackOptions(**values | options), built_from or {"name": "demo"}, costs)[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What our tools are called for, and with which settings, unless as usual; what they write is left to the test."""
    found: Calls = []

    def run(name: str, settings: dict[str, Any]) -> None:
        found.append((name, settings))
        if name == "plan":
            Path(settings["output"]).write_text("{}")
        if "like" in settings:
            pack(Path(settings["output_dir"]))
        if name == "preprocess" or "held_out_of" in settings:
            note(Path(settings["output_dir"]), over=False)

    def run_tool(tool: Path, words: list[str], _: bool) -> None:
        name = tool.name.partition("_")[0]
        parser = {"profile": profile_parser, "preprocess": preprocess_parser}[name]()
        given, usual = vars(parser.parse_args([*map(str, words)])), parser.defaults()
        run(name, {name: value for name, value in given.items() if value != usual[name]})

    for module in (planning, conversations):
        monkeypatch.setattr(module, "run_our_tool", run_tool)
        monkeypatch.setattr(module, "run_fork", lambda work, _, **given: run(WORK[work], given))
    return found


WORK: dict[Callable[..., None], str] = {pack_and_show: "pack", plan_and_show: "plan"}


def note(folder: Path, content: str = "{}", over: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if over or not (folder / "manifest.json").exists():
        (folder / "manifest.json").write_text(content)


def launched(*words: object) -> argparse.Namespace:
    return launch._parser().parse_args([*map(str, words)])


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planning:
    """The first start: profiled and packed, not planned yet. A quarter of the dataset's tokens is learnt."""
    learnt = SimpleNamespace(of_dataset=lambda folder: SimpleNamespace(supervised_share=0.25))
    monkeypatch.setattr(planning, "Corpus", learnt)
    flags = launched("--model", "tiny", "--run-dir", tmp_path, "--pipeline-model-parallel-size", 2, "--data", "DATA")
    job = launch._megatron_flags(argparse.Namespace(megatron=[]))
    analytic_profile(TINY, "a100", dict(zip(("tiles", "tokens"), BUDGETS, strict=True))).save(tmp_path / "profile.json")
    return Planning(flags, job, TINY, pack(tmp_path / "packs-first"), 1, 4, Path("tools"))


def with_flags(start: Planning, **flags: Any) -> Planning:
    return replace(start, flags=argparse.Namespace(**vars(start.flags) | flags))


def with_job(start: Planning, **flags: Any) -> Planning:
    return replace(start, job=argparse.Namespace(**vars(start.job) | flags))


def with_packs(start: Planning, folder: str, **options: Any) -> Planning:
    return replace(start, index=pack(start.run_dir / folder, **options))


def with_profile(start: Planning, layers: bool = False) -> Planning:
    profile = Profile.load(start.profile_path)
    llm = replace(profile.layers["llm"], forward_fit=(0.0, 1e-3, 0.0))
    other = {"layers": {**profile.layers, "llm": llm}} if layers else {"action_seconds": profile.action_seconds + 1e-3}
    replace(profile, **other).save(start.profile_path)
    return start


OTHER_MODEL = replace(TINY, language=replace(TINY.language, vocab_size=1024))


def with_model(start: Planning) -> Planning:
    analytic_profile(OTHER_MODEL, "a100", dict(zip(("tiles", "tokens"), BUDGETS, strict=True))).save(start.profile_path)
    return replace(start, architecture=OTHER_MODEL)


OTHER_FLAGS = {
    "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2, "method": "bmp", "schedule": "zb_v", "memory_gib": 64.0, "recompute": "full",
    "tower": "auto", "measure_top_k": 2, "analytic": "h100",
}  # fmt: skip
OF_A_JOB = {"bf16": True, "use_distributed_optimizer": True, "sequence_parallel": True, "freeze": ["vit"],
            "lora_rank": 4, "lora_targets": ["vit"], AWARE: True, **dict.fromkeys(DTYPES, "bf16")}  # fmt: skip
OF_A_PLAN: dict[str, Callable[[Planning], Planning]] = {
    **{name: partial(with_flags, **{name: value}) for name, value in OTHER_FLAGS.items()},
    **{name: partial(with_job, **{name: value}) for name, value in OF_A_JOB.items()},
    "num_microbatches": lambda s: replace(s, micro_batches=2),
    "data_parallel_size": lambda s: replace(s, data_parallel=2),
    "packs": lambda s: with_packs(s, "packs-other", seed=1),
    "profile_hash": with_profile,
    "model_hash": with_model,
}
"""Every input of a plan, and another start in which it alone is different."""
NOT_OF_A_PLAN = {
    *("plan", "profile", "repack", "replan", "model", "from_scratch", "first_weights", "fresh", "data", "packs"),
    *("eval_data", "eval_packs", "run_dir", "epochs", "input", "image_root", "chat_template", "workers"),
    *("max_rejects", "nproc_per_node", "nnodes", "rdzv_endpoint", "rdzv_id", "check", "dry_run", "progress", "json"),
    *("megatron", "micro_batches", "no_logit_check", "no_save", "save_hf", "max_tiles", "max_pixels", "max_tokens"),
    *("shorten", "vit_budget", "llm_budget", "audio_budget", "film_budget", "widths", "held_out", "config", "download"),
    # of the trainer's
    *("lora_alpha", "lr", "min_lr", "lr_vit", "lr_projector", "lr_decay_style", "lr_warmup_iters"),
    *("lr_warmup_fraction", "weight_decay", "weight_decay_vit", "weight_decay_projector", "clip_grad"),
    *("loss_reduction", "max_bad_samples", "max_bad_steps", "image_checksums", "trust", "metrics_file", "timelines"),
    *("train_iters", "save", "save_interval", "save_retain_interval", "eval_interval", "log_interval", "num_workers"),
    *("seed", "fp16", "stores", "cache_tiles"),
}
"""Flags that name the things themselves, whose hashes are inputs, or that change nothing in a plan."""


def test_a_plan_is_made_once_for_the_same_inputs(start: Planning, calls: Calls) -> None:
    assert not start.is_planned()
    start._plan()
    assert start.is_planned()
    assert set(start._asked()) == set(OF_A_PLAN) - {AWARE, *DTYPES}, "older plans note no precision of states"
    assert set(with_job(start, **{AWARE: True})._asked()) == set(OF_A_PLAN)
    assert replace(start, flags=argparse.Namespace(**vars(start.flags))).is_planned()
    assert replace(start, architecture=replace(TINY, name="renamed")).is_planned()
    assert not replace(start, architecture=OTHER_MODEL).is_planned(), "a plan of another model's profile"


@pytest.mark.parametrize("name", OF_A_PLAN)
def test_another_input_of_a_plan_has_it_made_again(name: str, start: Planning, calls: Calls) -> None:
    start = with_job(start, **{AWARE: name in DTYPES})
    start._plan()
    other = OF_A_PLAN[name](start)
    assert not other.is_planned()
    other._plan()
    assert other.is_planned()


def test_the_plan_of_the_run_s_folder_is_named_with_the_flags_it_was_made_from(start: Planning, calls: Calls) -> None:
    start = with_flags(start, schedule="zb_h1")
    start._plan()
    start.provisional().save(start.plan_path)
    named = with_flags(start, plan=str(start.plan_path))
    assert named.ensure() == Plan.load(start.plan_path)
    with pytest.raises(UserError, match="made from other flags, costs or packs: leave --plan out"):
        with_flags(named, schedule="1f1b").ensure()
    words = ("--model", "tiny", "--run-dir", start.run_dir, "--schedule", "zb_h1", "--plan")
    assert launched(*words, start.plan_path).schedule == "zb_h1"
    with pytest.raises(UserError, match=r"--schedule.*without --plan: an existing plan is used as it is"):
        launched(*words, start.run_dir / "other.json")


@pytest.mark.parametrize("damage", ["plan.json", "profile.json", "plan.inputs.json", "nothing in it"])
def test_a_part_that_is_gone_has_a_plan_made_again(damage: str, start: Planning, calls: Calls) -> None:
    start._plan()
    if damage == "nothing in it":
        start.inputs_path.write_text("")
    else:
        (start.run_dir / damage).unlink()
    assert not start.is_planned()


def test_every_flag_of_the_launcher_is_an_input_of_plans_or_known_to_be_none() -> None:
    flags = set(vars(launched("--model", "m", "--run-dir", "r")))
    assert flags - (set(OF_A_PLAN) - {"packs"}) == NOT_OF_A_PLAN, "does a plan depend on it?"
    assert set(vars(launch._megatron_flags(argparse.Namespace(megatron=[])))) <= set(OF_A_PLAN)


def test_the_planner_is_asked_for_what_was_asked(start: Planning, calls: Calls) -> None:
    asked = {"memory_gib": 7.5, "method": "bmp", "schedule": "zb_h1", "recompute": "full"}
    replace(with_flags(start, **asked, virtual_pipeline_model_parallel_size=2), micro_batches=3)._plan()
    ((tool, found),) = calls
    assert tool == "plan"
    assert found == {
        "profile": start.profile_path, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
        "num_microbatches": 3, "packs": start.index.folder, "method": "bmp", "recompute": "full", "schedule": "zb_h1",
        "output": start.plan_path, "memory_gib": 7.5, "tower": "cut",
    }  # fmt: skip


def test_the_profiler_is_asked_for_the_run(start: Planning, calls: Calls) -> None:
    other = with_flags(start, analytic="h100", tensor_model_parallel_size=2, expert_model_parallel_size=2)
    replace(with_job(other, freeze=["vit"], bf16=True, sequence_parallel=True), data_parallel=3)._ensure_profile()
    ((tool, found),) = calls
    assert tool == "profile"
    assert found == {
        "model": "tiny", "vit_budget": 40, "llm_budget": 320, "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2, "data_parallel_size": 3, "output": str(start.profile_path),
        "analytic": "h100", "supervised_share": 0.25, "bf16": True, "sequence_parallel": True, "freeze": ["vit"],
    }  # fmt: skip
    with_flags(start, profile="given.json")._ensure_profile()
    assert len(calls) == 1
    with_job(start, lora_rank=4, lora_targets=["vit"])._ensure_profile()
    assert (calls[1][1]["lora_rank"], calls[1][1]["lora_targets"]) == (4, ["vit"])


def test_whole_layers_are_profiled_too_where_the_tower_may_stand_beside(start: Planning, calls: Calls) -> None:
    """Priced, they come along; measured, from a profile at tensor-parallel size 1 that is made first."""
    beside = with_flags(start, tower="auto", pipeline_model_parallel_size=2)
    beside._ensure_profile()
    assert [found.get("replica_ranks") for _, found in calls] == [2]
    of_two = with_flags(beside, tensor_model_parallel_size=2)
    with_flags(of_two, analytic="h100")._ensure_profile()
    assert calls[1][1]["replica_ranks"] == 4
    assert "tower_profile" not in calls[1][1]
    of_two._ensure_profile()
    whole, cut = (found for _, found in calls[2:])
    assert whole.get("tensor_model_parallel_size", 1) == 1
    assert whole["output"] == cut["tower_profile"]
    assert "replica_ranks" not in whole
    assert cut["output"] == str(start.profile_path)
    of_two._plan()
    assert calls[4][1]["tower"] == "auto"


@pytest.mark.parametrize(
    "change",
    [
        {"model_hash": "other"}, {"vit_budget": 41}, {"llm_budget": 321}, {"tensor_model_parallel_size": 2},
        {"expert_model_parallel_size": 2}, {"frozen": ["vit"]}, {"lora_rank": 4}, {"lora_targets": ["vit"]},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_given_profile_of_something_else_is_refused(change: dict[str, Any], start: Planning) -> None:
    given = start.run_dir / "given.json"
    profile = analytic_profile(TINY, "a100", dict(zip(("tiles", "tokens"), BUDGETS, strict=True)))
    profile.save(given)
    asks = with_flags(start, profile=str(given))
    asks.check_profile()
    Profile.from_record({**profile.to_record(), **change}).save(given)
    with pytest.raises(UserError, match=r"given\.json: is of .* not of"):
        asks.check_profile()


OF_PACKS: dict[str, Callable[[Planning], Planning]] = {
    "profile": partial(with_profile, layers=True),
    "pipeline": lambda s: with_flags(s, pipeline_model_parallel_size=1),
    "data parallel": lambda s: replace(s, data_parallel=2),
    "micro batches": lambda s: replace(s, micro_batches=2),
    **{name: partial(with_packs, folder="given-2", **{name: value}) for name, value in (
        ("seed", 1), ("vit_budget", 41), ("llm_budget", 321), ("method", "isf"), ("epochs", 2), ("wait", 0.008),
        ("seconds", 0.5), ("last_iteration", "empty"), ("oversize", "alone"), ("built_from", {"name": "other"}),
    )},
}  # fmt: skip


def test_packs_are_packed_again_once(start: Planning, calls: Calls) -> None:
    """The profiler knows by itself what it has measured."""
    for _ in range(2):
        assert start.repacked().index.folder == start.run_dir / "packs"
    assert [tool for tool, _ in calls] == ["profile", "pack", "profile"]


@pytest.mark.parametrize("name", OF_PACKS)
def test_another_input_of_packs_has_them_packed_again(name: str, start: Planning, calls: Calls) -> None:
    folder = start.repacked().index.folder
    other = OF_PACKS[name](start)
    calls.clear()
    other.repacked()
    tool, found = calls[-1]
    assert tool == "pack"
    assert found == {
        "data": "DATA", "like": other.index.folder, "costs": start.profile_path,
        "data_parallel_size": other.data_parallel, "micro_batches": other.micro_batches,
        "pipeline_model_parallel_size": other.flags.pipeline_model_parallel_size, "output_dir": folder,
    }  # fmt: skip


A_PROFILE = ("--model", "tiny", "--vit-budget", 4, "--llm-budget", 64, "--output", "profile.json")
NARROW = ("--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer")
OF_STATES = {
    AWARE: NARROW,
    **{name: (*NARROW, f"--{name.replace('_', '-')}", kinds[-1]) for name, kinds in DTYPES.items()},
}
OF_A_PROFILE: dict[str, tuple[object, ...]] = {
    **OF_STATES,
    "model": ("--model", "internvl2-1b"), "vit_budget": ("--vit-budget", 5), "llm_budget": ("--llm-budget", 65),
    "tensor_model_parallel_size": ("--tensor-model-parallel-size", 2),
    "expert_model_parallel_size": ("--expert-model-parallel-size", 2), "sequence_parallel": ("--sequence-parallel",),
    "data_parallel_size": ("--data-parallel-size", 2), "use_distributed_optimizer": ("--use-distributed-optimizer",),
    "bf16": ("--bf16",), "freeze": ("--freeze", "vit"), "lora_rank": ("--lora-rank", 4),
    "lora_targets": ("--lora-rank", 4, "--lora-targets", "vit"), "steps": ("--steps", 6),
}  # fmt: skip
"""Every flag that measured figures depend on, and what makes it another one."""
NOT_OF_A_PROFILE = {"analytic", "force", "output", "json", "replica_ranks", "tower_profile",
                    "supervised_share"}  # fmt: skip  # reckoned behind what is measured
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex")


def another_version(package: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(profile_layers, "version", lambda of: "2.0" if of == package else "1.0")


MACHINE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "device": lambda patch: patch.setattr(platform, "device_name", lambda: "another"),
    "devices": lambda patch: patch.setattr(platform, "device_count", lambda: 8),
    "processes": lambda patch: patch.setenv("WORLD_SIZE", "4"),
    "threads": lambda patch: patch.setenv("OMP_NUM_THREADS", "7"),
    "compiled layers": lambda patch: patch.setenv("TORCHDYNAMO_DISABLE", "0"),
    **{package: partial(another_version, package) for package in PACKAGES},
    "profiler": lambda patch: patch.setattr(profile_layers, "PROFILER", profile_layers.PROFILER + 1),
}


def asked_for(folder: Path, *words: object) -> argparse.Namespace:
    given = [*map(str, (*A_PROFILE, *words)), "--output", str(folder / "profile.json")]
    return profile_parser().parse_args(given)


def measured_before(arguments: argparse.Namespace) -> bool:
    return is_known(arguments, preset(arguments.model))


def is_known(arguments: argparse.Namespace, model: Architecture) -> bool:
    settings = profile_layers._settings(arguments, model)
    return profile_layers._known(arguments.output, settings, model) is not None


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device_count", lambda: 1)
    monkeypatch.setattr(profile_layers, "version", lambda _: "1.0")
    for name in ("WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def leave(folder: Path, arguments: argparse.Namespace) -> None:
    settings = profile_layers._settings(arguments, preset(arguments.model))
    profile = analytic_profile(preset(arguments.model), "a100", dict(zip(("tiles", "tokens"), BUDGETS, strict=True)))
    replace(profile, measured_with=settings).save(folder / "profile.json")


def test_every_flag_of_the_profiler_is_an_input_of_profiles_or_known_to_be_none(tmp_path: Path) -> None:
    others = set(vars(asked_for(tmp_path))) - set(OF_A_PROFILE) - {"audio_budget", "film_budget"}
    assert others == NOT_OF_A_PROFILE, "do figures depend on it?"


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("name", [*OF_A_PROFILE, "audio_budget"])
@pytest.mark.usefixtures("one_device")
def test_a_profile_is_measured_again_for_another_flag(name: str, tensor: int, tmp_path: Path) -> None:
    """And the other way round. The sequence is shared among two ranks or more, or not at all."""
    common: tuple[object, ...] = ("--tensor-model-parallel-size", tensor)
    if name == "audio_budget":
        common = (*common, "--model", "qwen2.5-omni-3b", "--audio-budget", 200)
    starts = (
        asked_for(tmp_path, *common),
        asked_for(tmp_path, *common, *OF_A_PROFILE.get(name, ("--audio-budget", 400))),
    )
    for before, now in (starts, starts[::-1]):
        leave(tmp_path, before)
        assert measured_before(before)
        assert measured_before(now) == (name == "sequence_parallel" and tensor == 1)


@pytest.mark.parametrize("name", MACHINE)
@pytest.mark.usefixtures("one_device")
def test_a_profile_is_measured_on_another_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other software is another machine. Where there are twice the devices, transfers are measured between ranks."""
    arguments = asked_for(tmp_path)
    leave(tmp_path, arguments)
    assert measured_before(arguments)
    MACHINE[name](monkeypatch)
    assert not measured_before(arguments)


@pytest.mark.usefixtures("one_device")
def test_a_profile_is_measured_again_for_another_config_of_one_name(tmp_path: Path) -> None:
    """A folder's config.json may change, and keep its folder."""
    arguments = asked_for(tmp_path)
    leave(tmp_path, arguments)
    other = replace(TINY, language=with_layers(TINY.language, TINY.language.layers + 1))
    assert [is_known(arguments, model) for model in (TINY, replace(TINY, name="renamed"), other)] == [True, True, False]


@pytest.mark.parametrize("name", OF_A_PROFILE)
@pytest.mark.usefixtures("one_device")
def test_the_profiler_measures_for_what_was_asked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[profiler.ProfileJob] = []
    monkeypatch.setattr(profiler, "profile_on_this_machine", lambda job, _: jobs.append(job))
    monkeypatch.setenv("RANK", "0")
    before_it = {AWARE: NARROW[:-1], **dict.fromkeys(DTYPES, NARROW)}.get(name, ())
    for words in (before_it, OF_A_PROFILE[name]):
        arguments = asked_for(tmp_path, *words)
        profile_layers._measured(arguments, preset(arguments.model))
    fields = {"model": "preset", "tensor_model_parallel_size": "tensor_parallel", "freeze": "frozen",
              "expert_model_parallel_size": "expert_parallel", "data_parallel_size": "data_parallel",
              "use_distributed_optimizer": "distributed_optimizer", "lora_rank": "adapters",
              "lora_targets": "adapters", **dict.fromkeys(OF_STATES, "states")}  # fmt: skip
    before, now = ({**vars(job), **budget_fields(job.budgets)} for job in jobs)
    del before["budgets"], now["budgets"]
    assert {field for field in before if before[field] != now[field]} == {fields.get(name, name)}
    word = OF_A_PROFILE[name][-1] if len(OF_A_PROFILE[name]) > 1 else True
    others = {"freeze": ("vit",), "lora_rank": Adapters(4, 8.0, ("llm",)), "lora_targets": Adapters(4, 8.0, ("vit",)),
              **dict.fromkeys(OF_STATES, tuple(state_words(arguments)))}  # fmt: skip
    assert now[fields.get(name, name)] == others.get(name, word)


def conversation(folder: Path, *words: object) -> argparse.Namespace:
    run = ("--model", "tiny", "--run-dir", folder, "--input", "chat.jsonl", "--json")
    arguments = launched(*run, *words)
    arguments.data, arguments.packs = str(folder / "data"), str(folder / "packs-by-size")
    arguments.eval_packs = str(folder / "packs-held-out")
    return arguments


def make(folder: Path, calls: Calls, *words: object, data_parallel: int = 1) -> list[str]:
    before = len(calls)
    conversations.make_packs(conversation(folder, *words), Path("tools"), data_parallel)
    note(folder / "packs-by-size")
    return [tool for tool, _ in calls[before:]]


LIMITS_OF_PACKS = {"vit budget": ("--vit-budget", 7), "llm budget": ("--llm-budget", 900)}


@pytest.mark.parametrize(
    "change", ["pipeline", "micro batches", "data parallel", "dataset", "packs gone", "inputs gone", *LIMITS_OF_PACKS]
)
def test_packs_of_conversations_are_made_again_for_another_input(change: str, tmp_path: Path, calls: Calls) -> None:
    note(tmp_path / "data", '{"of": 1}')
    both = ["preprocess", "pack"]  # the first knows by itself what is there
    assert make(tmp_path, calls) == both
    assert make(tmp_path, calls) == both[:1]
    if change == "dataset":
        note(tmp_path / "data", '{"of": 2}')
    if change.endswith("gone"):
        (tmp_path / {"packs gone": "packs-by-size/manifest.json"}.get(change, "packs.inputs.json")).unlink()
    counts = {"pipeline": ("--pipeline-model-parallel-size", 2), "micro batches": ("--micro-batches", 3)}
    words: tuple[object, ...] = {**counts, **LIMITS_OF_PACKS}.get(change, ())
    replicas = 2 if change == "data parallel" else 1
    assert make(tmp_path, calls, *words, data_parallel=replicas) == both
    found = calls[-1][1]
    for flag, value in LIMITS_OF_PACKS.values():
        assert found.get(flag[2:].replace("-", "_")) == (value if flag in words else None)
    assert found["micro_batches"] == {"pipeline": 8, "micro batches": 3}.get(change, 4)
    assert found["data_parallel_size"] == replicas
    assert found["pipeline_model_parallel_size"] == (2 if change == "pipeline" else 1)
    assert found["last_iteration"] == "empty", "an epoch is one to the sample"
    assert make(tmp_path, calls, *words, data_parallel=replicas) == both[:1]


def test_packs_of_conversations_are_as_wide_as_the_launcher_is_told(tmp_path: Path, calls: Calls) -> None:
    """And ranks that are no whole teams are refused before conversations are read."""
    note(tmp_path / "data")
    budget = ("--llm-budget", 900)
    make(tmp_path, calls, *budget, data_parallel=4)
    assert calls[-1][1]["widths"] == (1,)
    for widths, read in (("1,2,4", (1, 2, 4)), ("auto", None)):
        both = make(tmp_path, calls, *budget, "--widths", widths, data_parallel=4)
        assert both == ["preprocess", "pack"]
        assert calls[-1][1]["widths"] == read
        assert json.loads((tmp_path / "packs.inputs.json").read_text())["--widths"] == widths, "as older notes have it"
    assert "node_ranks" not in calls[-3][1]
    for gpus, tensor, ranks in ((8, 1, 8), (8, 4, 2), (6, 4, 1)):  # of the last, groups of four leave the node
        words = ("--nproc-per-node", gpus, "--tensor-model-parallel-size", tensor)
        make(tmp_path, calls, *budget, "--widths", "auto", *words, data_parallel=4)
        assert calls[-1][1]["node_ranks"] == ranks
    before = len(calls)
    with pytest.raises(UserError, match=r"--widths 1,2,4: 4 ranks must divide --data-parallel-size 6"):
        conversations.are_made(conversation(tmp_path, *budget, "--widths", "1,2,4"), 6)
    with pytest.raises(UserError, match=r"--widths auto needs --llm-budget"):
        make(tmp_path, calls, "--widths", "auto", data_parallel=4)
    with pytest.raises(UserError, match=r"--widths: invalid widths value: 'wide'"):
        make(tmp_path, calls, *budget, "--widths", "wide", data_parallel=4)
    assert len(calls) == before


@pytest.mark.parametrize(
    "other", [("--max-pixels", 900), ("--shorten", "truncate"), ("--micro-batches", 2), ("--held-out", 0.1)]
)
def test_packs_are_known_to_be_made_before_tools_run(other: tuple[object, ...], tmp_path: Path, calls: Calls) -> None:
    """Until then all else is checked first: what is wrong behind -- is not said after hours of preprocessing."""
    note(tmp_path / "data")
    assert not conversations.are_made(conversation(tmp_path), 1)
    make(tmp_path, calls)
    before = len(calls)
    assert conversations.are_made(conversation(tmp_path), 1)
    assert not conversations.are_made(conversation(tmp_path), 2)
    assert not conversations.are_made(conversation(tmp_path, *other), 1)
    (tmp_path / "packs-by-size/manifest.json").unlink()
    assert not conversations.are_made(conversation(tmp_path), 1)
    assert len(calls) == before


def test_what_is_held_out_is_packed_within_the_rests_budgets_and_again_with_it(tmp_path: Path, calls: Calls) -> None:
    once, thrice = ["preprocess"], ["preprocess", "pack", "pack"]
    words, held = ("--held-out", 0.1), tmp_path / "packs-held-out"
    assert make(tmp_path, calls, *words) == thrice
    rest = str(tmp_path / "packs-by-size")
    assert calls[-2][1]["held_out"] == 0.1
    assert calls[-1][1] == {"data": str(tmp_path / "data"), "held_out_of": rest, "output_dir": str(held)}
    assert make(tmp_path, calls, *words) == once
    (held / "manifest.json").write_text("of the share before")
    assert make(tmp_path, calls, "--held-out", 0.2) == thrice
    assert (held / "manifest.json").read_text() == "{}"
    (held / "manifest.json").unlink()
    assert make(tmp_path, calls, "--held-out", 0.2) == thrice


@pytest.mark.parametrize(
    "words", [("--max-tiles", "6"), ("--max-pixels", "60000"), ("--max-tokens", "600"), ("--shorten", "truncate")]
)
def test_other_limits_make_another_dataset_before_a_run(words: tuple[str, str], tmp_path: Path, calls: Calls) -> None:
    """Then the tool refuses: it is for the user to remove what a run may go on with."""
    data = tmp_path / "data/manifest.json"
    for limits in ((), words):
        make(tmp_path, calls, *limits)
        data.write_text("made before")
        make(tmp_path, calls, *limits)
        assert data.read_text() == "made before"
        asked = next(settings for tool, settings in reversed(calls) if tool == "preprocess")
        given = {flag[2:].replace("-", "_"): int(value) if value.isdigit() else [value] for flag, value in [words]}
        assert (given.items() <= asked.items()) == (limits == words)
    (tmp_path / "inputs.json").touch()
    make(tmp_path, calls)
    assert data.read_text() == "made before"
    (tmp_path / "inputs.json").unlink()
    make(tmp_path, calls, *words)
    assert data.read_text() == "{}"
