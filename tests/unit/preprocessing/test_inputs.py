"""A job's inputs are read once, however many shards it has, and anew when they have changed."""

from pathlib import Path

import pytest

from megatron.vlm.preprocessing import inputs
from megatron.vlm.preprocessing.inputs import read_inputs
from omnibal_ext.errors import UserError


def test_what_one_shard_has_read_the_others_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, notes = tmp_path / "chat.jsonl", tmp_path / "work/inputs"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(1203)))
    first = read_inputs([path], 500, notes)
    assert first == read_inputs([path], 500)
    assert [part.lines for part in first[0].parts] == [500, 500, 203]
    monkeypatch.setattr(inputs, "read_input", None)
    assert read_inputs([path], 500, notes) == first
    monkeypatch.undo()
    assert read_inputs([path], 600, notes)[0].parts != first[0].parts
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))  # as long as before
    assert read_inputs([path], 500, notes)[0].sha256 != first[0].sha256
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_inputs([path], 500, notes)
