"""Flags of the trainer that omnibal launch takes too and forwards: all of ours, and the most used of Megatron's.

`megatron.vlm.arguments` adds ours to the trainer from here; Megatron declares its own, and here is the launcher's help.
"""

from argparse import ArgumentParser, _ArgumentGroup
from collections.abc import Callable

from omnibal_ext import adapters
from omnibal_ext.costs.states import add_state_flags
from omnibal_ext.flags import Interval
from omnibal_ext.reading.stores import store_named

Group = ArgumentParser | _ArgumentGroup
PARTS_WITH_RATES = ("vit", "projector")
"""Parts with flags for their learning rate and weight decay; the language model has the run's."""
RATES = tuple(f"lr_{part}" for part in PARTS_WITH_RATES)
DECAYS = tuple(f"weight_decay_{part}" for part in PARTS_WITH_RATES)

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def _add_trained(group: Group) -> None:
    adapters.add_trained_flags(group)
    group.add_argument(
        "--lora-alpha", type=float, metavar="A", help="what adapters give is scaled by A / R (default: twice the rank)"
    )


def _add_rates(group: Group) -> None:
    add = group.add_argument
    for part in PARTS_WITH_RATES:
        add(f"--lr-{part}", type=float, metavar="RATE", help=f"learning rate of the {part}, not --lr")
        add(f"--weight-decay-{part}", type=float, metavar="W", help=f"weight decay of the {part}, not --weight-decay")
    add(
        "--loss-reduction",
        default="token",
        choices=("token", "square", "sample"),
        help="mean over the global batch's tokens, over its samples, or square-root weighting between (InternVL)",
    )


def _add_stores(group: Group) -> None:
    said = "object stores in which a dataset's inputs and images may lie (omnibal launch: also those of --input)"
    group.add_argument("--stores", type=store_named, action="extend", nargs="+", metavar="SCHEME://BUCKET", help=said)


def _add_cache(group: Group) -> None:
    group.add_argument(
        "--cache-tiles", metavar="DIR", help="keep decoded and resized images on a local disk, for later epochs"
    )


def _add_tolerances(group: Group) -> None:
    add = group.add_argument
    add("--max-bad-samples", type=int, default=100, metavar="N", help="samples whose images may break while training")
    add("--no-image-checksums", dest="image_checksums", action="store_false", help="take changed images as they are")
    add("--max-bad-steps", type=int, default=5, metavar="N", help="steps in a row that may be not finite and left out")
    add("--trust", action="store_true", help="load checkpoints that have no checksums, or may run code when loaded")


def _add_records(group: Group) -> None:
    add = group.add_argument
    add("--metrics-file", help="append one JSON line an interval: balance, padding, rates")
    add(
        "--timelines", type=int, default=0, metavar="N",
        help="record what every rank does in N iterations, to timeline.jsonl next to --metrics-file",
    )  # fmt: skip


def _add_megatron(group: Group) -> None:
    add = group.add_argument
    add("--lr", type=float, metavar="RATE", help="learning rate")
    add("--min-lr", type=float, metavar="RATE", help="where it ends")
    add("--lr-decay-style", choices=DECAY_STYLES, metavar="STYLE", help=f"how it falls: {', '.join(DECAY_STYLES)}")
    add("--lr-warmup-iters", type=int, metavar="N", help="iterations over which it rises")
    add("--lr-warmup-fraction", type=float, metavar="SHARE", help="the same, as a share of the run")
    add("--weight-decay", type=float, metavar="W")
    add("--clip-grad", type=float, metavar="NORM", help="largest norm of gradients; 0: any")
    add("--train-iters", type=int, metavar="N", help="iterations in all, instead of --epochs")
    add("--save", metavar="FOLDER", help="where checkpoints go (default: RUN/checkpoints)")
    add("--save-interval", type=int, metavar="N", help="iterations between them")
    add("--save-retain-interval", type=int, metavar="N", help="keep those at multiples of it, and the last")
    add("--eval-interval", type=int, metavar="N", help="iterations between evaluations")
    add("--log-interval", type=int, metavar="N", help="iterations between lines of the log")
    add("--num-workers", type=int, metavar="N", help="processes of a rank that read ahead")
    add("--seed", type=int, metavar="N")
    add("--bf16", action="store_true", help="train in bfloat16")
    add("--fp16", action="store_true", help="train in half precision, with a scaled loss")
    add("--use-distributed-optimizer", action="store_true", help="data-parallel ranks share its state")
    add_state_flags(add)
    add("--sequence-parallel", action="store_true", help="tensor-parallel ranks share what is between matrices")


TRAINER_FLAGS: dict[str, Callable[[Group], None]] = {
    "what is trained": _add_trained,
    "rates of parts, and the loss": _add_rates,
    "where images may lie": _add_stores,
    "what is kept of images": _add_cache,
    "what may go wrong": _add_tolerances,
    "what is recorded": _add_records,
}
"""Our flags by title of their group."""
FORWARDED_FLAGS = {**TRAINER_FLAGS, "of Megatron's, those that most runs give (all others: behind --)": _add_megatron}
"""The flags that the launcher forwards to the trainer, by title of their group."""
OWN_NUMBERS = (
    *adapters.NUMBERS,
    Interval("(0, 1e30]", "lora_alpha"),
    Interval("[0, 1e30]", " ".join((*RATES, *DECAYS))),
    Interval("[0, inf)", "max_bad_samples max_bad_steps timelines"),
)
MEGATRON_NUMBERS = (
    Interval("[0, 1e30]", "lr min_lr weight_decay clip_grad"),  # products of a few are numbers in single precision
    Interval("[0, inf)", "lr_warmup_iters"),
    Interval("[0, 1)", "lr_warmup_fraction"),
    Interval("[1, inf)", "train_iters save_interval save_retain_interval eval_interval log_interval"),
    Interval("[0, 128]", "num_workers"),  # processes of a rank
    Interval("[1, 2147483647]", "seed"),
)
NUMBERS = (*OWN_NUMBERS, *MEGATRON_NUMBERS)
