"""Packs of a corpus with sounds: a third budget, a third part of the model to wait for; without sounds nothing new."""

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packers.budgets import further_budgets_for
from omnibal_ext.packing.packs import TOKENS
from omnibal_ext.report.against_random import _wide_packs, random_index, sizes_of
from omnibal_ext.sizes import Sizes
from tests.programs import refusal, tool
from tests.unit.packing.corpora import mix


def packed(folder: Path, sizes: Sizes, **options: object) -> tuple[PackedIndex, Summary]:
    asked = {"vit_budget": 5600, "llm_budget": 8192, "budgets": {"frames": 12000}, "data_parallel_size": 8,
             "micro_batches": 4}  # fmt: skip
    return build_index(sizes, folder, PackOptions(**asked | options))  # type: ignore[arg-type]


def test_packs_keep_three_budgets_and_ranks_wait_for_none_of_three_parts(tmp_path: Path) -> None:
    sizes = mix(20_000)
    index, summary = packed(tmp_path / "packs", sizes)
    heard = index.loads[:, index.load_names.index("frames")]
    assert heard.max() <= index.budgets["frames"] == summary.further[AUDIO].budget == 12000
    assert heard[: summary.packs].sum() == sizes.more["frames"].sum()
    assert list(index.costs.parts) == ["vision", "language", "audio"]
    assert summary.packs <= 1.04 * summary.lower_bound_packs
    assert summary.wait < 0.01
    assert summary.further[AUDIO].dist_ratio < 0.05
    assert summary.further[AUDIO].longest == heard.max()
    packs = packs_of_index(index, profiled(index), 4)
    assert packs.more
    assert packs.of("frames").shape == packs.tokens.shape
    assert packs.of("frames").max() <= 12000
    of_pack = dict(zip(index.loads[:, TOKENS].tolist(), heard.tolist(), strict=True))
    assert packs.of("frames").ravel()[0] == of_pack[packs.tokens.ravel()[0]]


def test_a_long_sound_among_words_has_room(tmp_path: Path) -> None:
    """On average there are fewer frames than it has."""
    heard = np.zeros(500, np.int64)
    heard[7] = 9000
    sizes = Sizes(np.ones(500, np.int64), np.full(500, 100), {"frames": heard})
    assert further_budgets_for(sizes, 1000) == {"frames": 9000}
    assert further_budgets_for(replace(sizes, more={"frames": heard // heard.max() * 90}), 100_000)["frames"] > 90


def profiled(index: PackedIndex, **budgets: int) -> Any:
    return SimpleNamespace(budget=lambda size: (index.budgets | budgets).get(size, 0))


def test_64_ranks_hardly_wait_for_any_of_three_parts(tmp_path: Path) -> None:
    _, summary = packed(tmp_path / "packs", mix(40_000), data_parallel_size=64)
    assert summary.wait <= 0.005


def test_a_profile_of_fewer_frames_does_not_fit(tmp_path: Path) -> None:
    index, _ = packed(tmp_path / "packs", mix(500))
    with pytest.raises(UserError, match="packed for audio_budget 12000, but profiled at 3000"):
        packs_of_index(index, profiled(index, frames=3000), 4)


@pytest.mark.parametrize("method", ["isf", "random", "length_group", "device_group"])
def test_other_methods_count_mel_frames_and_leave_out_what_is_too_long(tmp_path: Path, method: str) -> None:
    """ISF fills packs within three budgets; padded batches hold all three for samples alone."""
    sizes = mix(3_000)
    index, summary = packed(tmp_path / "packs", sizes, method=method, budgets={"frames": 4000})
    heard, fits = index.loads[:, index.load_names.index("frames")], sizes.more["frames"] <= 4000
    assert summary.rejected_by_reason == {"too many frames": int((~fits).sum())}
    assert heard[: summary.packs].sum() == sizes.more["frames"][fits].sum()
    assert summary.further[AUDIO].longest == heard.max()
    assert (heard.max() <= 4000) == (method == "isf")
    assert "audio" in index.costs.parts
    assert 0.01 < summary.further[AUDIO].dist_ratio < 0.5


def test_random_batches_of_a_report_hear_the_same_sounds(tmp_path: Path) -> None:
    """Their audio encoder's time is counted, and samples that packs leave out are left out of them too."""
    sizes = mix(600)
    sizes.save(tmp_path / "sizes.npz")
    budgets = ("--vit-budget", 5600, "--llm-budget", 8192, "--audio-budget", 3000)
    tool("pack_data.py", "--sizes", tmp_path / "sizes.npz", *budgets, "--output-dir", tmp_path / "packs")
    index = PackedIndex.open(tmp_path / "packs")
    known = sizes_of(index)
    assert known is not None
    random = random_index(index, known, tmp_path / "random")
    fits = sizes.more["frames"] <= 3000
    assert not fits.all()
    assert random.loads[:, random.load_names.index("frames")].sum() == sizes.more["frames"][fits].sum()
    problem: Any = Namespace(profile=_Profile({"tiles": 0, "tokens": 0, "frames": 3000}), microbatches=1)
    packs = _wide_packs(random, problem)
    assert packs.more
    assert packs.of("frames").any()


@dataclass(frozen=True)
class _Profile:
    budgets: dict[str, int]

    def budget(self, size: str) -> int:
        return self.budgets.get(size, 0)


def test_samples_with_too_long_sounds_are_named(tmp_path: Path) -> None:
    index, summary = packed(tmp_path / "packs", mix(500), budgets={"frames": 3000})
    assert summary.rejected_by_reason == {"too many frames": int((mix(500).more["frames"] > 3000).sum())}
    line = json.loads((index.folder / "rejected.jsonl").read_text().splitlines()[0])
    assert line["frames"] > 3000
    assert line["detail"].endswith(f"{line['frames']} mel frames of 3000")


def test_wide_packs_with_sounds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--widths 1,2: packs of several ranks cannot have sounds yet; leave it out"):
        packed(tmp_path / "packs", mix(50), widths=(1, 2))


def test_sizes_say_their_frames_or_have_none(tmp_path: Path) -> None:
    sizes = mix(30)
    sizes.save(tmp_path / "a.npz")
    rows = [
        {"vit_num": int(tiles), "token_num": int(tokens)} | ({"audio_num": int(frames)} if frames else {})
        for tiles, tokens, frames in zip(sizes.tiles, sizes.tokens, sizes.more["frames"], strict=True)
    ]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    Sizes(sizes.tiles, sizes.tokens).save(tmp_path / "c.npz")
    found = Sizes.load([tmp_path / name for name in ("a.npz", "b.json", "c.npz")], ("frames",))
    expected = [*sizes.more["frames"], *sizes.more["frames"], *[0] * 30]
    assert found.more["frames"].tolist() == expected


def test_the_program_has_a_budget_where_there_are_sounds_and_only_there(tmp_path: Path) -> None:
    """Without, the index is the same, whether or not the sizes say that there are none, and whatever the costs."""
    sizes, common = mix(400), ("--vit-budget", 5600, "--llm-budget", 8192, "--model", "qwen2.5-omni-3b")
    sizes.save(tmp_path / "heard.npz")
    silent = Sizes(sizes.tiles, sizes.tokens, {"frames": 0 * sizes.tokens})
    silent.save(tmp_path / "silent.npz")
    Sizes(sizes.tiles, sizes.tokens).save(tmp_path / "seen.npz")

    def pack(name: str, *more: object, out: str = "") -> tuple[object, ...]:
        return "--sizes", tmp_path / f"{name}.npz", *common, *more, "--output-dir", tmp_path / (out or name)

    assert "no sample has sounds" in refusal(tool("pack_data.py", *pack("seen", "--audio-budget", 100), check=False))
    done = tool("pack_data.py", *pack("heard", "--audio-budget", 12000, "--json"))
    assert json.loads(done.stdout)["audio_budget"] == 12000
    done = tool("pack_data.py", *pack("heard", "--json", out="auto"))
    of_tokens = 8192 * sizes.more["frames"].sum() / sizes.tokens.sum()
    assert json.loads(done.stdout)["audio_budget"] == max(np.ceil(1.25 * of_tokens), sizes.more["frames"].max())
    for name in ("silent", "seen"):
        tool("pack_data.py", *pack(name))
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("silent", "seen")]
    assert files[0] == files[1]
    for name in set(files[0]) - {"manifest.json"}:
        assert (tmp_path / "silent" / name).read_bytes() == (tmp_path / "seen" / name).read_bytes(), name
    manifests = [PackedIndex.open(tmp_path / name).manifest for name in ("silent", "seen")]
    for manifest in manifests:
        del manifest["built_from"], manifest["sources"], manifest["manifest_hash"]
    assert manifests[0] == manifests[1]
    assert manifests[0]["loads"] == ["tiles", "tokens", "attention"]
    assert list(manifests[0]["costs"]["parts"]) == ["vision", "language"]


def test_costs_by_default_are_of_a_model_that_hears_where_somebody_speaks() -> None:
    assert "audio" in PackCosts.of_model(audio_budget=1000).parts
    assert list(PackCosts.of_model().parts) == ["vision", "language"]
    for budgets in ({"tiles": 0, "tokens": 4096}, {"tiles": 0, "tokens": 4096, "frames": 0}):  # 0: none have any
        assert PackCosts.asked_for(None, None, None, budgets) == PackCosts.of_model(vit_budget=0)
    with pytest.raises(TypeError, match="no budget is called audio_budgt"):
        PackCosts.of_model(audio_budgt=1000)
    assert Corpus.of(mix(10)).sizes.more["frames"].any()
