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
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.chain import DENSE, KIND_OF, PART_OF, PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Need, Numbers

ONE_MATRIX = ("glm4v_text",)
"""Language models whose gate and up are one matrix at Hugging Face's too, with one A."""
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


@dataclass(frozen=True)
class Matrix:
    """A matrix that gets an adapter, whole: [rows, columns], by the name of its layer within a link."""

    name: str
    rows: int
    columns: int
    shares: tuple[int, ...] = (1,)
    """Rows of each matrix of Hugging Face's that it is made of: of gate and up, one behind the other; of query, key and
    value in each group of heads, group by group."""
    by_rows: bool = False
    """Tensor-parallel ranks have parts of its columns, and add up what these give."""
    is_stacked: bool = False
    """It is gate and up, each of which is cut over tensor-parallel ranks."""

    @property
    def parts(self) -> int:
        """How many matrices of Hugging Face's it is, each with an A of its own."""
        return len(self.shares)

    def numbers(self, rank: int, tensor: int = 1) -> float:
        """Numbers in its adapters, on one of `tensor` tensor-parallel ranks; each of these has one of the two whole."""
        rows, columns = (self.rows, self.columns / tensor) if self.by_rows else (self.rows / tensor, self.columns)
        return rank * (self.parts * columns + rows)


def adapted_matrices(architecture: Architecture) -> dict[str, tuple[Matrix, ...]]:
    """The matrices that get adapters, by what costs stand under: all linear layers of transformer layers and projector.

    Experts get none, nor does their router: of a mixture those of the attention alone. Nor do matrices that join
    squares of patches, or stand between that and a perceptron, nor those of what layers read beside hidden states.
    """
    language, one_matrix = architecture.language, architecture.types[1] in ONE_MATRIX
    return {
        "vit": _vision(architecture),
        "projector": _projector(architecture),
        **{kind: _language(one, one_matrix) for kind, one in language.by_kind.items() if kind != DENSE},
    }


def adapter_numbers(architecture: Architecture, adapters: Adapters, tensor: int = 1) -> dict[str, float]:
    """Numbers in the adapters of one layer of each kind, on one of `tensor` tensor-parallel ranks."""
    return {
        kind: sum(matrix.numbers(adapters.rank, tensor) for matrix in matrices)
        for kind, matrices in adapted_matrices(architecture).items()
        if PART_OF[KIND_OF.get(kind, kind)] in adapters.targets
    }


def _vision(architecture: Architecture) -> tuple[Matrix, ...]:
    vision = architecture.vision
    if not vision.layers:
        return ()
    width, inner, head = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size // vision.heads
    # Query, key and value are one matrix at Hugging Face's too, but for Gemma 4's and Pixtral's.
    packed = vision.native is not None and not architecture.pools and architecture.merger != "matrix"
    return (
        Matrix("self_attention.linear_qkv", 3 * width, width, (1,) if packed else (head,) * 3),
        Matrix("self_attention.linear_proj", width, width, by_rows=True),
        Matrix(
            "mlp.linear_fc1", inner * (1 + vision.gated), width, (inner,) * (1 + vision.gated), is_stacked=vision.gated
        ),
        Matrix("mlp.linear_fc2", width, inner, by_rows=True),
    )


def _projector(architecture: Architecture) -> tuple[Matrix, ...]:
    if architecture.pools or architecture.merger == "normed":
        return ()
    out, shuffled = architecture.language.hidden_size, architecture.joined_width
    if architecture.merger == "gated":
        inner = architecture.merger_width
        return (
            Matrix("mlp.linear_fc1", 2 * inner, out, (inner, inner), is_stacked=True),
            Matrix("mlp.linear_fc2", out, inner, by_rows=True),
        )
    if architecture.merger == "matrix":
        width = architecture.vision.hidden_size
        return (Matrix("linear_fc1", out, width), Matrix("linear_fc2", out, out, by_rows=True))
    if architecture.merger == "shuffled":
        return (Matrix("linear", out, shuffled),)
    inner = shuffled if architecture.vision.native else out
    names = ("", *(f"feature_{number}." for number in range(architecture.streams - 1)))
    return tuple(
        matrix
        for name in names
        for matrix in (
            Matrix(f"{name}linear_fc1", inner, shuffled),
            Matrix(f"{name}linear_fc2", out, inner, by_rows=True),
        )
    )


def _language(language: LanguageArchitecture, one_matrix: bool = False) -> tuple[Matrix, ...]:
    width, heads = language.hidden_size, language.heads * language.head_dim
    keys = (language.head_dim,) * (1 if language.keys_are_values else 2)
    group = (language.heads // language.kv_heads * language.head_dim, *keys)
    projected = Matrix("self_attention.linear_qkv", language.kv_heads * sum(group), width, group)
    if language.takes_keys:
        projected = Matrix("self_attention.linear_qkv", heads, width)
    attention = (
        projected,
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
    )
    if language.experts:
        return attention
    inner = language.ffn_hidden_size
    shares = (1,) if one_matrix else (inner, inner)
    return (
        *attention,
        Matrix("mlp.linear_fc1", 2 * inner, width, shares, is_stacked=True),
        Matrix("mlp.linear_fc2", width, inner, by_rows=True),
    )


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


NUMBERS = (Numbers("[1, 65536]", "lora_rank"),)
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
