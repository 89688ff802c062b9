"""Evaluation is what the held-out packs say: whole, at an interval that makes sense, or refused in one line."""

from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from megatron.vlm.evaluation import set_evaluation
from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("packs")
    corpus = Corpus.of(Sizes.from_arrays(np.ones(25, int), np.full(25, 90)))
    options = PackOptions(vit_budget=4, llm_budget=100, micro_batches=2, data_parallel_size=2)
    build_index(corpus, folder / "packs", options, {})
    return str(folder / "packs")


def arguments(**values: Any) -> Namespace:
    """What Megatron's own check leaves of a run of 1,000 iterations on 2 data-parallel ranks."""
    usual = {"eval_data": "D", "eval_iters": None, "eval_interval": None, "eval_global_batch_size": 8}
    run = {"train_iters": 1000, "train_samples": None, "global_batch_size": 8, "data_parallel_size": 2}
    return Namespace(**{**usual, **run, **values})


@pytest.mark.parametrize(("ranks", "batch", "iterations"), [(1, 4, 7), (2, 4, 7), (3, 6, 5), (8, 8, 4)])
def test_an_evaluation_is_a_whole_pass_whatever_the_ranks(packs: str, ranks: int, batch: int, iterations: int) -> None:
    args = arguments(eval_packs=packs, data_parallel_size=ranks)
    set_evaluation(args)
    assert (args.eval_iters, args.eval_global_batch_size) == (iterations, batch)


@pytest.mark.parametrize(("given", "interval"), [({}, 100), ({"eval_interval": 30}, 30), ({"train_iters": 4}, 1),
                                                 ({"train_iters": None, "train_samples": 1600}, 20)])  # fmt: skip
def test_the_interval_is_obeyed_or_a_tenth_of_the_run(packs: str, given: dict[str, int], interval: int) -> None:
    args = arguments(eval_packs=packs, **given)
    set_evaluation(args)
    assert args.eval_interval == interval


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eval_data": None}, "--eval-packs .* without --eval-data"),
        ({"eval_packs": None}, "--eval-data D without --eval-packs"),
        ({"eval_packs": "/nowhere"}, "/nowhere.*omnibal pack"),
    ],
)
def test_what_is_no_whole_pass_is_refused(packs: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        set_evaluation(arguments(**{"eval_packs": packs, **given}))


def test_without_held_out_data_nothing_is_evaluated() -> None:
    args = arguments(eval_data=None, eval_packs=None)
    set_evaluation(args)
    assert args.eval_iters == 0
    assert args.eval_interval > args.train_iters
