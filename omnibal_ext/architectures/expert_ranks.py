"""Expert parallelism: which sizes a model allows, and how many ranks share a layer's experts."""

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError

MULTIPLE = 8
"""An expert's widths on a rank must be multiples of this: torch wants rows aligned to 16 bytes."""


def check_expert_ranks(architecture: Architecture, ranks: int, of: tuple[int, int] | None = None) -> None:
    """Raise UserError unless `ranks` is a possible expert-parallel size of the model.

    `of`: (tensor-parallel size, data-parallel size); None if not known yet.
    """
    flag, experts = f"--expert-model-parallel-size {ranks}", architecture.language.experts
    if ranks < 1:
        raise UserError(f"{flag}: must be at least 1")
    if ranks > 1 and experts is None:
        raise UserError(f"{flag}: model {architecture.name!r} has no experts; leave it out")
    if experts and experts.count % ranks:
        raise UserError(f"{flag} does not divide the {experts.count} experts of a layer; give one that does")
    if of is not None and of[0] * of[1] % ranks:
        raise UserError(
            f"{flag} does not divide the {of[0] * of[1]} ranks (tensor x data parallel) of a pipeline stage; give "
            "one that does, or other parallel sizes"
        )
    if experts:
        _check_widths(architecture, of[0] if of and ranks == 1 else 1)


def _check_widths(architecture: Architecture, cuts: int) -> None:
    hidden, inner = architecture.language.hidden_size, architecture.language.usual.ffn_hidden_size
    for name, width in (("hidden_size", hidden), ("an expert's intermediate size", inner)):
        if width % MULTIPLE:
            raise UserError(
                f"model {architecture.name!r}: {name} is {width}; experts are trained only if it is a multiple of "
                f"{MULTIPLE} (16 bytes in bf16), as torch requires"
            )
    if inner % (MULTIPLE * cuts):
        raise UserError(
            f"model {architecture.name!r}: an expert's intermediate size {inner}, divided by {cuts} tensor-parallel "
            f"ranks, must be a multiple of {MULTIPLE}: give a smaller --tensor-model-parallel-size, or an "
            "--expert-model-parallel-size above 1, which does not shard experts"
        )


def expert_shares(tensor: int, data: int, ranks: int) -> tuple[int, float]:
    """Return over how many ranks a layer's experts are divided, and how many ranks have the same ones.

    `ranks`: expert-parallel size; 1: experts are sharded over the tensor-parallel ranks."""
    shares = ranks if ranks > 1 else tensor
    return shares, tensor * data / shares
