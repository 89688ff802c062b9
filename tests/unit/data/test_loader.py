"""What training reads: an index of another dataset is refused by the field that differs, damage before it is used."""

import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import sentencepiece
import torch

from examples.demo import evaluate
from examples.demo.evaluate import answers_of
from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.loader import Needs, PackDataset, first_iteration, microbatches
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.sources import Sources, short_names
from megatron.vlm.evaluation import HeldOutPass
from megatron.vlm.pixels import normalise
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs
from tests.media import seen
from tests.programs import environment, runs
from tests.unit.data.workers import Worker
from tests.waiting import until

ALL = Needs(frozenset({"tiles"}), tokens=True, labels=True)


class OnePack:
    """An index of one pack, the samples given, in their order. It was made here: there is nothing to check."""

    pad, wide = False, None

    def __init__(self, samples: np.ndarray) -> None:
        self._samples = samples

    def samples(self, _: int) -> np.ndarray:
        return self._samples

    def width(self, _: int) -> int:
        return 1

    def check(self, *_: object) -> None: ...

    check_samples = verify = check


def pack_of(samples: np.ndarray, pad: bool = False) -> PackedIndex:
    index = OnePack(samples)
    index.pad = pad
    return cast(PackedIndex, index)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    folder = tmp_path_factory.mktemp("raw")
    return demo_dataset(folder, folder / "dataset", 40)


@pytest.fixture
def index(dataset: ChatDataset, tmp_path: Path) -> PackedIndex:
    return pack(dataset, tmp_path, llm_budget=400, data_parallel_size=2)


@pytest.mark.parametrize("pad", [False, True])
def test_stages_with_experts_know_what_each_sample_weighs(dataset: ChatDataset, pad: bool) -> None:
    """Wherever the head is: its tokens to be predicted, by the dataset itself; padding has none."""
    samples = np.arange(5)
    index = pack_of(samples, pad)
    needs = Needs.of(("llm", "llm"), preset("qwen3-vl-30b-a3b").language)
    batch = PackDataset(dataset, index, needs, sequence_multiple=64)[0]
    assert (batch.labels, batch.loss_mask, batch.input_ids) == (None, None, None)
    assert batch.sample_lengths == tuple(dataset.sizes.tokens[samples])
    wanted = [float(dataset.sample(sample).text[1][1:].sum()) for sample in samples]
    assert batch.targets.tolist() == [*wanted, *[0.0] * (len(batch.lengths) - 5)]
    assert len(set(batch.lengths[:5])) == 1 or not pad
    assert PackDataset(dataset, index, Needs.of(("llm", "llm"), preset("qwen3-vl-2b").language))[0].targets is None


def test_stages_whose_layers_look_words_up_are_given_them(dataset: ChatDataset) -> None:
    """Of Gemma 4 E2B all with a language layer, and of others the first; whose ViT alone is theirs get none."""
    needs = {name: preset(name).language for name in ("gemma-4-e2b", "gemma-4-31b")}
    index = pack_of(np.arange(3))
    for kinds, wanted in ((("llm", "llm"), [True, False]), (("vit", "vit"), [False, False])):
        packs = [PackDataset(dataset, index, Needs.of(kinds, language))[0] for language in needs.values()]
        assert [pack.input_ids is not None for pack in packs] == wanted
        assert [seen(pack).positions is not None for pack in packs] == wanted


def test_every_label_is_the_next_token_and_those_of_the_answers_count(dataset: ChatDataset) -> None:
    """Of each sample by itself; which tokens are an answer's: test_hugging_face_parity.py."""
    samples = np.random.default_rng(0).permutation(len(dataset))[:7]
    batch = PackDataset(dataset, pack_of(samples), ALL)[0]
    texts = [dataset.sample(sample).text for sample in samples]
    assert batch.lengths == tuple(len(tokens) for tokens, _ in texts)
    assert batch.input_ids.tolist() == np.concatenate([tokens for tokens, _ in texts]).tolist()
    following, counts = (np.concatenate([[*text[part][1:], 0] for text in texts]) for part in (0, 1))
    assert batch.loss_mask.tolist() == counts.tolist()
    assert batch.labels.numpy()[counts == 1].tolist() == following[counts == 1].tolist()


@pytest.mark.parametrize("pad", [False, True])
def test_what_is_useful_of_a_pack_is_its_samples_own(dataset: ChatDataset, pad: bool) -> None:
    """Padded to the longest, or to a multiple, it computes more."""
    samples = np.arange(6)
    batch = PackDataset(dataset, pack_of(samples, pad), ALL, sequence_multiple=64)[0]
    lengths = dataset.sizes.tokens[samples]
    assert batch.useful_tokens == lengths.sum() < sum(batch.lengths)
    assert batch.useful_squares == (lengths**2).sum() < sum(length**2 for length in batch.lengths)


def test_pixels_are_the_bytes_of_the_samples_tiles_in_order(dataset: ChatDataset) -> None:
    """A quarter of what travels to the device otherwise; tiles of a sample are its processor's: test_processors.py."""
    samples = np.flatnonzero(dataset.sizes.tiles > 3)[:4]
    batch = PackDataset(dataset, pack_of(samples), ALL)[0]
    assert seen(batch).values.dtype == torch.uint8
    pixels = normalise(seen(batch).values, seen(batch).statistics)
    assert torch.equal(pixels, torch.cat([pixels_of(dataset.sample(sample)) for sample in samples]))
    assert len(pixels) == seen(batch).amount


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pack_of_gemmas_says_where_each_image_begins(tmp_path: Path, seed: int) -> None:
    gemma: dict[str, Any] = {"template": "gemma", "tiling": Tiling(32, rule="gemma"), "markup": "gemma"}
    data = demo_dataset(tmp_path, tmp_path / "dataset", 12, seed, **gemma)
    samples = np.random.default_rng(seed).permutation(len(data))
    batch = PackDataset(data, pack_of(samples), ALL)[0]
    context = batch.input_ids == data.manifest["image_token_id"]
    assert sorted(place for start in seen(batch).starts for place in range(start, start + 4)) == (
        context.nonzero().squeeze(1).tolist()
    )
    assert not any(context[start - 1] or context[start + 4] for start in seen(batch).starts)
    assert len(seen(batch).starts) == seen(batch).amount > 0
    told = PackDataset(data, pack_of(samples), Needs(frozenset(), tokens=False, labels=False))[0]
    assert seen(told).starts == seen(batch).starts
    assert seen(told).grids == ()
    asked = evaluate._pack(data, [answer for sample in samples.tolist() for answer in answers_of(data, sample)])
    shown = (asked.input_ids == data.manifest["image_token_id"]).nonzero().squeeze(1).tolist()
    assert sorted(place for start in seen(asked).starts for place in range(start, start + 4)) == shown


@pytest.mark.parametrize("pad", [False, True])
def test_a_pack_of_paligemmas_says_where_each_answer_begins(tmp_path: Path, pad: bool) -> None:
    """To every stage, also those that read neither words nor pixels; and to whoever lets it answer."""
    paligemma: dict[str, Any] = {"template": "paligemma", "tiling": Tiling(32, rule="paligemma"), "markup": "paligemma"}
    data = demo_dataset(tmp_path, tmp_path / "dataset", 30, 0, max_rejects=30, **paligemma)
    samples = np.random.default_rng(0).permutation(len(data))
    assert {len(data.sample(sample).images) for sample in samples} >= {1, 2}
    index = pack_of(samples, pad)
    batch = PackDataset(data, index, ALL, sequence_multiple=64)[0]
    words, counts = (part.split(batch.lengths) for part in (batch.input_ids, batch.loss_mask))
    first = [int(part.nonzero()[0]) + 1 for part in counts[: len(samples)]]
    assert batch.prefixes == tuple(first)
    newline = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).piece_to_id("\n")
    assert {int(part[one - 1]) for part, one in zip(words, first, strict=False)} == {newline}
    told = PackDataset(data, index, Needs(frozenset(), tokens=False, labels=False), sequence_multiple=64)[0]
    assert told.prefixes == batch.prefixes
    answers = [answer for sample in samples.tolist() for answer in answers_of(data, sample)]
    assert evaluate._pack(data, answers).prefixes == batch.prefixes


def test_an_empty_pack_counts_no_token(dataset: ChatDataset, index: PackedIndex) -> None:
    batch = PackDataset(dataset, index, ALL)[EMPTY_PACK]
    assert batch.samples == seen(batch).amount == 0
    assert batch.loss_mask.sum() == 0


def test_an_index_of_another_dataset_is_refused_by_field(dataset: ChatDataset, index: PackedIndex) -> None:
    other = ChatDataset(dataset.folder)
    other.manifest = {**dataset.manifest, "tiling": {**dataset.manifest["tiling"], "max_tiles": 6}}
    with pytest.raises(UserError, match=r"manifest\.tiling\.max_tiles is 32, not 6"):
        PackDataset(other, index, ALL)


def test_a_flipped_byte_is_found_before_training(dataset: ChatDataset, index: PackedIndex) -> None:
    path = index.folder / "sample_ids.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-8] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"sample_ids\.npy: damaged"):
        PackDataset(dataset, PackedIndex.open(index.folder), ALL)


@pytest.mark.parametrize("last_iteration", ["next_epoch", "empty"])
@pytest.mark.parametrize("resumed_at", [1, 2, 4, 7])
def test_a_resumed_rank_reads_on(dataset: ChatDataset, tmp_path: Path, resumed_at: int, last_iteration: str) -> None:
    """Also in the middle of an epoch, and at another data-parallel size: the samples read are those that come next."""
    index = pack(dataset, tmp_path, data_parallel_size=2, micro_batches=2, last_iteration=last_iteration)
    stream = PackStream(index, 2, 2)
    assert index.num_packs % 4, "an epoch must end inside an iteration"
    whole = [read(index, islice(stream.of_rank(rank, 0), 20)) for rank in range(2)]
    resumed = [read(index, islice(stream.of_rank(rank, resumed_at), 20 - 2 * resumed_at)) for rank in range(2)]
    assert resumed == [samples[2 * resumed_at :] for samples in whole]
    assert resumed[0] != whole[0][: 20 - 2 * resumed_at]
    (alone,) = [read(index, islice(PackStream(index, 1, 4).of_rank(0, resumed_at), 4))]
    assert sorted(alone) == sorted(resumed[0][:2] + resumed[1][:2])
    before = [sample for samples in whole for pack in samples[: 2 * resumed_at] for sample in pack]
    assert stream.samples_before(resumed_at) == len(before)


@pytest.mark.parametrize("resumed_at", [999, 1000, 1001, 2500])
def test_samples_of_a_long_run_are_all_counted(dataset: ChatDataset, tmp_path: Path, resumed_at: int) -> None:
    index = pack(dataset, tmp_path, data_parallel_size=2, micro_batches=2)
    stream = PackStream(index, 2, 2)
    sizes = np.diff(np.load(index.folder / "pack_offsets.npy"))
    runs = (stream.iteration(number) for number in range(resumed_at))
    assert stream.samples_before(resumed_at) == sum(int(sizes[packs].sum()) for packs in runs)


@pytest.mark.parametrize("global_batch", [1, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_held_out_pass_is_every_sample_once(
    dataset: ChatDataset, tmp_path: Path, global_batch: int, ranks: int, epochs: int
) -> None:
    index = pack(dataset, tmp_path, micro_batches=global_batch, epochs=epochs)
    held_out = HeldOutPass(index, ranks)
    assert held_out.global_batch % ranks == 0
    a_pass = held_out.iterations * held_out.global_batch // ranks
    orders = [list(islice(held_out.of_rank(rank), 2 * a_pass)) for rank in range(ranks)]
    for packs in orders:
        assert packs[:a_pass] == packs[a_pass:]  # and the next one reads the same
    read_once = [sample for packs in orders for samples in read(index, packs[:a_pass]) for sample in samples]
    assert sorted(read_once) == list(range(len(dataset)))
    assert sum(packs[:a_pass].count(EMPTY_PACK) for packs in orders) < held_out.global_batch


def pack(dataset: ChatDataset, folder: Path, **options: Any) -> PackedIndex:
    return demo_packs(dataset, folder / "packs", PackOptions(**{"vit_budget": 40, "llm_budget": 160, **options}))


def read(index: PackedIndex, packs: Iterable[int]) -> list[tuple[int, ...]]:
    return [tuple(index.samples(number).tolist()) if number != EMPTY_PACK else () for number in packs]


def test_every_token_is_of_its_sample_and_its_file(dataset: ChatDataset, index: PackedIndex) -> None:
    halves = [{"file": "in/a.jsonl", "samples": 15}, {"file": "in/b.jsonl", "samples": 0},
              {"file": "in/c.jsonl", "samples": len(dataset) - 15}]  # fmt: skip
    data = PackDataset(dataset, index, ALL, sequence_multiple=64)
    data.sources = Sources(halves)
    batch, samples = data[0], index.samples(0).tolist()
    assert {sample < 15 for sample in samples} == {True, False}, "the pack must have samples of both"
    assert torch.bincount(batch.segment_ids).tolist() == list(batch.lengths)
    assert batch.sources[: len(samples)].tolist() == [0 if sample < 15 else 2 for sample in samples]
    assert len(batch.sources) == len(batch.lengths) == len(samples) + 1
    assert data.sources.names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (("a/train.jsonl",), ("train",)),
        (("a/train.jsonl", "b/train.jsonl", "b/more.v2.jsonl"), ("a/train", "b/train", "more.v2")),
        (("/x/s/t.jsonl", "/y/s/t.jsonl", "t.jsonl"), ("x/s/t", "y/s/t", "t")),
    ],
)
def test_sources_have_the_shortest_names_that_tell_them_apart(files: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert short_names(files) == names


def test_a_position_inside_an_iteration_is_refused() -> None:
    assert first_iteration(48, 8) == 6
    with pytest.raises(UserError, match="global-batch-size"):
        first_iteration(50, 8)


@pytest.mark.starts
def test_workers_are_forks_of_one_process_that_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an evaluation too: Megatron is imported once a rank, not once a worker; no worker opens a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    order, dataset = cast(Any, range(4)), cast(Any, Worker())
    training, evaluation = (list(microbatches(dataset, order, num_workers=2)) for _ in range(2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    readers = {batch.samples for batch in (*training, *evaluation)}
    parents = {batch.useful_tokens for batch in (*training, *evaluation)}
    assert len(readers) == 4
    assert len(parents) == 1
    assert not {os.getpid()} & (parents | readers)
    assert {batch.lengths for batch in (*training, *evaluation)} == {(True, False)}


@pytest.mark.starts
def test_workers_end_when_their_packs_are_closed() -> None:
    """And before that no pack is missing; what is closed without a pack taken has started none."""
    opened = microbatches(cast(Any, Worker()), count(), num_workers=2)
    workers = {next(opened).samples for _ in range(6)}
    assert len(workers) == 2
    assert all(map(psutil.pid_exists, workers))
    opened.close()
    assert not any(map(psutil.pid_exists, workers))
    assert next(opened, None) is None
    microbatches(cast(Any, Worker()), count(), num_workers=2).close()


RANK = """
import sys, time
from itertools import count
from megatron.vlm.data.loader import microbatches
from tests.unit.data.workers import Worker

if __name__ == "__main__":
    loaders = [microbatches(Worker(), count(), num_workers=1) for _ in range(2)]
    for batch in map(next, loaders):
        print(batch.samples, batch.useful_tokens, flush=True)
    time.sleep(600)
"""


@pytest.mark.starts
def test_workers_end_with_their_rank_however_it_ended(tmp_path: Path) -> None:
    """Those that training and an evaluation have, and the process that they are forks of."""
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "rank.py")]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as rank:
        processes = {int(number) for _ in range(2) for number in rank.stdout.readline().split()}
        rank.kill()
    assert len(processes) == 3
    until(lambda: not any(map(runs, processes)), "the end of every worker")


FILES = [
    [("a", 3)], [("a", 3), ("b", 1), ("c", 4)], [("a", 2), ("b", 2), ("a", 2)],  # one of them twice
    [("a", 0), ("b", 2), ("c", 0), ("d", 0), ("e", 1), ("f", 0)],  # empty ones
]  # fmt: skip


@pytest.mark.parametrize("files", FILES)
def test_every_sample_is_of_the_input_that_holds_it(files: list[tuple[str, int]]) -> None:
    """At both ends of every input file."""
    entries = [
        {"file": f"{file}.jsonl", "samples": count, "image_root": f"root {number}"}
        for number, (file, count) in enumerate(files)
    ]
    sources = Sources(entries)
    of = [entry for entry in entries for _ in range(int(str(entry["samples"])))]
    assert [sources.entry(sample) for sample in range(len(of))] == of
    numbers = sources.of(np.arange(len(of)))
    assert [f"{sources.names[number]}.jsonl" for number in numbers] == [entry["file"] for entry in of]


def test_words_of_a_pack_begin_with_each_sample_and_none_predicts_anothers() -> None:
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5, 6], [7, 8, 9])]
    batch, edges = join_words(samples), boundaries(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["use_cache"] is False
    assert edges["cu_seq_lens_q"].tolist() == edges["cu_seq_lens_k"].tolist() == [0, 2, 5]
    assert edges["cu_seq_lens_q"].dtype == torch.int32
    assert edges["max_length_q"] == edges["max_length_k"] == 3
    with pytest.raises(UserError, match="ask for fewer ranks or micro-batches"):
        join_words([])
