"""Profile: what one layer of every kind costs at the packed shape, measured or analytic, and what a given pack costs.

Seconds of a layer on a pack with `units` (tiles for the vision kinds, tokens for the others) and `squares` (sum of the
squared sample lengths, in tokens squared; 0 for the vision kinds, whose attention stays inside a tile):

    seconds = constant + per_unit * units + per_square * squares         where the profile has a fit
    seconds = seconds at the budget * units / budget                     where it has none

of the device. Its host launches them in `host_forward_seconds` and `host_backward_seconds`, whatever the pack, and does
not wait for it: a rank is bound by its host where launching a whole iteration takes longer (`schedules.simulate`).
A pack without tiles passes the vision kinds by: it takes their `empty_seconds`, backward.
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
    PARTS,
    RECOMPUTABLE_KINDS,
    VISION_KINDS,
    GradientMode,
    chain_kind,
    cost_kinds,
    gradient_mode,
)
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import check_version, read_record, write_record
from omnibal_ext.flow import features_after
from omnibal_ext.formats import MEASURED, PROFILE, PROFILE_COUNTS
from omnibal_ext.reading.checks import integer, is_number, listing, shown
from omnibal_ext.reading.seal import check_if_sealed, sealed

SCHEMA_VERSION = 1
LISTS = ("chain", "frozen", "lora_targets", "feature_layers", "carried_after")
"""Fields that are tuples here and lists in a file."""
OLDER = {"full_layers": "vit_full", "linear_layers": "llm_linear"}
"""Fields of older files that `layers_apart` has, and by what name."""
RENAMED = {f"least_{name}_seconds": f"host_{name}_seconds" for name in ("forward", "backward")}
"""Costs of a layer in older files, and what they are called now."""
DROPPED = tuple(f"recompute_{part}_{what}" for part in ("attention", "mlp") for what in ("seconds", "kept_bytes"))
"""Costs of a layer that older files have, and nothing asks for."""
IF_KNOWN = ("whole_layers", "image_tiles", "replica_seconds_per_byte", "carried_after", "supervised_share",
            "host_action_seconds", "corrected_by")  # fmt: skip
"""Fields that a file has only where they say something."""
Fit = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer of one kind on one rank, for a pack at both budgets, in the kind's mode (`Profile.mode`).

    A frozen layer's backward computes gradients of inputs only, one with adapters those of the adapters too; an idle
    one has no backward and keeps nothing.
    """

    forward_seconds: float
    backward_seconds: float
    """Without the second forward of a recomputed layer."""
    kept_bytes: float
    """Saved for the backward of one microbatch when the layer is not recomputed, its input included."""
    recompute_kept_bytes: float
    """Saved when it is recomputed: its input."""
    weight_bytes: float
    """Weights and, where they are trained, gradients and optimizer state."""
    output_bytes: float
    """What a cut right after this layer carries, one way; each feature beside its output is as many again."""
    recompute_seconds: float | None = None
    """What recomputing adds to the backward; None: `forward_seconds`."""
    recompute_cheap_seconds: float | None = None
    """What computing outputs of norms and of the activation function again adds to the backward; None: not offered."""
    recompute_cheap_kept_bytes: float | None = None
    """Saved when these are computed again."""
    weight_gradient_seconds: float | None = None
    """What W takes in zero-bubble schedules; None: half of `backward_seconds`."""
    split_backward_seconds: float | None = None
    """What B and W take together there; None: `backward_seconds`."""
    late_bytes: float | None = None
    """Held from B to W there, recomputed or not: inputs and output gradients of linear layers; None: as before B."""
    empty_seconds: float = 0.0
    """What a pack without tiles takes of a vision layer, backward."""
    host_forward_seconds: float = 0.0
    """In which the host launches the kernels of a forward, however small the pack; 0 on a CPU."""
    host_backward_seconds: float = 0.0
    """The same of a backward."""
    step_seconds: float = 0.0
    """Once an iteration: data-parallel reduction and optimizer step."""
    exchange_seconds: float = 0.0
    """Of a token of a sample that several ranks hold parts of, what ranks exchange, forward; as long backward."""
    exchange_key_seconds: float = 0.0
    """Of it keys and values: where more ranks share a sample than there are groups of these, each goes to several."""
    exchange_groups: float = 0.0
    """Of keys and values, of a tensor-parallel rank; 0: the layer has none."""
    forward_fit: Fit | None = None
    """(constant, per unit, per square), seconds."""
    backward_fit: Fit | None = None

    @property
    def extra_seconds(self) -> float:
        """What recomputing the layer adds to its backward."""
        return self.forward_seconds if self.recompute_seconds is None else self.recompute_seconds

    @property
    def saved_bytes(self) -> float:
        """What recomputing the layer saves for each microbatch in flight."""
        return max(0.0, self.kept_bytes - self.recompute_kept_bytes)


@dataclass(frozen=True, slots=True)
class PackSizes:
    """Sizes of packs, int64 arrays of one shape. `squares`: the sum of the squared sample lengths of a pack."""

    tiles: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    exchanged: NDArray[np.int64] | None = None
    """Tokens that a rank sends to others of its team, of packs that are wider than a rank; None: there are none."""
    widths: NDArray[np.int64] | None = None
    """Ranks that run each together; None: one. No cost depends on it."""


@dataclass(frozen=True)
class Profile:
    """Costs of every kind of layer of one model, on one device, at one budget and one set of parallel sizes."""

    model: str
    model_hash: str
    chain: tuple[str, ...]
    layers: dict[str, LayerCost]
    vit_budget: int
    llm_budget: int
    parameters: dict[str, int] = field(default_factory=dict)
    """Parameters of one layer of each kind, of all tensor-parallel ranks; only the parameter-based cut needs them."""
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    """Ranks that the experts of a layer are dealt over."""
    frozen: tuple[str, ...] = ()
    """Parts of the model whose weights are not trained, of `omnibal_ext.chain.PARTS`."""
    lora_rank: int = 0
    """Of the adapters that are trained instead; 0: none."""
    lora_targets: tuple[str, ...] = ()
    """The parts that have adapters."""
    layers_apart: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers whose costs differ from those of the first of their kind in the chain: by the name that their costs stand
    under, numbers among that kind's. ViT layers that stand apart keep as many bytes as the others."""
    feature_layers: tuple[int, ...] = ()
    """ViT layers whose output enters the language model too: until then it travels beside the hidden states."""
    features_joined: bool = False
    """It enters the projector, all at once, and not the first language layers."""
    carried_after: tuple[int, ...] = ()
    """How many tensors as large as the hidden states travel beside the output of every layer of the chain, which
    language layers read or gave; (): none."""
    supervised_share: float = 0.0
    """Of a pack's tokens, on average, those that are learnt, which the head's seconds are of; 0: not known, all."""
    device: str = ""
    dtype: str = ""
    transfer_seconds_per_byte: float = 0.0
    """Time between neighbouring pipeline ranks."""
    transfer_latency_seconds: float = 0.0
    overhead_bytes: float = 0.0
    """Taken on every rank whatever it holds: driver context, communication buffers."""
    action_seconds: float = 0.0
    """Once for every forward and every backward of a stage, beside its layers: the executor and the wrappers."""
    host_action_seconds: float = 0.0
    """In which the host launches these."""
    iteration_seconds: float = 0.0
    """Once an iteration on every rank, beside the layers' `step_seconds`."""
    measured_with: dict[str, Any] = field(default_factory=dict)
    """Hardware, software and settings: the same ones need not be measured again. Empty in analytic profiles."""
    whole_layers: dict[str, LayerCost] = field(default_factory=dict)
    """Of a tower beside the pipeline where tensor-parallel ranks are several: its kinds on one rank that has all of a
    layer. Empty: not known, or those of `layers` at tensor-parallel size 1."""
    image_tiles: float = 0.0
    """Tiles (or patches) of an image, which is encoded in one piece; 0: a tile is."""
    replica_seconds_per_byte: float = 0.0
    """Between any ranks of a replica; 0: as between neighbours."""
    corrected_by: dict[str, Any] = field(default_factory=dict)
    """The run whose measured seconds these are (`costs.corrected`): its folder, its iterations, and the hash of the
    profile that it was planned from. Empty: no run's."""
    notes: dict[str, Any] = field(default_factory=dict)
    """How it went: efficiencies, outliers; for people, read by no program."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read and validate profile.json. Raises UserError naming the file and the layer at fault."""

        def build(record: Any) -> "Profile":
            check_if_sealed(record, "profile again")
            profile = cls.from_record(record)
            profile.validate()
            return profile

        return read_record(path, "profile", "tools/profile_layers.py", build)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Profile":
        """The profile in a decoded profile.json. Raises UserError for missing fields or another schema version."""
        check_version(record, SCHEMA_VERSION, "profile again")
        PROFILE("", record)
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        layers = {kind: _layer_cost(kind, cost) for kind, cost in record["layers"].items()}
        whole = {kind: _layer_cost(kind, cost) for kind, cost in record.get("whole_layers", {}).items()}
        values["whole_layers"] = whole
        values |= {"chain": tuple(record["chain"]), "layers": layers, "frozen": tuple(record.get("frozen", ()))}
        values |= {name: tuple(record.get(name, ())) for name in LISTS[2:]}
        older = {kind: record[name] for name, kind in OLDER.items() if record.get(name)}
        apart = record.get("layers_apart", older)
        values["layers_apart"] = {kind: tuple(layers) for kind, layers in apart.items()}
        return cls(**values)

    def to_record(self) -> dict[str, Any]:
        """What profile.json holds."""
        lists = {name: list(getattr(self, name)) for name in LISTS}
        apart = {kind: list(layers) for kind, layers in self.layers_apart.items()}
        record = dataclasses.asdict(self) | lists | {"layers_apart": apart}
        return {name: value for name, value in record.items() if value or name not in IF_KNOWN}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate and write profile.json, all or nothing."""
        self.validate()
        write_record(path, sealed(self.to_record()))

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits that change when any figure does."""
        record = {name: value for name, value in self.to_record().items() if name != "notes"}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]

    def validate(self) -> None:
        """Raise UserError for missing layers, and for times and bytes that cannot be, naming the layer."""
        if not self.chain:
            raise UserError("the layer chain is empty")
        for kind in self.chain:
            if kind not in KINDS:
                raise UserError(f"chain has a layer of unknown kind {kind!r}; kinds are {', '.join(KINDS)}")
        for kind in self.cost_kinds:
            if kind not in self.layers:
                raise UserError(f"layer {kind}: no costs, but the chain has one; profile again")
        for name in ("frozen", "lora_targets"):
            for part in getattr(self, name):
                if part not in PARTS:
                    raise UserError(f"{name}: {part!r} is no part of a model; parts are {', '.join(PARTS)}")
        for kind, cost in (*self.layers.items(), *self.whole_layers.items()):
            if chain_kind(kind) not in KINDS:
                raise UserError(f"layer {kind}: unknown kind; kinds are {', '.join(KINDS)}")
            _validate_cost(kind, cost, self.mode(kind))
        if others := sorted(kind for kind in self.whole_layers if chain_kind(kind) not in VISION_KINDS):
            raise UserError(f"whole_layers: {others[0]} is no kind of a tower; those are {', '.join(VISION_KINDS)}")
        vision, language = self.chain.count("vit"), self.chain.count("llm")
        most = vision if self.features_joined else language
        listing(integer(0, vision - 1), 0, most)("feature_layers", list(self.feature_layers))
        carried = len(self.chain) if self.carried_after else 0
        listing(integer(0, 2**16), carried, carried)("carried_after", list(self.carried_after))
        for name, check in PROFILE_COUNTS.items():
            check(name, getattr(self, name))

    @property
    def cost_kinds(self) -> tuple[str, ...]:
        """What the costs of every layer of the chain stand under in `layers`."""
        return cost_kinds(self.chain, self.layers_apart)

    @property
    def features_after(self) -> tuple[int, ...]:
        """How many features travel beside the output of every layer of the chain."""
        features = features_after(self.chain, self.feature_layers, self.features_joined)
        return tuple(map(sum, zip(features, self.carried_after or (0,) * len(features), strict=True)))

    @property
    def bound_by_host(self) -> tuple[str, ...]:
        """Kinds of which a layer takes longer to launch than to compute, at the budgets."""
        return tuple(
            kind for kind, cost in self.layers.items()
            if cost.host_forward_seconds + cost.host_backward_seconds > cost.forward_seconds + cost.backward_seconds
        )  # fmt: skip

    def check_model(self, model: str, model_hash: str) -> None:
        """Raise UserError if the profile is of another model."""
        if self.model_hash != model_hash:
            raise UserError(
                f"the profile is of model {self.model!r} (hash {self.model_hash}), not of {model!r} "
                f"(hash {model_hash}); profile again with tools/profile_layers.py"
            )

    def with_supervised(self, share: float) -> "Profile":
        """This profile where `share` of a pack's tokens are learnt, on average: the head multiplies no others.

        Its bytes stay: packs differ, and the fullest has to fit.
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
        """What the backward pass does in layers of a kind."""
        return gradient_mode(kind, self.frozen, self.lora_targets)

    def replaced_by(self, measured: Mapping[str, Any]) -> "Profile":
        """This profile with every figure that `measured` has, a whole or partial profile record, in its place.

        Raises UserError if it was measured for another model, budgets, parallel sizes or frozen parts.
        """
        MEASURED("", measured)
        record = self.to_record()
        sizes = ("tensor_model_parallel_size", "expert_model_parallel_size")
        for name in ("model_hash", "vit_budget", "llm_budget", *sizes, "frozen", "lora_rank", "lora_targets"):
            if measured.get(name, record[name]) != record[name]:
                raise UserError(f"{name} is {measured[name]}, not {record[name]}: measure for the same settings")
        layers = measured.get("layers", {})
        for kind, costs in layers.items():
            given = {name: value for name, value in costs.items() if value is not None}
            record["layers"][kind] = record["layers"].get(kind, {}) | given
            for name in ("forward", "backward"):  # a fit prices packs by itself
                if f"{name}_seconds" in given and f"{name}_fit" not in given:
                    record["layers"][kind][f"{name}_fit"] = None
        plain = ("transfer_seconds_per_byte", "transfer_latency_seconds", "action_seconds", "iteration_seconds",
                 "host_action_seconds")  # fmt: skip
        record |= {name: measured[name] for name in (*plain, "overhead_bytes") if measured.get(name)}
        record["notes"] |= {"measured": {kind: sorted(costs) for kind, costs in layers.items()}}
        profile = Profile.from_record(record)
        profile.validate()
        return profile

    def load_factor(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Units of each pack over the budget: what bytes scale with."""
        if chain_kind(kind) in VISION_KINDS:
            return packs.tiles / self.vit_budget
        return packs.tokens / self.llm_budget

    def forward_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Forward seconds of one layer of that kind on each pack."""
        cost = self.layers[kind]
        return self._seconds(kind, cost.forward_seconds, cost.forward_fit, packs, 0.0)

    def backward_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """Backward seconds of one layer of that kind on each pack, recomputation left out."""
        cost = self.layers[kind]
        return self._seconds(kind, cost.backward_seconds, cost.backward_fit, packs, cost.empty_seconds)

    def exchange_seconds(self, kind: str, packs: PackSizes) -> NDArray[np.float64]:
        """What ranks that run a pack together take to exchange heads in a layer, forward; backward it is as much."""
        cost, sent = self.layers[kind], np.zeros(packs.tokens.shape) if packs.exchanged is None else packs.exchanged
        copies = 1.0 if packs.widths is None else np.maximum(1, packs.widths / (cost.exchange_groups or np.inf))
        return np.asarray(sent * (cost.exchange_seconds + (copies - 1) * cost.exchange_key_seconds))

    def _seconds(
        self, kind: str, at_budget: float, fit: Fit | None, packs: PackSizes, empty: float
    ) -> NDArray[np.float64]:
        vision = chain_kind(kind) in VISION_KINDS
        units = packs.tiles if vision else packs.tokens
        squares = np.zeros_like(packs.squares) if vision else packs.squares
        if fit is None:
            seconds = at_budget * self.load_factor(kind, packs)
        else:
            seconds = fit[0] + fit[1] * units + fit[2] * squares
        return np.where(units > 0, seconds, empty)


def _of_share(seconds: float, fit: Fit | None, share: float) -> tuple[float, Fit | None]:
    """Seconds at the budgets and their fit, where only a share of the units is worked on."""
    if fit is None:
        return seconds * share, None
    constant, per_unit, per_square = fit
    return constant + (seconds - constant) * share, (constant, per_unit * share, per_square * share)


def _layer_cost(kind: str, record: Mapping[str, Any]) -> LayerCost:
    fields = {f.name: f for f in dataclasses.fields(LayerCost)}
    for name, entry in fields.items():
        if entry.default is dataclasses.MISSING and name not in record:
            raise UserError(f"layer {kind}: {name} is missing; profile again")
    record = {RENAMED.get(name, name): value for name, value in record.items() if name not in DROPPED}
    unknown = sorted(set(record) - set(fields))
    if unknown:
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
