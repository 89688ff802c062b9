"""What the launcher makes of conversations."""

from itertools import pairwise
from pathlib import Path

import pytest

from omnibal_ext.launch.conversations import check_conversation_flags
from omnibal_ext.launch.folder import is_made
from tools import launch


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "null", b"\xff"])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "packs.inputs.json"
    assert not is_made(path, {})
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not is_made(path, {})


@pytest.mark.parametrize("held_out", [(), ("--held-out", "0.02")])
def test_a_run_evaluates_on_what_it_holds_out(held_out: tuple[str, ...]) -> None:
    words = ("--model", "tiny", "--run-dir", "run", "--input", "chat.jsonl", *held_out)
    arguments = launch._parser().parse_args(words)
    check_conversation_flags(arguments)
    assert (arguments.data, arguments.packs) == ("run/data", "run/packs-by-size")
    evaluated = ("run/data", "run/packs-held-out") if held_out else (None, None)
    assert (arguments.eval_data, arguments.eval_packs) == evaluated


@pytest.mark.parametrize(
    ("given", "rate"), [((), "1e-5"), (("--lora-rank", "8"), "4e-5"), (("--lora-rank", "8", "--lr", "1e-4"), "1e-4")]
)
def test_adapters_are_trained_at_their_own_usual_rate(given: tuple[str, ...], rate: str) -> None:
    arguments = launch._parser().parse_args(
        ("--model", "tiny", "--run-dir", "run", "--input", "chat.jsonl", "--", *given)
    )
    check_conversation_flags(arguments)
    words = arguments.megatron
    assert [value for flag, value in pairwise(words) if flag == "--lr"] == [rate]
