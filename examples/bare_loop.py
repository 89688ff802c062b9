"""Balanced packs in a bare PyTorch loop: no Megatron, no framework.

    python examples/bare_loop.py

The same four steps serve DeepSpeed, Accelerate or `transformers.Trainer`: know the sizes, pack them, sample packs,
join the samples of a pack into one sequence in which each sees only itself.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

RANKS, STEPS_TO_PRINT = 4, 5


class CountingSentences(Dataset[Tensor]):
    """Sentences of very different lengths that count upwards modulo 16: easy to learn."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = (torch.randn(samples, generator=generator).exp() * 12).long().clamp(3, 120)
        self.starts = torch.randint(16, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tensor:
        return (self.starts[number] + torch.arange(int(self.lengths[number]))) % 16


class TinyLanguageModel(nn.Module):
    """One attention layer; `mask` keeps the samples of a pack apart."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [T], mask [T, T] -> logits [T, words]."""
        hidden = self.embedding(tokens)
        query, key, value = self.query_key_value(hidden)[None].chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(hidden + attended[0])


def join(samples: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a pack as one sequence: tokens [T], labels [T] (-100: none), attention mask [T, T]."""
    tokens = torch.cat(samples)
    labels = torch.cat([torch.cat([sample[1:], torch.tensor([-100])]) for sample in samples])
    owner = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([len(sample) for sample in samples]))
    return tokens, labels, (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool).tril()


def main() -> None:
    """Train for one epoch as rank 0 of four, and show that all four have the same work."""
    torch.manual_seed(0)
    dataset = CountingSentences(4000)
    sizes = Sizes.from_arrays([0] * len(dataset), dataset.lengths.numpy())
    with tempfile.TemporaryDirectory() as folder:
        options = PackOptions(llm_budget=256, data_parallel_size=RANKS)
        index, summary = build_index(sizes, Path(folder) / "packs", options)
        print(f"{summary.samples} samples in {summary.packs} packs (lower bound {summary.lower_bound_packs})")
        samplers = [PackBatchSampler(index, RANKS, rank) for rank in range(1, RANKS)]
        others = zip(*samplers, strict=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = TinyLanguageModel().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(dataset, batch_sampler=PackBatchSampler(index, RANKS, rank=0), collate_fn=join)
        for step, ((tokens, labels, mask), elsewhere) in enumerate(zip(loader, others, strict=True)):
            loss = nn.functional.cross_entropy(model(tokens.to(device), mask.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < STEPS_TO_PRINT or step == len(loader) - 1:
                work = [len(tokens)] + [int(dataset.lengths[samples].sum()) for samples in elsewhere]
                print(f"step {step}: loss {loss.item():.3f}, tokens of the {RANKS} ranks {work}")


if __name__ == "__main__":
    main()
