"""Experts: their routers are balanced sample by sample, by an independent formula; what would differ is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.vlm.arguments import TrainingInputs, read_arguments
from megatron.vlm.defaults import expert_defaults
from megatron.vlm.loss import REDUCTIONS, weigh_samples
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.mixture import router as module
from megatron.vlm.models.mixture.experts import Experts
from megatron.vlm.models.mixture.router import Balance
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError
from omnibal_ext.plan import single_stage_plan
from tests.distributed import harness
from tests.unit.alone import megatron_alone

COEFFICIENT = 0.7
MODEL = harness.EXPERTS.language


@pytest.fixture(scope="module")
def inputs() -> Iterator[TrainingInputs]:
    with megatron_alone("experts", "--moe-aux-loss-coeff", str(COEFFICIENT)) as inputs:
        yield inputs


def experts_of(inputs: TrainingInputs, model: Architecture = harness.EXPERTS, number: int = 0) -> Experts:
    """Of a language layer."""
    chain = harness.Chain.of(inputs.args, model)
    experts = chain.build(chain.kinds.index("llm") + number).mlp
    assert isinstance(experts, Experts)
    experts.router.weight.data.normal_()
    return experts


def balance_by_hand(rows: Tensor, weight: Tensor) -> Tensor:
    """Of one sample: experts x what they share of the choices x how likely they are, by counting."""
    likely = (rows @ weight.T).softmax(-1)
    chosen = torch.zeros(len(weight))
    for row in likely.tolist():
        for expert in sorted(range(len(row)), key=row.__getitem__)[-MODEL.experts.chosen :]:
            chosen[expert] += 1 / (MODEL.experts.chosen * len(rows))
    return len(weight) * (chosen * likely.mean(0)).sum()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("reduction", "power"), [("token", 1.0), ("square", 0.5), ("sample", 0.0)])
def test_balance_is_that_of_each_sample(inputs: TrainingInputs, reduction: str, power: float, seed: int) -> None:
    """Weighed as in the loss, with the coefficient asked for; padding behind a sample or the pack has no part in it."""
    torch.manual_seed(seed)
    lengths, true, targets = (7, 7, 7, 5), (7, 4, 6), torch.tensor([5.0, 2.0, 0.0, 0.0])
    batch = Microbatch(lengths, 3, sum(true), targets=targets, sample_lengths=true)
    experts = experts_of(inputs)
    weight = experts.router.weight
    hidden = torch.randn(sum(lengths), 1, MODEL.hidden_size)
    module.get_moe_metrics_tracker().clear()
    out, _ = experts(hidden, padding_mask=Balance.of(weigh_samples(reduction, batch)))
    (0 * out).sum().backward()
    begins = (0, 7, 14)
    samples = [hidden[begin : begin + length, 0] for begin, length in zip(begins, true, strict=True)]
    weights = [float(count) ** power if count else 0.0 for count in targets[:3].tolist()]
    copied = weight.detach().clone().requires_grad_()
    wanted = sum(w * balance_by_hand(rows, copied) for w, rows in zip(weights, samples, strict=True))
    (COEFFICIENT * wanted).backward()
    assert torch.allclose(weight.grad, copied.grad, rtol=1e-4, atol=1e-6)
    assert copied.grad.abs().max() > 1e-3
    logged = module.get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values
    assert logged.tolist() == pytest.approx([wanted.item() / sum(weights), 0, 0, 0], rel=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_balance_depends_on_no_packing(inputs: TrainingInputs, reduction: str) -> None:
    """Gradients of all weights from a global batch are those of its samples in packs of their own."""
    chain = harness.build_chain(inputs.args, harness.EXPERTS)
    text = harness.sample_packs("text only", model="experts")
    packed = harness.reference(chain, text, reduction)
    alone = harness.reference(chain, [one for pack in text for one in apart(pack)], reduction)
    for name, gradient in packed.gradients.items():
        if name.startswith(("word_embed", "llm", "head")):
            scale = gradient.abs().max().clamp(min=1e-8)
            assert (gradient - alone.gradients[name]).abs().max() / scale < 1e-5, name


def apart(pack: Microbatch) -> list[Microbatch]:
    rows = {name: getattr(pack, name).split(pack.lengths) for name in ("input_ids", "labels", "loss_mask")}
    return [
        replace(
            pack, lengths=(length,), samples=1, useful_tokens=length,
            supervised=rows["loss_mask"][number].nonzero().squeeze(1),
            segment_ids=torch.zeros(length, dtype=torch.long), targets=pack.targets[number : number + 1],
            **{name: parts[number] for name, parts in rows.items()},
        )
        for number, length in enumerate(pack.lengths)
    ]  # fmt: skip


def test_balance_is_scaled_as_the_loss(inputs: TrainingInputs) -> None:
    """By the loss scale of fp16, on every stage and in every iteration."""
    chain = harness.build_chain(inputs.args, harness.EXPERTS)
    plan = single_stage_plan(chain.kinds)
    model = harness.build_model(chain, plan)
    found = []
    for scale in (1.0, 8.0, 1.0):
        model[0].config.grad_scale_func = lambda loss, scale=scale: loss * scale
        harness.run_iteration(model, plan, harness.sample_packs("short", model="experts"), Executor())
        gradients = harness.gradients(model)
        found.append({name: gradient / scale for name, gradient in gradients.items()})
    for name, gradient in found[0].items():
        for other in found[1:]:
            assert torch.allclose(gradient, other[name], rtol=1e-4, atol=1e-7), name


def test_nothing_is_balanced_where_nothing_is_trained(inputs: TrainingInputs) -> None:
    """Held-out packs, and a coefficient of 0: the output has no other gradient than its own, nothing is logged."""
    experts, hidden = experts_of(inputs), torch.randn(6, 1, MODEL.hidden_size)
    batch = weigh_samples("token", Microbatch((6,), 1, 6, targets=torch.tensor([5.0])))
    module.get_moe_metrics_tracker().clear()
    for change in (experts.eval, lambda: setattr(experts.config, "moe_aux_loss_coeff", [0.0])):
        change()
        out, _ = experts(hidden, padding_mask=Balance.of(batch))
        (gradient,) = torch.autograd.grad((0 * out).sum(), experts.router.weight)
        assert not gradient.any()
        experts.train()
    assert not module.get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values.any()


@pytest.mark.parametrize(("flag", "dtype"), [(None, torch.float32), ("fp64", torch.float64)])
def test_routers_compute_in_the_precision_asked_for(inputs: TrainingInputs, flag: str | None, dtype: object) -> None:
    assert expert_defaults(MODEL)["moe_router_dtype"] == inputs.args.moe_router_dtype == "fp32"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs.args, "moe_router_dtype", flag or "fp32")
        router = experts_of(inputs).router.bfloat16()
        assert router.gating(torch.randn(3, 1, MODEL.hidden_size).bfloat16()).dtype == dtype


COMPLETE = "--lr 1e-3 --train-iters 3 --global-batch-size 1"


def test_tensor_parallel_ranks_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = f"--model qwen3-vl-30b-a3b --tensor-model-parallel-size 2 {COMPLETE}"
    with pytest.raises(UserError, match="needs --sequence-parallel"):
        read_arguments(words.split())
    assert read_arguments([*words.split(), "--sequence-parallel"]).args.num_experts == 128


def test_experts_are_dealt_over_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens then travel; fp16's scale must be one for all, which core learns for experts apart."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = f"--model qwen3-vl-30b-a3b --expert-model-parallel-size 4 {COMPLETE} --global-batch-size 4".split()
    args = read_arguments(words).args
    assert args.expert_tensor_parallel_size == 1
    with pytest.raises(UserError, match="learns a loss scale for the experts apart"):
        read_arguments([*words, "--fp16"])
    assert read_arguments([*words, "--fp16", "--loss-scale", "64"]).args.fp16


def test_a_bias_of_choices_stays_as_it_is(inputs: TrainingInputs) -> None:
    """Core would change it after a step."""
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    experts = experts_of(inputs, harness.GLM, 2)
    router = experts.router
    router.expert_bias.copy_(torch.randn(8))
    before = router.expert_bias.clone()
    router(torch.randn(30, 1, 48))
    assert router.local_tokens_per_expert.std() > 0
    _update_router_expert_bias([experts], experts.config)
    assert torch.equal(router.expert_bias, before)
