"""Images and sounds are decoded by one rank of a tensor-parallel group; all get the same, of the right samples."""

from pathlib import Path

from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs
from tests.distributed.conftest import run_program
from tests.unit.data.noises import chirp, write_wav
from tests.unit.data.test_sound_samples import made, with_pictures


def test_one_rank_decodes_and_all_see_the_pixels(tmp_path: Path) -> None:
    data = demo_dataset(tmp_path, tmp_path / "data", 24, seed=5, max_tiles=12)
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=20, llm_budget=200))
    result = run_program("tests.distributed.arrival", 2, str(tmp_path / "data"), str(tmp_path / "packs"))
    assert len(result) == index.num_packs + 1
    assert set(result.values()) == {0.0}


def test_one_rank_decodes_and_all_hear_the_sounds(tmp_path: Path) -> None:
    with_pictures(tmp_path)
    records: list[dict[str, object]] = []
    for number in range(8):
        write_wav(tmp_path / f"{number}.wav", chirp(2000 + 1500 * number, seed=number))
        media = {"audio": f"{number}.wav", **({"image": "p.png"} if number % 2 else {})}
        marks = "<image> <audio>" if number % 2 else "<audio>"
        turns = [{"from": "human", "value": f"{marks} What?"}, {"from": "gpt", "value": "A cat."}]
        records.append({**media, "conversations": turns})
    data = made(tmp_path, records, "data")
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=200, llm_budget=120))
    result = run_program("tests.distributed.arrival", 2, str(tmp_path / "data"), str(tmp_path / "packs"))
    assert len(result) == index.num_packs + 1 > 2
    assert set(result.values()) == {0.0}
