"""What ranks read of packs that they run or encode together: all of it, every token, tile and sample once."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.encoder_share import EncoderShares, numbered
from megatron.vlm.data.inputs import images as reading
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.pack_shard import shard_of, with_filler
from megatron.vlm.evaluation import HeldOutPass
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch, segment_ids
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import EncoderRank, assign_pieces
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.shards import shard_tokens
from omnibal_ext.sizes import Sizes
from tests.media import seen, with_images
from tests.unit.data.clips import film_and_image
from tests.unit.data.test_loader import ALL, dataset, pack_of  # noqa: F401 (a fixture)
from tests.unit.data.test_videos import made
from tests.unit.preprocessing.test_processors import PATCH

SEEDS = range(12)


def drawn(seed: int, joined: bool) -> tuple[Microbatch, list, np.ndarray, int]:
    """A pack with images in it, the spans of its places, who makes each feature, and the width."""
    generator = np.random.default_rng(seed)
    width, multiple = int(generator.choice([2, 4, 8])), int(generator.choice([1, 4]))
    real = generator.integers(1, 60, generator.integers(1, 9)).tolist()
    shares = shard_tokens(real, width, multiple)
    lengths, spans = with_filler(shares, real, multiple)
    total, words = sum(lengths), sum(real)
    shown = np.flatnonzero(generator.random(words) < 0.4)
    features = len(shown) if not joined else max(1, len(shown) // 2)
    mask = torch.from_numpy((np.arange(total) < words) * (generator.random(total) < 0.5)).float()
    images = Images(together(features), positions=torch.from_numpy(shown))
    pack = Microbatch(
        lengths, len(real), words, input_ids=torch.arange(total), labels=torch.arange(total) + 1000,
        loss_mask=mask, supervised=mask.nonzero().squeeze(1), segment_ids=segment_ids(lengths),
        targets=torch.stack([part.sum() for part in mask.split(lengths)]), media={"tiles": images},
    )  # fmt: skip
    if joined:
        sources = torch.from_numpy(generator.integers(-1, features, (len(shown), 4)))
        pack = with_images(pack, sources=sources, weights=torch.rand(len(shown), 4))
    return pack, spans, generator.integers(0, width, features), width


@pytest.mark.parametrize("seed", SEEDS)
def test_places_hold_every_token_once(seed: int) -> None:
    pack, spans, makers, width = drawn(seed, joined=False)
    shares = [shard_of(pack, spans, makers, place) for place in range(width)]
    ids = torch.cat([share.input_ids for share in shares])
    assert sorted(ids.tolist()) == list(range(pack.tokens))
    for share in shares:
        assert torch.equal(share.labels, share.input_ids + 1000)
        assert torch.equal(share.loss_mask, pack.loss_mask[share.input_ids])
        assert torch.equal(share.supervised, share.loss_mask.nonzero().squeeze(1))
        assert torch.equal(share.host_segment_ids, pack.segment_ids[share.input_ids])
        assert torch.equal(share.segment_ids, share.host_segment_ids)
        begins = torch.tensor([0, *pack.lengths]).cumsum(0)
        assert torch.equal(share.host_positions, share.input_ids - begins[share.segment_ids])
        assert share.tokens == len(share.input_ids)
        assert share.full_pack.lengths == pack.lengths
        assert share.full_pack.input_ids is None
    assert sum(share.samples for share in shares) == pack.samples
    assert sum(share.useful_tokens for share in shares) == pack.useful_tokens
    squares = sum(length**2 for length in pack.lengths[: pack.samples])
    assert 0 <= squares - sum(share.useful_squares for share in shares) < width  # rounded down on each place
    assert all(0 < share.tokens <= -(-pack.useful_tokens // width) + 3 for share in shares)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_features_come_to_the_tokens_that_show_them(seed: int, joined: bool) -> None:
    pack, spans, makers, width = drawn(seed, joined)
    shares = [shard_of(pack, spans, makers, place) for place in range(width)]
    made = [torch.from_numpy(np.flatnonzero(makers == place)) for place in range(width)]
    routes = [share.shard.features for share in shares]
    sent = [features[route.send_rows].split(route.send_counts) for features, route in zip(made, routes, strict=True)]
    for place, (share, route) in enumerate(zip(shares, routes, strict=True)):
        parts = [sent[other][place] for other in range(width)]
        assert tuple(map(len, parts)) == route.receive_counts
        taken = torch.cat(parts)[route.receive_rows]
        number = {int(position): i for i, position in enumerate(seen(pack).positions)}
        shown = [number[int(token)] for token in share.input_ids[seen(share).positions]]
        if not joined:
            assert taken.tolist() == shown
            continue
        found = torch.cat([taken, torch.tensor([-1])])[seen(share).sources]
        assert torch.equal(found, seen(pack).sources[shown])
        assert torch.equal(seen(share).weights, seen(pack).weights[shown])
        assert len(set(taken.tolist())) == len(taken)  # each once, whatever tokens it is a part of


@pytest.mark.parametrize("markup", ["qwen-vl", "qwen3-vl"])
def test_no_place_reads_what_another_shows(markup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long film and an image over four ranks: every frame is opened by one, and all tiles are there once."""
    data = made(tmp_path, markup, film_and_image(tmp_path, 18))
    index: Any = pack_of(np.arange(2))
    index.width = lambda _: 1
    whole = PackDataset(data, index, Needs(frozenset({"tiles"}), True, True))[0]
    index.width = lambda _: 4
    opened: Counter[str] = Counter()
    load = reading.load_rgb
    monkeypatch.setattr(
        reading, "load_rgb", lambda path, *more, **named: (opened.update([path.name]), load(path, *more, **named))[1]
    )
    shares = [PackDataset(data, index, Needs(frozenset({"tiles"}), True, True), rank=rank)[0] for rank in range(4, 8)]
    assert set(opened.values()) == {1}
    assert set(opened) == {"b.png", *(Path(name).name for image in data.sample(0).images for name in image.film.files)}
    assert sum(seen(share).amount for share in shares) == seen(whole).amount
    assert max(seen(share).amount for share in shares) < seen(whole).amount / 2
    rows = [row.tobytes() for share in shares for row in as_film(seen(share).values)]
    assert Counter(rows) == Counter(row.tobytes() for row in as_film(seen(whole).values))
    for share in shares:
        assert sum(steps * height * width for steps, height, width in seen(share).grids) == seen(share).amount
        assert seen(share.full_pack).grids == seen(whole).grids
        blind = PackDataset(data, index, ALL, decodes=False, rank=share.shard.team_rank)[0]
        assert seen(blind).values.is_meta
        assert seen(blind).values.shape == seen(share).values.shape


def as_film(pixels: torch.Tensor) -> np.ndarray:
    found = pixels.numpy()
    return found if found.ndim == 5 else np.repeat(found[:, None], 2, axis=1)


def test_a_place_without_images_has_rows_of_none(tmp_path: Path) -> None:
    index: Any = pack_of(np.arange(1))
    index.width = lambda _: 2
    data = made(tmp_path, "qwen-vl", film_and_image(tmp_path, 2)[1:])
    shares = [PackDataset(data, index, Needs(frozenset({"tiles"}), True, True), rank=rank)[0] for rank in range(2)]
    assert sorted(seen(share).amount for share in shares) == [0, 32]
    assert all(seen(share.full_pack).amount and seen(share).values.shape[-2] == PATCH for share in shares)
    assert sum(len(seen(share).positions) for share in shares) == 8


def test_samples_of_wide_packs_count_once(tmp_path: Path) -> None:
    """Behind a resume, and in an evaluation: every sample of an epoch, however many ranks run its pack."""
    tokens = np.array([*[30] * 40, 150, 90, 170], np.int64)
    sizes = Sizes(np.zeros(len(tokens), np.int32), tokens)
    options = PackOptions(
        vit_budget=1, llm_budget=100, data_parallel_size=2, micro_batches=2, widths=(1, 2), last_iteration="empty"
    )
    index = build_index(sizes, tmp_path / "packs", options)[0]
    stream = PackStream(index, 2, 2)
    assert index.widths == (1, 2)
    assert stream.samples_before(stream.first_iteration(1)) == len(tokens)
    run = HeldOutPass(index, 2)
    ranks = [[pack for pack, _ in zip(run.of_rank(rank), range(run.iterations * 2), strict=False)] for rank in range(2)]
    shared = {pack for pack in ranks[0] if pack >= 0 and index.width(pack) == 2}
    assert [pack for pack in ranks[0] if pack in shared] == [pack for pack in ranks[1] if pack in shared]
    alone = [pack for own in ranks for pack in own if pack >= 0 and pack not in shared]
    assert sorted([*alone, *shared]) == list(range(index.num_packs))
    assert all((one in shared) == (other in shared) for one, other in zip(*ranks, strict=True))


PARTS = ((0, 1), (1,), (0, 1, 2))
"""Of three microbatches the pipeline ranks, of three, that encode it."""
TENSOR = 2


def parts_of(data: ChatDataset, samples: np.ndarray, microbatch: int) -> dict[tuple[int, int], Microbatch]:
    """By (pipeline, tensor) rank, what it reads of the pack of these samples."""
    readers = {rank: EncoderRank(PARTS, *rank, TENSOR) for rank in product(range(3), range(TENSOR))}
    return {rank: EncoderShares(data, pack_of(samples), one)[5, microbatch] for rank, one in readers.items()}


def put_together(parts: dict[tuple[int, int], Microbatch]) -> Iterator[torch.Tensor]:
    """The tiles of each unit of the pack, from the one rank whose own it is."""
    rows = {rank: iter(seen(part).values if seen(part).values is not None else ()) for rank, part in parts.items()}
    units = seen(next(iter(parts.values()))).pieces
    for number, (size,) in enumerate(units):
        (rank,) = (rank for rank, part in parts.items() if seen(part).encodes[number])
        yield torch.stack([*islice(rows[rank], size)])
    assert not any(list(left) for left in rows.values())


@pytest.mark.parametrize("microbatch", range(4))
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_read_every_tile_once_and_in_order(dataset: ChatDataset, seed: int, microbatch: int) -> None:  # noqa: F811
    samples = np.random.default_rng(seed).permutation(len(dataset))[:9]
    whole, parts = PackDataset(dataset, pack_of(samples), ALL)[5], parts_of(dataset, samples, microbatch)
    assert seen(whole).values is not None
    assert torch.equal(torch.cat([*put_together(parts)]), seen(whole).values)
    encode = PARTS[microbatch % 3]
    units = tuple(map(prod, seen(whole).grids)) or (1,) * seen(whole).amount
    dealt = assign_pieces(units, microbatch, encode, TENSOR)
    for (rank, tensor), part in parts.items():
        place = encode.index(rank) * TENSOR + tensor if rank in encode else -1
        assert seen(part).encodes == tuple(worker == place for worker in dealt)
        assert seen(part).pieces == tuple((unit,) for unit in units)
        assert (part.pack, part.samples, part.sample_ids) == (whole.pack, whole.samples, whole.sample_ids)
        assert seen(part).statistics == (seen(whole).statistics if seen(part).amount else None)
        assert seen(part).amount == sum(seen(part).encodes)
        assert rank in encode or not seen(part).amount
    counts = [seen(part).amount for (rank, _), part in parts.items() if rank in encode]
    assert max(counts) - min(counts) <= 1


def test_steps_of_films_and_images_go_with_their_grids(tmp_path: Path) -> None:
    data, samples = made(tmp_path, "qwen3-vl", film_and_image(tmp_path, 10)), np.arange(2)
    whole, parts = PackDataset(data, pack_of(samples), ALL)[5], parts_of(data, samples, 0)
    assert len({seen(part).pieces for part in parts.values()}) == 1
    assert len(seen(parts[0, 0]).pieces) > 4
    assert np.array_equal(np.concatenate([as_film(one) for one in put_together(parts)]), as_film(seen(whole).values))
    for part in parts.values():
        assert tuple(map(prod, seen(part).grids)) == seen(part).inputs
    assert sum(bool(seen(part).amount) for part in parts.values()) == 4


def test_a_rank_opens_its_own_images_alone_and_says_which_are_broken(
    dataset: ChatDataset, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Broken ones are black tiles to whoever encodes them."""
    samples = np.flatnonzero(dataset.sizes.tiles > 0)[:6]
    images = {Path(image.path).name for sample in samples for image in dataset.sample(sample).images}
    broken = Path(dataset.sample(samples[2]).images[0].path).name
    opened, original = [], reading.load_rgb

    def load(path: Path, *more: object, **named: object) -> object:
        opened.append(path.name)
        if path.name == broken:
            raise UserError(f"{path}: is no image")
        return original(path, *more, **named)

    monkeypatch.setattr(reading, "load_rgb", load)
    found = EncoderShares(dataset, pack_of(samples), EncoderRank(((0,),), 1, 0, 1))[5, 0]
    assert not seen(found).amount
    assert not opened
    parts = [EncoderShares(dataset, pack_of(samples), EncoderRank(((0, 1),), rank, 0, 1))[5, 0] for rank in (0, 1)]
    assert set(opened) == images
    assert len(opened) <= len(images) + 1  # one may lie on either side
    said = [part for part in parts if part.broken]
    assert said
    for part in said:
        ((sample, why),) = part.broken
        assert sample == samples[2]
        assert "is no image" in why
        assert bool((seen(part).values == 0).flatten(1).all(1).any())


def test_a_pack_without_images_and_an_empty_one_are_parts_of_nothing(dataset: ChatDataset) -> None:  # noqa: F811
    texts = np.flatnonzero(dataset.sizes.tiles == 0)[:2]
    worker = EncoderRank(((0,),), 0, 0, 1)
    for pack in (5, -1):
        found = EncoderShares(dataset, pack_of(texts), worker)[pack, 0]
        assert (seen(found).amount, seen(found).pieces, seen(found).encodes, seen(found).values) == (0, (), (), None)
        assert found.samples == (len(texts) if pack == 5 else 0)


def test_packs_are_numbered_within_their_iteration() -> None:
    assert list(numbered((7, 3, 9, 4, 8), 2)) == [(7, 0), (3, 1), (9, 0), (4, 1), (8, 0)]
