"""Batches balanced as they come: every sample once, the same loss and gradients, whoever runs it."""

import pytest

from megatron.vlm.data.stream import AUDIO, StreamSteps
from omnibal_ext.errors import UserError
from tests.distributed import stream
from tests.distributed.conftest import run_program

RANKS = 4


def test_sounds_without_a_cost_are_refused() -> None:
    seen = {name: phase for name, phase in stream.PHASES.items() if name != AUDIO}
    with pytest.raises(UserError, match="phases have no cost of audio"):
        StreamSteps([], 1, 1, 8, seen, audio_token=3)


@pytest.mark.parametrize(("more", "hears"), [(0, False), (2, False), (0, True)])
def test_balanced_batches_train_as_those_that_were_read(more: int, hears: bool) -> None:
    """Rank 0 has images, rank 1 has none; the last one has samples for three steps, and `more` beyond them. If they
    hear rank 1 has most sounds, rank 2 none."""
    result = run_program("tests.distributed.stream", RANKS, str(3 * stream.EACH + more), *["hears"] * hears)
    read, balanced = result["as read"], result["balanced"]
    assert len(read) == len(balanced) == 3
    for number, (one, other) in enumerate(zip(read, balanced, strict=True)):
        wanted = [
            1000 * (rank + 1) + number * stream.EACH + each for rank in range(RANKS) for each in range(stream.EACH)
        ]
        assert one["samples"] == wanted
        assert sorted(other["samples"]) == sorted(wanted)
        samples = [list(stream.samples_of(rank, 12, hears)) for rank in range(RANKS)]
        own = [samples[name // 1000 - 1][name % 1000] for name in wanted]
        assert one["counted"] == other["counted"] == sum(int((s["labels"][1:] != -100).sum()) for s in own)
        assert one["tiles"][:2] == [18, 0]
        assert sum(other["tiles"]) == sum(one["tiles"])
        assert max(other["tiles"]) < 12
        assert sum(other["frames"]) == sum(one["frames"])
        if hears:
            assert one["frames"][2] == 0 < one["frames"][1]
            assert max(other["frames"]) < 0.8 * max(one["frames"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["gradients"] == pytest.approx(one["gradients"], rel=1e-4, abs=1e-4)
        assert max(map(abs, one["gradients"])) > 1
