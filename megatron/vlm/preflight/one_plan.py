"""Checks that all ranks have one plan, before their first collective: with different plans they would deadlock."""

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store, rendezvous

from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan

NOT_COMPARED = ("predicted", "alternatives", "trials", "method", "memory_gib")
"""A plan's fields that do not affect training."""


@contextmanager
def one_plan(plan: Plan, args: Namespace) -> Iterator[None]:
    """Check that all ranks of the job have the same plan, before the block begins.

    Raises UserError on the first rank, and on the ranks whose plan is not the first's. Hashes of plans are exchanged
    through the rendezvous store.
    """
    if args.world_size == 1:
        yield
        return
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    store, _, _ = next(iter(rendezvous("env://", timeout=limit)))  # stays open, so that torch's init reuses it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _compare(PrefixStore(f"plans/{attempt}", store), hash_of(plan), args)
    yield


def hash_of(plan: Plan) -> str:
    """Hash the fields of a plan that must be equal on all ranks."""
    record = {name: value for name, value in plan.to_record().items() if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()


def _compare(store: Store, mine: str, args: Namespace) -> None:
    """Raise UserError if this rank's hash of the plan is not the first rank's; on the first rank, if any differs.

    The first rank reads all hashes, and so ends last: it holds the store that the others read.
    """
    rank = args.rank
    first = mine if rank == 0 else store.get("0").decode()
    store.set(str(rank), mine)
    found = [first, *(store.get(str(other)).decode() for other in range(1, args.world_size) if rank == 0)]
    for other, theirs in enumerate(found):
        if theirs != mine:
            raise UserError(
                f"plan {args.plan}: rank {rank} was given another than rank {other}; all ranks obey one: give every "
                "node the same file"
            )
