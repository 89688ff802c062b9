"""What Gemma 3 rounds in half precision, and where, is what transformers rounds: bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from tests.unit.alone import megatron_alone

gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    with megatron_alone("gemma") as inputs:
        inputs.args.params_dtype = request.param
        yield Chain.of(inputs.args, inputs.architecture)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("chain", HALVES, indirect=True, ids=str)
def test_words_are_scaled_by_a_rounded_root(chain: Chain) -> None:
    ours, width = chain.build(chain.kinds.index("word_embed")), chain.language.hidden_size
    theirs = gemma.Gemma3TextScaledWordEmbedding(chain.vocab_size, width, 0, embed_scale=width**0.5)
    theirs = theirs.to(chain.language.params_dtype)
    table = drawn(chain.vocab_size, width, dtype=chain.language.params_dtype)
    ours.embedding.weight.data.copy_(table)
    theirs.weight.data.copy_(table)
    ids = torch.arange(100)
    batch = Microbatch((100,), 1, 100, input_ids=ids, media={"tiles": Images(positions=ids[:0])})
    found = ours(drawn(0, 1, width, dtype=table.dtype), batch).squeeze(1)
    assert found.dtype == table.dtype
    assert torch.equal(found, theirs(ids))


@pytest.mark.parametrize("chain", HALVES, indirect=True, ids=str)
def test_norms_round_once_behind_the_weight(chain: Chain) -> None:
    ours, width = chain.build(len(chain.kinds) - 1).norm, chain.language.hidden_size
    theirs = gemma.Gemma3RMSNorm(width, eps=chain.language.layernorm_epsilon).to(chain.language.params_dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(drawn(width, seed=1))
    hidden = 3 * drawn(50, 1, width, dtype=chain.language.params_dtype, seed=2)
    assert torch.equal(ours(hidden), theirs(hidden))
