"""A corpus with too many rejects is told what mends it, by the kind of most of them."""

import re
from pathlib import Path

import pytest

from megatron.vlm.data.rejects import REMEDIES, RejectCount
from omnibal_ext.errors import UserError
from tests.programs import ROOT


def documented() -> set[str]:
    page = (ROOT / "docs/data.md").read_text().partition("## What is rejected")[2].partition("\n##")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}


def test_every_reason_has_a_remedy() -> None:
    assert documented()
    assert documented() == set(REMEDIES)


def refused(*reasons: str) -> str:
    count = RejectCount()
    count.add([{"file": "chat.jsonl", "line": 1, "reason": reason, "detail": "it"} for reason in reasons])
    with pytest.raises(UserError) as found:
        count.check(1, 130, Path("rejected.jsonl"))
    return str(found.value)


@pytest.mark.parametrize("reason", sorted(REMEDIES))
def test_the_remedy_is_that_of_most_rejects(reason: str) -> None:
    other = "bad_roles" if reason != "bad_roles" else "not_utf8"
    said = refused(reason, other, reason)
    assert REMEDIES[reason] in said
    assert "--max-rejects 3" in said


def test_images_that_are_not_found_name_where_paths_start() -> None:
    for reason in ("missing_image", "missing_video", "path_outside_root"):
        assert "--image-root" in refused(reason, reason)
