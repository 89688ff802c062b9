"""example.py NAME [argument...]: a program of examples/ runs as `tests/system/example.py` runs it, and is looked at.

Prints one line COMPUTED: the backends that were asked for, with the device that each is bound to, and of all linear
layers the devices of weights and of inputs, and the types of weights and of outputs.
"""

import json
import runpy
from typing import Any

import torch
from cards import machine

seen: dict[str, set[str]] = {"weights": set(), "inputs": set(), "stored": set(), "outputs": set()}


def look(layer: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Note where a layer has computed, and in what."""
    if isinstance(layer, torch.nn.Linear):
        seen["weights"].add(str(layer.weight.device))
        seen["inputs"].add(str(inputs[0].device))
        seen["stored"].add(str(layer.weight.dtype))
        seen["outputs"].add(str(output.dtype))


if __name__ == "__main__":
    torch.nn.modules.module.register_module_forward_hook(look)
    try:
        runpy.run_module("tests.system.example", run_name="__main__", alter_sys=True)
    finally:
        found = {name: sorted(values) for name, values in seen.items()}
        print("COMPUTED " + json.dumps({**found, "backend": machine.backends.asked}), flush=True)
