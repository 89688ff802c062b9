"""What the launcher starts ends with it: signals reach the ranks, errors are said once, nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from omnibal_ext.launch.processes import descendants
from tests.programs import ROOT, runs
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.starts
RANK = """
import os, signal, sys, time
from pathlib import Path
folder, what = Path(sys.argv[1]), sys.argv[2]
def end(number, _):
    (folder / f"{number}.{os.environ['RANK']}").write_text("1")
    time.sleep(1.0)
    sys.stdout.write(f"saved by {os.environ['RANK']}\\n")
    sys.exit(0)
if what == "saves":
    signal.signal(signal.SIGTERM, end)
if what == "refuses":
    sys.stderr.write("error: the same on every rank\\n")
    sys.stderr.write(f"of {os.environ['RANK']}\\n")
    sys.exit(2)
if what == "fails":
    sys.exit(7 if os.environ["RANK"] == "1" else time.sleep(60))
(folder / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(120)
"""
LAUNCHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs, perhaps these tests, ignore
from omnibal_ext.errors import run_tool
from omnibal_ext.launch.processes import run_ranks, run_to_end, stoppable
def main():
    with stoppable():
        if sys.argv[1] == "tool":
            run_to_end(sys.argv[2:])
        else:
            grace = float(sys.argv[1])
            torchrun = [sys.executable, "-W", "ignore", "-m", "omnibal_ext.launch.torchrun", "--standalone"]
            sys.exit(run_ranks([*torchrun, "--nproc-per-node=2", *sys.argv[2:]], grace=grace))
run_tool(main)
"""
FORKING = """
import os, resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.folders import building
from omnibal_ext.launch.processes import run_fork, stoppable
def work(folder, what):
    if what == "refuses":
        raise UserError("the limit: raise it")
    if what == "fails":
        raise ValueError("ours")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "takes":
        print(len(b"1" * 2**28), "bytes taken")
    with building(folder / "made") as made:
        (made / "half").write_text("1")
        if what == "lasts":
            (folder / "pid").write_text(str(os.getpid()))
            sum(range(10**11))  # as compiled code, which no handler of Python's interrupts
def main():
    with stoppable():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run_fork(work, Path(sys.argv[1]), what=sys.argv[2])
        print("went on with", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, "KiB more")
run_tool(main)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    (tmp_path / "rank.py").write_text(RANK)
    return tmp_path / "rank.py"


def start(*words: object, program: str = LAUNCHER) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(folder: Path, names: list[str], launcher: subprocess.Popen[str]) -> list[int]:
    while not all((folder / name).exists() and (folder / name).read_text() for name in names):
        assert launcher.poll() is None
        time.sleep(0.1)
    return [int((folder / name).read_text()) for name in names]


def stopped(rank: Path, grace: float, what: str, number: int) -> tuple[int, str, str]:
    """What a launcher of two ranks ends with when it gets a signal; none of its processes may be left."""
    launcher = start(grace, rank, rank.parent, what)
    pids = wait_for(rank.parent, ["pid.0", "pid.1"], launcher)
    tree = [process.pid for process in descendants(launcher.pid)]
    assert set(pids) < set(tree)
    launcher.send_signal(number)
    if number == signal.SIGTERM:  # as Slurm may, to all processes of a step: it must not cut the saving short
        wait_for(rank.parent, [f"{int(number)}.0", f"{int(number)}.1"], launcher)
        for pid in (launcher.pid, tree[0]):
            os.kill(pid, number)
    output, errors = launcher.communicate(timeout=PATIENCE)
    assert not [pid for pid in tree if runs(pid)]
    return launcher.returncode, output, errors


def test_ranks_that_save_when_they_are_told_to_end_may_do_so(rank: Path) -> None:
    code, output, errors = stopped(rank, 60.0, "saves", signal.SIGTERM)
    assert code == 143
    assert sorted(output.splitlines()) == ["saved by 0", "saved by 1"]
    assert errors.splitlines() == ["stopped by SIGTERM"]


@pytest.mark.parametrize(("what", "code"), [("saves", 0), ("sleeps", 143)])
def test_torchrun_hands_a_signal_on_and_waits_for_its_ranks(rank: Path, what: str, code: int) -> None:
    """By itself it would kill after 30 seconds those that still save. How they end, it ends."""
    launcher = start(60.0, rank, rank.parent, what)
    wait_for(rank.parent, ["pid.0", "pid.1"], launcher)
    (torchrun,) = (child.pid for child in psutil.Process(launcher.pid).children())
    os.kill(torchrun, signal.SIGUSR1 if what == "saves" else signal.SIGTERM)
    output, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code
    assert sorted(output.splitlines()) == (["saved by 0", "saved by 1"] if what == "saves" else [])
    assert "error:" not in errors
    assert "Traceback" not in errors


def test_ranks_that_do_not_listen_are_ended_after_a_while(rank: Path) -> None:
    """Ctrl-C reaches ranks that sleep on; they are gone, and one line is all that is said."""
    rank.write_text("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + RANK)
    code, _, errors = stopped(rank, 0.5, "sleeps", signal.SIGINT)
    assert (code, errors.splitlines()) == (130, ["stopped by SIGINT"])


def test_a_clock_that_is_set_back_hides_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter(range(10**9, 0, -3600))
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: float(next(boots)))
        assert child.pid in [process.pid for process in descendants(os.getpid())]
        assert not psutil.Process().children()  # what would be read instead


@pytest.mark.parametrize("whom", ["launcher", "torchrun", "rank"])
def test_whoever_is_killed_nothing_is_left(rank: Path, whom: str) -> None:
    """Ranks run a program that ends with who started it, as ours do."""
    rank.write_text(
        "import os\nfrom omnibal_ext.launch.processes import kill_with_parent\nkill_with_parent(os.getppid())\n" + RANK
    )
    launcher = start(5.0, rank, rank.parent, "sleeps")
    pids = wait_for(rank.parent, ["pid.0", "pid.1"], launcher)
    tree = [process.pid for process in descendants(launcher.pid)]
    os.kill({"launcher": launcher.pid, "torchrun": tree[0], "rank": pids[1]}[whom], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == (-signal.SIGKILL if whom == "launcher" else 1)
    until(lambda: not any(map(runs, {*tree, *pids})), "the end of the tree")
    if whom != "launcher":
        assert "was ended by SIGKILL" in errors


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [("refuses", 2, "error: the same on every rank"),
     ("fails", 1, "error: rank 1 failed with exit code 7; its last words are above")],
)  # fmt: skip
def test_how_ranks_end_is_said_in_a_line(rank: Path, what: str, code: int, said: str) -> None:
    launcher = start(5.0, rank, rank.parent, what)
    _, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code
    assert {line for line in errors.splitlines() if line.startswith("error:")} == {said}
    assert "Traceback" not in errors


def test_a_tool_and_what_it_started_end_with_the_launcher(tmp_path: Path) -> None:
    grandchild = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    launcher = start("tool", sys.executable, "-c", child)
    (pid,) = wait_for(tmp_path, ["pid"], launcher)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, errors.splitlines()) == (143, ["stopped by SIGTERM"])
    assert not runs(pid)


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("refuses", 2, "error: the limit: raise it"),
        ("fails", 1, "ValueError: ours"),
        ("dies", 256 - 9, ""),
    ],
)
def test_a_fork_that_fails_ends_the_launcher_with_its_code(what: str, code: int, said: str, tmp_path: Path) -> None:
    """As a child of ours would: a refusal in a line, said once, and nothing is made."""
    launcher = start(tmp_path, what, program=FORKING)
    output, errors = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, output) == (code, "")
    assert (errors.splitlines() or [""])[-1] == said
    assert ("Traceback" in errors) == (what == "fails")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_fork_ends_with_the_launcher_amid_compiled_code(number: signal.Signals, tmp_path: Path) -> None:
    """What it was writing is not there, and the next one removes what it has left."""
    launcher = start(tmp_path, "lasts", program=FORKING)
    (pid,) = wait_for(tmp_path, ["pid"], launcher)
    launcher.send_signal(number)
    output, errors = launcher.communicate(timeout=PATIENCE)
    killed = number == signal.SIGKILL
    assert launcher.returncode == (-number if killed else 128 + number)
    assert (output, errors.splitlines()) == ("", [] if killed else [f"stopped by {number.name}"])
    until(lambda: not runs(pid), "the end of the fork")
    assert not (tmp_path / "made").exists()
    start(tmp_path, "makes", program=FORKING).communicate(timeout=PATIENCE)
    assert {path.name for path in tmp_path.iterdir()} == {"made", "pid"}


def test_what_a_fork_takes_is_gone_with_it(tmp_path: Path) -> None:
    """While ranks run, the launcher holds nothing of packing and planning."""
    output, errors = start(tmp_path, "takes", program=FORKING).communicate(timeout=PATIENCE)
    assert errors == ""
    taken, more = output.splitlines()
    assert taken == f"{2**28} bytes taken"
    assert int(more.split()[3]) < 2**15
