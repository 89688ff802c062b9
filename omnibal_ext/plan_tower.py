"""A replicated tower: what plan.json says of it.

    chain     patch_embed vit.0 vit.1 projector | word_embed llm.0 | llm.1 head
    tower     [0, 4): whole copies on every rank  stage 0             stage 1

Every rank of a replica (pipeline x tensor ranks) has a working copy of the tower and encodes a share of the images of
some microbatches; each of the tower's layers is owned by one rank, in whose stage the optimizer and checkpoints see it.
In models with further encoders, the tower is the first encoders of the chain, or all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from omnibal_ext.chain import RECOMPUTABLE_KINDS, layer_names, sizes_of
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import ENCODED, FURTHER, LANGUAGE, VISION, Size
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.trained import Trained


def _named(values: Mapping[str, str]) -> str:
    """Return the name of a tower layout from each encoder's value, "cut" or "beside": that value if all have the same,
    else such as "audio=beside,vision=cut", in the order of the chain."""
    found = [f"{one.name}={values[one.name]}" for one in ENCODED if one.name in values]
    return ",".join(found) if len({*values.values()}) > 1 else next(iter(values.values()))


def tower_ends(chain: Collection[str]) -> dict[str, str]:
    """Return {layout's name: kind of the first layer behind the replicated tower} for the tower layouts, other than
    "cut", of a model whose chain has these kinds of layers."""
    encoders, found = [one for one in ENCODED if one.kinds[0] in chain], {}
    for count in range(len(encoders), 0, -1):
        values = {one.name: "beside" if number < count else "cut" for number, one in enumerate(encoders)}
        found[_named(values)] = (*encoders, LANGUAGE)[count].kinds[0]
    return found


def _layouts() -> list[str]:
    found = ["cut"]
    for count in range(len(FURTHER) + 1):
        for further in combinations(FURTHER, count):
            found += tower_ends([one.kinds[0] for one in ENCODED if one not in FURTHER or one in further])
    return list(dict.fromkeys(found))


LAYOUTS = _layouts()
"""Layouts of the tower that all models have."""


def tower_layout(text: str) -> str:
    """Return the layout's name for a flag's text: VALUE, or `vision=VALUE,audio=VALUE` in any order."""
    of_encoders = dict(word.partition("=")[::2] for word in text.split(","))
    is_of_encoders = len(of_encoders) > 1 and of_encoders.keys() <= {one.name for one in ENCODED}
    return _named(of_encoders) if is_of_encoders else text


@dataclass(frozen=True, slots=True)
class Tower:
    """First layers of the chain, of which every rank has a copy; stages hold the rest."""

    layers: int
    """Number of layers; the chain's next one is one of `tower_ends`."""
    owners: tuple[int, ...]
    """Rank of a replica that owns the weights of each layer: pipeline rank * tensor ranks + tensor rank."""
    encoding_ranks: tuple[tuple[int, ...], ...]
    """Pipeline ranks that encode the images of each microbatch, ascending."""
    mode: str = "bubbles"
    """When E and V run: "first" and last; in "bubbles"; "ahead": the tower is frozen, and E are of the next
    iteration."""
    recompute: tuple[int, ...] = ()
    """Layer ids of which only the input is kept from E to V."""
    rates: Mapping[Size, float] = field(default_factory=lambda: {VISION.size: 1.0}, hash=False)
    """Time to encode a unit of each size of its encoders (`chain.sizes_of` its layers), in units of the last: by these,
    inputs are assigned."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], chain: Sequence[str]) -> "Tower":
        """Read a tower from `record`, the field `tower` of a checked plan.json; `chain` lists the kinds of all layers.

        `again`, in older plans, recomputes each of its layers that can be. Raises UserError if it names a size twice.
        """
        layers, recompute = record["links"], record.get("recompute", ())
        if record.get("again"):
            recompute = [layer for layer, kind in enumerate(chain[:layers]) if kind in RECOMPUTABLE_KINDS]
        encoding_ranks = tuple(map(tuple, record["parts"]))
        keys = {one.size: one.rate for one in ENCODED}
        sizes = record.get("sizes", (VISION.size,))
        if len(rates := {size: record.get(keys[size], 1.0) for size in sizes}) != len(sizes):
            raise UserError(f"tower: sizes are {' '.join(sizes)}, each must be there once")
        return cls(layers, tuple(record["owners"]), encoding_ranks, record["mode"], tuple(recompute), rates)

    def to_record(self) -> dict[str, Any]:
        """Return the tower as plan.json has it."""
        lists = {
            "owners": list(self.owners),
            "parts": [*map(list, self.encoding_ranks)],
            "recompute": list(self.recompute),
        }
        rates = {one.rate: self.rates[one.size] for one in FURTHER if one.size in self.rates}
        further = {"sizes": list(self.rates), **rates} if rates else {}
        return {"links": self.layers, "mode": self.mode, **lists, **further}

    @property
    def beside(self) -> Beside:
        """Pipeline ranks that encode each microbatch, in the form that schedules take."""
        return Beside(self.encoding_ranks, self.mode == "ahead")

    def validate(
        self,
        chain: Sequence[str],
        ranks: tuple[int, int],
        microbatches: int,
        trained: Trained,
    ) -> None:
        """Raise UserError, naming layer or microbatch, unless it fits chain, (pipeline, tensor) ranks, frozen parts."""
        ends = {end: list(chain).index(end) for end in tower_ends(chain).values() if end in chain}
        if self.layers not in ends.values():
            where = " or ".join(f"{end}, layer {layer}" for end, layer in ends.items())
            raise UserError(f"tower: {self.layers} layers end elsewhere than before {where}")
        if tuple(self.rates) != (sizes := sizes_of(chain[: self.layers])):
            raise UserError(f"tower: sizes are {' '.join(self.rates)}, but its layers need {' '.join(sizes)}")
        names, (pipeline, tensor) = layer_names(chain), ranks
        if len(self.owners) != self.layers:
            raise UserError(f"tower: {len(self.owners)} owners for {self.layers} layers; each layer has one")
        for layer, owner in enumerate(self.owners):
            if not 0 <= owner < pipeline * tensor:
                raise UserError(
                    f"tower: {names[layer]} is owned by rank {owner}, but a replica has {pipeline} x {tensor} ranks"
                )
        self._validate_encoding_ranks(pipeline, microbatches)
        for layer in self.recompute:
            if not 0 <= layer < self.layers or chain[layer] not in RECOMPUTABLE_KINDS:
                raise UserError(f"tower: recompute names layer {layer}, which is no encoder's layer of it")
        idle = trained.mode(chain[self.layers - 1]) == "idle"
        if idle != (self.mode == "ahead"):
            state = "all of it is frozen" if idle else "some of it is trained"
            raise UserError(f'tower: mode {self.mode!r}, but {state}; "ahead" is for frozen towers, and only for them')

    def _validate_encoding_ranks(self, pipeline: int, microbatches: int) -> None:
        if len(self.encoding_ranks) != microbatches:
            raise UserError(f"tower: parts of {len(self.encoding_ranks)} microbatches for {microbatches}")
        for microbatch, ranks in enumerate(self.encoding_ranks):
            if not ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < pipeline:
                raise UserError(
                    f"tower: parts of microbatch {microbatch} are {list(ranks)}; name pipeline ranks from 0 to "
                    f"{pipeline - 1}, ascending, at least one"
                )


def choice_in_words(said: Mapping[str, Any], tower: Tower | None) -> str:
    """Return a line that says if the tower is cut or replicated ("beside"), and of either layout the predicted
    iteration, and speed relative to the language model alone, or why it has no plan. `said`: a plan's
    `predicted["tower"]`."""
    words, text_only = [], said.get("text_only_step_seconds")
    for layout in LAYOUTS:
        if step := said.get(f"{layout}_step_seconds"):
            share = f", {text_only / step:.1%} of text-only speed" if text_only else ""
            words.append(f"{layout} {step * 1e3:,.2f} ms{share}")
        elif reason := said.get(f"no_plan_{layout}"):
            words.append(f"{layout}: {reason}")
    mode = f", {tower.mode}" if tower else ""
    return f"{said['road']}{mode} (predicted: {'; '.join(words)})"
