"""Bytes are said in a unit in which they have digits."""

import re
from dataclasses import replace

import pytest

from omnibal_ext.units import GIB, in_bytes
from tests.unit.layout.instances import make_profile
from tools import profile_layers


@pytest.mark.parametrize("size", [*range(1, 2000, 7), *(int(1.37**power) for power in range(20, 90))])
def test_what_is_said_is_the_size_to_a_part_in_fifteen(size: int) -> None:
    number, unit = in_bytes(size).split()
    bytes_of = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    assert float(number) * bytes_of[unit] == pytest.approx(size, rel=1 / 15)
    assert float(number) > 0


def test_gib_are_as_flags_have_them() -> None:
    assert in_bytes(0.5 * GIB) == "0.50 GiB"
    assert in_bytes(80 * GIB) == "80.00 GiB"
    assert in_bytes(3 * 2**20) == "3.00 MiB"


@pytest.mark.parametrize("each", [0.0, 1e-10])
def test_a_profile_without_transfers_prints_no_infinite_rate(each: float, capsys: pytest.CaptureFixture[str]) -> None:
    profile_layers._show(replace(make_profile(), transfer_seconds_per_byte=each), "profile.json")
    said = capsys.readouterr().out
    assert not re.search(r"\b(inf|nan)\b", said)
    assert ("GB/s" in said) is bool(each)
