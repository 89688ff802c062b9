"""What an index falls short of is said beyond its limits, and not at them."""

import re
from dataclasses import fields, replace

import pytest

from omnibal_ext.packing.index.summary import HELPS, MISSING, RANDOM, TOO_LONG, Summary, shortfalls
from omnibal_ext.packing.options import PackOptions

OPTIONS = PackOptions(vit_budget=8, llm_budget=4096, data_parallel_size=8, wait=0.004)
FINE = replace(
    Summary(**{field.name: 0 for field in fields(Summary)}),  # type: ignore[arg-type]
    iterations=20, wait=TOO_LONG * 0.004, spread_sizes=RANDOM, spread_sources=RANDOM, kinds_missing=0.3 + MISSING,
    kinds_missing_random=0.3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        ({"wait": 0.00409, "wait_last": 0.0123}, "ranks wait for 0.0041 of the time, more than --wait 0.004 .* 0.0123"),
        ({"spread_sizes": 1.11}, "1.11 times as much in sizes and 1.10 in sources"),
        ({"spread_sources": 1.12}, "1.10 times as much in sizes and 1.12 in sources"),
        ({"kinds_missing": 0.32}, r"32.0% of iterations .* \(in a random order 30.0%\)"),
    ],
)
def test_what_is_beyond_a_limit_is_said(beyond: dict[str, float], words: str) -> None:
    assert shortfalls(FINE, OPTIONS) == []
    said, helps = shortfalls(replace(FINE, **beyond), OPTIONS)
    assert helps == HELPS
    assert re.search(words, said)
    assert shortfalls(replace(FINE, **beyond), replace(OPTIONS, method="isf")) == []
    assert shortfalls(replace(FINE, **beyond, iterations=1), OPTIONS) == []
