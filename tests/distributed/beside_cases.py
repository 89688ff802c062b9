"""The grid of cases with the tower beside the pipeline: lists, parts and owners are drawn too."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from omnibal_ext.chain import RECOMPUTABLE_KINDS, sizes_of
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower
from omnibal_ext.schedules.actions import Action, Schedule
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import build_schedule, placement_of
from tests.distributed.cases import FILMING, HEARING, LAYERLESS, PACKS, REDUCTIONS, Case, Question, has_to_share, spread

MODELS = ("small", "wide_norm", "native", "features", "gemma", "gemma_4_inputs", "tied")
FREEZE = ((), (), (), ("vit",), ("projector",), ("llm",), ("vit", "projector"), ("vit", "projector"))
ADAPTED = ("llm", "vit")
SCHEDULES = (
    ("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("v_half", 2), ("zb_v", 3),
)  # fmt: skip
KEPT = ("kept", "recomputed")
MODES = ("first", "bubbles")
ENDS = ("word_embed", "patch_embed")
"""Of models with two encoders, both are beside the pipeline, or that of sounds alone."""


@dataclass(frozen=True)
class Beside:
    """A question, and a way to compute the answer with the tower beside the pipeline."""

    case: Case
    mode: str
    """Of a tower that is trained; one that is frozen runs ahead."""
    kept: str
    everyone: bool
    """All ranks encode all microbatches; else some of them."""
    microbatches: int
    end: str = "word_embed"
    """The layer before which the tower ends."""

    def plan(self, chain: tuple[str, ...], ranks: int, tensor: int) -> Plan:
        """Cuts behind the tower, owners, parts and lists drawn; the same for both modes."""
        generator, case = random.Random(self.case.seed), self.case
        layers, stages = chain.index(self.end), ranks * case.chunks
        edges = (layers, *sorted(generator.sample(range(layers + 1, len(chain)), stages - 1)), len(chain))
        whole = case.plan(chain, ranks)
        made = tuple(case._stage(chain, *slice_, generator) for slice_ in pairwise(edges))
        plan = replace(whole, stages=made, num_microbatches=self.microbatches, tensor_model_parallel_size=tensor)
        some = [layer for layer in range(layers) if chain[layer] in RECOMPUTABLE_KINDS]
        tower = Tower(
            layers,
            tuple(generator.randrange(ranks * tensor) for _ in range(layers)),
            tuple(self._ranks(ranks, generator) for _ in range(self.microbatches)),
            self.mode_of(plan),
            tuple(sorted(generator.sample(some, min(2, len(some))))) if self.kept == "recomputed" else (),
            {size: 1.0 if size == "tiles" else generator.uniform(0.1, 3) for size in sizes_of(chain[:layers])},
        )
        lists = woven(case.schedule, case.chunks, ranks, tower, generator)
        words = tuple(" ".join(action.word for action in actions) for actions in lists)
        return replace(plan, tower=tower, lists=words)

    def mode_of(self, plan: Plan) -> str:
        """Frozen towers run ahead."""
        idle = plan.trained.mode(plan.chain[plan.chain.index(self.end) - 1]) == "idle"
        return "ahead" if idle else self.mode

    def _ranks(self, ranks: int, generator: random.Random) -> tuple[int, ...]:
        chosen = generator.sample(range(ranks), generator.randint(1, ranks))
        return tuple(range(ranks)) if self.everyone else tuple(sorted(chosen))


def woven(schedule: str, chunks: int, ranks: int, tower: Tower, generator: random.Random) -> Schedule:
    """Lists with E and V: first and last, or each at any place where it can be done."""
    microbatches, placement = len(tower.encoding_ranks), placement_of(schedule, ranks, chunks)
    base = build_schedule(schedule, ranks, microbatches, chunks)
    order = compile_schedule(base, microbatches, placement).listed
    places = {place: float(number) for number, place in enumerate(order)}
    end = float(len(order))
    for rank in range(ranks):
        mine = [m for m, parts in enumerate(tower.encoding_ranks) if rank in parts]
        for microbatch in reversed(mine):
            following = places.get((rank, _next(mine, microbatch, "E", rank)), end)
            latest = (
                following if tower.mode == "ahead" else min(following, _of_first(places, placement, "F", microbatch))
            )
            at = -1.0 if tower.mode == "first" else generator.uniform(-1, latest)
            places[rank, Action("E", microbatch, rank)] = at
        for microbatch in mine if tower.mode != "ahead" else ():
            before = places.get((rank, _next(mine[::-1], microbatch, "V", rank)), -1.0)
            earliest = max(before, _of_first(places, placement, "B", microbatch))
            at = end if tower.mode == "first" else generator.uniform(earliest, end)
            places[rank, Action("V", microbatch, rank)] = at
    lists: Schedule = [[] for _ in range(ranks)]
    for rank, action in sorted(places, key=lambda place: (places[place], place[1].microbatch)):
        lists[rank].append(action)
    return lists


def _next(mine: Sequence[int], microbatch: int, kind: str, rank: int) -> Action:
    """Of the microbatch behind one in a list; of none behind the last."""
    behind = mine.index(microbatch) + 1
    return Action(kind, mine[behind] if behind < len(mine) else -1, rank)


def _of_first(places: dict[tuple[int, Action], float], placement: Placement, kind: str, microbatch: int) -> float:
    rank, chunk = placement.rank_and_chunk(0)
    return places[rank, Action(kind, microbatch, chunk)]


@dataclass(frozen=True)
class Launch:
    """One start: its ranks, and the cases it runs through."""

    ranks: int
    tensor: int
    pipeline: int
    seed: int
    count: int
    layerless: int = 0
    """Cases more, of the model without a ViT."""
    hearing: int = 0
    """Cases more, of models that hear: with both `ENDS`."""
    filming: int = 0
    """The same of the model whose videos have an encoder."""
    is_long: bool = False
    """Run by `scripts/test.sh --long` alone: another launch has its ranks, and more."""

    def cases(self) -> list[Beside]:
        """Cases in which every value of every dimension comes up about equally often."""
        generator = random.Random(self.seed)
        asked = questions(self.seed, self.hearing, HEARING) if self.hearing else []
        bare = [replace(one, model=LAYERLESS, adapted=()) for one in questions(0, 12)]
        found = [
            *self._drawn(questions(self.seed, self.count), self.count, generator),
            *self._drawn(bare, self.layerless, generator),
        ]
        heard = self._drawn(asked, self.hearing, generator) if asked else []
        filmed = questions(self.seed, self.filming, FILMING) if self.filming else []
        heard += self._drawn(filmed, self.filming, generator) if filmed else []
        return [*found, *(replace(case, end=ENDS[number % 2]) for number, case in enumerate(heard))]

    def _drawn(self, questions: Sequence[Question], count: int, generator: random.Random) -> list[Beside]:
        schedules = (
            [one for one in SCHEDULES if one[1] * self.pipeline <= 6]
            if self.pipeline > 1
            else [("1f1b", 1), ("zb_h1", 1)]
        )
        dimensions = (
            questions, schedules, ("none", "mixed"), (False, True)[: self.tensor], (False, True),
            MODES, KEPT, (True, True, False),
        )  # fmt: skip
        columns = (spread(values, count, generator) for values in dimensions)
        replicas = self.ranks // self.tensor // self.pipeline
        return [
            Beside(
                Case(
                    question, *schedule, recompute, share or has_to_share(question, self.tensor), overlap,
                    generator.randrange(2**31),
                ),
                mode, kept, everyone, PACK_COUNTS[question.packs] // replicas,
            )
            for question, schedule, recompute, share, overlap, mode, kept, everyone in zip(*columns, strict=True)
        ]  # fmt: skip


PACK_COUNTS = {"all": 8, "text only": 4, "image only": 4, "one of many": 4, "short": 2}


def questions(seed: int, count: int, models: Sequence[str] = MODELS) -> list[Question]:
    """Questions in which every value of every dimension comes up about equally often; some of adapters."""
    generator = random.Random(seed)
    columns = (spread(values, count, generator) for values in (models, FREEZE, PACKS, REDUCTIONS))
    found = [Question(*row) for row in zip(*columns, strict=True)]
    adapted = [replace(one, freeze=(), adapted=(ADAPTED[n % 2],)) for n, one in enumerate(found[: count // 6])]
    return [*adapted, *found[count // 6 :]]


LAUNCHES = {
    "one rank": Launch(1, 1, 1, seed=41, count=5, hearing=2, filming=2),
    "pipeline": Launch(2, 1, 2, seed=42, count=12, hearing=8, is_long=True),
    "tensor": Launch(2, 2, 1, seed=43, count=12, hearing=8, is_long=True),
    "data": Launch(2, 1, 1, seed=44, count=10, is_long=True),
    "tensor and pipeline": Launch(4, 2, 2, seed=45, count=4, layerless=1, hearing=3, filming=3),
    "data and pipeline": Launch(4, 1, 2, seed=46, count=8, hearing=6, is_long=True),
    "long pipeline": Launch(4, 1, 4, seed=47, count=14, hearing=8, is_long=True),
    "data and tensor": Launch(4, 2, 1, seed=248, count=12, hearing=4, filming=2, is_long=True),
}
LAUNCHES |= {
    f"{name}, more": replace(one, seed=one.seed + 200, count=4 * one.count, hearing=2 * one.hearing, is_long=True)
    for name, one in LAUNCHES.items()
    if not one.is_long
}
