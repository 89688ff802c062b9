"""What a machine is taken for: optional accelerators count where they can be used, and not where they cannot."""

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm import core_patches, platform
from tests.programs import ROOT, fresh_python

ASK = """
import megatron.vlm
from megatron.core import optimizer
print(optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam.__module__)
"""


@pytest.mark.starts
def test_an_apex_without_kernels_is_not_used(tmp_path: Path) -> None:
    """It can be imported, and Megatron would take its optimizer, which raises when it is built."""
    (tmp_path / "apex/optimizers").mkdir(parents=True)
    (tmp_path / "apex/__init__.py").touch()
    kernels = "class FusedAdam:\n    def __init__(self, *_, **__): raise RuntimeError('requires cuda extensions')\n"
    (tmp_path / "apex/optimizers/__init__.py").write_text(kernels + "FusedSGD = FusedAdam\n")
    done = fresh_python("-W", "ignore", "-c", ASK, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.stdout.split() == ["True", "torch.optim.adamw"]


NO_LIBRARY = "Could not find shared object file for Transformer Engine torch lib."
ASK_ENGINE = """
import os
import torch
from torch.utils._python_dispatch import TorchDispatchMode
torch.cuda.is_available = lambda: {cuda}
from megatron.vlm import core_patches, optional, platform
from megatron.core.extensions.transformer_engine import HAVE_TE
print(HAVE_TE, platform.HAS_TRANSFORMER_ENGINE, platform.HAS_FLASH_ATTENTION, sorted(optional.UNUSABLE.items()))
print(os.environ.get("TORCHDYNAMO_DISABLE") == "1", torch.compile.__module__)
"""


@pytest.mark.starts
@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (True, "False False False [('flash_attn', 'undefined symbol: _ZN3c104cuda'), "
               f"('transformer_engine.pytorch', {NO_LIBRARY!r})]"),
        (False, "False False False []"),
    ],
)  # fmt: skip
def test_packages_that_cannot_be_imported_are_not_used(
    cuda: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed without their kernels, or for another torch: errors are of any kind, and Megatron dies of some."""
    lines = {
        "transformer_engine": f"raise FileNotFoundError({NO_LIBRARY!r})",
        "flash_attn": "raise ImportError('undefined symbol:\\n_ZN3c104cuda')",
    }
    for package, line in lines.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(line + "\n")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    done = fresh_python("-W", "ignore", "-c", ASK_ENGINE.format(cuda=cuda), PYTHONPATH=f"{ROOT}:{tmp_path}")
    engine, compiler_off = done.stdout.splitlines()
    assert engine == said, done.stderr[-2000:]
    by = "megatron.vlm.compiling" if cuda else "torch"
    assert compiler_off == f"{not cuda} {by}", "small functions are fused where there is a GPU, for all packs at once"


ASK_QUEUES = """
import importlib, json, os, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
cases, found = json.loads(sys.argv[1]), []
sys.argv = ["-m"]
from megatron.vlm import core_patches, platform
torch.cuda.is_available = lambda: bool(found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
for words, by_user in cases:
    sys.argv = ["-m", *words]
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": by_user} if by_user else {})
    importlib.reload(platform)
print(json.dumps(found))
"""
ONE, FOUR = ["--bf16", "--tensor-model-parallel-size", "1"], ["--tensor-model-parallel-size", "4", "--bf16"]
QUEUES: list[tuple[list[str], str | None, str | None]] = [
    ([], None, None), (ONE, None, None), (FOUR, None, "1"), (["--tensor-model-parallel-size=2"], None, "1"),
    (FOUR, "8", "8"), (ONE, "1", "1"),
]  # fmt: skip
"""The command line, what the user has set, and what CUDA is to find."""


@pytest.mark.starts
def test_a_device_has_one_queue_under_tensor_parallelism_alone() -> None:
    """When CUDA is first asked for, which is when it starts; what the user has set stays."""
    cases = json.dumps([case[:2] for case in QUEUES])
    done = fresh_python("-W", "ignore", "-c", ASK_QUEUES, cases)
    assert json.loads(done.stdout) == [wanted for *_, wanted in QUEUES]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_hosts_talk_while_devices_compute(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the default group where that is the hosts' already, and never without end."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **how: made.append(how) or how)
    group = platform.host_group(timedelta(minutes=3))
    assert (group is None) == (backend == "gloo") == (not made)
    assert all((how["backend"], how["timeout"]) == ("gloo", timedelta(minutes=3)) for how in made)
    assert not any(how.get("ranks") for how in made), "all ranks"


@pytest.mark.parametrize("seed", range(3))
def test_the_norm_of_gradients_is_core_s_and_asks_no_host(seed: int) -> None:
    """Bit for bit; one number, on the device, of any number of gradients."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    core_patches.patch_gradient_norm()
    ours = clip_grads.l2_norm_impl
    assert ours is not utils.local_multi_tensor_l2_norm
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator) * 10**seed for size in ((7, 5), (1,), (300, 40), (0, 3))]
    wanted, _ = utils.local_multi_tensor_l2_norm(1, None, [gradients], False)
    found, _ = ours(1, None, [gradients], False)
    assert torch.equal(found, wanted)
    with Waits() as waits:
        ours(1, None, [gradients], False)
    assert waits.number == 0


class Waits(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_that_is_ready_to_load_a_state_steps_as_it_would(momentum: float) -> None:
    """Core asks it to make the state that it starts from, and has no way for SGD."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    core_patches.patch_momentum()
    ends = []
    for asked in (False, True):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        sgd = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        optimizer = FP32Optimizer(sgd, OptimizerConfig(), None)
        if asked:
            optimizer.init_state_fn(sgd, optimizer.config)
            assert bool(sgd.state[weight]) == bool(momentum)
        for _ in range(3):
            weight.grad = 2 * weight.detach()
            sgd.step()
        ends.append(weight.tolist())
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="cuda"), lambda: torch.tensor([1.0], device=torch.device("cuda", 0)),
        lambda: torch.zeros_like(torch.ones(2), device="cuda"), lambda: torch.ones(2).new_empty(3, device="cuda:0"),
        lambda: torch.ones(2).to("cuda"), lambda: torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
        lambda: torch.ones(2).cuda(), lambda: torch.nn.Linear(2, 2).to("cuda").weight,
    ],
)  # fmt: skip
def test_what_asks_for_cuda_is_on_the_cpu(make: Callable[[], torch.Tensor]) -> None:
    """And what asks for another device is there."""
    assert make().device.type == "cpu"
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    with torch.device("meta"):
        assert torch.empty(2).device.type == torch.ones(3).new_zeros(3).device.type == "meta"
        assert torch.empty(2, device="cuda").device.type == "cpu"


def _counted(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_what_other_packages_compile_by_torch_jit_calls_the_operators() -> None:
    with warnings.catch_warnings(action="ignore"):  # of torch's own that it is deprecated
        assert torch.jit.script(_counted)(3).tolist() == [0, 1, 2]


BUILT_FOR_CUDA = """
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
from megatron.vlm import core_patches, platform
asked = torch.accelerator
print(asked.current_accelerator(), asked.current_accelerator(True), asked.is_available(), asked.device_count())
for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer([weight]).step()
    assert (weight < 1).all()
assert len(list(DataLoader(range(4), batch_size=2, pin_memory=True))) == 2
value = torch.ones(3, requires_grad=True)
for reentrant in (True, False):
    checkpoint(lambda x: torch.nn.functional.dropout(x), value, use_reentrant=reentrant).sum().backward()
with torch.random.fork_rng():
    torch.manual_seed(1)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.barrier()
torch.distributed.all_gather_object([None], 1)
torch.distributed.destroy_process_group()  # whose threads would outlive the interpreter now and then
print(torch.get_device_module().__name__, torch.cuda.is_available())
"""


@pytest.mark.starts
def test_a_build_for_cuda_knows_that_there_is_no_driver() -> None:
    """PyPI's torch says that it was built for CUDA, and takes our stand-ins for a device that is there."""
    done = fresh_python("-W", "ignore", "-c", BUILT_FOR_CUDA)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["None", "None", "False", "0", "torch.cpu", "True"]
