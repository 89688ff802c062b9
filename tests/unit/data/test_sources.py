"""Where a sample came from, at both ends of every input file."""

import numpy as np
import pytest

from megatron.vlm.data.sources import Sources

FILES = {
    "one": (("a", 3),),
    "several": (("a", 3), ("b", 1), ("c", 4)),
    "one of them twice": (("a", 2), ("b", 2), ("a", 2)),
    "empty ones": (("a", 0), ("b", 2), ("c", 0), ("d", 0), ("e", 1), ("f", 0)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_sample_is_of_the_input_that_holds_it(name: str) -> None:
    entries = [
        {"file": f"{file}.jsonl", "samples": count, "image_root": f"root {number}"}
        for number, (file, count) in enumerate(FILES[name])
    ]
    sources = Sources({"sources": entries})
    of = [entry for entry in entries for _ in range(int(str(entry["samples"])))]
    assert [sources.entry(sample) for sample in range(len(of))] == of
    numbers = sources.of(np.arange(len(of)))
    assert [f"{sources.names[number]}.jsonl" for number in numbers] == [entry["file"] for entry in of]
