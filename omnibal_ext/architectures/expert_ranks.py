"""Over which ranks the experts of a layer may be cut or dealt, and are shared out."""

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError

MULTIPLE = 8
"""Of an expert's widths on a rank: rows of what is multiplied begin at multiples of 16 bytes."""


def check_expert_ranks(architecture: Architecture, ranks: int, of: tuple[int, int] | None = None) -> None:
    """Raise UserError where `ranks` cannot have as many experts each, or not be given them so.

    `of`: tensor- and data-parallel size of a pipeline rank; None where they are not known yet.
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
            f"{flag} does not divide the {of[0] * of[1]} ranks (tensor x data parallel) over which experts are dealt; "
            "give one that does, or other parallel sizes"
        )
    if experts:
        _check_widths(architecture, of[0] if of and ranks == 1 else 1)


def _check_widths(architecture: Architecture, cuts: int) -> None:
    hidden, inner = architecture.language.hidden_size, architecture.language.ffn_hidden_size
    for name, width in (("hidden_size", hidden), ("an expert's intermediate size", inner)):
        if width % MULTIPLE:
            raise UserError(
                f"model {architecture.name!r}: {name} is {width}; experts are trained whose widths are multiples of "
                f"{MULTIPLE}, 16 bytes in bf16, as torch multiplies them"
            )
    if inner % (MULTIPLE * cuts):
        raise UserError(
            f"model {architecture.name!r}: experts {hidden} and {inner} wide, the latter over {cuts} tensor-parallel "
            f"ranks; a rank multiplies multiples of {MULTIPLE}: give a smaller --tensor-model-parallel-size, or "
            "--expert-model-parallel-size, which leaves experts whole"
        )


def expert_shares(tensor: int, data: int, ranks: int) -> tuple[int, float]:
    """Over how many ranks experts are shared out that are dealt over `ranks` (1: cut over the tensor-parallel ranks),
    and how many ranks then have the same ones."""
    shares = ranks if ranks > 1 else tensor
    return shares, tensor * data / shares
