"""Run on two ranks: inside `single_process` one of them raises while the other waits for it.

raises.py WHERE    "collective": the other rank is in a collective; "end": it is done
"""

import os
import sys

import torch

from megatron.vlm.single import single_process


def main() -> None:
    where = sys.argv[1]
    with single_process("tiny", []):
        if os.environ["RANK"] == "1":
            raise ValueError("rank 1 has no weights")
        if where == "collective":
            torch.distributed.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    main()
