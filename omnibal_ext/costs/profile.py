"""Profile: costs of one layer of every kind for a full pack, measured or analytic, and for any other pack.

Device seconds of a layer on a pack with `units` (`chain.size_of`: tiles for the vision kinds, mel frames for the audio
kinds, tokens for the others) and `squares` (sum of the squared sample lengths, in tokens squared; 0 for the towers,
whose attention stays inside a tile or a window):

    seconds = constant + per_unit * units + per_square * squares         with a fit
    seconds = seconds at the budget * units / budget                     without

The host launches a layer in `host_forward_seconds` and `host_backward_seconds`, whatever the pack, and runs ahead of
the device: a rank is host-bound if launching the entire iteration takes longer than computing it
(`schedules.simulate`). On a pack without its tiles or frames a tower's layer takes `empty_seconds`, in its backward.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.chain import (
    KINDS,
    RECOMPUTABLE_KINDS,
    TOWER_KINDS,
    GradientMode,
    chain_kind,
    cost_kinds,
    size_of,
)
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import check_version, read_record, write_record
from omnibal_ext.flow import encoder_extras, features_after
from omnibal_ext.formats import PROFILE
from omnibal_ext.modalities.encoder import Features
from omnibal_ext.modalities.modality import (
    ENCODED,
    FURTHER,
    LANGUAGE,
    MODALITIES,
    VISION,
    Budgets,
    Modality,
    Size,
    budgets_in,
    in_place,
    with_budget_keys,
)
from omnibal_ext.reading.checks import integer, is_number, listing, shown
from omnibal_ext.reading.document import FIELD, sealed
from omnibal_ext.trained import ALL, Trained

SCHEMA_VERSION = 1
LISTS = ("chain", "feature_layers", "carried_after")
"""Fields that are tuples here and lists in a file."""
IF_KNOWN = (
    *(one.budget for one in FURTHER),
    *("whole_layers", "image_tiles", "replica_seconds_per_byte", "carried_after", "supervised_share"),
    *("host_action_seconds", "corrected_by"),
)
"""Fields that are left out of a file when empty."""
UNCOMPILED = ("split_forward_seconds", "host_split_forward_seconds", "host_split_backward_seconds")
"""Fields of a compiled layer's costs where a schedule splits the backward, and it is none; of others left out."""
ELSEWHERE = {*(one.budget for one in MODALITIES), *ALL.to_record()}
"""Fields of a file that are in `Profile.budgets` and `Profile.trained` here."""
Fit = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer of one kind on one rank, for a pack at both budgets, in the kind's `chain.GradientMode`."""

    forward_seconds: float
    backward_seconds: float
    """Seconds without recomputation."""
    kept_bytes: float
    """Saved for the backward of one microbatch without recomputation, the layer's input included."""
    recompute_kept_bytes: float
    """Saved if the layer is recomputed: its input."""
    weight_bytes: float
    """Weights and, if trained, gradients and optimizer state."""
    output_bytes: float
    """Sent if the chain is cut after this layer, in one direction; each feature (`features_after`) adds as many."""
    recompute_seconds: float | None = None
    """Seconds that recomputing the layer adds to its backward; None: `forward_seconds`."""
    recompute_cheap_seconds: float | None = None
    """Seconds that cheap recomputation (norms and activation function) adds to the backward; None: not offered."""
    recompute_cheap_kept_bytes: float | None = None
    """Saved for the backward with cheap recomputation."""
    weight_gradient_seconds: float | None = None
    """Seconds of W in zero-bubble schedules; None: half of `backward_seconds`."""
    split_backward_seconds: float | None = None
    """Seconds of B and W together in zero-bubble schedules; None: `backward_seconds`."""
    split_forward_seconds: float | None = None
    """Seconds of F in zero-bubble schedules, which have no compiled layers; None: `forward_seconds`."""
    host_split_forward_seconds: float | None = None
    """Host seconds to launch F there; None: `host_forward_seconds`."""
    host_split_backward_seconds: float | None = None
    """Host seconds to launch B and W; None: `host_backward_seconds`."""
    late_bytes: float | None = None
    """Held from B to W: inputs and output gradients of linear layers, recomputed or not; None: as much as before B."""
    empty_seconds: float = 0.0
    """Backward seconds of a tower's layer on a pack without its tiles or frames."""
    host_forward_seconds: float = 0.0
    """Host seconds to launch a forward's kernels, whatever the pack; 0 on a CPU."""
    host_backward_seconds: float = 0.0
    """Host seconds to launch a backward's kernels."""
    step_seconds: float = 0.0
    """Data-parallel reduction and optimizer step, once an iteration."""
    exchange_seconds: float = 0.0
    """Seconds a token of the exchange between a team's ranks, for samples cut between them; forward or backward."""
    exchange_key_seconds: float = 0.0
    """The part for keys and values, sent to several ranks if the team is wider than `exchange_groups`."""
    exchange_groups: float = 0.0
    """Key-value groups of a tensor-parallel rank; 0: the layer has none."""
    forward_fit: Fit | None = None
    """(constant, per unit, per square), seconds."""
    backward_fit: Fit | None = None

    @property
    def extra_seconds(self) -> float:
        """Seconds that recomputing the layer adds to its backward."""
        return self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds

    @property
    def uncompiled(self) -> "LayerCost":
        """The costs in a zero-bubble schedule, which has no compiled layers.

        Recomputing cheap operations is measured beside a layer that may be compiled, so what that saves is subtracted.
        """
        forward, host_f, host_b = (getattr(self, name) for name in UNCOMPILED)
        if forward is None:
            return self
        share, cheap, fit = forward / self.forward_seconds, self.recompute_cheap_seconds, self.forward_fit
        backward = self.backward_seconds if self.split_backward_seconds is None else self.split_backward_seconds
        saved = forward + backward - self.forward_seconds - self.backward_seconds
        return replace(
            self,
            forward_seconds=forward,
            forward_fit=fit and (share * fit[0], share * fit[1], share * fit[2]),
            recompute_seconds=self.extra_seconds * share,
            recompute_cheap_seconds=None if cheap is None else max(0.0, cheap - saved),
            host_forward_seconds=self.host_forward_seconds if host_f is None else host_f,
            host_backward_seconds=self.host_backward_seconds if host_b is None else host_b,
        )

    @property
    def saved_bytes(self) -> float:
        """Bytes that recomputing the layer saves for each microbatch in flight."""
        return max(0.0, self.kept_bytes - self.recompute_kept_bytes)


@dataclass(frozen=True, slots=True)
class PackSizes:
    """Sizes of packs, int64 arrays of one shape. `squares`: the sum of the squared sample lengths of a pack."""

    tiles: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    exchanged: NDArray[np.int64] | None = None
    """Tokens that a rank of each pack's team sends to the others; None: no pack is wider than a rank."""
    widths: NDArray[np.int64] | None = None
    """Ranks that run each pack; None: one."""
    more: Mapping[Size, NDArray[np.int64]] = field(default_factory=dict)
    """Further sizes, such as mel frames; missing ones are 0."""

    def of(self, size: Size) -> NDArray[np.int64]:
        """Return one of the packs' sizes; zeros if they do not have it."""
        sizes = {VISION.size: self.tiles, LANGUAGE.size: self.tokens, **self.more}
        return sizes[size] if size in sizes else np.zeros_like(self.tokens)


@dataclass(frozen=True)
class Profile:
    """Costs of every kind of layer of one model, on one device, for one set of budgets and parallel sizes."""

    model: str
    model_hash: str
    chain: tuple[str, ...]
    layers: dict[str, LayerCost]
    budgets: Budgets
    """Budget by size of each modality in the model: at least 1."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Parameters of one layer of each kind, unsharded; for parameter-based cuts and copies of a tower."""
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    """Ranks over which whole experts of a layer are distributed; 1: every expert is sharded by tensor parallelism."""
    trained: Trained = ALL
    layers_apart: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers whose costs differ from the first layer's of their kind: their key in `layers`, and their numbers within
    the kind. ViT layers among them keep as many bytes as the others."""
    feature_layers: tuple[int, ...] = ()
    """ViT layers whose output, a feature, also enters the language model; stages pass it on with the hidden states."""
    features_joined: bool = False
    """The features all enter the projector, instead of one language layer each."""
    carried_after: tuple[int, ...] = ()
    """Per layer of the chain: tensors as large as the hidden states that stages pass on with its output, for later
    language layers (`Architecture.carried_after`); (): none."""
    supervised_share: float = 0.0
    """Mean fraction of supervised tokens in a pack; the head's seconds are for these. 0: unknown, they are for all."""
    device: str = ""
    dtype: str = ""
    transfer_seconds_per_byte: float = 0.0
    """Seconds between neighbouring pipeline ranks."""
    transfer_latency_seconds: float = 0.0
    overhead_bytes: float = 0.0
    """Bytes on every rank, whatever layers it holds: driver context, communication buffers."""
    action_seconds: float = 0.0
    """Seconds of executor and wrappers, added to each forward and each backward of a stage."""
    host_action_seconds: float = 0.0
    """Host seconds to launch an action's executor and wrappers."""
    iteration_seconds: float = 0.0
    """Seconds once an iteration on every rank, in addition to the layers' `step_seconds`."""
    measured_with: dict[str, Any] = field(default_factory=dict)
    """Hardware, software and settings: with the same ones a profile is reused. Empty in analytic profiles."""
    whole_layers: dict[str, LayerCost] = field(default_factory=dict)
    """Costs of unsharded tower layers, for a replicated tower with tensor parallelism. Empty: unknown, or `layers` have
    them (tensor-parallel size 1)."""
    image_tiles: float = 0.0
    """Tiles (or patches) of an image that one rank must encode; 0: one tile."""
    replica_seconds_per_byte: float = 0.0
    """Seconds between any ranks of a replica; 0: `transfer_seconds_per_byte`."""
    corrected_by: dict[str, Any] = field(default_factory=dict)
    """The run whose measurements corrected this profile (`costs.corrected`): its folder, iterations, and the hash of
    its plan's profile. Empty: none."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Notes for people: efficiencies, outliers. No program reads them."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read and validate profile.json. Raises UserError naming the file and the layer at fault."""

        def build(record: Any) -> "Profile":
            profile = cls.from_record(record)
            profile.validate()
            return profile

        return read_record(path, "profile", "omnibal profile", build)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Profile":
        """Read a decoded profile.json. Raises UserError for missing or unknown fields, or another schema version."""
        check_version(record, SCHEMA_VERSION, "profile again")
        PROFILE("", record)
        known = {field.name for field in dataclasses.fields(cls)} - {"budgets", "trained"} | {FIELD, *ELSEWHERE}
        if unknown := sorted(record.keys() - known):
            raise UserError(f"{unknown[0]} is not a field of profiles; profile again")
        values = {name: value for name, value in record.items() if name != FIELD}
        for name in ("layers", "whole_layers"):
            values[name] = {kind: _layer_cost(kind, cost) for kind, cost in record.get(name, {}).items()}
        values = {name: value for name, value in values.items() if name not in ELSEWHERE}
        values |= {"budgets": budgets_in(record), "trained": Trained.from_record(record)}
        values["layers_apart"] = {kind: tuple(layers) for kind, layers in record.get("layers_apart", {}).items()}
        return cls(**values | {name: tuple(values[name]) for name in LISTS if name in values})

    @property
    def fields(self) -> dict[str, Any]:
        """All fields under their names in a file."""
        lists = {name: list(getattr(self, name)) for name in LISTS}
        apart = {kind: list(layers) for kind, layers in self.layers_apart.items()}
        budgets = {one.size: self.budget(one.size) for one in MODALITIES}
        record = dataclasses.asdict(self) | lists | {"layers_apart": apart, "budgets": budgets}
        for cost in (*record["layers"].values(), *record["whole_layers"].values()):
            for name in UNCOMPILED:
                if cost[name] is None:
                    del cost[name]
        return with_budget_keys(in_place(record, {"trained": self.trained.to_record()}), behind="parameters")

    def to_record(self) -> dict[str, Any]:
        """Return the content of profile.json."""
        return {name: value for name, value in self.fields.items() if value or name not in IF_KNOWN}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate and write profile.json atomically."""
        self.validate()
        write_record(path, sealed(self.to_record()))

    @property
    def hash(self) -> str:
        """Hash of all fields but `notes`: 16 hexadecimal digits."""
        record = {name: value for name, value in self.to_record().items() if name != "notes"}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def validate(self) -> None:
        """Raise UserError for missing layers and impossible figures, naming the layer (fields: `formats.PROFILE`)."""
        for kind in self.cost_kinds:
            if kind not in self.layers:
                raise UserError(f"layer {kind}: no costs, but the chain has one; profile again")
        for kind, cost in (*self.layers.items(), *self.whole_layers.items()):
            if chain_kind(kind) not in KINDS:
                raise UserError(f"layer {kind}: unknown kind; kinds are {', '.join(KINDS)}")
            _validate_cost(kind, cost, self.mode(kind))
        if others := sorted(kind for kind in self.whole_layers if chain_kind(kind) not in TOWER_KINDS):
            raise UserError(f"whole_layers: {others[0]} is no kind of a tower; those are {', '.join(TOWER_KINDS)}")
        for one in FURTHER:
            if (is_there := not set(one.kinds).isdisjoint(self.chain)) != (self.budget(one.size) > 0):
                needs = f"needs a budget of {one.units}" if is_there else "has no layers for it"
                raise UserError(f"{one.budget} is {self.budget(one.size)}, but the chain {needs}; profile again")
        vision, language = self.chain.count("vit"), self.chain.count("llm")
        most = vision if self.features_joined else language
        listing(integer(0, vision - 1), 0, most)("feature_layers", list(self.feature_layers))
        carried = len(self.chain) if self.carried_after else 0
        listing(integer(0, 2**16), carried, carried)("carried_after", list(self.carried_after))

    @property
    def cost_kinds(self) -> tuple[str, ...]:
        """Key in `layers` of every layer of the chain."""
        return cost_kinds(self.chain, self.layers_apart)

    @property
    def features_after(self) -> tuple[int, ...]:
        """Number of extra tensors, as large as the hidden states, sent on with every layer's output."""
        features = features_after(self.chain, self._encoders)
        return tuple(map(sum, zip(features, self.carried_after or (0,) * len(features), strict=True)))

    @property
    def tokens_after(self) -> dict[str, tuple[int, ...]]:
        """{kind of an encoder's last layer: for every layer of the chain 1 if that encoder's tokens travel with its
        output, past other encoders, else 0}. They take as many bytes as that last layer's output."""
        found, layers = dict[str, tuple[int, ...]](), range(1, len(self.chain) + 1)
        for one in encoder_extras(self.chain, self._encoders, 1):
            if one.counted:
                before = found.get(kind := one.counted.kinds[2], (0,) * len(layers))
                found[kind] = tuple(was + one.enters(layer) for was, layer in zip(before, layers, strict=True))
        return found

    def streams(self, size: Size) -> int:
        """Return how many tensors the encoder of a size gives the language model: its tokens, and features that are
        added later."""
        return next((features for one, features in self._encoders.items() if one.size == size), Features()).streams

    @property
    def _encoders(self) -> dict[Modality, Features]:
        seen = Features(self.feature_layers, self.features_joined)
        return {one: seen if one is VISION else Features() for one in ENCODED if self.budget(one.size)}

    @property
    def bound_by_host(self) -> tuple[str, ...]:
        """Kinds whose layers take longer to launch than to compute, at the budgets."""
        return tuple(
            kind for kind, cost in self.layers.items()
            if cost.host_forward_seconds + cost.host_backward_seconds > cost.forward_seconds + cost.backward_seconds
        )  # fmt: skip

    def with_supervised(self, share: float) -> "Profile":
        """Return this profile for packs with a fraction `share` of supervised tokens; the head computes no others.

        Its bytes are unchanged: packs differ, and the fullest has to fit.
        """
        head, ratio = self.layers["head"], share / (self.supervised_share or 1.0)
        if ratio == 1:
            return self
        forward, forward_fit = _of_share(head.forward_seconds, head.forward_fit, ratio)
        backward, backward_fit = _of_share(head.backward_seconds, head.backward_fit, ratio)
        late, split = (
            None if seconds is None else seconds * backward / (head.backward_seconds or 1.0)
            for seconds in (head.weight_gradient_seconds, head.split_backward_seconds)
        )
        cost = replace(
            head, forward_seconds=forward, backward_seconds=backward, forward_fit=forward_fit,
            backward_fit=backward_fit, weight_gradient_seconds=late, split_backward_seconds=split,
        )  # fmt: skip
        return replace(self, layers={**self.layers, "head": cost}, supervised_share=share)

    def mode(self, kind: str) -> GradientMode:
        """Return which gradients a backward computes in layers of a kind: "trained", "adapted", "frozen" or "idle"."""
        return self.trained.mode(kind)

    def budget(self, size: Size) -> int:
        """Return the budget of a size; 0: the model has no layers whose work grows with it."""
        return self.budgets.get(size, 0)

    def load_factor(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Return tiles, tokens or frames of each pack divided by the budget; bytes are proportional to it."""
        size = size_of(kind)
        return packs.of(size) / max(1, self.budget(size))

    def forward_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Return forward seconds of one layer of that kind on each pack."""
        cost = self.layers[kind]
        return self._seconds(kind, cost.forward_seconds, cost.forward_fit, packs, 0.0)

    def backward_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Return backward seconds of one layer of that kind on each pack, without recomputation."""
        cost = self.layers[kind]
        return self._seconds(kind, cost.backward_seconds, cost.backward_fit, packs, cost.empty_seconds)

    def exchange_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Return, by pack, the seconds in which ranks that share a wide pack exchange attention heads in a layer's
        forward; the backward takes as many."""
        cost, sent = self.layers[kind], np.zeros(packs.tokens.shape) if packs.exchanged is None else packs.exchanged
        copies = 1.0 if packs.widths is None else np.maximum(1, packs.widths / (cost.exchange_groups or np.inf))
        return np.asarray(sent * (cost.exchange_seconds + (copies - 1) * cost.exchange_key_seconds))

    def _seconds(
        self, kind: str, at_budget: float, fit: Fit | None, packs: PackSizes, empty: float
    ) -> NDArray[np.float64]:
        size = size_of(kind)
        units = packs.of(size)
        squares = packs.squares if size == "tokens" else np.zeros_like(packs.squares)
        if fit is None:
            seconds = at_budget * self.load_factor(kind, packs)
        else:
            seconds = fit[0] + fit[1] * units + fit[2] * squares
        return np.where(units > 0, seconds, empty)


def _of_share(seconds: float, fit: Fit | None, share: float) -> tuple[float, Fit | None]:
    """Return seconds at the budgets and their fit if only a fraction `share` of the units is computed."""
    if fit is None:
        return seconds * share, None
    constant, per_unit, per_square = fit
    return constant + (seconds - constant) * share, (constant, per_unit * share, per_square * share)


def _layer_cost(kind: str, record: Mapping[str, Any]) -> LayerCost:
    fields = {f.name: f for f in dataclasses.fields(LayerCost)}
    for name, entry in fields.items():
        if entry.default is dataclasses.MISSING and name not in record:
            raise UserError(f"layer {kind}: {name} is missing; profile again")
    if unknown := sorted(set(record) - set(fields)):
        raise UserError(f"layer {kind}: {unknown[0]} is not a known cost; known are {', '.join(fields)}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}
    return LayerCost(**values)


def _validate_cost(kind: str, cost: LayerCost, mode: GradientMode) -> None:
    has_backward = mode != "idle"
    positive = {
        "forward_seconds": True,
        "backward_seconds": has_backward,
        "kept_bytes": has_backward and chain_kind(kind) in RECOMPUTABLE_KINDS,
    }
    for entry in dataclasses.fields(cost):
        value = getattr(cost, entry.name)
        if value is None and entry.default is None:
            continue
        if entry.name.endswith("_fit"):
            if not (isinstance(value, tuple) and len(value) == 3 and all(map(is_number, value))):
                raise UserError(f"layer {kind}: {entry.name} must be three finite numbers, got {shown(value)}")
            continue
        least = "above 0" if positive.get(entry.name, False) else "0 or more"
        if not is_number(value) or value < 0 or (value == 0 and least == "above 0"):
            raise UserError(f"layer {kind}: {entry.name} is {shown(value)}, must be finite and {least}; profile again")
