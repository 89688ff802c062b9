"""The grid of cases that every layout must compute alike: generated, so that nobody picks the easy ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from omnibal_ext.chain import KINDS, PARTS, RECOMPUTABLE_KINDS, sizes_of
from omnibal_ext.costs.profile import LayerCost
from omnibal_ext.layout.lists import build_lists
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import BUILT
from omnibal_ext.plan import Plan, StagePlan
from omnibal_ext.schedules.actions import Schedule
from omnibal_ext.trained import Trained
from tests.chains import layer_chain
from tests.programs import ENGINE, PLAIN
from tests.unit.layout.instances import make_profile

SCHEDULES = (
    ("1f1b", 1), ("1f1b", 2), ("interleaved", 3), ("gpipe", 1), ("gpipe", 2), ("zb_h1", 1), ("zb_h1", 2), ("zb_h2", 1),
    ("zb_auto", 1), ("zb_auto", 2), ("zb_v", 2), ("zb_v", 3), ("v_half", 2), ("v_min", 2), ("zb_v_auto", 2),
)  # fmt: skip
"""Name and chunks a rank."""
RECOMPUTE = ("none", "full", "cheap", "mixed")
FREEZE = ((), (), ("vit",), ("projector",), ("llm",), ("vit", "llm"), ("vit", "projector"), ("projector", "llm"))
ADAPTED = (("llm",), ("llm",), ("vit",), ("projector",), ("vit", "projector", "llm"))
"""Parts with adapters, where nothing else is trained."""
PACKS = ("all", "all", "text only", "image only", "one of many", "short")
REDUCTIONS = ("token", "square", "sample")
MODELS = (
    "small", "wide_norm", "tied", "native", "features", "gemma", "gemma_4_inputs", "gemma_4_moe", "linear", "experts",
    "pixtral", "paddleocr", "glm", "paligemma",
)  # fmt: skip
ADAPTED_MODELS = (*(name for name in MODELS if name not in ("linear", "experts", "gemma_4_moe")), "mixture")
"""Those whose language layers can have adapters."""
LAYERLESS = "layerless"
"""The model without a ViT, of which launches run cases of its own."""
HEARING = ("hearing", "hearing_features")
"""Models with an audio encoder, of which launches run cases of their own."""
FILMING = ("filming",)
"""The model whose videos have an encoder of their own, before the projector of images."""
SHARING = ("experts", "gemma_4_moe", "mixture", "glm", "hearing_features")
"""Those whose tensor-parallel ranks share the tokens between blocks, and have to."""


Value = TypeVar("Value")


def spread(values: Sequence[Value], count: int, generator: random.Random) -> list[Value]:
    """Draws in any order, in which every value comes up about equally often."""
    rounds, rest = divmod(count, len(values))
    drawn = [*values] * rounds + generator.sample(values, rest)
    generator.shuffle(drawn)
    return drawn


@dataclass(frozen=True)
class Question:
    """What one process is asked: the answer depends on nothing else."""

    model: str
    freeze: tuple[str, ...]
    packs: str
    reduction: str
    adapted: tuple[str, ...] = ()

    @staticmethod
    def draw(count: int, seed: int, models: Sequence[str] = MODELS) -> list["Question"]:
        """Questions in which every value of every dimension comes up about equally often."""
        generator = random.Random(seed)
        columns = (spread(values, count, generator) for values in (models, FREEZE, PACKS, REDUCTIONS))
        return [Question(*row) for row in zip(*columns, strict=True)]

    @staticmethod
    def draw_adapted(count: int, seed: int, models: Sequence[str] = ADAPTED_MODELS) -> list["Question"]:
        """The same of models of which adapters are trained; the projector of Gemma's can have none."""
        generator = random.Random(seed)
        columns = (spread(values, count, generator) for values in (models, PACKS, REDUCTIONS, ADAPTED))
        return [
            Question(model, (), packs, reduction, ("llm",) if model.startswith("gemma") else adapted)
            for model, packs, reduction, adapted in zip(*columns, strict=True)
        ]


def has_to_share(question: Question, tensor: int) -> bool:
    """Whether ranks so many in a tensor-parallel group share the tokens between blocks in any case of it."""
    return tensor > 1 and question.model in SHARING


@dataclass(frozen=True)
class Case:
    """A question, and a way to compute the answer."""

    question: Question
    schedule: str
    chunks: int
    recompute: str
    sequence_parallel: bool
    overlap: bool
    """--overlap-grad-reduce"""
    seed: int
    """Of the cuts, of what "mixed" recomputes, and of widths."""
    wide: bool = False
    """Packs are run by several ranks together."""

    def plan(self, chain: tuple[str, ...], ranks: int) -> Plan:
        """The plan of this case: cuts drawn anywhere in the chain, none twice."""
        generator = random.Random(self.seed)
        stages = ranks * self.chunks
        edges = (0, *sorted(generator.sample(range(1, len(chain)), stages - 1)), len(chain))
        return Plan(
            chain=chain,
            stages=tuple(self._stage(chain, *slice_, generator) for slice_ in pairwise(edges)),
            num_microbatches=1,
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=self.chunks,
            schedule=self.schedule,
            trained=Trained(tuple(PARTS), 3, self.question.adapted)
            if self.question.adapted
            else Trained(self.question.freeze),
        )

    def lists(self, plan: Plan, microbatches: int) -> Schedule | None:
        """Lists built for costs drawn at random, where the schedule has lists of its own."""
        if self.schedule not in BUILT or microbatches == 0:
            return None
        costs = np.random.default_rng(self.seed).uniform(0.1, 1.0, (len(KINDS), 6))
        made = make_profile(costs={k: LayerCost(*c) for k, c in zip(KINDS, costs, strict=True)})
        further = {size: 1 for size in sizes_of(plan.chain) if size not in made.budgets}
        profile = replace(made, chain=plan.chain, budgets={**made.budgets, **further})
        ranks, chunks = plan.pipeline_model_parallel_size, plan.virtual_pipeline_model_parallel_size
        problem = LayoutProblem(profile, ranks, microbatches, chunks, self.schedule)
        layout = Layout((0, *(stage.layers[1] for stage in plan.stages)), ((),) * len(plan.stages))
        return build_lists(problem, layout, seconds=0.05, seed=self.seed % 1000, movable=False)[0].lists

    def _stage(self, chain: tuple[str, ...], first: int, end: int, generator: random.Random) -> StagePlan:
        layers = [layer for layer in range(first, end) if chain[layer] in RECOMPUTABLE_KINDS]
        ways = dict.fromkeys(layers, self.recompute)
        if self.recompute == "mixed":
            ways = {layer: generator.choice(RECOMPUTE[:-1]) for layer in layers}
        return StagePlan(
            (first, end),
            tuple(layer for layer in layers if ways[layer] == "full"),
            tuple(layer for layer in layers if ways[layer] == "cheap"),
        )


@dataclass(frozen=True)
class Launch:
    """One start of torchrun: its ranks, and the cases it runs through."""

    ranks: int
    tensor: int
    pipeline: int
    seed: int
    count: int
    questions: int = 24
    """How many different ones are asked; launches that ask as many share the answers."""
    server: str = PLAIN
    """The machine: with Transformer Engine, or without."""
    experts: int = 1
    """Ranks that the experts of a layer are dealt over."""
    dealt: int = 0
    """Cases more, of models with experts alone."""
    adapted: int = 0
    """Cases more, in which adapters are trained."""
    layerless: int = 0
    """Cases more, of the model without a ViT."""
    hearing: int = 0
    """Cases more, of models that hear."""
    filming: int = 0
    """Cases more, of the model whose videos have an encoder."""
    wide: bool = False
    """Packs are run by several ranks together; the models are all there are."""
    is_long: bool = False
    """Run by `scripts/test.sh --long` alone: others have its kinds of parallelism, on as many ranks or more."""

    def cases(self) -> list[Case]:
        """Cases in which every value of every dimension comes up about equally often."""
        generator, questions = (
            random.Random(self.seed),
            Question.draw(self.questions, seed=0, models=(*MODELS, "mixture") if self.wide else MODELS),
        )
        dealt = [question for question in questions if question.model in ("experts", "gemma_4_moe", "glm")]
        adapted = Question.draw_adapted(self.questions, seed=0)
        return [
            *self._drawn(questions, self.count, generator),
            *(self._drawn(dealt, self.dealt, generator) if self.dealt else ()),
            *self._drawn(adapted, self.adapted, generator),
            *self._drawn(Question.draw(12, seed=0, models=(LAYERLESS,)), self.layerless, generator),
            *self._drawn(
                [*Question.draw(8, seed=0, models=HEARING), *Question.draw_adapted(4, seed=0, models=HEARING)],
                self.hearing,
                generator,
            ),
            *self._drawn(
                [*Question.draw(8, seed=0, models=FILMING), *Question.draw_adapted(4, seed=0, models=FILMING)],
                self.filming,
                generator,
            ),
        ]

    def _drawn(self, questions: Sequence[Question], count: int, generator: random.Random) -> list[Case]:
        dimensions = (
            questions, SCHEDULES if self.pipeline > 1 else (("1f1b", 1), ("zb_h1", 1)), RECOMPUTE,
            (False, True) if self.tensor > 1 else (False,), (False, True),
        )  # fmt: skip
        columns = (spread(values, count, generator) for values in dimensions)
        return [
            Case(
                question, *schedule, recompute, share or has_to_share(question, self.tensor), overlap,
                generator.randrange(2**31), self.wide,
            )
            for question, schedule, recompute, share, overlap in zip(*columns, strict=True)
        ]  # fmt: skip


LAUNCHES = {
    "one rank": Launch(1, 1, 1, seed=0, count=5, adapted=2),
    "pipeline": Launch(2, 1, 2, seed=175, count=8, adapted=3, layerless=2, hearing=3, filming=3),
    "tensor": Launch(2, 2, 1, seed=5, count=10, adapted=4, is_long=True),
    "data": Launch(2, 1, 1, seed=3, count=10, experts=2, dealt=3, is_long=True),
    "tensor and pipeline": Launch(4, 2, 2, seed=4, count=4, adapted=2, layerless=1, hearing=2, filming=2),
    "data and pipeline": Launch(4, 1, 2, seed=143, count=16, experts=2, dealt=5, adapted=6, hearing=8, is_long=True),
    "long pipeline": Launch(4, 1, 4, seed=167, count=16, hearing=12, is_long=True),
    "data and tensor": Launch(4, 2, 1, seed=7, count=3, experts=4, dealt=2),
    "Transformer Engine": Launch(4, 2, 2, seed=8, count=4, server=ENGINE, adapted=1),
}
STRICT = {
    "two ranks": Launch(2, 1, 2, seed=21, count=16, layerless=4, is_long=True),
    "three ranks": Launch(3, 1, 3, seed=22, count=16, is_long=True),
    "four ranks": Launch(4, 1, 4, seed=23, count=16, hearing=2, filming=2),
    "two pipelines": Launch(4, 1, 2, seed=25, count=16, experts=2, dealt=3, is_long=True),
    "pipelines of two": Launch(4, 2, 2, seed=20, count=16, is_long=True),
    "teams": Launch(4, 1, 2, seed=34, count=16, experts=2, dealt=2, wide=True),
}
"""Launches over a strict transport."""
TEAMS = {
    "teams": Launch(4, 1, 1, seed=31, count=9, experts=2, dealt=2, wide=True),
    "teams and pipeline": Launch(4, 1, 2, seed=32, count=18, adapted=4, layerless=4, wide=True, is_long=True),
    "teams and tensor": Launch(4, 2, 1, seed=33, count=4, wide=True),
}
"""Launches whose packs are run by several ranks together."""
TRAINING = {
    "pipeline": Launch(2, 1, 2, seed=11, count=5, questions=8, is_long=True),
    "tensor": Launch(2, 2, 1, seed=12, count=3, questions=8, is_long=True),
    "data": Launch(2, 1, 1, seed=22, count=3, questions=8, experts=2, dealt=2, adapted=2),
    "data and pipeline": Launch(4, 1, 2, seed=22, count=4, questions=8, adapted=1, hearing=2, filming=1),
    "data in teams": Launch(4, 1, 2, seed=24, count=4, questions=8, wide=True),
}
"""Launches that take optimizer steps."""
LAUNCHES |= {
    f"{name}, more": replace(one, seed=one.seed + 200, count=4 * one.count, hearing=2 * one.hearing, is_long=True)
    for name, one in LAUNCHES.items()
    if not one.is_long
}


def compile_lists() -> None:
    """Have numba compile what builds lists, and keep it: else every rank compiles it, all at the same time."""
    case = Case(Question.draw(1, seed=0)[0], "zb_auto", 1, "none", False, False, 0)
    case.lists(case.plan(layer_chain(1, 1), 2), 2)


def questions(is_long: bool) -> set[Question]:
    """What launches ask: all of them, or those of the short suite."""
    launches = (*LAUNCHES.values(), *STRICT.values(), *TEAMS.values())
    return {case.question for launch in launches if is_long or not launch.is_long for case in launch.cases()}
