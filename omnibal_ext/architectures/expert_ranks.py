"""Over which ranks the experts of a layer may be dealt, and are shared out."""

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError


def check_expert_ranks(architecture: Architecture, ranks: int, of: int | None = None) -> None:
    """Raise UserError where `ranks` cannot have as many experts each.

    `of`: tensor x data-parallel ranks, those of a pipeline rank; None where they are not known yet.
    """
    flag, experts = f"--expert-model-parallel-size {ranks}", architecture.language.experts
    if ranks < 1:
        raise UserError(f"{flag}: must be at least 1")
    if ranks > 1 and experts is None:
        raise UserError(f"{flag}: model {architecture.name!r} has no experts; leave it out")
    if experts and experts.count % ranks:
        raise UserError(f"{flag} does not divide the {experts.count} experts of a layer; give one that does")
    if of is not None and of % ranks:
        raise UserError(
            f"{flag} does not divide the {of} ranks (tensor x data parallel) over which experts are dealt; give one "
            "that does, or other parallel sizes"
        )


def expert_shares(tensor: int, data: int, ranks: int) -> tuple[int, float]:
    """Over how many ranks experts are shared out that are dealt over `ranks` (1: cut over the tensor-parallel ranks),
    and how many ranks then have the same ones."""
    shares = ranks if ranks > 1 else tensor
    return shares, tensor * data / shares
