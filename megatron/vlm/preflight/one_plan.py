"""Checks that all ranks have one plan, before their first collective: with different plans they would deadlock."""

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from textwrap import shorten
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous

from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.reading.document import decode

NOT_COMPARED = ("predicted", "alternatives", "trials", "method", "memory_gib")
"""A plan's fields that do not affect training."""
SHOWN = 60
"""Most characters of a value in a message."""


@contextmanager
def one_plan(plan: Plan, args: Namespace) -> Iterator[None]:
    """Inside, all ranks of the job have the same plan.

    Raises UserError with the difference on the first rank, and on the ranks whose plan is not the first's. Plans are
    exchanged through the rendezvous store.
    """
    if args.world_size == 1:
        yield
        return
    limit = timedelta(minutes=args.distributed_timeout_minutes)
    store, _, _ = next(iter(rendezvous("env://", timeout=limit)))  # stays open, so that torch's init reuses it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _compare(PrefixStore(f"plans/{attempt}", store), compared_fields(plan), args)
    yield


def compared_fields(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that must be equal; lists of actions split into words."""
    record = {name: value for name, value in plan.to_record().items() if name not in NOT_COMPARED}
    record.setdefault("tower", None)
    record["lists"] = [words.split() for words in record.get("lists", ())]
    alike: dict[str, Any] = json.loads(json.dumps(record))
    return alike


def _compare(store: Store, mine: dict[str, Any], args: Namespace) -> None:
    """The first rank reads all other plans, the others the first's. The first holds the store, so it must end last."""
    text, rank = json.dumps(mine), args.rank
    found = "" if rank == 0 else _difference_from(store, mine, text, 0)
    store.set(f"{rank}/plan", text)
    store.set(f"{rank}/hash", hashlib.sha256(text.encode()).hexdigest())
    others = [(other, _difference_from(store, mine, text, other)) for other in range(1, args.world_size) if rank == 0]
    for other, difference in [(0, found), *others]:
        if difference:
            raise UserError(
                f"plan {args.plan}: rank {rank} was given another than rank {other}: {difference}; all ranks obey one: "
                "give every node the same file"
            )


def _difference_from(store: Store, mine: dict[str, Any], text: str, other: int) -> str:
    """The first difference from another rank's plan; "" if none."""
    if store.get(f"{other}/hash").decode() == hashlib.sha256(text.encode()).hexdigest():
        return ""
    return first_difference("", mine, decode(store.get(f"{other}/plan")))


def first_difference(name: str, mine: Any, other: Any) -> str:
    """The first difference of two records, as "lists.1.4 is F1.0, not E1.1"; "" if none."""
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        pairs = [(key, mine[key], other[key]) for key in mine]
    elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        pairs = [(str(place), *pair) for place, pair in enumerate(zip(mine, other, strict=True))]
    elif isinstance(mine, list) and isinstance(other, list):
        return f"{name} has {len(mine)} entries, not {len(other)}"
    else:
        shown = [shorten(str(value), SHOWN, placeholder="...") for value in (mine, other)]
        return "" if mine == other else f"{name} is {shown[0]}, not {shown[1]}"
    found = (first_difference(f"{name}.{key}".removeprefix("."), one, another) for key, one, another in pairs)
    return next(filter(None, found), "")
