"""What a run on one machine opens, no other machine reaches: every socket that listens is on 127.0.0.1 or ::1."""

import ipaddress
import json
import os
import subprocess
from typing import Any

import pytest

from omnibal_ext.launch import loopback
from tests.programs import ROOT, environment, warm_interpreter
from tests.unit.launch.listening import outer_address

pytestmark = pytest.mark.starts
TORCHRUN = ("-m", "omnibal_ext.launch.torchrun")
MODULE = "tests.unit.launch.listening"
FILE = MODULE.replace(".", "/") + ".py"
COLD = {"COLD_MODULES": "renamed", "RES_OPTIONS": "timeout:1 attempts:1"}
"""The ranks start cold, as gloo reads its environment once; and wait for no name server."""


def results(*words: str, **changes: str) -> list[dict[str, Any]]:
    ours = ("MASTER_", "RANK", "GLOO_", "NCCL_")
    plain = {name: value for name, value in environment(**changes).items() if not name.startswith(ours)}
    done = subprocess.run(
        [warm_interpreter(), *words], cwd=ROOT, env=plain, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def are_loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


def test_all_that_listens_is_out_of_reach_though_the_machine_s_name_leads_elsewhere() -> None:
    found = results(*TORCHRUN, "--standalone", FILE, "renamed", **COLD)
    (one,) = found
    assert len(one["store"]) == 1
    assert are_loopback(one["rank"]), one
    assert are_loopback(one["store"][0]), one
    assert os.geteuid() or one["renamed"] or not outer_address()


@pytest.mark.parametrize(
    "words",
    [(*TORCHRUN, "--nproc-per-node=2", "-m", MODULE), ("-m", MODULE, "alone")],
    ids=["one node by default", "without torchrun"],
)
def test_so_is_the_store_however_ranks_of_one_machine_are_started(words: tuple[str, ...]) -> None:
    found = results(*words)
    assert len(found) == (2 if "--nproc-per-node=2" in words else 1)
    for one in found:
        assert [are_loopback(addresses) for addresses in one["store"]] == [True]
        assert one["interface"] == "lo"


def test_interfaces_that_a_user_has_chosen_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    loopback.stay_on_this_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=lo"
