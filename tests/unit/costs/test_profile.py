"""Profiles: bad figures are refused by layer; costs of packs follow the fit."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.costs.profile import Fit, LayerCost, PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.trained import Trained
from tests.chains import layer_chain

COST = LayerCost(1.0, 2.0, 100.0, 10.0, 1000.0, 5.0)


def _cost(**changes: Any) -> LayerCost:
    return replace(COST, **changes)


def _profile(**changes: Any) -> Profile:
    chain = layer_chain(2, 2)
    return replace(Profile("tiny", "aa", chain, dict.fromkeys(chain, COST), {"tiles": 4, "tokens": 100}), **changes)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    fitted = {**_profile().layers, "llm": replace(COST, forward_fit=(0.1, 0.2, 0.3))}
    profile = _profile(layers=fitted, notes={"by": "hand"})
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert Profile.load(tmp_path / "profile.json").hash == profile.hash
    assert profile.hash != _profile().hash


def test_a_figure_that_was_changed_since_it_was_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    _profile().save(path)
    record = json.loads(path.read_text())
    record["layers"]["llm"]["forward_seconds"] = 1.5
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"profile\.json: manifest_hash is not the hash .*take manifest_hash out"):
        Profile.load(path)
    del record["manifest_hash"]
    path.write_text(json.dumps(record))
    assert Profile.load(path).layers["llm"].forward_seconds == 1.5


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["forward_seconds", "backward_seconds", "kept_bytes"])
def test_impossible_figures_are_refused_by_layer(name: str, value: float) -> None:
    layers = {**_profile().layers, "vit": _cost(**{name: value})}
    with pytest.raises(UserError, match=rf"layer vit: {name} is .*, must be finite and above 0"):
        _profile(layers=layers).validate()


def test_only_an_idle_layer_may_have_no_backward() -> None:
    idle = replace(COST, backward_seconds=0.0, kept_bytes=0.0)
    layers = {**_profile().layers, "patch_embed": idle, "vit": idle}
    _profile(layers=layers, trained=Trained(("vit",))).validate()
    with pytest.raises(UserError, match="layer llm: backward_seconds is 0"):
        _profile(
            layers={**layers, "llm": idle}, trained=Trained(("vit", "llm"))
        ).validate()  # the projector is trained before it
    with pytest.raises(UserError, match=r"frozen\[0\] must be one of .*, got 'eyes'"):
        Profile.from_record(_profile(trained=Trained(("eyes",))).to_record())


@pytest.mark.parametrize("fit", [None, (0.5, 2.0, 0.0)])
def test_a_pack_without_tiles_costs_the_vision_kinds_zeros_for_their_gradients(fit: Fit | None) -> None:
    vit = _cost(forward_fit=fit, backward_fit=fit, empty_seconds=0.25)
    profile = _profile(layers={**_profile().layers, "vit": vit, "llm": vit})
    packs = PackSizes(*(np.array(column) for column in ([0, 4], [8, 8], [64, 64])))
    assert profile.forward_seconds("vit", packs)[0] == 0.0 < profile.forward_seconds("vit", packs)[1]
    assert profile.backward_seconds("vit", packs)[0] == 0.25 < profile.backward_seconds("vit", packs)[1]
    assert profile.backward_seconds("llm", packs)[0] == profile.backward_seconds("llm", packs)[1]


@pytest.mark.parametrize("fit", [None, (0.1, 0.2, 0.0)])
def test_where_some_tokens_are_learnt_the_head_has_no_others(fit: Fit | None) -> None:
    """Its seconds are of these, and what it takes once; bytes, and all other layers, stay. Said once."""
    head = _cost(forward_fit=fit, backward_fit=fit, weight_gradient_seconds=0.5, split_backward_seconds=2.5)
    profile = _profile(layers={**_profile().layers, "head": head})
    packs = PackSizes(*(np.array(column) for column in ([0, 1], [8, 3], [64, 9])))
    share, once = profile.with_supervised(0.25), fit[0] if fit else 0.0
    for way in (Profile.forward_seconds, Profile.backward_seconds):
        plain = way(profile, "head", packs)
        assert way(share, "head", packs) == pytest.approx(once + 0.25 * (plain - once))
    cost, ratio = share.layers["head"], share.layers["head"].backward_seconds / head.backward_seconds
    assert (cost.weight_gradient_seconds, cost.split_backward_seconds) == pytest.approx((0.5 * ratio, 2.5 * ratio))
    assert (cost.kept_bytes, cost.step_seconds) == (head.kept_bytes, head.step_seconds)
    assert (share.layers, share.with_supervised(0.25)) == (profile.layers | {"head": cost}, share)
    again, once = (one.with_supervised(0.5).forward_seconds("head", packs) for one in (share, profile))
    assert again == pytest.approx(once)
    assert share.hash != profile.hash == profile.with_supervised(1.0).hash


def test_missing_layers_are_named() -> None:
    layers = _profile().layers
    del layers["projector"]
    with pytest.raises(UserError, match="layer projector: no costs"):
        _profile(layers=layers).validate()


def test_bad_files_name_file_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(UserError, match="cannot be read"):
        Profile.load(path)
    record = _profile().to_record()
    vit = record["layers"]["vit"]
    for change, message in (
        ({"schema_version": 7}, "schema_version is 7"),
        ({"layers": record["layers"] | {"vit": {"forward_seconds": 1.0}}}, "layer vit: backward_seconds is missing"),
        ({"layers": record["layers"] | {"vit": vit | {"speed": 1}}}, "layer vit: speed is not a known cost"),
        ({"layers": record["layers"] | {"vit": vit | {"forward_seconds": "x"}}}, "layer vit: forward_seconds is 'x'"),
        ({"layers": record["layers"] | {"vit": vit | {"forward_fit": [1]}}}, "layer vit: forward_fit must be three"),
        ({"full_layers": [1]}, "full_layers is not a field of profiles"),
        ({"vit_budget": 0}, "vit_budget must be a whole number from 1 to"),
    ):
        path.write_text(json.dumps(record | change))
        with pytest.raises(UserError, match=message) as caught:
            Profile.load(path)
        assert str(path) in str(caught.value)


def test_costs_of_packs_without_fit_scale_with_their_units() -> None:
    packs = PackSizes(np.array([4, 2, 0]), np.array([100, 50, 10]), np.array([0, 0, 0]))
    assert _profile().forward_seconds("vit", packs).tolist() == [1.0, 0.5, 0.0]
    assert _profile().backward_seconds("llm", packs).tolist() == [2.0, 1.0, 0.2]


def test_costs_of_packs_with_fit_follow_it_and_vision_has_no_squares() -> None:
    fitted = replace(COST, forward_fit=(0.5, 2.0, 0.25))
    profile = _profile(layers={**_profile().layers, "vit": fitted, "llm": fitted})
    packs = PackSizes(np.array([3, 0]), np.array([10, 10]), np.array([40, 40]))
    assert profile.forward_seconds("vit", packs).tolist() == [0.5 + 2.0 * 3, 0.0]
    assert profile.forward_seconds("llm", packs).tolist() == [0.5 + 2.0 * 10 + 0.25 * 40] * 2
