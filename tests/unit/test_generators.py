"""Nothing draws from a generator that others draw from: a resume, or an evaluation, would move what they draw.

What layers draw (dropout, drop path) is seeded anew in every iteration (`models/draws.py`); what is drawn to be timed
trains nobody.
"""

import ast
from collections.abc import Iterator

import pytest
import torch

from megatron.vlm.data.loader import microbatches
from tests.programs import ROOT

ALLOWED = {
    "megatron/vlm/models/attention/core_attention.py": {"torch.dropout"},
    "megatron/vlm/models/audio.py": {"torch.randn"},  # inputs to be timed, as of the ViT and of stages
    "megatron/vlm/models/films.py": {"torch.randn"},  # inputs to be timed, as of the ViT and of stages
    "megatron/vlm/models/chain.py": {  # inside what puts them back
        "torch.manual_seed",
        "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed",
    },
    "megatron/vlm/models/draws.py": {
        "torch.set_rng_state",
        "torch.cuda.set_rng_state",
        "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed",
    },
    "megatron/vlm/models/language.py": {"torch.nn.functional.dropout"},
    "megatron/vlm/models/linear/gated_delta_net.py": {  # first weights, seeded by the chain for each layer
        "torch.empty(linear.groups * linear.convolved, linear.kernel).uniform_",
        "torch.empty(linear.heads).uniform_",
    },
    "megatron/vlm/models/norm.py": {"torch.nn.functional.dropout"},
    "megatron/vlm/models/vit/layers.py": {"torch.nn.functional.dropout", "torch.rand"},
    "megatron/vlm/models/vit/encoder.py": {"torch.randn"},
    "megatron/vlm/no_cuda.py": {"torch.set_rng_state"},  # as torch.cuda's, where that is not
    "megatron/vlm/profiling/stage_pass.py": {"torch.randint", "torch.randn"},
    "megatron/vlm/prove/models.py": {"torch.manual_seed"},  # first weights, inside what puts it back
}
OWN = {"numpy.random": {"default_rng", "Generator", "SeedSequence"}, "random": {"Random", "SystemRandom"}}
"""What makes a generator of one's own."""
DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like", "seed", "manual_seed", "set_rng_state"),
    *("model_parallel_cuda_manual_seed", "DataLoader", "RandomSampler", "random_split"),
}  # fmt: skip
METHODS = {
    *("random_", "normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
    *("bernoulli", "multinomial", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"),
    *("kaiming_normal_", "orthogonal_"),
}  # fmt: skip
"""Of tensors, or of torch.nn.init."""


def drawn(source: str) -> Iterator[str]:
    """The calls of a module that draw from, or seed, a generator which is not handed to them, by full name."""
    tree, names = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
            names |= dict(zip(tops, tops, strict=True))
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(word.arg == "generator" for word in node.keywords):
            first, *rest = ast.unparse(node.func).split(".")
            name = ".".join((names.get(first, first), *rest))
            if _draws(name, first in names):
                yield name


def _draws(name: str, imported: bool) -> bool:
    module, _, last = name.rpartition(".")
    if not imported:  # a method of something
        return bool(module) and last in METHODS
    if module in OWN:
        return last not in OWN[module]
    if name.startswith("torch.Generator"):
        return False
    return name.startswith(("torch.", "megatron.core.")) and (last in DRAWS | METHODS or "dropout" in last.lower())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import numpy as np; np.random.shuffle(a)", ["numpy.random.shuffle"]),
        ("from random import shuffle as mix; mix(a)", ["random.shuffle"]),
        ("import torch; torch.rand(3)", ["torch.rand"]),
        ("import torch; torch.rand(3, generator=g)", []),
        ("from torch.utils.data import DataLoader; DataLoader(a)", ["torch.utils.data.DataLoader"]),
        ("weight.normal_()", ["weight.normal_"]),
        ("from torch import nn; nn.init.normal_(a)", ["torch.nn.init.normal_"]),
        ("from torch.nn import functional as F; F.dropout(a)", ["torch.nn.functional.dropout"]),
    ],
)
def test_a_draw_is_seen(line: str, found: list[str]) -> None:
    assert list(drawn(line)) == found


def test_nothing_draws_from_a_global_generator_but_layers() -> None:
    files = [path for room in ("omnibal_ext", "megatron", "tools") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): set(drawn(path.read_text())) for path in files}
    assert {path: names for path, names in found.items() if names} == ALLOWED


def test_packs_are_read_without_a_draw() -> None:
    class Numbers(torch.utils.data.Dataset[int]):
        reads_media = True

        def __getitem__(self, number: int) -> int:
            return number

    before = torch.get_rng_state()
    assert [*microbatches(Numbers(), [3, 1, 2])] == [3, 1, 2]  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
