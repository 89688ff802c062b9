"""Errors of the user, a line each, and the exit codes of our programs."""

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from omnibal_ext.output import ignore_lost_output, output_error, printable, say

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exhausted quota, a file at its size limit."""


MOST_CHARACTERS = 4000
"""Most characters of an error's messages together: a screen, or all flags of a long script."""
_LINE, _REST = 1400, 60


class UserError(Exception):
    """Bad input. Each argument is the message of one fault, in one line: what, where (file, row, layer), the limit, the
    remedy."""

    @property
    def lines(self) -> list[str]:
        """The messages, with non-printable characters escaped. Long ones lack their middle; of many there are those
        that fit into `MOST_CHARACTERS`, and the number of the others."""
        shown, room = list[str](), MOST_CHARACTERS - _REST
        for number, message in enumerate(self.args):
            # A message may have grown around text of a file: its ends say what is wrong, and the remedy.
            line = _ends(printable(_ends(str(message))))
            room -= len(line) + 2
            if room < 0:
                return [*shown, f"and {len(self.args) - number} more faults"]
            shown.append(line)
        return shown

    def __str__(self) -> str:
        """Return the messages (`lines`) joined to one line."""
        return "; ".join(self.lines)


def _ends(line: str) -> str:
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} ... {line[5 - _LINE // 2 :]}"


class Stopped(KeyboardInterrupt):
    """Raised where a signal, `number`, asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


EXTRAS = {
    "train": (
        *("torch", "megatron", "einops", "triton", "tensorboard", "typing_extensions"),
        *("sentencepiece", "tokenizers", "safetensors", "PIL", "transformers"),
    ),
    "video": ("av",),
    "audio": ("av", "soxr"),
    "tables": ("pyarrow",),
    "remote": ("fsspec", "s3fs", "aiobotocore"),
    "demo": ("sklearn",),
}
"""Modules that each extra of setup.py installs."""
NOT_IN_EXTRAS = ("accelerate", "datasets", "deepspeed", "peft", "trl")
"""Frameworks of examples/, which no extra installs."""


def how_to_install(extra: str) -> str:
    """Return the pip command that installs an extra of setup.py from a clone: no package index has this project."""
    return f"pip install '.[{extra}]' in a clone of this project"


def missing_package(module: str) -> str:
    """Return a missing module's package and how to install it, in words; "" if it is there, or is not one of ours."""
    root = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if root in modules), "")
    module = "megatron.core" if root == "megatron" else root  # `megatron` is a namespace package
    if not (extra or root in NOT_IN_EXTRAS) or find_spec(module):
        return ""
    remedy = how_to_install(extra) if extra else f"pip install {root}"
    if module == "megatron.core" and sys.version_info < (3, 12):
        # Its wheel runs on Python 3.11, but its metadata excludes it.
        remedy = "pip install --no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'"
    return f"{module}, which is not installed: {remedy}"


def from_os_error(error: OSError) -> UserError:
    """Return a `UserError`, with a remedy, for an OSError about a file, such as a full disk."""
    remedy = "make room and start again" if error.errno in FULL else "choose another path, or fix what is there"
    where = f"{error.filename}: " if error.filename is not None else ""
    return UserError(f"{where}{error.strerror or error}; {remedy}")


def run_tool(main: Callable[[], None]) -> None:
    """Run a program's `main`. `UserError`, and an OSError about a file, print a line for each fault on stderr and exit
    with code 2; signal n exits with 128 + n. Output that could not be written to stdout is an error too."""
    ignore_lost_output()
    with exit_on_user_error():
        main()
        sys.stdout.flush()
        if reason := output_error():
            raise UserError(f"stdout: {reason}: not all of it is written; give it to another file")


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Make a context that prints UserErrors, OSErrors about files and missing optional packages, and exits with code 2.

    Signal n exits with code 128 + n. Other errors are raised.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not (package := missing_package(error.name or "")):
            raise
        say(f"error: this needs {package}", error=True)
        sys.exit(2)
    except UserError as error:
        say(*(f"error: {line}" for line in error.lines), error=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise
        say(f"error: {from_os_error(error)}", error=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        say(f"stopped by {signal.Signals(number).name}", error=True)
        sys.exit(128 + number)


class Rejected(Exception):  # noqa: N818 - about a sample, not an error of the program
    """A sample cannot be used: the reason, a key of `megatron.vlm.data.rejects.REMEDIES`, and a detail for the user."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
