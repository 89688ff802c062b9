"""What is recomputed instead of kept: the same gradients from fewer bytes, each once more."""

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.vlm.loss import token_loss
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models import recompute
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from omnibal_ext.chain import PARTS, RECOMPUTABLE_KINDS
from tests.distributed import harness

pytestmark = pytest.mark.usefixtures("inputs")
ROUNDING = 5e-6
WAYS = ("full", "cheap")
MODELS = ("small", "wide_norm", "features", "gemma", "gemma_4", "experts")


def build(name: str, way: str = "", frozen: tuple[str, ...] = (), targets: tuple[str, ...] = ()) -> Stage:
    """The whole model, all layers recomputed in one way or none, with numbers in B of adapters."""
    chain = harness.build_chain(harness.get_args(), harness.MODELS[name], frozen, targets)
    layers = tuple(layer for layer, kind in enumerate(chain.kinds) if kind in RECOMPUTABLE_KINDS)
    return harness.stirred(Stage(chain, 0, len(chain.kinds), *(layers if way == one else () for one in WAYS)))


def gradients_of(stage: Stage) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in stage.named_parameters() if weight.grad is not None}


def different(kept: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of gradients that differ by more than rounding."""
    assert found.keys() == kept.keys()
    return [name for name, one in kept.items() if (one - found[name]).abs().max() > ROUNDING * one.abs().max()]


def forward(stage: Stage, pack: Microbatch) -> Tensor:
    return token_loss("token", pack, stage(pack))[0]


def gradients(stage: Stage, packs: list[Microbatch], split: bool) -> tuple[dict[str, Tensor], int]:
    """Of all packs together, by weight; and the bytes that wait for W, of all packs at once."""
    late, aside = WeightGradients(), list[Late]()
    if split:
        late.attach(stage)
    for pack in packs:
        with late.delaying(aside):
            forward(stage, pack).backward()
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for one in aside for t in one.held}
    accumulate(aside)
    return gradients_of(stage), sum(held.values())


@pytest.mark.parametrize(
    ("name", "split", "frozen"),
    [*((name, split, ()) for name in MODELS for split in (False, True)), *(("small", True, (part,)) for part in PARTS)],
)
def test_gradients_are_those_of_keeping_everything(name: str, split: bool, frozen: tuple[str, ...]) -> None:
    packs = harness.sample_packs(model=name)
    kept, held = gradients(build(name, "", frozen), packs, split)
    found, held_again = gradients(build(name, "cheap", frozen), packs, split)
    # Where a norm is many operations, its input's gradients are added up in another order.
    assert different(kept, found) == []
    assert held_again == held, "from B to W nothing changes"
    assert (held > 0) == split


def test_outside_of_b_gradients_wait_for_no_w() -> None:
    packs, stage = harness.sample_packs(model="small")[:1], build("small")
    plain, _ = gradients(build("small"), packs, False)
    WeightGradients().attach(stage)
    forward(stage, packs[0]).backward()
    found = gradients_of(stage)
    assert found.keys() == plain.keys()
    assert all(torch.allclose(found[name], plain[name], rtol=1e-4, atol=1e-6) for name in plain)


def test_each_is_computed_once_more_and_only_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, pack, ran = build("small", "cheap"), harness.sample_packs()[7], []
    config = list(stage.links.values())[4].mlp.config
    activation = config.activation_func
    monkeypatch.setattr(config, "activation_func", lambda x: ran.append(torch.is_grad_enabled()) or activation(x))
    with torch.no_grad():
        forward(stage, pack)
    assert ran == [False] * 4
    ran.clear()
    loss = forward(stage, pack)
    assert ran == [False] * 4, "nothing is kept of how it was computed"
    loss.backward()
    assert ran == [False] * 4 + [True] * 4


def test_the_input_of_a_linear_layer_is_let_go_once_it_is_multiplied() -> None:
    """Counters of what autograd saves do not see this: of two hooks on saved tensors the inner one alone is called."""
    norm, linear, outputs = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4), []
    recompute.keep_where_from(linear)

    def watched(entering: Tensor) -> Tensor:
        out: Tensor = norm(entering)
        outputs.append(StorageWeakRef(out.untyped_storage()))
        return out

    out = linear(recompute.run_recomputed(watched, torch.randn(3, 8, requires_grad=True)))
    assert [one.expired() for one in outputs] == [True]
    out.sum().backward()
    assert [one.expired() for one in outputs] == [True, True]
