"""A trace of the trainer on small packs, and sums of it made another way: traced.py FOLDER. Prints one RESULT line.

The other way reads the file that the profiler writes: of each thread, in how many seconds any operator ran.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import gpu_packs, gpu_trace, gpu_training
from omnibal_ext.architectures.presets import preset

MODEL, BUDGETS, PACKS = "tiny", (6, 96), 2


def main() -> None:
    folder = Path(sys.argv[1])
    gpu_training.AS_TRAINED = ("--bf16", "--use-distributed-optimizer")
    packs = gpu_packs.make_packs(preset(MODEL), BUDGETS, PACKS)[:PACKS]
    (folder / "packs.json").write_text(json.dumps(packs))
    traced = gpu_trace.traced(MODEL, packs, PACKS, folder / "run")
    trace, profiler = traced.trace, traced.profile
    asked = gpu_trace.counted(MODEL, folder / "packs.json", PACKS, 600)
    reach = gpu_trace.Reach.of("NVIDIA H200", traced.attention)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    launched = Counter(f"{name}: {kernel.name}" for name, kernel in trace.named())
    found = {
        "counted": {" ".join(group): figures for group, figures in asked.items()},
        "rows": gpu_trace.rows(trace, asked, PACKS, reach), "packs": trace.packs, "seconds": trace.seconds,
        "operators": sum(kernel.seconds for kernel in trace.kernels), "spans": spans(events),
        "launched": launched, "shapes": trace.shapes, "tiles": [sum(tiles for tiles, _ in pack) for pack in packs],
        "lengths": [tokens for pack in packs for _, tokens in pack], "reach": asdict(reach),
        "untraced": traced.untraced, "attention": traced.attention,
    }  # fmt: skip
    print("RESULT " + json.dumps(found))


def spans(events: list[dict[str, Any]]) -> float:
    """Seconds in which an operator ran, over all threads."""
    total = 0.0
    for thread in {event.get("tid") for event in events}:
        end = 0.0
        own = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread]
        for start, until in sorted(own):
            total += max(0.0, until - max(start, end))
            end = max(end, until)
    return total / 1e6


if __name__ == "__main__":
    main()
