"""Plan: budgets, layout, schedule and predictions in one JSON file, which the planner writes and the trainer follows.

    chain   patch_embed vit.0 vit.1 | projector word_embed llm.0 | llm.1 head      two ranks, two chunks: four stages
    stage   0                  rank 0 | 1                  rank 1 | 2      rank 0 ...

The file has the hash of its content, so that damage is detected. Remove the hash to edit the file by hand; in any case
loading validates the plan, and names the layer at fault.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import RECOMPUTABLE_KINDS, layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import check_version, read_record, write_record
from omnibal_ext.formats import OLD_RECOMPUTE, PLAN, PLAN_COUNTS
from omnibal_ext.modalities.modality import Budgets, budget_fields, budgets_in, in_place, with_budget_keys
from omnibal_ext.output import say
from omnibal_ext.plan_tower import Tower
from omnibal_ext.reading.document import sealed
from omnibal_ext.schedules.actions import Action, Schedule, check_packs
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import check_schedule
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, build_schedule, placement_of
from omnibal_ext.trained import ALL, Trained

SCHEMA_VERSION = 1
_LISTS = ("alternatives", "trials", "lists", "stage_ranks")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A contiguous slice of the chain, layer ids `layers[0]` .. `layers[1] - 1`.

    Layers in `recompute` are recomputed entirely; in `recompute_cheap`, only outputs of norms and activation functions.
    """

    layers: tuple[int, int]
    recompute: tuple[int, ...] = ()
    recompute_cheap: tuple[int, ...] = ()

    def to_record(self) -> dict[str, list[int]]:
        """Return a stage as plan.json has it; the list of cheaply recomputed layers only if it names one."""
        record = {"layers": list(self.layers), "recompute": list(self.recompute)}
        return record | ({"recompute_cheap": list(self.recompute_cheap)} if self.recompute_cheap else {})


@dataclass(frozen=True)
class Plan:
    """What the trainer follows (plan.json). Stages are in the order of the forward; `placement` has their ranks."""

    chain: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    num_microbatches: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    schedule: str = "1f1b"
    stage_ranks: tuple[int, ...] = ()
    """The pipeline rank of every stage, which must be `schedule`'s; empty: not written down."""
    lists: tuple[str, ...] = ()
    """The actions of every rank ("F0.0 F1.0 B0.0 ...": kind, microbatch, chunk); empty: those of `schedule`."""
    tower: Tower | None = None
    """The tower of which every rank has a copy; None: stages hold all layers."""
    model: str = ""
    model_hash: str = ""
    profile_hash: str = ""
    budgets: Budgets = field(default_factory=dict)
    method: str = ""
    memory_gib: float | None = None
    trained: Trained = ALL
    predicted: dict[str, Any] = field(default_factory=dict)
    """step_seconds, bubble_fraction, stage_seconds (per stage), stage_peak_bytes (per pipeline rank) and more."""
    alternatives: tuple[dict[str, Any], ...] = ()
    """The next-best layouts: stages, step_seconds and why each is worse; see `alternative`."""
    trials: tuple[dict[str, Any], ...] = ()
    """Layouts measured by `launch.py --measure-top-k`: stages, predicted and measured seconds, and which was kept."""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def from_cuts(
        cls,
        chain: Sequence[str],
        cuts: Sequence[int],
        recompute: Sequence[Sequence[int]] | None = None,
        recompute_cheap: Sequence[Sequence[int]] | None = None,
        *,
        num_microbatches: int = 1,
        virtual_pipeline_model_parallel_size: int = 1,
        **fields: Any,
    ) -> "Plan":
        """Return a validated plan with a new stage at each layer id in `cuts` (ascending, without 0 and the end).

        `recompute` and `recompute_cheap` list layer ids per stage, see `StagePlan`.
        """
        tower: Tower | None = fields.get("tower")
        edges = (tower.layers if tower else 0, *cuts, len(chain))
        nothing: list[tuple[int, ...]] = [()] * (len(edges) - 1)
        ids = zip(pairwise(edges), recompute or nothing, recompute_cheap or nothing, strict=True)
        stages = tuple(StagePlan(layers, tuple(full), tuple(cheap)) for layers, full, cheap in ids)
        ranks = len(stages) // virtual_pipeline_model_parallel_size
        placement = placement_of(fields.get("schedule", "1f1b"), ranks, virtual_pipeline_model_parallel_size)
        plan = cls(
            chain=tuple(chain),
            stages=stages,
            stage_ranks=placement.ranks_of,
            num_microbatches=num_microbatches,
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
            **fields,
        )
        plan.validate()
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read and validate plan.json. Raises UserError naming the file and the fault."""

        def build(record: Any) -> "Plan":
            plan = cls.from_record(record)
            plan.validate()
            old = {name for stage in record["stages"] for name in OLD_RECOMPUTE if stage.get(name)}
            if old and os.environ.get("RANK", "0") == "0":
                say(f"{path}: layers in {', '.join(sorted(old))} are recomputed whole", error=True)
            return plan

        return read_record(path, "plan", "omnibal plan", build)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Plan":
        """Return the plan of a decoded plan.json, not yet validated. Raises UserError for a damaged or other format."""
        check_version(record, SCHEMA_VERSION, "plan again")
        PLAN("", record)
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        values |= {"chain": tuple(record["chain"]), "stages": tuple(map(_stage, record["stages"]))}
        values |= {"tower": Tower.from_record(record["tower"], record["chain"])} if "tower" in record else {}
        values |= {"budgets": budgets_in(record), "trained": Trained.from_record(record)}
        return cls(**values | {name: tuple(record.get(name, ())) for name in _LISTS})

    def to_record(self) -> dict[str, Any]:
        """Return the plan as the JSON object of plan.json, without the hash."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tower"}
        if self.tower:
            record |= {"tower": self.tower.to_record()}
        record |= {name: list(record[name]) for name in ("chain", *_LISTS)}
        record |= {"stages": [stage.to_record() for stage in self.stages]}
        return with_budget_keys(in_place(record, {"trained": self.trained.to_record()}), behind="alternatives")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate and write plan.json, atomically."""
        self.validate()
        write_record(path, sealed(self.to_record()))

    def validate(self) -> None:
        """Raise UserError, naming the layer, unless stages hold every layer once, in order, and all else fits."""
        self._validate_counts()
        names, at = [*layer_names(self.chain), "the chain's end"], self.tower.layers if self.tower else 0
        for number, stage in enumerate(self.stages):
            first, end = stage.layers
            if not 0 <= first < end <= len(self.chain):
                raise UserError(
                    f"stage {number}: layers [{first}, {end}] is not a slice of the {len(self.chain)} layers "
                    "(at least one layer a stage, end is one past the last)"
                )
            if first != at:
                wrong = f"{names[at]} (id {at}) is lost" if first > at else f"{names[first]} (id {first}) is doubled"
                raise UserError(
                    f"layer {wrong}: stage {number} starts at {names[first]}, not at {names[at]}, where what is before "
                    "it ends: stages go in the order the data flows"
                )
            at = end
        if at < len(self.chain):
            raise UserError(f"layer {names[at]} (id {at}) is lost: no stage holds it")
        self._validate_recompute(names[:-1])
        if self.tower:
            ranks = (self.pipeline_model_parallel_size, self.tensor_model_parallel_size)
            self.tower.validate(self.chain, ranks, self.num_microbatches, self.trained)
        self._validate_lists()

    def _validate_lists(self) -> None:
        if not self.lists:
            if self.tower:
                raise UserError("a plan with a tower needs lists of actions, with its E and V; plan again")
            return
        if len(self.lists) != self.pipeline_model_parallel_size:
            raise UserError(
                f"{len(self.lists)} lists of actions for {self.pipeline_model_parallel_size} pipeline ranks"
            )
        schedule = self.build_schedule()
        check_schedule(schedule, self.num_microbatches, self.placement, self.tower.beside if self.tower else None)
        check_packs(schedule, self.placement.chunks)

    def _validate_counts(self) -> None:
        counts = vars(self) | budget_fields(self.budgets) | vars(self.trained)
        for name, check in PLAN_COUNTS.items():
            if name in counts:
                check(name, counts[name])
        if self.schedule not in SCHEDULE_NAMES:
            raise UserError(f"schedule {self.schedule!r} is not known; choose one of {', '.join(SCHEDULE_NAMES)}")
        wanted = self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size
        if len(self.stages) != wanted:
            raise UserError(
                f"{len(self.stages)} stages, but {self.pipeline_model_parallel_size} pipeline ranks x "
                f"{self.virtual_pipeline_model_parallel_size} chunks need {wanted}"
            )
        if self.stage_ranks and self.stage_ranks != self.placement.ranks_of:
            raise UserError(
                f"stage_ranks {list(self.stage_ranks)} are not those of schedule {self.schedule}, "
                f"{list(self.placement.ranks_of)}; leave them out"
            )
        for name, count in (
            ("stage_seconds", len(self.stages)),
            ("stage_peak_bytes", self.pipeline_model_parallel_size),
        ):
            if name in self.predicted and len(self.predicted[name]) != count:
                raise UserError(f"predicted.{name} must have {count} numbers, has {len(self.predicted[name])}")

    def _validate_recompute(self, names: Sequence[str]) -> None:
        for number, stage in enumerate(self.stages):
            for layer in (*stage.recompute, *stage.recompute_cheap):
                if not stage.layers[0] <= layer < stage.layers[1]:
                    name = names[layer] if 0 <= layer < len(names) else "no layer"
                    raise UserError(f"stage {number} recomputes {name} (id {layer}), which it does not hold")
                if self.chain[layer] not in RECOMPUTABLE_KINDS:
                    raise UserError(f"stage {number} recomputes {names[layer]}: only ViT and LLM layers can be")
            named = Counter((*stage.recompute, *stage.recompute_cheap))
            if twice := [names[layer] for layer, times in named.items() if times > 1]:
                raise UserError(
                    f"stage {number} names {twice[0]} twice in `recompute` and `recompute_cheap`; once is enough"
                )

    def check_model(self, model: Architecture) -> None:
        """Raise UserError if the plan was made for another model, or its chain is not the model's."""
        if not model.was_noted(self.model, self.model_hash):
            raise UserError(
                f"the plan was made for model {self.model!r} (hash {self.model_hash}), not for {model.name!r} "
                f"(hash {model.hash}); plan again with omnibal plan"
            )
        if (chain := model.chain) != self.chain:
            at = next((i for i, (one, other) in enumerate(zip(self.chain, chain, strict=False)) if one != other), None)
            where = f"differs at layer {at}" if at is not None else f"has {len(self.chain)} layers, not {len(chain)}"
            raise UserError(f"the plan's chain is not that of model {model.name!r}: it {where}; plan again")

    def check_trained(self, frozen: Sequence[str], adapters: Adapters) -> None:
        """Raise UserError if the plan was made for other frozen parts than these, or other adapters."""
        found = (self.trained.lora_rank, set(self.trained.lora_targets))
        if found != (adapters.rank, set(adapters.targets)):
            made, wanted = (
                f"adapters of rank {rank} in {' '.join(sorted(parts))}" if rank else "no adapters"
                for rank, parts in (found, (adapters.rank, adapters.targets))
            )
            raise UserError(f"the plan was made with {made}, this run has {wanted}; profile and plan again")
        if set(self.trained.frozen) != set(frozen):
            made, wanted = (" ".join(sorted(parts)) or "nothing" for parts in (self.trained.frozen, frozen))
            raise UserError(f"the plan was made with {made} frozen, this run freezes {wanted}; profile and plan again")

    def alternative(self, number: int) -> "Plan":
        """Return the plan with the layout of `alternatives[number]`, validated."""
        entry = self.alternatives[number]
        predicted = {"step_seconds": entry["step_seconds"], **entry.get("predicted", {})}
        stages = tuple(map(_stage, entry["stages"]))
        plan = dataclasses.replace(self, stages=stages, predicted=predicted, alternatives=())
        plan.validate()
        return plan

    @property
    def placement(self) -> Placement:
        """The pipeline rank and chunk of every stage."""
        return placement_of(self.schedule, self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size)

    def build_schedule(self) -> Schedule:
        """Return the actions of every pipeline rank, in order: those of `lists`, else those of `schedule`."""
        if self.lists:
            return [_actions(rank, words) for rank, words in enumerate(self.lists)]
        return build_schedule(
            self.schedule,
            self.pipeline_model_parallel_size,
            self.num_microbatches,
            self.virtual_pipeline_model_parallel_size,
        )


def _actions(rank: int, words: str) -> list[Action]:
    """Return the actions of a rank's list, "F0.0 B0.0 ...". Raises UserError naming the rank for another word."""
    try:
        return [Action.of_word(word) for word in words.split()]
    except UserError as error:
        raise UserError(f"lists: of rank {rank}, {error}") from None


def layer_ranges(names: Sequence[str], layers: Iterable[int]) -> str:
    """Return layer ids in words, neighbours together: "patch_embed, vit.0-3". `names`: of all layers of the chain."""
    words = []
    for _, group in groupby(enumerate(sorted(layers)), key=lambda one: (one[1] - one[0], names[one[1]].split(".")[0])):
        ids = [layer for _, layer in group]
        last = names[ids[-1]].rpartition(".")[2]
        words.append(names[ids[0]] if len(ids) == 1 else f"{names[ids[0]]}-{last}")
    return ", ".join(words)


def single_stage_plan(chain: Sequence[str], **fields: Any) -> Plan:
    """Return a plan with all layers in one stage, on one rank."""
    return Plan.from_cuts(chain, (), **fields)


def _stage(entry: Mapping[str, Any]) -> StagePlan:
    """Read a stage of plan.json, {"layers": [first, last + 1], "recompute": [layer ids], ...}."""
    full, cheap = tuple(entry.get("recompute", ())), tuple(entry.get("recompute_cheap", ()))
    partly = {layer for name in OLD_RECOMPUTE for layer in entry.get(name, ())} - {*full}
    first, end = entry["layers"]
    return StagePlan((first, end), (*full, *sorted(partly)), tuple(layer for layer in cheap if layer not in partly))
