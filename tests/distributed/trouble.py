"""Run on two ranks: rank 1 ends as asked, rank 0 sleeps."""

import os
import signal
import sys
import time


def main() -> None:
    how, rank = sys.argv[1], os.environ["RANK"]
    if how == "well":
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
    elif rank == "0" or how == "hang":
        time.sleep(1000)
    elif how == "raise":
        raise ValueError("rank 1 is at fault")
    else:
        os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    main()
