"""Run on one rank: a pack gives, sample by sample, what its samples give alone; padded or end to end."""

import json
import sys
from dataclasses import replace

import torch

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.stage import Stage
from tests.distributed import harness


def main() -> None:
    del sys.argv[1:]
    args = harness.start(harness.SMALL, 1, 1)
    chain = harness.build_chain(args, harness.SMALL)
    stage = Stage(chain, 0, len(chain.kinds))
    packed, alone = 0.0, 0.0
    with torch.no_grad():
        for pack in harness.sample_packs():
            losses = stage(replace(pack, supervised=None))  # of every token
            for start, end, sample in samples_of(pack):
                single = stage(sample)
                scale = single.abs().max().item()
                packed = max(packed, (losses[start:end] - single).abs().max().item() / scale)
                padded = stage(pad(sample, 5))[: end - start]
                alone = max(alone, (padded - single).abs().max().item() / scale)
    print("RESULT " + json.dumps({"packed": packed, "padded": alone}))


def samples_of(pack: Microbatch) -> list[tuple[int, int, Microbatch]]:
    """The samples of a pack as packs of their own."""
    found, start, tile = [], 0, 0
    for length in pack.lengths:
        ids = pack.input_ids[start : start + length]
        positions = (ids == harness.IMAGE_TOKEN).nonzero().squeeze(1)
        tiles = len(positions) // harness.SMALL.image_tokens_per_tile
        sample = Microbatch(
            tiles=tiles, lengths=(length,), samples=1, useful_tokens=length, pixels=pack.pixels[tile : tile + tiles],
            input_ids=ids, image_positions=positions, labels=pack.labels[start : start + length],
        )  # fmt: skip
        found.append((start, start + length, sample))
        start, tile = start + length, tile + tiles
    return found


def pad(sample: Microbatch, filler: int) -> Microbatch:
    """The same sample with tokens after it that count for nothing."""
    more = torch.zeros(filler, dtype=torch.long)
    return replace(
        sample,
        lengths=(sample.lengths[0] + filler,),
        input_ids=torch.cat([sample.input_ids, more]),
        labels=torch.cat([sample.labels, more]),
    )


if __name__ == "__main__":
    main()
