"""What is checked of machine, memory and disk: each limit at its edge, on both sides."""

import json
import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from megatron.vlm import optional, platform
from megatron.vlm.preflight import machine, run, saving
from megatron.vlm.preflight.findings import Note, refuse, run_checks
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import MODALITIES
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.rebalanced import RankLayout, rebalance, write_rebalanced
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes

TINY, GIB = preset("tiny"), 2**30


def arguments(**changes: Any) -> Namespace:
    sizes = ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel", "expert_model_parallel", "world")
    nothing = ("save", "save_interval", "save_retain_interval", "tensorboard_dir", "metrics_file", "cache_tiles",
               "data", "packs", "eval_data", "eval_packs")  # fmt: skip
    off = ("bf16", "fp16", "no_save_optim", "use_distributed_optimizer", "use_precision_aware_optimizer")
    values = {**dict.fromkeys(nothing), **dict.fromkeys(off, False), **{f"{name}_size": 1 for name in sizes}}
    return Namespace(**values | {"train_iters": 100, "freeze": [], "lora_rank": 0} | changes)


def test_every_check_is_made_whatever_the_others_find() -> None:
    def refused(_: object) -> str:
        raise UserError("no")

    fine = (("a", lambda _: "fine"), ("b", lambda _: None), ("c", lambda _: Note("read this")))
    checks = (fine[0], ("no", refused), *fine[1:], ("no", refused))
    findings = run_checks(checks, object())
    assert [one.check for one in findings] == ["a", "no", "c", "no"]
    assert [one.state for one in findings] == ["ok", "refused", "note", "refused"]
    refuse([one for one in findings if one.state != "refused"])
    with pytest.raises(UserError, match="no"):
        refuse(findings)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        ("gemma-4-e2b", 3, r"numbers of each layer's own input 256 do not divide by --tensor-model-parallel-size 3"),
        ("gemma-4-31b", 3, r"width of the ViT's MLP 4304 do not divide by --tensor-model-parallel-size 3"),
        ("gemma-4-31b", 5, r"width of the MLP 21504 do not divide by"), ("gemma-4-e2b", 2, None),
        ("gemma-4-31b", 2, None),
    ],
)  # fmt: skip
def test_widths_no_ranks_share(monkeypatch: pytest.MonkeyPatch, model: str, ranks: int, message: str | None) -> None:
    for config in ("language_config", "configs_of"):
        monkeypatch.setattr(run, config, lambda *_: None)
    inputs = SimpleNamespace(args=arguments(tensor_model_parallel_size=ranks), architecture=preset(model))
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        assert run._check_model(SimpleNamespace(inputs=inputs)).startswith(model)  # type: ignore[arg-type]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setattr(platform, "device_count", lambda: 8)
    monkeypatch.setattr(platform, "device_name", lambda: "GPU")
    monkeypatch.setattr(optional, "UNUSABLE", {})
    assert machine.check_devices(8) == "8 ranks, 8 x GPU"
    assert not isinstance(machine.check_devices(8), Note)
    optional.UNUSABLE["flash_attn"] = "undefined symbol: _Z"
    said = machine.check_devices(8)
    assert isinstance(said, Note)
    assert said.endswith("; flash_attn is installed and not used: undefined symbol: _Z")
    with pytest.raises(UserError, match=r"9 ranks .* torch sees 8 GPUs"):
        machine.check_devices(9)


def test_a_gpu_that_torch_does_not_see_is_refused_unless_it_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_CUDA", False)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    original = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: str(self) != "/dev/nvidia0" and original(self))
    machine.check_devices(1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(UserError, match=r"SLURM_GPUS_ON_NODE is 4, but torch .* sees no CUDA"):
        machine.check_devices(1)
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/nvidia0" or original(self))
    with pytest.raises(UserError, match=r"/dev/nvidia0.*CUDA_VISIBLE_DEVICES="):
        machine.check_devices(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError):
        machine.check_devices(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.check_devices(1)


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which another program listens, which never answers."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_busy_port_is_named_and_another_nodes_store_is_not_busy(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.2)
    with pytest.raises(UserError, match=f"localhost:{port}: the port is used"):
        machine.check_rendezvous(f"localhost:{port}")
    store = torch.distributed.TCPStore("localhost", 0, is_master=True)
    assert "open for the other nodes" in machine.check_rendezvous(f"localhost:{store.port}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number = free.getsockname()[1]
    assert "free" in machine.check_rendezvous(f"localhost:{number}")
    for wrong in ("localhost", "localhost:", "localhost:http", "localhost:70000", ":29500"):
        with pytest.raises(UserError, match="must be HOST:PORT"):
            machine.check_rendezvous(wrong)


def test_parameters_are_those_of_the_model() -> None:
    """Counted by hand from the sizes of the preset; biases of linear layers are left out."""
    vit = 4 * (4 * 64 * 64 + 2 * 64 * 256 + 4 * 64)
    patches = 3 * 8 * 8 * 64 + 17 * 64
    projector = 64 * 4 * 128 + 128 * 128
    llm = 3 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 352 + 2 * 128)
    words, head = 512 * 128, 512 * 128 + 128
    assert machine.parameters(TINY, ()) == (whole := vit + patches + projector + llm + words + head, whole)
    assert machine.parameters(TINY, ("vit", "projector")) == (whole, llm + words + head)
    args = arguments(save="x", freeze=["llm"])
    trained = vit + patches + projector
    assert saving.checkpoint_bytes(args, TINY) == 4 * whole + 8 * trained
    args.bf16 = True
    assert saving.checkpoint_bytes(args, TINY) == 2 * whole + 12 * trained
    args.no_save_optim = True
    assert saving.checkpoint_bytes(args, TINY) == 2 * whole


HEARS = preset("qwen2.5-omni-3b")
MADE_FOR = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "vit_budget": 40, "llm_budget": 320,
            "audio_budget": 50, "num_microbatches": 3}  # fmt: skip


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("name", MADE_FOR)
def test_a_plan_for_another_job_is_refused(name: str, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the six alone, all together; microbatches are those of a replica. A plan of no planner's names none."""
    packs = SimpleNamespace(budgets={"tiles": 40, "tokens": 320, "frames": 50}, global_batch=15)
    monkeypatch.setattr(run.PackedIndex, "open", lambda _: packs)
    args = arguments(plan="plan.json", packs="packs", tensor_model_parallel_size=2, expert_model_parallel_size=4,
                     data_parallel_size=5)  # fmt: skip

    def check(**made_for: Any) -> str:
        asked = {"profile_hash": "made", **MADE_FOR, **made_for}
        budgets = {one.size: asked.pop(one.budget) for one in MODALITIES if one.budget in asked}
        plan = Plan.from_cuts(TINY.chain, (), budgets=budgets, **asked)
        started: Any = SimpleNamespace(inputs=SimpleNamespace(args=args, plan=plan, architecture=HEARS))
        return run._check_plan(started)

    assert check()
    other = MADE_FOR[name] + more
    with pytest.raises(UserError, match=rf"made for {name} {other}, not {MADE_FOR[name]}; plan again"):
        check(**{name: other})
    with pytest.raises(UserError) as refusal:
        check(**{one: value + more for one, value in MADE_FOR.items()})
    assert all(f"{one} {value + more}, not {value}" in str(refusal.value) for one, value in MADE_FOR.items())
    assert check(**{name: other, "profile_hash": ""})


@pytest.mark.parametrize(
    ("widest", "ranks", "tower", "says"),
    [(4, 6, None, "packs of 4 ranks, which do not divide the 6"), (4, 2, None, "do not divide the 2 data-parallel"),
     (2, 8, object(), "need a vision tower cut into stages"), (4, 8, None, None), (1, 3, object(), None)],
)  # fmt: skip
def test_wide_packs_need_whole_teams_and_a_cut_tower(widest: int, ranks: int, tower: object, says: str | None) -> None:
    index: Any = SimpleNamespace(widths=(1, widest), folder=Path("packs"))
    args, plan = arguments(data_parallel_size=ranks), SimpleNamespace(tower=tower)
    started: Any = SimpleNamespace(inputs=SimpleNamespace(args=args, plan=plan))
    with pytest.raises(UserError, match=f"--packs packs: .*{says}") if says else nullcontext():
        run._check_teams(started, index, "--packs")


def test_packs_that_are_ordered_for_other_ranks_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(20, 200, 300)
    Sizes.from_arrays(tokens // 50, tokens).save(tmp_path / "sizes.npz")
    options = PackOptions("balanced", 20, 800, micro_batches=4, data_parallel_size=2)
    index, _ = build_index(Corpus.load([tmp_path / "sizes.npz"]), tmp_path / "packs", options, {"sizes": {}})
    monkeypatch.setattr(run, "_packs_fit", lambda *_: "fits")

    def said(ranks: int) -> str:
        args = Namespace(data="", packs=index.folder, global_batch_size=8, data_parallel_size=ranks)
        return run._check_packs(SimpleNamespace(inputs=SimpleNamespace(args=args)))

    assert said(2) == "fits"
    other = said(4)
    assert isinstance(other, Note)
    assert other == "fits; ordered for 2 data-parallel ranks: omnibal level orders them for 4"
    layout = RankLayout(4, 2, str(index.manifest["last_iteration"]))
    write_rebalanced(index, layout, rebalance(index, PackStream(index, *layout).order, layout))
    assert said(4) == "fits"


@pytest.mark.parametrize(("tensor", "data", "dealt"), [(1, 8, 1), (1, 8, 8), (2, 8, 4), (2, 4, 1)])
def test_a_rank_needs_memory_for_its_share_of_the_experts(tensor: int, data: int, dealt: int) -> None:
    """48 layers of 128 experts of 3 x 2048 x 768 weights: cut over the tensor-parallel ranks, or dealt whole."""
    model, experts = preset("qwen3-vl-30b-a3b"), 48 * 128 * 3 * 2048 * 768
    args = arguments(bf16=True, use_distributed_optimizer=True, tensor_model_parallel_size=tensor,
                     data_parallel_size=data, expert_model_parallel_size=dealt)  # fmt: skip
    shares = dealt if dealt > 1 else tensor
    others = machine.parameters(model, ())[0] - experts
    needs = others / tensor * (6 + 12 / data) + experts / shares * (6 + 12 * shares / (tensor * data))
    bare = Plan.from_cuts(model.chain, ())
    assert f"at least {needs / GIB:.2f} GiB" in machine.check_memory(args, model, bare, 1e6)


def test_ranks_on_the_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_CUDA", False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    needs = 4 * 16 * machine.parameters(TINY, ())[0]
    for available, fits in ((needs + 1, True), (needs - 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda size=available: SimpleNamespace(available=size))
        with nullcontext() if fits else pytest.raises(UserError, match="4 ranks on the CPU need"):
            machine.check_host_memory(arguments(), TINY, 0)


@pytest.mark.parametrize(
    ("iteration", "interval", "retain", "kept"),
    [(0, 10, None, 10), (0, 30, None, 4), (95, 10, None, 1), (100, 10, None, 0), (0, 10, 50, 5), (0, 10, 10, 10)],
)
def test_checkpoints_that_lie_there_at_once(iteration: int, interval: int, retain: int | None, kept: int) -> None:
    args = arguments(save_interval=interval, save_retain_interval=retain)
    assert saving.checkpoints_kept(args, iteration) == kept


def test_the_disk_holds_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(save=str(tmp_path / "not" / "there yet"), save_interval=10)
    size = saving.checkpoint_bytes(args, TINY)
    for free, state in ((10 * size, str), (10 * size - 1, Note), (2 * size, Note)):
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert type(saving.check_saving(args, TINY, 0)) is state
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * size - 1))
    small = rf"no room for two checkpoints: 10 x {size / 2**20:.2f} MiB"
    with pytest.raises(UserError, match=small):  # in GiB it would be 0.0
        saving.check_saving(args, TINY, 0)
    saving.check_saving(args, TINY, 95)  # one is left to write
    assert isinstance(saving.check_saving(arguments(), TINY, 0), Note)
    args.no_save_optim = True
    assert "(--no-save-optim): a run that is interrupted cannot go on" in saving.check_saving(args, TINY, 95)


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file"):
        saving.check_writable(file / "deeper")
    monkeypatch.setattr(saving.os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(UserError, match="may not be written"):
        saving.check_saving(arguments(metrics_file=str(tmp_path / "run" / "metrics.jsonl")), TINY, 0)
    with pytest.raises(UserError, match=rf"^{tmp_path}/tiles: {tmp_path} may not be written"):
        saving.check_saving(arguments(cache_tiles=str(tmp_path / "tiles")), TINY, 0)


@pytest.mark.parametrize("read", ["data", "packs", "eval_data", "eval_packs"])
@pytest.mark.parametrize("written", ["save", "tensorboard_dir", "metrics_file", "cache_tiles"])
def test_nothing_is_written_into_what_is_read(tmp_path: Path, read: str, written: str) -> None:
    folder = tmp_path / read
    (folder / "deep").mkdir(parents=True)
    for inside in (folder, folder / "deep/saves"):
        file = inside / "metrics.jsonl" if written == "metrics_file" else inside
        args = arguments(**{read: str(folder), written: str(file), "save_interval": 10})
        with pytest.raises(UserError, match=rf"--{written.replace('_', '-')} .*: lies in --{read.replace('_', '-')} "):
            saving.check_saving(args, TINY, 0)
    fine = tmp_path / "fine" / "metrics.jsonl"
    saving.check_saving(arguments(**{read: str(folder), written: str(fine), "save_interval": 10}), TINY, 0)


def test_what_another_run_has_written_is_not_mixed_with(tmp_path: Path) -> None:
    """Its figures, its curves, its folder; this run's own, and what it was given before, are its own."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for run_dir in (mine, other):
        (run_dir / "tensorboard").mkdir(parents=True)
        (run_dir / "tensorboard/events.1").touch()
        (run_dir / "metrics.jsonl").write_text("{}\n")
        (run_dir / "inputs.json").write_text("{}")
    for flag, name in (("metrics_file", "metrics.jsonl"), ("tensorboard_dir", "tensorboard")):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(other)
        for theirs in (other / name, mine / ".." / "other" / name, tmp_path / "link" / name):
            with pytest.raises(UserError, match=rf"--{flag.replace('_', '-')} .*: has figures of another run"):
                saving.check_run_folder(arguments(**{flag: str(theirs)}), mine)
        for own in (mine / name, tmp_path / "new" / name, mine / ".." / "mine" / name):
            saving.check_run_folder(arguments(**{flag: str(own)}), mine)
        (mine / "inputs.json").write_text(json.dumps({"metrics": str((other / name).resolve())}))
        saving.check_run_folder(arguments(**{flag: str(other / name)}), mine)
        (mine / "inputs.json").write_text("{}")
    said = r"--save .*other: is another run's folder; choose another, such as .*mine/check"
    with pytest.raises(UserError, match=said):
        saving.check_run_folder(arguments(save=str(other)), mine)
    for save in (mine, mine / "saves", other / "saves"):
        saving.check_run_folder(arguments(save=str(save)), mine)
    (other / "latest_checkpointed_iteration.txt").write_text("8")  # a run may go on under another --run-dir
    saving.check_run_folder(arguments(save=str(other)), mine)
    (tmp_path / "inputs.json").mkdir()
    with pytest.raises(UserError, match=r"inputs.json: cannot be read .*; remove it"):
        saving.check_run_folder(arguments(), tmp_path)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    ("half", "freeze"), [("bf16", ["vit"]), ("fp16", ["llm"]), ("bf16", []), ("", ["vit", "projector"]), ("", [])]
)
def test_what_is_frozen_needs_its_weights_alone(
    half: str, freeze: list[str], distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 bytes a weight, 4 its gradient, 12 the optimizer's, the last over the replicas where they share; in fp32 4, 4
    and 8. At the edge of the limit, and a byte beyond."""
    monkeypatch.setattr(platform, "device_memory", lambda: 2**50)
    huge = preset("internvl2-76b")
    total, trained = machine.parameters(huge, tuple(freeze))
    weight, gradient, state = (2, 4, 12) if half else (4, 4, 8)
    args = arguments(freeze=freeze, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, data_parallel_size=4,
                     use_distributed_optimizer=distributed, **({half: True} if half else {}))  # fmt: skip
    needs = (total * weight + trained * (gradient + state / (4 if distributed else 1))) / 8
    assert_memory_needed(args, Plan.from_cuts(huge.chain, (5,)), needs)


def assert_memory_needed(args: Namespace, plan: Plan, needs: float) -> None:
    """Of InternVL2-76B, which fits it and nothing less."""
    huge = preset("internvl2-76b")
    assert machine.check_memory(args, huge, plan, needs / GIB)
    with pytest.raises(UserError, match="weights, gradients and optimizer state need at least"):
        machine.check_memory(args, huge, plan, (needs - 64) / GIB)


@pytest.mark.parametrize(("given", "replicas", "offered"), [(False, 2, True), (True, 2, False), (False, 1, False)])
def test_memory_that_is_missing_has_remedies_that_were_not_given(given: bool, replicas: int, offered: bool) -> None:
    """And none that would shard over a single replica."""
    args = arguments(use_distributed_optimizer=given, data_parallel_size=replicas)
    with pytest.raises(UserError, match="raise --tensor-model-parallel-size") as refused:
        machine.check_memory(args, TINY, Plan.from_cuts(TINY.chain, ()), 1e-6)
    assert ("--use-distributed-optimizer" in str(refused.value)) is offered


def test_adapters_alone_need_gradients_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 16 in InternVL2-76B's Llama 3 70B: 80 layers of 8192, 28672 inside, 64 heads of 128 in 8 groups."""
    monkeypatch.setattr(platform, "device_memory", lambda: 2**50)
    huge = preset("internvl2-76b")
    a_layer = 16 * ((8192 + 8192) + 2 * (8192 + 1024) + (8192 + 8192) + 3 * (8192 + 28672))
    base, trained = machine.parameters(huge, ())[0], 80 * a_layer
    assert machine.parameters(huge, (), Adapters(16, 32.0, ("llm",))) == (base + trained, trained)
    args = arguments(lora_rank=16, lora_targets=None, tensor_model_parallel_size=4, bf16=True)
    assert_memory_needed(args, Plan.from_cuts(huge.chain, ()), ((base + trained) * 2 + trained * 16) / 4)
    assert saving.checkpoint_bytes(args, huge) == (base + trained) * 2 + trained * 12


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True), (-1, False)])
def test_a_plan_is_held_to_the_memory_at_its_edge(more: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's, or what the user allows, which may be more than there is."""
    monkeypatch.setattr(platform, "device_memory", lambda: 80 * GIB)
    plan = Plan.from_cuts(TINY.chain, (5,), predicted={"stage_peak_bytes": [1, 80 * GIB + more]})
    with pytest.raises(UserError, match=r"the device has 80.00 GiB") if refused else nullcontext():
        machine.check_memory(arguments(), TINY, plan, None)
    said = r"predicts 80.00 GiB on pipeline rank 1, --memory-gib is 80 GiB"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        assert not isinstance(machine.check_memory(arguments(), TINY, plan, 80.0), Note)
    assert isinstance(machine.check_memory(arguments(), TINY, plan, 80.1), Note)
    assert isinstance(machine.check_memory(arguments(), TINY, replace(plan, predicted={}), 80.1), Note)


ADAPTERS: Any = dict(run.CHECKS)["adapters"]


@pytest.mark.parametrize(
    ("model", "rank", "targets", "numbers", "none"),
    [
        # 3 layers, 128 wide, 352 inside: query and output of 128, key and value of 64 rows
        ("tiny", 4, None, 3 * 4 * (2 * 256 + 2 * 192 + 3 * 480), ""),
        # 48 layers, 2048 wide, 32 heads and 4 groups of 128; of the mixture the attention alone
        ("internvl3.5-30b-a3b", 2, ["llm"], 48 * 2 * (2 * 6144 + 2 * 2560), "; experts and their routers have none"),
        ("internvl3.5-30b-a3b", 2, ["projector"], 2 * (4096 + 2048 + 2048 + 2048), ""),
    ],
)
def test_numbers_that_adapters_train_are_said(model: str, rank: int, targets: Any, numbers: int, none: str) -> None:
    said = f"rank {rank} in {(targets or ['llm'])[0]}: {numbers:,} numbers are trained, nothing else{none}"
    for given, expected in (((rank, targets), said), ((None, None), None)):
        args = Namespace(lora_rank=given[0], lora_alpha=None, lora_targets=given[1])
        assert ADAPTERS(SimpleNamespace(inputs=SimpleNamespace(args=args, architecture=preset(model)))) == expected
