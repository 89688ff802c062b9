"""Low-rank adapters (LoRA, arXiv 2106.09685): which matrices get one, of what sizes, and the flags that ask for them.

Of a frozen matrix W [rows, columns], A [rank, columns] and B [rows, rank] are trained:

    y = W x + alpha / rank * B (A x)

A matrix of ours that is several at Hugging Face's (query, key and value; gate and up) has an A for each of them, so
that the adapters are those that peft would train.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import DENSE, KIND_OF, LINEAR, PART_OF, PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Interval, Need
from omnibal_ext.matrices import Matrix, matrices_of

SUFFIX = "_adapter"
"""Of an adapter's name, behind that of the layer that it belongs to."""


@dataclass(frozen=True)
class Adapters:
    """Which parts of a model have adapters, and what these are like; rank 0: there are none."""

    rank: int = 0
    alpha: float = 0.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Of `omnibal_ext.chain.PARTS`."""

    @classmethod
    def of(cls, arguments: Namespace) -> "Adapters":
        """As flags say: --lora-alpha is twice the rank, and --lora-targets the language model, unless given."""
        if not arguments.lora_rank:
            return cls()
        targets = tuple(part for part in PARTS if part in (arguments.lora_targets or ("llm",)))
        alpha = getattr(arguments, "lora_alpha", None) or 2 * arguments.lora_rank
        return cls(arguments.lora_rank, float(alpha), targets)

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> "Adapters":
        """Of `to_record`."""
        return cls() if record is None else cls(record["rank"], record["alpha"], tuple(record["targets"]))

    def to_record(self) -> dict[str, Any] | None:
        """What a save says of them; None where there are none."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)} if self.rank else None

    @property
    def scale(self) -> float:
        """What the product of a matrix's adapters is multiplied with."""
        return self.alpha / self.rank

    def frozen(self, parts: Sequence[str]) -> tuple[str, ...]:
        """The parts whose own weights are not trained: `parts`, or with adapters all."""
        return tuple(PARTS) if self.rank else tuple(parts)

    @property
    def size_flags(self) -> list[str]:
        """The flags that ask for adapters of this size, as words; what they are scaled by costs nothing."""
        return ["--lora-rank", str(self.rank), "--lora-targets", *self.targets] if self.rank else []

    @property
    def flags(self) -> list[str]:
        """The trainer's flags that ask for these, as words."""
        return [*self.size_flags, "--lora-alpha", repr(self.alpha).removesuffix(".0")] if self.rank else []


NO_ADAPTERS = Adapters()


def adapted_matrices(architecture: Architecture) -> dict[str, tuple[Matrix, ...]]:
    """The matrices that get adapters, by what costs stand under: all linear layers of transformer layers and projector.

    Experts get none, nor does their router: of a mixture those of the attention alone. Nor do matrices that join
    squares of patches, or stand between that and a perceptron, nor those of what layers read beside hidden states.
    """
    return {
        kind: tuple(matrix for matrix in found if matrix.is_adaptable)
        for kind, found in matrices_of(architecture).items()
        if kind not in (DENSE, LINEAR)
    }


def adapter_parameters(architecture: Architecture, adapters: Adapters, tensor: int = 1) -> dict[str, float]:
    """Interval in the adapters of one layer of each kind, on one of `tensor` tensor-parallel ranks."""
    return {
        kind: sum(matrix.numbers(adapters.rank, tensor) for matrix in matrices)
        for kind, matrices in adapted_matrices(architecture).items()
        if PART_OF[KIND_OF.get(kind, kind)] in adapters.targets
    }


def check_adapters(adapters: Adapters, architecture: Architecture) -> None:
    """Raise UserError for parts that cannot have adapters, and a rank that no matrix is as large as."""
    if not adapters.rank:
        return
    if architecture.language.linear and "llm" in adapters.targets:
        raise UserError(
            f"--lora-targets llm: {architecture.name} has layers of linear attention, which have no adapters here; "
            "give vit or projector, or train whole weights"
        )
    matrices = adapted_matrices(architecture)
    for part in adapters.targets:
        if not matrices[part]:
            why = {"projector": "is a bare matrix, for which peft has no adapter", "vit": "has no layers"}[part]
            raise UserError(f"--lora-targets {part}: the {part} of {architecture.name} {why}; leave it out")
        least, name = min((min(m.columns, m.rows), m.name) for m in matrices[part])
        if adapters.rank > least:
            raise UserError(
                f"--lora-rank {adapters.rank}: {part}'s {name} has {least} rows or columns; give at most that"
            )


NUMBERS = (Interval("[1, 65536]", "lora_rank"),)
NEEDS = (
    Need("lora_targets", "--lora-rank", lambda arguments: arguments.lora_rank),
    Need("freeze", "no --lora-rank beside it, which freezes all but the adapters", lambda args: not args.lora_rank),
)


def add_trained_flags(parser: Any) -> None:
    """The flags that choose what of a model is trained, for a parser or a group of one's."""
    parser.add_argument("--freeze", nargs="+", default=[], choices=tuple(PARTS), help="parts that are not trained")
    parser.add_argument("--lora-rank", type=int, metavar="R", help="train adapters of this rank, and nothing else")
    parser.add_argument(
        "--lora-targets", nargs="+", choices=tuple(PARTS), metavar="PART", help="parts that get them (default: llm)"
    )
