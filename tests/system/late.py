"""Ranks of the trainer whose pixels come late: 200 ms in every fourth pack, the first of an iteration of four."""

import time
from itertools import count

from megatron.vlm import pretrain
from megatron.vlm.data.loader import PackDataset
from megatron.vlm.ending import run_rank
from megatron.vlm.microbatch import Microbatch


class LateDataset(PackDataset):
    """As it is, but for its lateness."""

    def __getitem__(self, pack: int) -> Microbatch:
        if "tiles" in self.needs.media and next(ASKED) % 4 == 0:
            time.sleep(0.2)
        return super().__getitem__(pack)


ASKED = count()

if __name__ == "__main__":
    pretrain.PackDataset = LateDataset  # type: ignore[misc]
    run_rank(pretrain.main)
