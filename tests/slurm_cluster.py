"""A Slurm of one node for a test: munged, slurmctld and slurmd of Debian's packages, in a folder of their own.

    node      any number of CPUs and 8 counted GPUs, whatever the machine has
    low       partition of ordinary jobs, which are requeued when they are preempted
    high      partition whose jobs take their place

Needs root, as slurmd does.
"""

import getpass
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.programs import ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun")
SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=8
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=5
OverTimeLimit=0
DependencyParameters=kill_invalid_depend
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=600
NodeName={host} NodeAddr=127.0.0.1 CPUs=256 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE PriorityTier=1 State=UP
PartitionName=high Nodes={host} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> str | None:
    """Why no such Slurm can be started here; None if it can."""
    lacking = [program for program in PROGRAMS if shutil.which(program, path=SEARCHED) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: apt-get install slurm-wlm munge"
    if os.geteuid():
        return f"slurmd must be started by root, not by {getpass.getuser()}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_device(Path(folder, "gpu"))
        except OSError as error:
            return f"no devices can be made here ({error.strerror})"
    return None


def _make_device(path: Path) -> None:
    """What Slurm counts as a GPU: another /dev/null."""
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


@dataclass(frozen=True)
class Cluster:
    """A running Slurm. `environment` makes its commands find it."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *words: object, **more: str) -> str:
        """What a command prints; its failure is the test's."""
        done = subprocess.run(
            [str(word) for word in words], env={**self.environment, **more}, capture_output=True, text=True,
            check=False, cwd=ROOT, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: object, **more: str) -> str:
        """The number of a job that was submitted."""
        return self.run("sbatch", "--parsable", *words, **more).partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job (of the first task of an array)."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(word.partition("=")[::2] for word in shown.split() if "=" in word)

    def states(self, number: str) -> set[str]:
        """The states of a job, or of all tasks of an array."""
        lines = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()
        return {word.partition("=")[2] for line in lines for word in line.split() if word.startswith("JobState=")}

    def wait(self, number: str, seconds: float = 600) -> set[str]:
        """Wait until nothing of a job is pending or running; its states."""
        until(lambda: not self.states(number) & {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}, seconds)
        return self.states(number)


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for something. Fails after that many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds} s in vain"
        time.sleep(0.3)


@contextmanager
def slurm(folder: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a Slurm in a folder, whose jobs have this environment; ends it and all of its jobs."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().partition(".")[0]
    ports = {"controller_port": free_port(), "node_port": free_port()}
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, **ports))
    (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName={host} Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        _make_device(folder / f"gpu{number}")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {**environment, "PATH": SEARCHED, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (folder / f"{words[0]}.out").open("wb") as out:
            daemons.append(subprocess.Popen(words, env=environment, stdout=out, stderr=out))

    try:
        start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        until((folder / "munge.socket").exists, 20)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", host)
        cluster = Cluster(folder, environment)
        until(lambda: _is_idle(cluster, host), 60)
        yield cluster
    finally:
        _end_jobs(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _end_jobs(environment: Mapping[str, str]) -> None:
    """Cancel what still runs, and wait for it: what runs a job outlives the daemons."""
    user = getpass.getuser()
    subprocess.run(["scancel", "--user", user], env=dict(environment), check=False, timeout=30)
    left = ["squeue", "--noheader", "--user", user]
    for _ in range(60):
        if not subprocess.run(left, env=dict(environment), check=False, capture_output=True, timeout=30).stdout:
            break
        time.sleep(0.5)


def _is_idle(cluster: Cluster, host: str) -> bool:
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "node", host], env=dict(cluster.environment), capture_output=True, text=True,
        check=False, timeout=30,
    )  # fmt: skip
    return "State=IDLE " in done.stdout
