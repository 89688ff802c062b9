"""Gives a reader damaged files, and says what became of each: read, refused in a line, or a finding."""

import json
import os
import random
import resource
import select
import signal
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading.memory import taken
from tests.fuzz.mutate import Choices, damaged
from tests.fuzz.reader import ENDS, Reader

TIMERS = {signal.ITIMER_PROF: 5.0, signal.ITIMER_REAL: 60.0}
"""Seconds of computing, and of waiting."""
STANDS = 90
"""Seconds after which a process whose input is still the same is killed: C code that waits hears no timer."""
MEMORY, MOST_CHOICES, MOST_MESSAGE = 2**29, 96, 2000
FIRST = ("/omnibal_ext/reading/document.py", "/omnibal_ext/reading/files.py", "/json/", "/encodings/", "/codecs.py",
         "/zipfile")  # fmt: skip
"""Files of code that look at a file as a whole: whether it is there, is text, JSON, an archive, has the right seal."""
OPENING = ("/formats/table.py", "_open")
"""What opens a table: reads what it says of itself."""
UNKNOWN = ("UnidentifiedImageError", "InvalidDataError")
"""What Pillow and PyAV raise for content that is of no format they know."""


class Hang(BaseException):
    """No answer in time."""


@dataclass
class Trial:
    """A reader on trial in a folder. Calling it with a string of choices tries one input."""

    name: str
    reader: Reader
    folder: Path
    fates: Counter[str] = field(default_factory=Counter)
    """How often each: read, refused, undocumented; and first: refused by the first check, a part of refused."""
    found: dict[str, str] = field(default_factory=dict)
    """Finding -> the choices that lead there, in hexadecimal."""

    @property
    def tried(self) -> int:
        return sum(self.fates[fate] for fate in ("read", "refused", "undocumented"))

    @property
    def beyond(self) -> float:
        """The share of the inputs that got past the first check of their file."""
        return 1 - self.fates["first"] / max(1, self.tried)

    def __call__(self, content: bytes) -> None:
        choices = Choices(content)
        name = choices.one(sorted(self.reader.files))
        for other, whole in self.reader.files.items():
            (self.folder / other).write_bytes(damaged(other, whole, choices) if other == name else whole)
        if choices.below(2):
            self.reader.mend(self.folder)
        self.read(content)

    def read(self, content: bytes = b"") -> None:
        """Have the reader read what lies in the folder, and note what came of it."""
        _set_timers(1)
        try:
            self.reader.read(self.folder)
            self.fates["read"] += 1
        except (UserError, Rejected) as refusal:
            self.fates["refused"] += 1
            self.fates["first"] += _is_first(refusal)
            lines = refusal.lines if isinstance(refusal, UserError) else [str(refusal)]
            if not all(line.isprintable() and len(line) <= MOST_MESSAGE for line in lines):
                self._finding(AssertionError(f"no line of {MOST_MESSAGE} characters: {str(refusal)[:200]!r}"), content)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # panics of libraries in Rust are no Exception
            self._finding(error, content)
        finally:
            _set_timers(0)

    def _finding(self, error: BaseException, content: bytes) -> None:
        self.fates["undocumented"] += 1
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        said = f"{type(error).__name__} at {' < '.join(frames[-3:][::-1])}: {str(error)[:120]}"
        self.found.setdefault(said, content.hex())

    def run(self, inputs: int, seed: int) -> None:
        """Try `inputs` inputs in a process of their own: one that a signal ends is a finding, and another goes on."""
        tried = 0
        while tried < inputs:
            last = self._in_a_fork(inputs - tried, seed + tried)
            tried += last["tried"]
            self.fates.update(last["fates"])
            for finding, content in last["found"].items():
                self.found.setdefault(finding, content)

    def _in_a_fork(self, inputs: int, seed: int) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile() as note:
            child = os.fork()
            if not child:
                _run_and_exit(self, inputs, seed, Path(note.name))
            _kill_if_it_stands(child, Path(note.name))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said: dict[str, Any] = json.loads(Path(note.name).read_bytes().partition(b"\n")[0])
        if status:
            is_refusal = self.reader.may_end and -status in ENDS
            fate = "refused" if is_refusal else "undocumented"
            said["fates"][fate] = said["fates"].get(fate, 0) + 1
            if not is_refusal:
                how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
                said["found"][f"the process ended by {how}"] = said["last"]
        return said


def _run_and_exit(trial: Trial, inputs: int, seed: int, note: Path) -> None:
    code = 70
    try:
        trial.fates, trial.found = Counter(), {}
        limit_this_process()
        generator = random.Random(seed)
        for tried in range(1, inputs + 1):
            content = generator.randbytes(generator.randint(0, MOST_CHOICES))
            _write(note, _record(trial, tried, content))
            trial(content)
        _write(note, _record(trial, inputs, b""))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _kill_if_it_stands(child: int, note: Path) -> None:
    """Wait for the end of a process, which it is given if its note stays the same."""
    ended, last = os.pidfd_open(child), b""
    while not select.select([ended], [], [], STANDS)[0]:
        said = note.read_bytes()
        if said == last:
            os.kill(child, signal.SIGKILL)
        last = said
    os.close(ended)


def _write(note: Path, record: dict[str, Any]) -> None:
    """Over what was there, at one go: the process may be killed at any moment."""
    with note.open("r+b", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def _record(trial: Trial, tried: int, last: bytes) -> dict[str, Any]:
    return {"tried": tried, "fates": trial.fates, "found": trial.found, "last": last.hex()}


def limit_this_process() -> None:
    """End what computes or waits too long with `Hang`, and what takes too much memory with MemoryError."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (taken() + MEMORY, resource.RLIM_INFINITY))


def _is_first(refusal: BaseException) -> bool:
    """Whether a refusal began with the first look at a file: the exception that was raised first says where."""
    while refusal.__context__ is not None:
        refusal = refusal.__context__
    frames = traceback.extract_tb(refusal.__traceback__)
    if any(frame.filename.endswith(OPENING[0]) and frame.name == OPENING[1] for frame in frames):
        return True
    return type(refusal).__name__ in UNKNOWN or any(part in frames[-1].filename for part in FIRST)


def _hang(*_: object) -> None:
    raise Hang("no answer")


def _set_timers(times: int) -> None:
    for timer, seconds in TIMERS.items():
        signal.setitimer(timer, times * seconds)
