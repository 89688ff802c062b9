"""Tables of contents run no code, change no class and cost no more than their size; what is written is read."""

import builtins
import copy
import pickle
import resource
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, EnumType
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron.vlm.checkpoint.contents import NAMES, RECORDS
from megatron.vlm.checkpoint.safe import read_contents
from megatron.vlm.checkpoint.unpickling import unpickle
from omnibal_ext.errors import UserError
from tests.unit.checkpoint.programs import ATTACKS, drawn, whole
from tests.unit.checkpoint.tables import made

WATCHED = [
    *RECORDS, planner.WriteItemType, metadata._MEM_FORMAT_ENCODING, torch.Size, OrderedDict, PosixPath, Path, Enum,
    EnumType, torch.serialization._get_layout, NAMES["torch", "Size"].__class__,
]  # fmt: skip
EVENTS: list[str] | None = None
"""What Python's own watch reports of code that is run, files and processes; None while nobody looks."""


def _watch(event: str, _: Any) -> None:
    if EVENTS is not None and event.partition(".")[0] in (
        "import",
        "exec",
        "compile",
        "open",
        "os",
        "subprocess",
        "pickle",
    ):
        EVENTS.append(event)


sys.addaudithook(_watch)


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Inside, nothing runs; afterwards every class and function that a table may name is as before."""
    global EVENTS

    def state() -> list[dict[str, Any]]:
        spaces = [dict(vars(one)) for one in WATCHED]
        return [{key: copy.copy(v) if type(v) in (dict, list) else v for key, v in space.items()} for space in spaces]

    before, names, builtins._ran, EVENTS = state(), dict(NAMES), [], []  # type: ignore[attr-defined]
    try:
        yield
    finally:
        seen, EVENTS = EVENTS, None
    assert not seen
    assert not builtins._ran  # type: ignore[attr-defined]
    assert state() == before
    assert names == NAMES


def described(value: Any) -> str:
    """A value with all it holds, in its order."""
    if isinstance(value, dict):
        return f"{type(value)}({', '.join(f'{described(key)}: {described(one)}' for key, one in value.items())})"
    if type(value) in (list, tuple):
        return f"{type(value)}({', '.join(map(described, value))})"
    return (
        f"{type(value)}({described(dict(sorted(vars(value).items())))})"
        if type(value) in RECORDS
        else f"{type(value)}({value!r})"
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("mcore", [False, True])
def test_what_is_written_is_read_as_torch_reads_it(mcore: bool, protocol: int) -> None:
    data = pickle.dumps(made(mcore), protocol)
    found = unpickle(data)
    assert described(found) == described(pickle.loads(data))
    assert mcore or found == made()


def test_a_save_of_megatrons_is_read_as_torch_reads_it(tmp_path: Path, one_rank: None) -> None:
    state = {
        "model": ShardedTensor.from_rank_offsets("links.a", torch.ones(2, 3)),
        "optimizer": {
            "steps": 3,
            "state": [ShardedTensor.from_rank_offsets(f"m.{n}", torch.ones(5)) for n in range(9)],
        },
    }
    dist_checkpointing.save(state, str(tmp_path))
    data = (tmp_path / ".metadata").read_bytes()
    found = unpickle(data)
    assert described(found) == described(pickle.loads(data))
    assert len(found.state_dict_metadata) == 11


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_a_line_and_runs_nothing(tmp_path: Path, name: str) -> None:
    """Also in front of what a save holds, which would be read as if nothing had been there."""
    for body in (whole(ATTACKS[name]), pickle.dumps(made())[:2] + ATTACKS[name] + b"0" + pickle.dumps(made())[2:]):
        (tmp_path / ".metadata").write_bytes(body)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UserError) as refused:
            read_contents(tmp_path / ".metadata")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 2**10, "KiB"
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 2_000
        assert "--trust" in str(refused.value)
    with nothing_changes(), pytest.raises(pickle.UnpicklingError):
        unpickle(whole(ATTACKS[name]))


@pytest.mark.parametrize("seed", [0, 1])
def test_programs_at_random_run_nothing_and_mean_what_they_mean_to_torch(seed: int, is_long: bool) -> None:
    genuine, fates = pickle.dumps(made()), Counter[str]()
    programs = list(drawn(genuine, 50_000 if is_long else 3_000, seed))
    read = []
    with nothing_changes():
        for program in programs:
            try:
                read.append((program, unpickle(program)))
                fates["read"] += 1
            except pickle.UnpicklingError as error:
                fates[" ".join(str(error).split()[:6])] += 1
    for program, found in read:
        assert type(found) in (metadata.Metadata, MCoreMetadata)
        assert described(found) == described(pickle.loads(program))
    assert fates["read"] > len(programs) / 50
    assert len(fates) > 20, fates
    assert max(fates.values()) < len(programs) / 2, fates


def first(table: Any) -> Any:
    return table.state_dict_metadata["links.a"]


def place(table: Any) -> Any:
    return next(iter(table.storage_data.values()))


def item(table: Any) -> Any:
    return table.all_local_plans[0].items[0]


def itself(table: Any) -> Any:
    return table


def index(table: Any) -> Any:
    return item(table).index


WRONG: dict[str, tuple[Callable[[Any], Any], Callable[[Any], dict[str, Any]]]] = {
    "a file above the save": (place, lambda table: {"relative_path": "../iter_0000004/__0_0.distcp"}),
    "a file of the machine": (place, lambda table: {"relative_path": "/etc/passwd"}),
    "the table as a file": (place, lambda table: {"relative_path": ".metadata"}),
    "bytes before a file": (place, lambda table: {"offset": -1}),
    "a length that is none": (place, lambda table: {"length": True}),
    "a length beyond all files": (place, lambda table: {"length": 2**64}),
    "a size that is a tuple": (first, lambda table: {"size": (8, 4)}),
    "a piece that is none": (first, lambda table: {"chunks": [first(table).properties]}),
    "properties without a type": (first, lambda table: {"properties": None}),
    "an attribute that no table has": (itself, lambda table: {"__class__": 1}),
    "a weight by a number": (itself, lambda table: {"state_dict_metadata": {1: first(table)}}),
    "a weight that is none": (itself, lambda table: {"state_dict_metadata": {"a": "b"}}),
    "places of names": (itself, lambda table: {"storage_data": {"a": place(table)}}),
    "names that nest": (itself, lambda table: {"planner_data": {"a": (("b",),)}}),
    "a version that is none": (itself, lambda table: {"version": 1}),
    "a plan that is none": (itself, lambda table: {"all_local_plans": [table.version]}),
    "a name that is a list": (index, lambda table: {"fqn": ["a"]}),
    "a plan twice": (itself, lambda table: {"all_local_plans": table.all_local_plans * 2}),
    "pieces twice": (itself, lambda table: {"state_dict_metadata": {"links.a": first(table), "b": first(table)}}),
    "an index below zero": (index, lambda table: {"index": -1}),
    "a kind that is none": (item, lambda table: {"type": 1}),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_hold_what_they_can(tmp_path: Path, name: str) -> None:
    """A weight's bytes lie in the save, whose files are hashed; what is read later is of the type that it must be."""
    table, (whose, fields) = made(), WRONG[name]
    vars(whose(table)).update(fields(table))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(UserError, match=r"cannot be loaded safely") as refused:
        read_contents(tmp_path / ".metadata")
    assert str(refused.value).isprintable()


def test_what_is_cut_off_or_goes_on_is_refused() -> None:
    genuine = pickle.dumps(made())
    for cut in range(len(genuine)):
        with pytest.raises(pickle.UnpicklingError):
            unpickle(genuine[:cut])
    for more in (b".", b"N.", genuine):
        with pytest.raises(pickle.UnpicklingError):
            unpickle(genuine + more)


def test_time_is_in_proportion_to_the_entries() -> None:
    """Instructions are run once each, and none costs more than what it takes from the stack."""

    def calls(entries: int) -> int:
        table = made()
        table.storage_data = {
            metadata.MetadataIndex(f"a{n}"): _StorageInfo("__0_0.distcp", n, n) for n in range(entries)
        }
        data, counted = pickle.dumps(table), 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            unpickle(data)
        finally:
            sys.setprofile(None)
        return counted

    few, more, most = calls(0), calls(300), calls(600)
    assert abs((most - more) - (more - few)) < 0.1 * (more - few)
