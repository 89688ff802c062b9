"""What narrower states of Adam do to a loss, by torch alone and by torchao: a small model of the documents' characters.

    TORCHDYNAMO_DISABLE=1 python benchmarks/narrow_states.py [--steps 400]      # pip install torchao for all rows

Each row is the same model from the same weights on the same characters. `states` are bytes a weight; of small matrices
torchao keeps states in fp32. The last line is the ratio of the last losses, the best with narrower states to fp32's.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.console import print_table
from omnibal_ext.output import say

WIDTH, LAYERS, HEADS, TOKENS, ROWS = 64, 2, 4, 48, 8
LAST = 20
"""Steps over which a loss is averaged, and packs of the text that is held out."""
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizers(rate: float) -> dict[str, tuple[torch.dtype, Make]]:
    """Of each row the precision of the weights, and what steps them."""
    how: dict[str, Any] = {"lr": rate, "weight_decay": 0.1}
    rows: dict[str, tuple[torch.dtype, Make]] = {
        "torch, fp32": (torch.float32, lambda weights: torch.optim.AdamW(weights, fused=True, **how)),
        "torch, bf16": (torch.bfloat16, lambda weights: torch.optim.AdamW(weights, fused=True, **how)),
    }
    if importlib.util.find_spec("torchao"):
        ao = importlib.import_module("torchao.optim")
        rounded = {**how, "bf16_stochastic_round": True}
        rows["torchao, bf16, stochastic rounding"] = torch.bfloat16, lambda weights: ao._AdamW(weights, **rounded)
        for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit"):
            rows[f"torchao {name}"] = torch.float32, lambda weights, name=name: getattr(ao, name)(weights, **how)
    return rows


class Model(nn.Module):
    """Characters [rows, tokens] -> logits of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, characters: Tensor) -> Tensor:
        """See the class."""
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=self.places.dtype)
        logits: Tensor = self.head(self.layers(self.words(characters) + self.places, mask=mask, is_causal=True))
        return logits


def loss_of(model: Model, text: Tensor, generator: torch.Generator) -> Tensor:
    """Of characters drawn anywhere in a text."""
    begins = torch.randint(len(text) - TOKENS, (ROWS, 1), generator=generator)
    rows = text[begins + torch.arange(TOKENS + 1)]
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def train(make: Make, dtype: torch.dtype, steps: int, text: Tensor) -> tuple[float, float, float]:
    """Bytes of states a weight, the mean of the last losses, and that of text that is held out."""
    torch.manual_seed(0)
    model, generator = Model().to(dtype), torch.Generator().manual_seed(1)
    optimizer, losses = make(model.parameters()), list[float]()
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    own, held = text[: -len(text) // 10], text[-len(text) // 10 :]
    for _ in range(steps):
        loss = loss_of(model, own, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falling.step()
        losses.append(loss.item())
    states = [state for states in optimizer.state.values() for state in states.values() if state.dim()]
    parts = [part for state in states for part in ((state.codes, state.scale) if hasattr(state, "codes") else (state,))]
    kept = sum(part.numel() * part.element_size() for part in parts) / sum(one.numel() for one in model.parameters())
    with torch.no_grad():
        after = [loss_of(model, held, generator).item() for _ in range(LAST)]
    return kept, sum(losses[-LAST:]) / len(losses[-LAST:]), sum(after) / LAST


def main() -> None:
    """Train every row and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    files = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
    found = {name: (dtype, *train(make, dtype, steps, text)) for name, (dtype, make) in optimizers(2e-3).items()}
    rows = [
        (name, dtype.itemsize, f"{kept:.2f}", f"{last:.3f}", f"{held:.3f}")
        for name, (dtype, kept, last, held) in found.items()
    ]
    print_table("states", ("optimizer", "weight", "states", "loss", "held out"), rows)
    first, *others = (last for _, _, last, _ in found.values())
    say(f"loss with narrower states over fp32's: {min(others) / first:.3f}")


if __name__ == "__main__":
    main()
