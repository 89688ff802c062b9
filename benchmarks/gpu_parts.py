"""What `benchmarks/gpu.py` needs processes of their own for; each prints one RESULT line.

python -m benchmarks.gpu_parts expected FOLDER                  what the CPU answers, made meanwhile
python -m benchmarks.gpu_parts packs MODEL VIT_BUDGET LLM_BUDGET COUNT FOLDER      and packs of samples
python -m benchmarks.gpu_parts pipeline FOLDER                  on two ranks, which may share a device
python -m benchmarks.gpu_parts queues                           by CUDA_DEVICE_MAX_CONNECTIONS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import benchmarks.bare  # noqa: F401 (before what may be missing)
import megatron.vlm  # noqa: F401 (readies the machine, before megatron.core is imported)
from megatron.vlm import platform

EXPECTED, PACKS = "expected.pt", "packs.json"


def expected(folder: str) -> bool:
    """What the small chain answers on the CPU, into a folder."""
    from benchmarks.gpu_answers import answers

    torch.save(vars(answers([], None)), Path(folder) / EXPECTED)
    return True


def packs(model: str, vit: str, llm: str, count: str, folder: str) -> bool:
    """Packs of samples, into a folder."""
    from benchmarks.gpu_packs import make_packs
    from omnibal_ext.architectures.presets import preset

    made = make_packs(preset(model), (int(vit), int(llm)), int(count))
    (Path(folder) / PACKS).write_text(json.dumps(made))
    return True


def pipeline(folder: str) -> dict[str, float]:
    """Two ranks: the largest difference from one, by schedule."""
    from benchmarks.gpu_answers import Answers
    from benchmarks.gpu_answers import pipeline as run

    return run(Answers.load(Path(folder) / EXPECTED))


def queues() -> dict[str, float]:
    """A kernel beside one that waits."""
    from benchmarks.gpu_probes import queues as run

    return run()


def main() -> None:
    platform.take_device()
    part = {each.__name__: each for each in (expected, packs, pipeline, queues)}[sys.argv[1]]
    result: Any = part(*sys.argv[2:])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps(result))
    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
