"""Files from outside are read, or refused in a line, however they are damaged: the short form of `tests.fuzz`."""

import json
from pathlib import Path

import pytest

from tests.fuzz.doors import OURS, entered, readers_of_source
from tests.fuzz.reader import Reader
from tests.fuzz.readers import all_readers
from tests.fuzz.trial import Trial
from tests.programs import run_tool

SHARE = 0.3
"""Of damaged files, those that get past the first look at a file: else what lies behind it is not tried."""


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    return all_readers(tmp_path_factory.mktemp("whole"))


@pytest.mark.starts
@pytest.mark.parametrize("seed", [0])
def test_damaged_files_are_read_or_refused_in_a_line(readers: dict[str, Reader], seed: int, is_long: bool) -> None:
    """By a program without threads: what it forks inherits no lock that nobody opens again."""
    inputs = (2000 if is_long else 10) * len(readers)
    done = run_tool("__main__.py", "--inputs", inputs, "--seed", seed, "--json", room="tests/fuzz")
    assert done.returncode in (0, 1), done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    beyond = said["beyond"]
    assert said["found"] == {}
    assert beyond.keys() == readers.keys()
    assert sum(beyond.values()) / len(beyond) > SHARE
    if is_long:  # ten inputs do not tell the share of one reader
        assert {name: share for name, share in beyond.items() if share < SHARE} == {}


def test_every_reader_in_the_source_gets_damaged_files(readers: dict[str, Reader], tmp_path: Path) -> None:
    """Counted from the source: a function that opens or decodes a file is named if no damaged file reaches it."""
    source, reached = readers_of_source(), set()
    assert OURS.keys() - source == set()
    for name, reader in readers.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, content in reader.files.items():
            (folder / file).write_bytes(content)
        reached |= entered(lambda reader=reader, folder=folder: reader.read(folder))
        trial = Trial(name, reader, folder)
        reached |= entered(lambda trial=trial: [trial(bytes([n, 3 * n, 5 * n])) for n in range(6)])
    assert sorted(source - reached - OURS.keys()) == []


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 11)", "raise Panic", "bytes(2**31)"])
def test_a_process_that_ends_or_grows_is_a_finding(ending: str, tmp_path: Path) -> None:
    class Panic(BaseException):
        pass

    def read(folder: Path) -> None:
        if (folder / "a.txt").read_bytes() != b"whole":
            exec(ending, {"os": __import__("os"), "Panic": Panic})

    trial = Trial("odd", Reader({"a.txt": b"whole"}, read), tmp_path)
    trial.run(2, 0)
    assert trial.fates["undocumented"] == len(trial.found) == 1 or trial.fates["undocumented"] == 2
    assert trial.tried == 2
