"""The gated delta rule over a pack (arXiv 2412.06464): a state for each sample and head, updated token by token.

    S[t] = e^d[t] S[t-1] + k[t] r[t] (v[t] - e^d[t] S[t-1]^T k[t])^T        out[t] = S[t]^T q[t] / sqrt(width)

e^d is the share of a state that is kept, r the rate at which it learns a value; queries and keys have length 1. Samples
are cut into chunks. The effect of a chunk's tokens on each other is one triangular system, solved for all chunks of the
pack at once (arXiv 2406.06484); then states go from chunk to chunk, for all samples that have one more at once:

    sample a   | a0 | a1 | a2 |
    sample b   | b0 |                  steps: a0 c0 b0, a1 c1, a2
    sample c   | c0 | c1 |

Where flash-linear-attention is installed, its kernels do the same in half precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron.vlm import platform

CHUNK = 64
"""Tokens of a chunk, as in transformers and in the kernels, so that rounding is theirs."""
EPSILON = 1e-6
"""Number added to the squared length of a query or key."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of a pack's samples, ordered by step; within a step those of the longest samples are first."""

    rows: Tensor
    """[chunks, tokens of one], rows of the pack; T behind a sample's end."""
    slots: Tensor
    """[T], index of each row of the pack in the flattened `rows`."""
    steps: tuple[int, ...]
    """Chunks of each step."""

    @classmethod
    def of(cls, lengths: Sequence[int], size: int = CHUNK) -> "Chunks":
        """Cut samples of these lengths, end to end in a pack, into chunks of `size` tokens."""
        begins = [*accumulate(lengths, initial=0)]
        longest_first = sorted(range(len(lengths)), key=lambda sample: -lengths[sample])
        parts, steps = [], []
        for done in range(0, max(lengths), size):
            going_on = [sample for sample in longest_first if lengths[sample] > done]
            parts += [
                (begins[sample] + done, min(begins[sample] + done + size, begins[sample + 1])) for sample in going_on
            ]
            steps.append(len(going_on))
        rows = torch.full((len(parts), size), begins[-1])
        for row, (first, end) in zip(rows, parts, strict=True):
            row[: end - first] = torch.arange(first, end)
        flat = rows.flatten()
        slots = torch.empty(begins[-1] + 1, dtype=torch.long).scatter_(0, flat, torch.arange(len(flat)))[:-1]
        return cls(platform.to_device(rows), platform.to_device(slots), tuple(steps))

    def cut(self, rows: Tensor) -> Tensor:
        """Cut [T, heads, ...] into [chunks, heads, tokens, ...] in fp32, zero behind a sample's end."""
        filled = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return filled[self.rows].float().transpose(1, 2)

    def joined(self, chunks: Tensor) -> Tensor:
        """Join [chunks, heads, tokens, width] to [T, heads, width]."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


def in_chunks(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, chunks: Chunks) -> Tensor:
    """Compute the gated delta rule in fp32: query, key [T, heads, key width], value [T, heads, value width], `decay` d,
    `rate` r [T, heads] -> [T, heads, value width] in the values' precision."""
    q, k = (_unit(chunks.cut(one)) for one in (query, key))
    v, d, r = chunks.cut(value), chunks.cut(decay).cumsum(-1), chunks.cut(rate)[..., None]
    q = q * q.shape[-1] ** -0.5
    upper = torch.ones(d.shape[-1], d.shape[-1], dtype=torch.bool, device=d.device).triu(1)
    kept = (d[..., :, None] - d[..., None, :]).masked_fill(upper, -torch.inf).exp()  # from token to token of a chunk
    seen = (q @ k.mT) * kept
    # In the place of each value, what of it is new; and of each key, what it would find in the state before the chunk.
    asked = torch.cat([v * r, k * r * d.exp()[..., None]], dim=-1)
    new, found = torch.linalg.solve_triangular(
        (k * r) @ k.mT * kept, asked, upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)  # fmt: skip
    q, k = q * d.exp()[..., None], k * (d[..., -1:] - d).exp()[..., None]
    left = d[..., -1, None, None].exp()
    state, out = None, []
    # Split, not sliced: backward joins the parts once, and does not fill up each of them.
    for seen_now, learned, found_now, q_now, k_now, left_now in zip(
        *(one.split(chunks.steps) for one in (seen, new, found, q, k, left)), strict=True
    ):
        if state is None:
            out.append(seen_now @ learned)
            state = k_now.mT @ learned
            continue
        state = state[: len(learned)]
        corrected = learned - found_now @ state
        out.append(seen_now @ corrected + q_now @ state)
        state = state * left_now + k_now.mT @ corrected
    return chunks.joined(torch.cat(out)).to(value.dtype)


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON)


def chunk_indices(lengths: Sequence[int], size: int = CHUNK) -> Tensor:
    """Return int32 [chunks, 2] on the device: the sample of each chunk of a pack, and its number there. Kernels that
    are not given them read the samples' boundaries from the device, for which the host waits."""
    pairs = [(sample, chunk) for sample, length in enumerate(lengths) for chunk in range(-(-length // size))]
    return platform.to_device(torch.tensor(pairs, dtype=torch.int32))


def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, boundaries: Tensor, indices: Tensor
) -> Tensor:
    """Compute `in_chunks` by flash-linear-attention. `boundaries` int32 [samples + 1]; `indices` of `chunk_indices`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        *(one.unsqueeze(0) for one in (query, key, value)),
        g=decay.unsqueeze(0),
        beta=rate.unsqueeze(0),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=boundaries,
        chunk_indices=indices,
    )
    found: Tensor = out.squeeze(0)
    return found
