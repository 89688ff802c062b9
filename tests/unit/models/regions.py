"""regions.py CASE...: models whose layers are compiled regions beside the same that are not, printed as JSON.

Of each case the largest difference of loss or any gradient in `main_grad` over packs of all sizes, the graphs that
these gave the compiler, those used without a trial, those of other packs after them, what was said, and the calls of
regions a layer and pack. Small functions are launched as where they are compiled, but not compiled.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

os.environ["TORCHDYNAMO_DISABLE"] = "0"

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch.utils._triton import has_triton

has_triton()  # asked and kept before anything stands in for CUDA
COMPILE = torch.compile
NO_CUDA = {name: getattr(torch.cuda, name) for name in ("is_available", "get_device_properties", "current_device")}


def compiled(function: Any = None, **options: Any) -> Any:
    """Takes the place of `torch.compile`: regions alone are compiled; what else is has its rows marked."""
    if function is None:
        return partial(compiled, **options)
    if not options.get("fullgraph"):

        @wraps(function)
        def launched(*given: Any, **named: Any) -> Any:  # `for_any_rows` is not there yet
            return for_any_rows(partial)(function)(*given, **named)

        return launched
    launch = for_any_rows(COMPILE)(function, **options)

    @wraps(function)
    def counted(*arguments: Any) -> Any:
        CALLS.append(function)
        RAN.clear()
        with patch.multiple(torch.cuda, **NO_CUDA), patch.object(compile_fx, "compile_fx", told_apart):
            return launch(*arguments)

    return counted


def told_apart(graph: Any, inputs: Any) -> Any:
    """The case's compiler; what it makes says that it runs."""
    made = BACKEND[0](graph, inputs)

    def run(*given: Any) -> Any:
        RAN.append(made)
        return made(*given)

    return run


def outcome(function: Any, *given: Any) -> Any:
    """Takes the place of a trial's half: which graph it tries."""
    found = OUTCOME(function, *given)
    TRIED.update(RAN)
    return found


BACKEND: list[Any] = []
CALLS: list[Any] = []
RAN: list[Any] = []
TRIED: set[Any] = set()
USED: set[Any] = set()
SAID: list[str] = []
torch.compile = compiled

from megatron.vlm.compiling import for_any_rows, mark_rows  # noqa: E402 (the compiler comes first)
from megatron.vlm.loss import token_loss, weigh_samples  # noqa: E402
from megatron.vlm.microbatch import Microbatch  # noqa: E402
from megatron.vlm.models import chain as chains  # noqa: E402
from megatron.vlm.models import region  # noqa: E402
from megatron.vlm.models.alone import alone  # noqa: E402
from megatron.vlm.models.attention import core_attention  # noqa: E402
from megatron.vlm.models.chain import Chain  # noqa: E402
from megatron.vlm.pipeline import tower  # noqa: E402
from megatron.vlm.pipeline.stage import Stage  # noqa: E402
from megatron.vlm.profiling.stage_pass import ModelType, get_model  # noqa: E402
from megatron.vlm.single import single_process  # noqa: E402
from omnibal_ext.architectures.presets import PRESETS  # noqa: E402
from tests import varlen  # noqa: E402
from tests.distributed import harness  # noqa: E402

OUTCOME, RUN = region._outcome, region.RegionLayer.run


def used(layer: Any, *given: Any) -> Any:
    """Takes the place of a layer's run: by which graph, if by any."""
    with patch.object(region.Region, "__call__", lambda *called: noted(CALL(*called))):
        return RUN(layer, *given)


CALL = region.Region.__call__


def noted(out: Any) -> Any:
    USED.update(() if out is None else RAN)
    return out


def marked(*given: Any) -> Any:
    """Takes the place of a region's inputs: of which something else has marked the rows."""
    found = INPUTS(*given)
    mark_rows(found or ())
    return found


INPUTS = region._inputs


def broken(*_: Any) -> Any:
    """A compiler that fails."""
    raise RuntimeError("no compiler here")


def as_it_is(graph: Any, _: Any) -> Any:
    return graph.forward


def wrong(graph: Any, _: Any) -> Any:
    """What gives other numbers."""
    return lambda *given: [one * 1.5 if isinstance(one, torch.Tensor) else one for one in graph.forward(*given)]


def copied(graph: Any, _: Any) -> Any:
    """What hands backward copies of the weights."""
    return lambda *given: [one.clone() if isinstance(one, torch.Tensor) else one for one in graph.forward(*given)]


CASES: dict[str, dict[str, Any]] = {
    "dense": {"backend": compile_fx.compile_fx},
    "half": {"backend": compile_fx.compile_fx, "words": ("--bf16",)},
    "recomputed": {"again": True},
    "adapted": {"adapted": ("vit", "llm")},
    "frozen": {"frozen": ("vit",)},
    "native": {"model": "native"},
    "gated": {"model": "linear"},
    "windows": {"model": "gemma"},
    "mixture": {"model": "mixture"},
    "samples": {"kernel": "sample_by_sample"},
    "apart": {"flags": {"gradient_accumulation_fusion": False}},
    "tower": {"beside": True},
    "marked": {"marks": True},
    "marked later": {"marks": True, "trials": False},
    "broken": {"backend": broken},
    "backward broken": {"backend": aot_autograd(fw_compiler=as_it_is, bw_compiler=broken)},
    "backward wrong": {"backend": aot_autograd(fw_compiler=as_it_is, bw_compiler=wrong)},
    "copied": {"backend": aot_autograd(fw_compiler=copied, bw_compiler=as_it_is)},
}


def trained(chain: Chain, packs: Sequence[Microbatch], recompute: Sequence[int]) -> dict[str, torch.Tensor]:
    """The loss, and the sums of gradients, of two iterations: `main_grad`, or of a whole chain a replicated tower's."""
    whole = harness.stirred(Stage(chain, 0, len(chain.kinds), tuple(recompute)))
    weights: list[Any] = [weight for weight in whole.parameters() if weight.requires_grad]
    if chain.is_whole:
        stage, sums = whole, tower._flatten(0, weights, [], True).totals
    else:
        (stage,) = get_model(lambda **_: whole, ModelType.encoder_or_decoder)
        sums = [weight.main_grad for weight in weights]
    for _ in range(2):
        for one in sums:
            one.zero_()
        for weight in weights:
            weight.grad_added_to_main_grad = False
        total = torch.zeros(())
        for pack in packs:
            loss, *_ = token_loss("token", pack, stage(weigh_samples("token", pack)))
            loss.backward()
            total += loss.detach()
    names = (name for name, weight in whole.named_parameters() if weight.requires_grad)
    return {"loss": total, **dict(zip(names, sums, strict=True))}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest, each against the largest entry."""
    pairs = [(found[name], whole) for name, whole in expected.items()]
    return max(((mine - whole).abs().max() / whole.abs().max().clamp(min=1e-8)).item() for mine, whole in pairs)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def measure(
    model: str = "small",
    kernel: str = "variable_length",
    again: bool = False,
    adapted: tuple[str, ...] = (),
    frozen: tuple[str, ...] = (),
    backend: Any = aot_eager,
    beside: bool = False,
    marks: bool = False,
    trials: bool = True,
    flags: dict[str, Any] | None = None,
    words: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A case; `again`: layers are computed again; `beside`: those of a replicated tower; `marks`: rows of inputs are
    marked, and, if so, in `trials`."""
    architecture, BACKEND[:] = harness.MODELS[model], [backend]
    varlen.on_cpu()
    PRESETS[model] = architecture
    with (
        single_process(model, words) as inputs,
        patch.object(core_attention, "choose_kernel", lambda *_: kernel),
        patch.object(region, "say", SAID.append),
        patch.object(region, "_outcome", outcome),
        patch.object(region, "_inputs", marked if marks else INPUTS),
        patch.object(region, "mark_rows", mark_rows if trials else lambda _: None),
        patch.object(region.RegionLayer, "run", used),
        alone() if beside else nullcontext(),
    ):
        vars(inputs.args).update({"gradient_accumulation_fusion": True, **(flags or {})})
        layers = [layer for layer, kind in enumerate(architecture.chain) if kind in ("vit", "llm")]
        # Several tiles first: one is a size of its own.
        packs = sorted(harness.sample_packs(model=model), key=lambda pack: -pack.media_of("tiles").amount)

        def run(packs: Sequence[Microbatch], chain: Chain) -> dict[str, torch.Tensor]:
            return trained(chain, packs, layers if again else ())

        def new() -> Chain:
            chain = harness.build_chain(inputs.args, architecture, frozen, adapted)
            return chain.whole() if beside else chain

        with patch.object(chains, "is_fit", lambda _: False):
            expected = run(packs, new())
        before, CALLS[:], chain = graphs(), [], new()
        TRIED.clear()
        USED.clear()
        found = run(packs, chain)
        first, calls = graphs() - before, len(CALLS)
        run(harness.sample_packs("one of many", model=model), chain)
        runs = 2 * sum(not chain.passes_by(layer, pack) for pack in packs for layer in layers)
        return {
            "difference": difference(found, expected),
            "graphs": first,
            "untried": len(USED - TRIED),
            "more": graphs() - before - first,
            "said": [SAID.pop(0) for _ in SAID[:]],
            "calls": calls / runs,
        }


if __name__ == "__main__":
    print(json.dumps({name: measure(**CASES[name]) for name in sys.argv[1:]}))
