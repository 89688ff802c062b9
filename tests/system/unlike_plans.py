"""Run under torchrun: the trainer on ranks each of which was given a plan of its own.

unlike_plans.py PLAN_OF_RANK_0 PLAN_OF_RANK_1 <arguments of megatron.vlm.pretrain>
"""

import os
import sys

from megatron.vlm import pretrain
from megatron.vlm.ending import run_rank


def main() -> None:
    plans, flags = sys.argv[1:3], sys.argv[3:]
    sys.argv[1:] = [*flags, "--plan", plans[int(os.environ["RANK"])]]
    run_rank(pretrain.main)


if __name__ == "__main__":
    main()
