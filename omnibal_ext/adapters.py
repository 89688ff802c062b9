"""Low-rank adapters (LoRA, arXiv 2106.09685): which matrices have one, their sizes, and their flags.

Of a frozen matrix W [rows, columns], A [rank, columns] and B [rows, rank] are trained:

    y = W x + alpha / rank * B (A x)

If a Megatron matrix concatenates several of Hugging Face (query, key, value; gate, up), each has its own A, as in peft.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import PART_OF, PARTS, chain_kind
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Interval, Need
from omnibal_ext.matrices import matrices_of
from omnibal_ext.modalities.matrix import Matrix
from omnibal_ext.trained import Trained

SUFFIX = "_adapter"
"""An adapter's name is its linear layer's with this suffix."""


@dataclass(frozen=True)
class Adapters:
    """Rank and scale of the adapters, and the parts of the model that have them; rank 0: there are none."""

    rank: int = 0
    alpha: float = 0.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Parts of the model, see `omnibal_ext.chain.PARTS`."""

    @classmethod
    def of(cls, arguments: Namespace) -> "Adapters":
        """Return the adapters that flags ask for. Defaults: --lora-alpha twice the rank, --lora-targets llm."""
        if not arguments.lora_rank:
            return cls()
        targets = tuple(part for part in PARTS if part in (arguments.lora_targets or ("llm",)))
        alpha = getattr(arguments, "lora_alpha", None) or 2 * arguments.lora_rank
        return cls(arguments.lora_rank, float(alpha), targets)

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> "Adapters":
        """Return the adapters of a record of `to_record`; of None, none."""
        return cls() if record is None else cls(record["rank"], record["alpha"], tuple(record["targets"]))

    def to_record(self) -> dict[str, Any] | None:
        """Return the record for a checkpoint's manifest; None: no adapters."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)} if self.rank else None

    @property
    def scale(self) -> float:
        """Factor on the adapters' output, alpha / rank."""
        return self.alpha / self.rank

    def frozen(self, parts: Sequence[str]) -> tuple[str, ...]:
        """Return the parts with frozen weights: all of the model if there are adapters, else `parts` (--freeze)."""
        return tuple(PARTS) if self.rank else tuple(parts)

    def trained(self, freeze: Sequence[str]) -> Trained:
        """Return what is trained: the adapters alone or, without any, all parts but `freeze` (--freeze)."""
        return Trained(self.frozen(freeze), self.rank, self.targets)

    @property
    def size_flags(self) -> list[str]:
        """The flags on which the adapters' costs depend, as command-line words: all but --lora-alpha."""
        return ["--lora-rank", str(self.rank), "--lora-targets", *self.targets] if self.rank else []

    @property
    def flags(self) -> list[str]:
        """The trainer's flags for these adapters, as command-line words."""
        return [*self.size_flags, "--lora-alpha", repr(self.alpha).removesuffix(".0")] if self.rank else []


NO_ADAPTERS = Adapters()


def adapted_matrices(architecture: Architecture) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices that can have adapters, by cost key (`chain.cost_kinds`): those of ViT, projector and LLM
    layers, except in experts and routers, patch merging and per-layer inputs."""
    return {
        kind: tuple(matrix for matrix in found if matrix.is_adaptable)
        for kind, found in matrices_of(architecture).items()
    }


def adapter_parameters(architecture: Architecture, adapters: Adapters, tensor: int = 1) -> dict[str, float]:
    """Return the number of adapter parameters in a layer, by cost key, on one of `tensor` tensor-parallel ranks."""
    return {
        kind: sum(matrix.numbers(adapters.rank, tensor) for matrix in matrices)
        for kind, matrices in adapted_matrices(architecture).items()
        if PART_OF[chain_kind(kind)] in adapters.targets
    }


def check_adapters(adapters: Adapters, architecture: Architecture) -> None:
    """Raise UserError for a target part that cannot have adapters, or a rank above a matrix's rows or columns."""
    if not adapters.rank:
        return
    matrices = adapted_matrices(architecture)
    for part in adapters.targets:
        if not matrices.get(part):
            why = {"projector": "is a bare matrix, for which peft has no adapter", "vit": "has no layers"}[part]
            raise UserError(f"--lora-targets {part}: the {part} of {architecture.name} {why}; leave it out")
        least, name = min((min(m.columns, m.rows), m.name) for m in matrices[part])
        if adapters.rank > least:
            raise UserError(
                f"--lora-rank {adapters.rank}: {part}'s {name} has {least} rows or columns; give at most that"
            )


NUMBERS = (Interval("[1, 65536]", "lora_rank"),)
NEEDS = (
    Need("lora_targets", "--lora-rank", lambda given: given.lora_rank),
    Need("freeze", "to be given without --lora-rank, which freezes all weights", lambda args: not args.lora_rank),
)


def add_trained_flags(parser: Any) -> None:
    """Add --freeze and the flags of adapters to a parser or an argument group."""
    parser.add_argument("--freeze", nargs="+", default=[], choices=tuple(PARTS), help="parts that are not trained")
    parser.add_argument("--lora-rank", type=int, metavar="R", help="train adapters of this rank, and nothing else")
    parser.add_argument(
        "--lora-targets", nargs="+", choices=tuple(PARTS), metavar="PART", help="parts that get adapters (default: llm)"
    )
