"""README's picture of shares shows every figure, and drawn again it is the same file."""

import re
from pathlib import Path

from benchmarks.picture import write_bars

BARS = {"published": {"others": 0.123, "more": 0.045, "ours": 0.006}, "single tiles": {"others": 0.2, "ours": 0.001}}


def test_every_way_and_share_is_written_beside_its_bar(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        write_bars(tmp_path / name, BARS, "ours")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    said = re.findall(r">([^<>]+)</text>", text)
    shares = [f"{share:.1%}" for bars in BARS.values() for share in bars.values()]
    assert [word for word in said if word.endswith("%")] == shares
    assert {*BARS, "others", "ours"} <= {*said}
