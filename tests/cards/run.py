"""run.py PROGRAM [argument...]: a module or file runs with cards, as `python -m` would run it.

Prints, however it ends, one line WAITS with what its host has waited for and how often.
"""

import json
import runpy
import sys
from collections import Counter

from cards import machine


def main() -> None:
    program, *arguments = sys.argv[1:]
    cards = machine.power_on()
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        print("WAITS " + json.dumps(Counter(cards.waits)), flush=True)


if __name__ == "__main__":
    main()
