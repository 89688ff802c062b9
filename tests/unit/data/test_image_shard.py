"""What ranks read of packs that they encode together: every tile once, in the pack's order, whoever they are."""

from collections.abc import Iterator
from itertools import islice, product
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.vlm.data import dataset as reading
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.image_shard import ImageShardDataset, numbered
from megatron.vlm.data.loader import PackDataset
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.image_assignment import EncoderRank, assign_units
from tests.unit.data.clips import OF_IMAGE, TURNS, noise, write_frames
from tests.unit.data.test_loader import ALL, dataset, pack_of  # noqa: F401 (a fixture)
from tests.unit.data.test_pack_shard import as_film
from tests.unit.data.test_videos import made

PARTS = ((0, 1), (1,), (0, 1, 2))
"""Of three microbatches the pipeline ranks, of three, that encode it."""
TENSOR = 2


def parts_of(data: ChatDataset, samples: np.ndarray, microbatch: int) -> dict[tuple[int, int], Microbatch]:
    """By (pipeline, tensor) rank, what it reads of the pack of these samples."""
    ranks = product(range(3), range(TENSOR))
    return {
        rank: ImageShardDataset(data, pack_of(samples), EncoderRank(PARTS, *rank, TENSOR))[5, microbatch]
        for rank in ranks
    }


def put_together(parts: dict[tuple[int, int], Microbatch]) -> Iterator[torch.Tensor]:
    """The tiles of each unit of the pack, from the one rank whose own it is."""
    rows = {rank: iter(part.pixels if part.pixels is not None else ()) for rank, part in parts.items()}
    units = next(iter(parts.values())).units
    for number, size in enumerate(units):
        (rank,) = (rank for rank, part in parts.items() if part.encodes[number])
        yield torch.stack([*islice(rows[rank], size)])
    assert not any(list(left) for left in rows.values())


@pytest.mark.parametrize("microbatch", range(4))
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_read_every_tile_once_and_in_order(dataset: ChatDataset, seed: int, microbatch: int) -> None:  # noqa: F811
    samples = np.random.default_rng(seed).permutation(len(dataset))[:9]
    whole, parts = PackDataset(dataset, pack_of(samples), ALL)[5], parts_of(dataset, samples, microbatch)
    assert whole.pixels is not None
    assert torch.equal(torch.cat([*put_together(parts)]), whole.pixels)
    encode = PARTS[microbatch % 3]
    units = tuple(map(prod, whole.grids)) or (1,) * whole.tiles
    dealt = assign_units(units, microbatch, encode, TENSOR)
    for (rank, tensor), part in parts.items():
        place = encode.index(rank) * TENSOR + tensor if rank in encode else -1
        assert part.encodes == tuple(worker == place for worker in dealt)
        assert part.units == units
        assert (part.pack, part.samples, part.sample_ids) == (whole.pack, whole.samples, whole.sample_ids)
        assert part.pixel_statistics == whole.pixel_statistics
        assert part.tiles == sum(part.encodes)
        assert rank in encode or not part.tiles
    counts = [part.tiles for (rank, _), part in parts.items() if rank in encode]
    assert max(counts) - min(counts) <= 1


def test_steps_of_films_and_images_go_with_their_grids(tmp_path: Path) -> None:
    names = write_frames(tmp_path, "f", noise(10, 56, 84))
    Image.fromarray(noise(1, 56, 112)[0]).save(tmp_path / "b.png")
    film = {"video": names, "fps": 2, "conversations": TURNS}
    image = OF_IMAGE
    data, samples = made(tmp_path, "qwen3-vl", [film, image]), np.arange(2)
    whole, parts = PackDataset(data, pack_of(samples), ALL)[5], parts_of(data, samples, 0)
    assert len({part.units for part in parts.values()}) == 1
    assert len(parts[0, 0].units) > 4
    assert np.array_equal(np.concatenate([as_film(one) for one in put_together(parts)]), as_film(whole.pixels))
    for part in parts.values():
        assert [steps * height * width for steps, height, width in part.grids] == [
            size for size, own in zip(part.units, part.encodes, strict=True) if own
        ]
    assert sum(bool(part.tiles) for part in parts.values()) == 4


def test_a_rank_opens_its_own_images_alone_and_says_which_are_broken(
    dataset: ChatDataset,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken ones are black tiles to whoever encodes them."""
    samples = np.flatnonzero(dataset.sizes.tiles > 0)[:6]
    broken = dataset.sample(samples[2]).images[0].path
    opened: list[str] = []

    def load(path: Path, *more: object, **named: object) -> object:
        opened.append(path.name)
        if path.name == Path(broken).name:
            raise reading.UserError(f"{path}: is no image")
        return original(path, *more, **named)

    original = reading.load_rgb
    monkeypatch.setattr(reading, "load_rgb", load)
    found = ImageShardDataset(dataset, pack_of(samples), EncoderRank(((0,),), 1, 0, 1))[5, 0]
    assert not found.tiles
    assert not opened
    parts = [ImageShardDataset(dataset, pack_of(samples), EncoderRank(((0, 1),), rank, 0, 1))[5, 0] for rank in (0, 1)]
    images = {Path(image.path).name for sample in samples for image in dataset.sample(sample).images}
    assert set(opened) == images
    assert len(opened) <= len(images) + 1  # one may lie on either side
    said = [part for part in parts if part.broken]
    assert said
    for part in said:
        ((sample, why),) = part.broken
        assert sample == samples[2]
        assert "is no image" in why
        assert bool((part.pixels == 0).flatten(1).all(1).any())


def test_a_pack_without_images_and_an_empty_one_are_parts_of_nothing(dataset: ChatDataset) -> None:  # noqa: F811
    texts = np.flatnonzero(dataset.sizes.tiles == 0)[:2]
    worker = EncoderRank(((0,),), 0, 0, 1)
    for pack in (5, -1):
        found = ImageShardDataset(dataset, pack_of(texts), worker)[pack, 0]
        assert (found.tiles, found.units, found.encodes, found.pixels) == (0, (), (), None)
        assert found.samples == (len(texts) if pack == 5 else 0)


def test_packs_are_numbered_within_their_iteration() -> None:
    assert list(numbered((7, 3, 9, 4, 8), 2)) == [(7, 0), (3, 1), (9, 0), (4, 1), (8, 0)]
