"""A model with an encoder more than any has: what passes by others keeps one order, and no layout is renamed."""

import pytest
import torch
from torch import Tensor

from megatron.vlm.media import Media
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.flow import Carrier
from megatron.vlm.monitoring import recorder
from megatron.vlm.pipeline.token_rows import EncoderRows, TokenRows
from megatron.vlm.platform import Moment
from omnibal_ext import flow, plan_tower
from omnibal_ext.flow import encoder_extras, in_rows
from omnibal_ext.modalities.encoder import Features
from omnibal_ext.modalities.modality import AUDIO, ENCODED, FURTHER, LANGUAGE, VISION, Modality
from omnibal_ext.plan_tower import LAYOUTS, Tower, tower_ends, tower_layout
from omnibal_ext.report import timeline
from omnibal_ext.report.timeline import packs_of_record
from omnibal_ext.schedules.actions import Action

TABLES = Modality(
    "tables",
    "cells",
    ("table_embed", "table", "table_projector"),
    "cells",
    "table_budget",
    "tables",
    "<table>",
    "count",
)
ENCODERS = (TABLES, AUDIO, VISION)
CHAIN = tuple(kind for one in (*ENCODERS, LANGUAGE) for kind in (*one.kinds[:2], *one.kinds[1:]))
TOKENS = {TABLES: 3, AUDIO: 2, VISION: 5}
WIDTH, WORDS = 4, CHAIN.index("word_embed")
FEATURES = {TABLES: Features(), AUDIO: Features(), VISION: Features((0,))}


@pytest.fixture(autouse=True)
def third_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "ENCODED", ENCODERS)
    monkeypatch.setattr(plan_tower, "ENCODED", (TABLES, *ENCODED))
    monkeypatch.setattr(plan_tower, "FURTHER", (*FURTHER, TABLES))


def tokens_of(modality: Modality) -> Tensor:
    rows = TOKENS[modality]
    return torch.arange(rows * WIDTH).view(rows, 1, WIDTH) + 100.0 * ENCODERS.index(modality)


def entering_words(cut: int) -> Tensor:
    """What enters the word embedding, behind stages that begin at 0 and at `cut`: each projector gives its tokens."""
    carrier = Carrier(tuple(encoder_extras(CHAIN, FEATURES, WIDTH))).at(TOKENS)
    found = carrier.split(0, None)
    for layer, kind in enumerate(CHAIN[:WORDS]):
        if layer == cut:
            found = carrier.split(layer, carrier.joined(layer, found))
        modality = ENCODERS[layer // 4]
        given = tokens_of(modality) if kind == modality.kinds[2] else torch.full((7, 1, WIDTH), float(layer))
        made = [one for one in carrier.extras if one.giver == layer and not one.passing]
        out = (given, *[-given] * len(made)) if kind == "projector" else given
        found = carrier.through(layer, found, lambda *_, out=out: out)
    return carrier.joined(WORDS, found)


@pytest.mark.parametrize("cut", range(1, WORDS))
def test_tokens_enter_the_words_in_the_order_of_a_replicated_tower(cut: int) -> None:
    copies = {one: FEATURES[one].streams for one in ENCODERS}
    order = in_rows(ENCODERS)
    units = tuple(EncoderRows((1, TOKENS[one] - 1), copies[one]) for one in order)
    rows = TokenRows(units, (0, 1, 1, 0, 0, 1), 2, 1)
    whole = torch.cat([sign * tokens_of(one) for one in order for sign in (1, -1)[: copies[one]]])
    assert torch.equal(entering_words(cut), whole)
    assert torch.equal(rows.assemble([rows.piece(whole, part, 0) for part in (0, 1)], None), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [4, 8, 12])
def test_behind_the_first_encoders_there_passes_what_passes_there_in_the_whole_chain(layers: int) -> None:
    def passing(chain: tuple[str, ...], first: int) -> dict[str, list[bool]]:
        extras = [one for one in encoder_extras(chain, FEATURES, WIDTH) if one.passing]
        after = {one.name: [one.enters(layer) for layer in range(first, len(chain) + 1)] for one in extras}
        return {name: enters for name, enters in after.items() if any(enters)}

    assert passing(CHAIN[layers:], 1) == passing(CHAIN, layers + 1)


def test_layouts_are_named_by_a_models_own_encoders() -> None:
    assert tower_ends(CHAIN[8:]) == {"beside": "word_embed"}
    assert tower_ends(CHAIN[4:]) == {"beside": "word_embed", "audio=beside,vision=cut": "patch_embed"}
    assert tower_ends(CHAIN) == {
        "beside": "word_embed",
        "tables=beside,audio=beside,vision=cut": "patch_embed",
        "tables=beside,audio=cut,vision=cut": "audio_embed",
    }
    assert [one for one in plan_tower._layouts() if one in LAYOUTS] == LAYOUTS
    assert tower_layout("vision=cut,audio=beside") == "audio=beside,vision=cut"


def test_what_units_take_is_written_for_each_further_encoder() -> None:
    tower = Tower(12, (0,) * 12, ((0,),), rates={"cells": 2.0, "frames": 0.5, "tiles": 1.0})
    record = tower.to_record()
    assert {name: record[name] for name in list(record)[-3:]} == {
        "sizes": ["cells", "frames", "tiles"], "tiles_per_frame": 0.5, "tiles_per_cell": 2.0
    }  # fmt: skip
    assert Tower.from_record(record, CHAIN) == tower


def test_a_recorded_pack_says_of_which_encoder_its_inputs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has none of the one before; zeros at the end are left out, as in files of one further encoder."""
    monkeypatch.setattr(recorder, "FURTHER", (AUDIO, TABLES))
    monkeypatch.setattr(timeline, "FURTHER_SIZES", ("frames", "cells"))
    noted = recorder.Recorder(None, ())
    noted._current = recorder.Timed(Action("F", 0), Moment())
    for media in ({"cells": 3}, {}, {"frames": 2}):
        inputs = {size: Media(pieces=((units,),)) for size, units in media.items()}
        noted.add_pack(Microbatch(lengths=(5,), samples=1, useful_tokens=5, media=inputs))
    assert noted.packs == [[0, 5, 25, 0, 1, 0, 3], [0, 5, 25, 0, 1], [0, 5, 25, 0, 1, 2]]
    found = packs_of_record({"lanes": [{"data_parallel_rank": 0, "packs": noted.packs}]})
    assert {size: units.tolist() for size, units in found.more.items()} == {
        "frames": [[[0, 0, 2]]],
        "cells": [[[3, 0, 0]]],
    }
