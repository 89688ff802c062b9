"""Readers of what a save says of itself: its table of contents, its checksums, and the tracker beside it."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path

from megatron.vlm.checkpoint.folder import INTEGRITY, TRACKER, Checkpoints, facts_of, seal
from megatron.vlm.checkpoint.safe import CONTENTS, read_contents
from megatron.vlm.hf.checkpoint import OurCheckpoint
from omnibal_ext.errors import UserError
from omnibal_ext.reading.document import sealed
from tests.fuzz.reader import Reader
from tests.unit.checkpoint.tables import made


def save_readers(folder: Path) -> dict[str, Reader]:
    """By name; whole files are made in the folder."""
    return {"contents": _contents(), "fields": _fields(), "save": _save(folder / "save" / "iter_0000004")}


def _contents() -> Reader:
    files = {f"{protocol}{CONTENTS}": pickle.dumps(made(), protocol) for protocol in (2, 4)}

    def read(folder: Path) -> None:
        for name in files:
            contents = read_contents(folder / name)
            for entry in contents.state_dict_metadata.values():
                _ = vars(entry)

    return Reader(files, read)


def _fields() -> Reader:
    """Whole pickles of tables whose fields hold other values, to get past the unpickler."""
    table = made()
    tensor, place = table.state_dict_metadata["links.a"], next(iter(table.storage_data.values()))
    fields = {
        "table": {"version": "1", "planner_data": {"a.b": ["a", "b", 0]}},
        "tensor": {},
        "meta": {"checkpoint_id": "a", "save_id": None, "load_id": "b", "modules": ["m"]},
        "place": {"relative_path": "__0_0.distcp", "offset": 5, "length": 7, "transform_descriptors": ["zstd"]},
        "plan": {"usable": True, "planner_data": {"a.b": ["a", "b", 0]}},
    }
    parts = {"table": table, "tensor": tensor, "meta": table.storage_meta, "place": place,
             "plan": table.all_local_plans[0]}  # fmt: skip
    kept = {name: dict(vars(part)) for name, part in parts.items()}

    def read(folder: Path) -> None:
        try:
            given = json.loads((folder / "fields.json").read_bytes())
            for name, part in parts.items():
                vars(part).clear()
                vars(part).update({**kept[name], **given[name]})
            (folder / CONTENTS).write_bytes(pickle.dumps(table))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError("no fields") from error
        read_contents(folder / CONTENTS)

    return Reader({"fields.json": json.dumps(fields).encode()}, read)


def _save(save: Path) -> Reader:
    save.mkdir(parents=True)
    (save / CONTENTS).write_bytes(pickle.dumps(made()))
    (save / "__0_0.distcp").write_bytes(bytes(100))
    seal(save, {path.name: facts_of(path) for path in save.iterdir()}, {"adapters": None, "preset": "tiny"})
    files = {path.name: path.read_bytes() for path in save.iterdir()}

    def read(folder: Path) -> None:
        copy = folder / "checkpoints" / save.name
        shutil.rmtree(copy.parent, ignore_errors=True)
        copy.mkdir(parents=True)
        for name in files:
            shutil.copy(folder / name, copy)
        shutil.copy(folder / TRACKER, copy.parent)
        checkpoints = Checkpoints(copy.parent)
        _ = checkpoints.exist, checkpoints.are_release, checkpoints.candidates(4)
        ours = OurCheckpoint(copy.parent)
        _ = ours.run, ours.adapters, ours.preset, ours.first

    return Reader({**files, TRACKER: b"4\n"}, read, _true_hashes)


def _true_hashes(folder: Path) -> None:
    path = folder / INTEGRITY
    try:
        facts = json.loads(path.read_bytes())
        for name in facts["files"]:
            body = (folder / name).read_bytes()
            facts["files"][name], facts["sizes"][name] = hashlib.sha256(body).hexdigest(), len(body)
        path.write_text(json.dumps(sealed(facts)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
