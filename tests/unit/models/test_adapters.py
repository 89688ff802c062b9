"""Adapters in a stage: trained alone, the same where layers are recomputed, left out where a checkpoint has none."""

import pytest
import torch
from torch import Tensor

from megatron.vlm.loss import token_loss
from megatron.vlm.models.adapters import adapters_in, left_out
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients
from omnibal_ext.chain import PARTS
from tests.distributed import harness
from tests.unit.models.test_cheap_recompute import WAYS, build, different, gradients_of

pytestmark = pytest.mark.usefixtures("inputs")


def gradients(stage: Stage, late: list[Late] | None = None) -> dict[str, Tensor]:
    aside = WeightGradients()
    if late is not None:
        aside.attach(stage)
    for pack in harness.sample_packs(model=stage.chain.architecture.name):
        with aside.delaying(late if late is not None else []):
            token_loss("token", pack, stage(pack))[0].backward()
    return gradients_of(stage)


@pytest.mark.parametrize("targets", [("llm",), ("vit",), tuple(PARTS)])
@pytest.mark.parametrize("name", ["small", "mixture"])
def test_adapters_alone_have_gradients_which_no_recomputation_changes(name: str, targets: tuple[str, ...]) -> None:
    kept = gradients(build(name, targets=targets))
    adapters = [adapter for adapter, _ in adapters_in(build(name, targets=targets))]
    assert kept.keys() == {f"{adapter}.{one}" for adapter in adapters for one in "ab"}
    assert all(gradient.any() for gradient in kept.values())
    for way in WAYS:
        assert different(kept, gradients(build(name, way, targets=targets))) == [], way


def test_zero_bubble_schedules_leave_nothing_for_later() -> None:
    late: list[Late] = []
    found, kept = gradients(build("small", targets=("llm",)), late), gradients(build("small", targets=("llm",)))
    assert not late
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_b_begins_as_zero_and_a_is_drawn_by_the_place_in_the_chain() -> None:
    chain = harness.build_chain(harness.get_args(), harness.SMALL, (), ("llm",))
    whole, last = Stage(chain, 0, len(chain.kinds)), Stage(chain, len(chain.kinds) - 2, len(chain.kinds))
    adapters = dict(adapters_in(whole))
    assert not any(adapter.b.any() for adapter in adapters.values())
    for name, adapter in adapters_in(last):
        assert torch.equal(adapter.a, adapters[name].a), name
        bound = adapter.matrix.columns**-0.5
        assert 0.8 * bound < adapter.a.abs().max() <= bound
    drawn = [adapter.a[0, :32] for adapter in adapters.values()]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn), "two are drawn alike"


def test_a_checkpoint_without_adapters_leaves_them_as_they_are() -> None:
    stage = build("small", targets=("llm",))
    before = {name: weight.clone() for name, weight in stage.named_parameters()}
    base = {name: weight + 1 for name, weight in before.items() if "_adapter." not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        stage.load_state_dict(base)
    with left_out([stage]):
        stage.load_state_dict(base)
        assert not any("_adapter." in name for name in stage.sharded_state_dict())
    after = dict(stage.named_parameters())
    assert all(torch.equal(after[name], before[name] + ("_adapter." not in name)) for name in before)
    assert sum("_adapter." in name for name in stage.sharded_state_dict()) == 4 * 4 * 2
