"""Checks a plan's replicated vision tower: one that every rank has, outside of the pipeline's stages."""

from argparse import Namespace

from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan

DROPOUTS = ("hidden_dropout", "attention_dropout")


def check_replicated_tower(args: Namespace, plan: Plan) -> str | None:
    """Which ranks encode, for the table of checks; None if the tower is cut into stages.

    Raises UserError for dropout if several ranks encode one microbatch: their masks would differ from one rank's.
    (Drop path is drawn for the entire pack on every rank.)
    """
    tower = plan.tower
    if tower is None:
        return None
    ranks = [len(encoders) * args.tensor_model_parallel_size for encoders in tower.parts]
    for name in DROPOUTS:
        if vars(args)[name] and max(ranks) > 1:
            raise UserError(
                f"--{name.replace('_', '-')} {vars(args)[name]:g}: {max(ranks)} ranks encode microbatch "
                f"{ranks.index(max(ranks))} together, and their dropout masks would differ from those of one "
                "rank; plan with --tower cut, or leave dropout out"
            )
    return f"{tower.links} links, {tower.mode}; at most {max(ranks)} ranks encode a microbatch"
