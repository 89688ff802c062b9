"""The trainer obeys its flags and the plan: what is frozen, how losses are weighed, what is recomputed; one rank."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron.vlm import pretrain
from megatron.vlm.ending import UnfinishedError
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models import recompute
from megatron.vlm.pretrain import Trainer
from omnibal_ext.chain import PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.plan import StagePlan, single_stage_plan
from omnibal_ext.schedules.actions import Action
from omnibal_ext.trained import Trained
from tests.distributed import harness
from tests.unit.alone import trainer_alone
from tests.unit.test_loss import closed_form

CHAIN = harness.SMALL.chain
RECOMPUTED, CHEAP = (1, 8), (4, 7)  # a ViT and an LLM layer each
CASES = {
    "vit": (("vit",), "token"), "projector": (("projector",), "sample"), "llm": (("llm",), "square"),
    "nothing": ((), "square"),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, Any]]:
    frozen, reduction = CASES[request.param]
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = single_stage_plan(CHAIN, model="small", model_hash=harness.SMALL.hash, trained=Trained(tuple(frozen)))
    stage = StagePlan((0, len(CHAIN)), RECOMPUTED, CHEAP)
    replace(plan, stages=(stage,), num_microbatches=4).save(path)
    flags = ["--plan", str(path), "--loss-reduction", reduction, *(["--freeze", *frozen] if frozen else [])]
    with trainer_alone("small", *flags) as made:
        yield made


def frozen_links(frozen: tuple[str, ...]) -> set[str]:
    kinds = {kind for part in frozen for kind in PARTS[part]}
    names = {"vit": [f"vit_{i}" for i in range(4)], "llm": [f"llm_{i}" for i in range(4)]}
    return {name for kind in kinds for name in names.get(kind, [kind])}


def link_of(name: str) -> str:
    return name.partition("links.")[2].split(".")[0]


def test_what_is_frozen_stays_bit_for_bit_and_the_rest_moves(case: tuple[Trainer, Any]) -> None:
    trainer, model = case
    frozen = frozen_links(tuple(trainer.args.freeze))
    before = {name: weight.detach().clone() for name, weight in model[0].named_parameters()}
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(config, model)
    optimizer.zero_grad()
    run(trainer, model, harness.sample_packs())
    assert optimizer.step()[0]
    for name, weight in model[0].named_parameters():
        held = link_of(name) in frozen
        assert weight.requires_grad != held, name
        assert torch.equal(weight, before[name]) == held, name


def execute(trainer: Trainer, model: Any, packs: Iterator[Microbatch], count: int, **how: bool) -> list[Any]:
    records: list[Any] = trainer.executor(
        forward_step_func=trainer.forward_step, data_iterator=packs, model=model, num_microbatches=count, **how
    )
    return records


def run(trainer: Trainer, model: Any, packs: list[Microbatch]) -> None:
    for module in model:
        module.zero_grad_buffer()
    execute(trainer, model, iter(packs), len(packs))


def test_the_loss_is_weighed_as_the_flag_says(case: tuple[Trainer, Any]) -> None:
    trainer, model = case
    pack = harness.sample_packs()[7]
    losses, weigh = trainer.forward_step(iter([pack]), model[0])
    total, normaliser, _ = weigh(losses)
    parts = zip(losses.detach().split(pack.lengths), pack.loss_mask.int().split(pack.lengths), strict=True)
    samples = [(of_tokens.tolist(), mask.tolist()) for of_tokens, mask in parts]
    wanted_total, wanted_normaliser, _ = closed_form(trainer.args.loss_reduction, samples)
    assert total.item() == pytest.approx(wanted_total, rel=1e-5)
    assert normaliser.item() == pytest.approx(wanted_normaliser, rel=1e-5)


def test_what_the_plan_recomputes_runs_twice_and_the_rest_once(case: tuple[Trainer, Any]) -> None:
    """Counted where the work is done: forwards of a layer."""
    trainer, model = case
    counts, layers = Counter[int](), enumerate(model[0].module.links.values())
    hooks = [module.register_forward_hook(lambda *_, layer=layer: counts.update([layer])) for layer, module in layers]
    run(trainer, model, [harness.sample_packs()[0]])
    for hook in hooks:
        hook.remove()
    # Nothing before the first trained part has a backward pass, so there is nothing to recompute for.
    idle = {"vit"} if trainer.args.freeze == ["vit"] else set()
    assert counts == {layer: 1 + (layer in RECOMPUTED and kind not in idle) for layer, kind in enumerate(CHAIN)}


def test_cheap_outputs_are_computed_again_where_the_plan_says(
    case: tuple[Trainer, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two norms and an activation of each layer it names, where there is a backward pass."""
    trainer, model = case
    ran, outcome = [], recompute._outcome

    def count(node: Any) -> Any:
        ran.append(node.outcome is None)
        return outcome(node)

    monkeypatch.setattr(recompute, "_outcome", count)
    run(trainer, model, [harness.sample_packs()[0]])
    assert sum(ran) == 3 * len(CHEAP) - 3 * (trainer.args.freeze == ["vit"])


def test_a_pack_is_read_while_the_one_before_is_computed(case: tuple[Trainer, Any]) -> None:
    trainer, model = case
    happened: list[str] = []

    def read() -> Iterator[Microbatch]:
        for number, pack in enumerate(harness.sample_packs()):
            happened.append(f"read {number}")
            yield pack

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        happened.append(f"{action.kind} {action.microbatch}")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.executor, "watch", watch)
        execute(trainer, model, read(), 3)
    assert happened == ["read 0", "F 0", "read 1", "B 0", "F 1", "read 2", "B 1", "F 2", "B 2"]


def test_evaluation_computes_no_gradient(case: tuple[Trainer, Any]) -> None:
    """As Megatron evaluates: model in evaluation, no gradient recorded, `forward_only`."""
    trainer, model = case
    packs = harness.sample_packs()[:2]
    weights = [weight for weight in model[0].parameters() if weight.requires_grad]
    for weight in weights:
        weight.main_grad.fill_(7.0)
    calls, backward = [], torch.autograd.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", lambda *a, **k: calls.append(a) or backward(*a, **k))
        model[0].eval()
        records = execute(trainer, model, iter(packs), 2, forward_only=True)
        model[0].train()
    assert not calls
    assert len(records) == 2
    assert all(not record["lm loss"].requires_grad for record in records)
    assert all(bool((weight.main_grad == 7.0).all()) for weight in weights)


@pytest.mark.parametrize(
    ("reached", "skips", "ends"), [(3, False, False), (8, False, True), (9, False, True), (0, True, True)]
)
def test_a_run_that_ends_before_its_end_has_failed(
    monkeypatch: pytest.MonkeyPatch, reached: int, skips: bool, ends: bool
) -> None:
    """As Megatron's loop returns, for no reason that was asked for."""
    steps = SimpleNamespace(install=lambda _: None)
    args = SimpleNamespace(train_iters=8, skip_train=skips, save_retain_interval=None, async_save=False)
    trainer = MagicMock(iteration=reached, bad_steps=steps, args=args)
    for name in ("platform", "guard", "install", "pretrain", "pretrain_cfg_container_from_args", "embedding_ranks"):
        monkeypatch.setattr(pretrain, name, MagicMock())
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda: None)
    with nullcontext() if ends else pytest.raises(UnfinishedError, match="after iteration 3 of 8; nothing says why"):
        pretrain.train(trainer)


@pytest.mark.parametrize("checks", [True, False])
def test_images_are_compared_unless_the_flag_says_not(monkeypatch: pytest.MonkeyPatch, checks: bool) -> None:
    asked: list[object] = []
    for name in ("PackedIndex", "PackDataset", "Needs", "sequence_multiple", "parallel_state", "stage_number"):
        monkeypatch.setattr(pretrain, name, MagicMock())
    monkeypatch.setattr(pretrain, "ChatDataset", lambda _, *given: asked.extend(given) or MagicMock())
    plan = MagicMock()
    plan.stages.__getitem__.return_value.layers = (0, 1)
    args = SimpleNamespace(image_checksums=checks)
    trainer = SimpleNamespace(args=args, plan=plan, architecture=MagicMock(), teams=MagicMock(), tile_cache=plan)
    Trainer._dataset(trainer, "data", "packs", None)  # type: ignore[arg-type]
    assert asked == [checks, plan]


@pytest.mark.parametrize("place", ["save", "metrics_file", "tensorboard_dir"])
def test_two_runs_write_in_no_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Their lines, curves or saves would mix."""
    monkeypatch.setattr("omnibal_ext.files.locks.PATIENCE_SECONDS", 0.0)
    names = {"save": None, "metrics_file": None, "tensorboard_dir": None, "rank": 0}
    args = Namespace(**names | {place: str(tmp_path / "place")})
    flag = f"--{place.replace('_', '-')}"
    with pretrain._write_locks(args):
        with pytest.raises(UserError, match=rf"{flag} .*place: in use by process"), pretrain._write_locks(args):
            pass
        with pretrain._write_locks(Namespace(**{**vars(args), "rank": 1})):  # of the same run
            pass
        with pretrain._write_locks(Namespace(**names | {place: str(tmp_path / "another")})):
            pass
    with pretrain._write_locks(args):
        pass
