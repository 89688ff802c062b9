"""Does a run go with the vision tower beside the pipeline, where its plan has one there?"""

from argparse import Namespace

from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan

DROPOUTS = ("hidden_dropout", "attention_dropout")


def check_beside(args: Namespace, plan: Plan) -> str | None:
    """Who encodes, for the table of checks; None where the chain is cut.

    Raises UserError for dropout where ranks share the images of a microbatch: each would draw masks of its own part,
    and a cut draws those of the whole. (Drop path is drawn for whole packs, wherever their tiles are.)
    """
    tower = plan.tower
    if tower is None:
        return None
    shares = [len(ranks) * args.tensor_model_parallel_size for ranks in tower.parts]
    for name in DROPOUTS:
        if vars(args)[name] and max(shares) > 1:
            raise UserError(
                f"--{name.replace('_', '-')} {vars(args)[name]:g}: {max(shares)} ranks encode microbatch "
                f"{shares.index(max(shares))} together, beside the pipeline, and would drop out other numbers than a "
                "cut of the chain; plan with --tower cut, or leave dropout out"
            )
    return f"{tower.links} links, {tower.mode}; at most {max(shares)} ranks encode a microbatch"
