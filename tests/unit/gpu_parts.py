"""Parts of `benchmarks/gpu.py` one after the other in this process, on the device that it has: gpu_parts.py FOLDER OUT.

FOLDER has the CPU's answers. Prints one RESULT line: what was found, and what was said of parts that went wrong.
"""

import json
import sys
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import gpu, gpu_layers, gpu_packs, gpu_probes, gpu_trace, gpu_training, gpu_ways
from benchmarks.gpu_parts import PACKS
from megatron.vlm import platform
from megatron.vlm.profiling import stopwatch
from omnibal_ext.architectures.presets import preset

NEED_CUDA = ("start", "host", "attention", "waits", "linear")
ALONE = ("pipeline", "queues")
"""In processes of their own."""


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    size = gpu.SHORT
    gpu_probes.HOST_TILES, gpu_probes.HOST_TOKENS = size.budgets
    gpu_ways.MASKED = (2, 16, 40)
    # Nobody looks at seconds here, and `tests/unit/traced.py` traces and counts.
    gpu_layers.CALLS = gpu_layers.ROUNDS = gpu_ways.ROUNDS = gpu_trace.ITERATIONS = 1
    stopwatch.WARM_UP, gpu_probes.SEGMENTS = 0, (1, 20)
    gpu_trace.counted = lambda *_: {}  # type: ignore[assignment]
    (folder / PACKS).write_text(json.dumps(gpu_packs.make_packs(preset(size.model), size.budgets, size.packs)))
    done: Future[Any] = Future()
    done.set_result(True)
    known = {"device": platform.device_name(), "model": size.model, "budgets": size.budgets, "packs": size.packs}
    known |= {"adapted": size.adapted, "versions": gpu.installed()}
    verdict = gpu.Verdict(size, inf, folder, known, aside={"expected": done, "packs": done})
    if not platform.HAS_CUDA:
        gpu_training.AS_TRAINED = ("--bf16", "--use-distributed-optimizer")
    parts = tuple(part for part in gpu.PARTS if part not in (ALONE if platform.HAS_CUDA else (*ALONE, *NEED_CUDA)))
    said = list(gpu.run_all(verdict, out / "result.json", parts))
    print("RESULT " + json.dumps({**verdict.found, "differences": verdict.differences, "said": said}))


if __name__ == "__main__":
    main()
