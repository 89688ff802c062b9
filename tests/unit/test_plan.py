"""Plans: what is written is read back; a chain not held exactly once is refused by the layer's name."""

import contextlib
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.chain import PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan, StagePlan, single_stage_plan
from omnibal_ext.plan_tower import Tower
from omnibal_ext.trained import Trained
from tests.chains import layer_chain

CHAIN = layer_chain(3, 2)


@given(st.sets(st.integers(1, len(CHAIN) - 1)))
def test_any_cut_holds_every_layer_once_and_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int]
) -> None:
    plan = Plan.from_cuts(CHAIN, sorted(cuts), num_microbatches=4)
    assert [layer for s in plan.stages for layer in range(*s.layers)] == list(range(len(CHAIN)))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def test_virtual_stages_go_round_the_ranks() -> None:
    plan = Plan.from_cuts(CHAIN, (2, 4, 6), virtual_pipeline_model_parallel_size=2)
    assert plan.pipeline_model_parallel_size == 2
    assert [plan.placement.rank_and_chunk(s) for s in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(plan.build_schedule()) == 2


def test_on_a_v_both_ends_are_on_the_last_rank_and_the_plan_says_so(tmp_path: Path) -> None:
    plan = Plan.from_cuts(CHAIN, (2, 4, 6), virtual_pipeline_model_parallel_size=2, schedule="zb_v", num_microbatches=3)
    plan.save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found.stage_ranks == found.placement.ranks_of == (1, 0, 0, 1)
    other = dataclasses.replace(found, stage_ranks=(0, 1, 0, 1))
    with pytest.raises(UserError, match=r"stage_ranks \[0, 1, 0, 1\] are not those of schedule zb_v, \[1, 0, 0, 1\]"):
        other.validate()


def test_a_plan_from_before_placements_is_interleaved() -> None:
    plan = Plan.from_cuts(CHAIN, (2, 4, 6), virtual_pipeline_model_parallel_size=2)
    record = {name: value for name, value in plan.to_record().items() if name != "stage_ranks"}
    old = Plan.from_record(record)
    old.validate()
    assert old.placement == plan.placement


LISTS = ("F0.0 F1.0 B0.0 B1.0 W0.0 W1.0", "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0")


def _with_lists(*lists: str) -> Plan:
    plan = Plan.from_cuts(CHAIN, (4,), num_microbatches=2, schedule="zb_auto")
    return dataclasses.replace(plan, lists=lists)


def test_a_plans_own_lists_survive_the_file(tmp_path: Path) -> None:
    plan = _with_lists(*LISTS)
    plan.save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found == plan
    assert [" ".join(action.word for action in actions) for actions in found.build_schedule()] == list(LISTS)


TOWER = Tower(5, (0, 1, 1, 0, 1), ((0, 1), (1,)))
BESIDE = ("E0.0 F0.0 F1.0 B0.0 B1.0 V0.0", "E0.1 E1.1 F0.0 B0.0 F1.0 B1.0 V0.1 V1.1")


def _beside(tower: Tower = TOWER, **fields: Any) -> Plan:
    """word_embed and llm.0 on the first rank, llm.1 and head on the second."""
    plan = Plan.from_cuts(CHAIN, (7,), num_microbatches=2, **({"lists": BESIDE, "tower": tower} | fields))
    assert [stage.layers for stage in plan.stages] == [(5, 7), (7, 9)]
    return plan


def test_a_tower_beside_the_pipeline_survives_the_file_and_a_plan_without_says_nothing_of_it(tmp_path: Path) -> None:
    for tower in (TOWER, dataclasses.replace(TOWER, recompute=(1, 3))):
        _beside(tower).save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == _beside(tower)
    record = _beside().to_record()
    older = json.loads(json.dumps(record | {"tower": {**record["tower"], "again": True}}))
    assert Plan.from_record(older).tower == dataclasses.replace(TOWER, recompute=(1, 2, 3)), "all that can be"
    ahead = dataclasses.replace(TOWER, mode="ahead")
    lists = tuple(" ".join(word for word in words.split() if word[0] != "V") for words in BESIDE)
    _beside(ahead, lists=lists, trained=Trained(("vit", "projector"))).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").tower == ahead
    assert "tower" not in Plan.from_cuts(CHAIN, (7,)).to_record()


@pytest.mark.parametrize(
    ("tower", "fields", "message"),
    [
        ({"layers": 4}, {}, "4 layers end elsewhere than before word_embed, layer 5"),
        ({"owners": (0, 1)}, {}, "2 owners for 5 layers"),
        ({"owners": (0, 1, 2, 0, 1)}, {}, "vit.1 is owned by rank 2, but a replica has 2 x 1 ranks"),
        ({"encoding_ranks": ((0, 1),)}, {}, "parts of 1 microbatches for 2"),
        ({"encoding_ranks": ((0, 1), ())}, {}, r"parts of microbatch 1 are \[\]"),
        ({"encoding_ranks": ((1, 0), (1,))}, {}, r"parts of microbatch 0 are \[1, 0\]; .* from 0 to 1, ascending"),
        ({"encoding_ranks": ((0, 1), (2,))}, {}, r"parts of microbatch 1 are \[2\]"),
        ({"encoding_ranks": ((0, 1), (0, 1))}, {}, r"rank 0 never does E\(microbatch 1, rank 0\)"),
        ({"recompute": (0,)}, {}, "recompute names layer 0, which is no encoder's layer"),
        ({"recompute": (6,)}, {}, "recompute names layer 6, which is no encoder's layer"),
        ({"mode": "ahead"}, {}, "some of it is trained"),
        ({}, {"trained": Trained(("vit", "projector"))}, "all of it is frozen"),
        ({}, {"lists": ()}, "needs lists of actions"),
        ({}, {"lists": (BESIDE[0], BESIDE[1].replace("E1.1 ", ""))}, r"rank 1 never does E\(microbatch 1, rank 1\)"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(tower: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _beside(dataclasses.replace(TOWER, **tower), **fields)


def test_a_tower_that_hears_ends_behind_either_encoder_and_says_which_it_has() -> None:
    chain = layer_chain(3, 2, 1)
    for layers, sizes in ((8, ("frames", "tiles")), (3, ("frames",))):
        hears = dataclasses.replace(
            TOWER, layers=layers, owners=(0,) * layers, rates=dict.fromkeys(sizes, 1.0), recompute=(1,)
        )
        hears.validate(chain, (2, 1), 2, Trained())
        assert Tower.from_record(hears.to_record(), chain) == hears
        with pytest.raises(UserError, match=f"sizes are tiles, but its layers need {' '.join(sizes)}"):
            dataclasses.replace(hears, rates={"tiles": 1.0}).validate(chain, (2, 1), 2, Trained())
    with pytest.raises(UserError, match="before word_embed, layer 8 or patch_embed, layer 3"):
        dataclasses.replace(TOWER, layers=7, owners=(0,) * 7).validate(chain, (2, 1), 2, Trained())
    assert not {"sizes", "tiles_per_frame"} & set(TOWER.to_record())


def test_links_of_the_tower_are_on_no_stage(tmp_path: Path) -> None:
    stages = (StagePlan((4, 7)), StagePlan((7, 9)))
    with pytest.raises(UserError, match=r"projector \(id 4\) is doubled: stage 0 .* not at word_embed"):
        dataclasses.replace(_beside(), stages=stages).validate()
    record = _beside().to_record()
    for name, value, message in (
        ("links", "5", "tower.links must be"),
        ("parts", [[0, 1], 1], r"tower.parts\[1\] must"),
        ("mode", "x", "tower.mode must be one of"),
        ("again", 1, "tower.again must be"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(record | {"tower": record["tower"] | {name: value}}))
        with pytest.raises(UserError, match=message):
            Plan.load(tmp_path / "plan.json")


def _with_stages(*stages: StagePlan | tuple[int, int]) -> Plan:
    made = tuple(one if isinstance(one, StagePlan) else StagePlan(one) for one in stages)
    return Plan(chain=CHAIN, stages=made, num_microbatches=1, pipeline_model_parallel_size=len(made))


SWAPPED = "F1.0 F0.0 B0.0 B1.0 W0.0 W1.0"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (_with_lists(LISTS[0]), "1 lists of actions for 2 pipeline ranks"),
        (_with_lists(LISTS[0], LISTS[1].replace("F1.0", "X1.0")), "'X1.0' is no action"),
        (_with_lists(LISTS[0], LISTS[1].replace(" W1.0", "")), r"rank 1 never does W\(microbatch 1"),
        (_with_lists(LISTS[0], "B0.0 F0.0 W0.0 F1.0 B1.0 W1.0"), "waits for ever"),
        (_with_lists(SWAPPED, SWAPPED), "where the pack of microbatch 0 comes"),
        (_with_stages((0, 2), (3, 9)), r"layer vit.1 \(id 2\) is lost"),
        (_with_stages((0, 7), (6, 9)), r"llm.0 \(id 6\) is doubled: stage 1 starts at llm.0, not at llm.1"),
        (_with_stages((0, 8)), "layer head .* is lost"),
        (_with_stages((4, 9), (0, 4)), "order the data flows"),
        (_with_stages((0, 9), (9, 9)), "stage 1: layers .*at least one layer"),
        (_with_stages(StagePlan((0, 9), (4,))), "recomputes projector: only ViT and LLM"),
        (_with_stages(StagePlan((0, 5), (6,)), (5, 9)), "stage 0 recomputes llm.0 .* does not hold"),
        (_with_stages(StagePlan((0, 9), (1, 1))), "twice"),
        (_with_stages(StagePlan((0, 9), (1,), (2, 1))), "names vit.0 twice"),
    ],
)
def test_plans_that_lose_work_or_layers_or_cannot_run_are_refused_by_name(plan: Plan, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan.validate()


def test_an_older_plan_with_parts_of_layers_recomputes_them_whole_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _with_stages(StagePlan((0, 9), (1,), (6, 7))).to_record()
    record["predicted"] = {"proven_best": True}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    assert Plan.load(path).stages == (StagePlan((0, 9), (1,), (6, 7)),)
    assert capsys.readouterr().err == ""
    record["stages"][0] |= {"recompute_attention": [2, 6], "recompute_mlp": [2]}
    path.write_text(json.dumps(record))
    assert Plan.load(path).stages == (StagePlan((0, 9), (1, 2, 6), (7,)),)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{path}: layers in recompute_attention, recompute_mlp are recomputed whole\n"
    record["stages"][0]["recompute_mlp"] = [4]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="recomputes projector: only ViT and LLM"):
        Plan.load(path)


def test_a_plan_for_another_model_is_refused() -> None:
    tiny, large = PRESETS["tiny"], PRESETS["internvl3.5-8b"]
    plan = single_stage_plan(tiny.chain, model="tiny", model_hash=tiny.hash)
    plan.check_model(tiny)
    with pytest.raises(UserError, match="made for model 'tiny'"):
        plan.check_model(large)
    tied = replace(tiny, tied=True)
    with pytest.raises(UserError, match=rf"hash {tiny.hash}\), not for 'tiny' \(hash {tied.hash}"):
        plan.check_model(tied)


def test_a_renamed_model_is_the_same_and_another_of_its_name_is_not() -> None:
    model = replace(PRESETS["tiny"], name="here")
    plan = single_stage_plan(model.chain, model="here", model_hash=model.hash)
    moved = replace(model, name="there")
    assert moved.hash != model.hash
    plan.check_model(moved)
    with pytest.raises(UserError, match="made for model 'here'"):
        plan.check_model(replace(moved, tied=True))


def test_a_plan_with_other_frozen_parts_is_refused() -> None:
    plan = single_stage_plan(CHAIN, trained=Trained(("vit",)))
    plan.check_trained(("vit",), NO_ADAPTERS)
    with pytest.raises(UserError, match="made with vit frozen, this run freezes nothing"):
        plan.check_trained((), NO_ADAPTERS)
    with pytest.raises(UserError, match="made with vit frozen, this run freezes projector vit"):
        plan.check_trained(("vit", "projector"), NO_ADAPTERS)


def test_a_plan_with_other_adapters_is_refused() -> None:
    plan = single_stage_plan(CHAIN, trained=Trained(tuple(PARTS), 8, ("vit", "llm")))
    plan.check_trained(tuple(PARTS), Adapters(8, 1.0, ("llm", "vit")))
    for other, said in ((NO_ADAPTERS, "no adapters"), (Adapters(4, 1.0, ("llm", "vit")), "rank 4 in llm vit"),
                        (Adapters(8, 1.0, ("llm",)), "rank 8 in llm;")):  # fmt: skip
        with pytest.raises(UserError, match=f"made with adapters of rank 8 in llm vit, this run has .*{said}"):
            plan.check_trained(tuple(PARTS), other)


def test_a_plan_that_was_changed_since_it_was_written_is_refused(tmp_path: Path) -> None:
    """Bits of every byte or two: refused, or the plan that was written. One edited by hand leaves the hash out."""
    plan, path = Plan.from_cuts(CHAIN, (4,), [(), (7,)], num_microbatches=3, model="tiny"), tmp_path / "plan.json"
    plan.save(path)
    written = path.read_bytes()
    for bit in range(0, 8 * len(written), 17):
        path.write_bytes(bytes(byte ^ (bit // 8 == at) << bit % 8 for at, byte in enumerate(written)))
        with contextlib.suppress(UserError):
            assert Plan.load(path) == plan
    record = json.loads(written)
    path.write_text(json.dumps(record | {"num_microbatches": 4}))
    with pytest.raises(UserError, match="if you edited it take manifest_hash out of it"):
        Plan.load(path)
    del record["manifest_hash"]
    path.write_text(json.dumps(record | {"num_microbatches": 4}))
    assert Plan.load(path).num_microbatches == 4


def test_bad_files_name_file_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(UserError, match="cannot be read"):
        Plan.load(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        Plan.load(path)
    record = single_stage_plan(CHAIN).to_record()
    for change, message in (
        ({"schema_version": 99}, "schema_version is 99"),
        ({"stages": [3]}, r"stages\[0\] must be a JSON object, got 3"),
        ({"num_microbatches": 0}, "num_microbatches must be"),
        ({"schedule": "x"}, "schedule 'x' is not known"),
        ({"pipeline_model_parallel_size": 2}, "1 stages, but 2 pipeline ranks"),
        ({"chain": ["mamba"]}, r"chain\[0\] must be one of .*patch_embed, .* got \'mamba\'"),
    ):
        path.write_text(json.dumps(record | change))
        with pytest.raises(UserError, match=message) as caught:
            Plan.load(path)
        assert str(path) in str(caught.value)
