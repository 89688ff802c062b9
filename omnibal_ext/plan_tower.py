"""A replicated tower: what plan.json says of it.

    chain     patch_embed vit.0 vit.1 projector | word_embed llm.0 | llm.1 head
    tower     [0, 4): whole copies on every rank  stage 0             stage 1

Every rank of a replica (pipeline x tensor ranks) has a working copy of the tower and encodes a share of the images of
some microbatches; each of the tower's links is owned by one rank, in whose stage the optimizer and checkpoints see it.
In models that hear, the tower is the audio encoder alone, or both encoders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnibal_ext.chain import RECOMPUTABLE_KINDS, layer_names, sizes_of
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import AUDIO, ENCODED, IN_CHAIN, Size
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.trained import Trained


def _named(values: Sequence[str]) -> str:
    """A layout by the value of each encoder, in the order of the chain."""
    if len(set(values)) == 1:
        return values[0]
    return ",".join(f"{one.name}={value}" for one, value in zip(ENCODED, values, strict=True))


BESIDE = [_named(["beside"] * count + ["cut"] * (len(ENCODED) - count)) for count in range(len(ENCODED), 0, -1)]
ENDS = dict(zip(BESIDE, (one.kinds[0] for one in reversed(IN_CHAIN[1:])), strict=True))
"""Tower layouts other than "cut": the kind of link before which the replicated tower ends."""


def tower_layout(text: str) -> str:
    """Return the layout that a flag names, for one value or `audio=VALUE,vision=VALUE`; other texts as they are."""
    of_encoders = dict(word.partition("=")[::2] for word in text.split(","))
    if of_encoders.keys() != {one.name for one in ENCODED}:
        return text
    return _named([of_encoders[one.name] for one in ENCODED])


@dataclass(frozen=True, slots=True)
class Tower:
    """The first links of the chain, of which every rank has a copy; stages hold the rest."""

    links: int
    """How many; the chain's next one is one of `ENDS`."""
    owners: tuple[int, ...]
    """Of every link, the rank of a replica that owns its weights: pipeline rank * tensor ranks + tensor rank."""
    parts: tuple[tuple[int, ...], ...]
    """Of every microbatch, the pipeline ranks that encode its images, ascending."""
    mode: str = "bubbles"
    """When E and V run: "first" and last; in "bubbles"; "ahead": the tower is frozen, and E are of the next
    iteration."""
    recompute: tuple[int, ...] = ()
    """Layer ids of which only the input is kept from E to V."""
    sizes: tuple[Size, ...] = ("tiles",)
    """Of packs, those with which the work of its encoders grows: `chain.sizes_of` its links."""
    tiles_per_frame: float = 1.0
    """With both encoders, the tiles that take as long to encode as a mel frame: by these, sounds are assigned."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any], chain: Sequence[str]) -> "Tower":
        """Of plan.json's entry, its format checked. In older plans `again` recomputes the whole tower."""
        links, recompute = record["links"], record.get("recompute", ())
        if record.get("again"):
            recompute = [link for link, kind in enumerate(chain[:links]) if kind in RECOMPUTABLE_KINDS]
        parts = tuple(map(tuple, record["parts"]))
        sizes, frame = tuple(record.get("sizes", ("tiles",))), record.get("tiles_per_frame", 1.0)
        return cls(links, tuple(record["owners"]), parts, record["mode"], tuple(recompute), sizes, frame)

    def to_record(self) -> dict[str, Any]:
        """What plan.json holds."""
        lists = {"owners": list(self.owners), "parts": [*map(list, self.parts)], "recompute": list(self.recompute)}
        heard = {"sizes": list(self.sizes), "tiles_per_frame": self.tiles_per_frame} if "frames" in self.sizes else {}
        return {"links": self.links, "mode": self.mode, **lists, **heard}

    @property
    def rates(self) -> dict[Size, float]:
        """What a unit of each of `sizes` takes to encode, in tiles."""
        return {size: self.tiles_per_frame if size == AUDIO.size else 1.0 for size in self.sizes}

    @property
    def beside(self) -> Beside:
        """As lists of actions know it."""
        return Beside(self.parts, self.mode == "ahead")

    def validate(
        self,
        chain: Sequence[str],
        ranks: tuple[int, int],
        microbatches: int,
        trained: Trained,
    ) -> None:
        """Raise UserError for what cannot be of this chain on (pipeline, tensor) ranks, naming link or microbatch."""
        ends = {end: list(chain).index(end) for end in ENDS.values() if end in chain[1:]}
        if self.links not in ends.values():
            where = " or ".join(f"{end}, link {link}" for end, link in ends.items())
            raise UserError(f"tower: {self.links} links end elsewhere than before {where}")
        if self.sizes != (sizes := sizes_of(chain[: self.links])):
            raise UserError(f"tower: sizes are {' '.join(self.sizes)}, but its links need {' '.join(sizes)}")
        names, (pipeline, tensor) = layer_names(chain), ranks
        if len(self.owners) != self.links:
            raise UserError(f"tower: {len(self.owners)} owners for {self.links} links; each link has one")
        for link, owner in enumerate(self.owners):
            if not 0 <= owner < pipeline * tensor:
                raise UserError(
                    f"tower: {names[link]} is owned by rank {owner}, but a replica has {pipeline} x {tensor} ranks"
                )
        self._validate_parts(pipeline, microbatches)
        for link in self.recompute:
            if not 0 <= link < self.links or chain[link] not in RECOMPUTABLE_KINDS:
                raise UserError(f"tower: recompute names link {link}, which is no encoder's layer of it")
        idle = trained.mode(chain[self.links - 1]) == "idle"
        if idle != (self.mode == "ahead"):
            state = "all of it is frozen" if idle else "some of it is trained"
            raise UserError(f'tower: mode {self.mode!r}, but {state}; "ahead" is for frozen towers, and only for them')

    def _validate_parts(self, pipeline: int, microbatches: int) -> None:
        if len(self.parts) != microbatches:
            raise UserError(f"tower: parts of {len(self.parts)} microbatches for {microbatches}")
        for microbatch, ranks in enumerate(self.parts):
            if not ranks or list(ranks) != sorted(set(ranks)) or not 0 <= ranks[0] <= ranks[-1] < pipeline:
                raise UserError(
                    f"tower: parts of microbatch {microbatch} are {list(ranks)}; name pipeline ranks from 0 to "
                    f"{pipeline - 1}, ascending, at least one"
                )


def choice_in_words(said: Mapping[str, Any], tower: Tower | None) -> str:
    """Whether the tower is cut or replicated ("beside"), from `predicted["tower"]` of a plan, with either
    layout's predicted iteration and speed relative to the language model alone, or why it has no plan."""
    words, text_only = [], said.get("text_only_step_seconds")
    for layout in ("cut", *ENDS):
        if step := said.get(f"{layout}_step_seconds"):
            share = f", {text_only / step:.1%} of text-only speed" if text_only else ""
            words.append(f"{layout} {step * 1e3:,.2f} ms{share}")
        elif reason := said.get(f"no_plan_{layout}"):
            words.append(f"{layout}: {reason}")
    mode = f", {tower.mode}" if tower else ""
    return f"{said['road']}{mode} (predicted: {'; '.join(words)})"
