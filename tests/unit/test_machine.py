"""The answers of machines that no other test stands on: with Apex, with flash-attn, newer than Hopper, of any name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.optimizer import clip_grads, distrib_optimizer

from benchmarks import gpu
from megatron.vlm import core_patches, optional, platform
from megatron.vlm.models.mixture.groups import weight_gradient
from megatron.vlm.preflight import machine
from megatron.vlm.preflight.findings import Note
from omnibal_ext.architectures.presets import TINY
from tests.programs import behind_torch

GIB = 2**30


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process takes its machine for one with GPUs."""
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    return monkeypatch


class Event:
    """Of a device that is a step behind its host."""

    waited = 0

    def record(self) -> None: ...

    def synchronize(self) -> None:
        Event.waited += 1


def test_what_is_read_from_a_device_is_waited_for_where_it_is_needed(cuda: pytest.MonkeyPatch) -> None:
    """And not before: the host goes on meanwhile."""
    cuda.setattr(torch.cuda, "Event", Event)
    cuda.setattr(Event, "waited", 0)
    reading = platform.Reading(torch.tensor([[1, 2], [3, 4]]))
    assert (Event.waited, reading.numbers(), Event.waited) == (0, [[1, 2], [3, 4]], 1)


def test_a_gpu_s_memory_is_its_own(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "memory_allocated", lambda: 7)
    cuda.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    assert (platform.allocated_bytes(), platform.device_memory()) == (7, 80 * GIB)


@pytest.mark.parametrize(("save", "available", "enough"), [("here", 11, False), ("here", 12, True), ("", 1, True)])
def test_a_host_of_gpus_has_room_for_a_save_alone(
    cuda: pytest.MonkeyPatch, save: str, available: int, enough: bool
) -> None:
    cuda.setenv("LOCAL_WORLD_SIZE", "4")
    cuda.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=available * GIB))
    args: Any = SimpleNamespace(save=save, world_size=16)
    assert isinstance(machine.check_host_memory(args, TINY, 48 * GIB - 16 * (available == 12)), Note) == (not enough)


@pytest.mark.parametrize(
    ("capability", "left_out"), [((8, 0), False), ((9, 0), False), ((10, 0), True), ((12, 1), True)]
)
def test_empty_groups_are_filled_behind_hopper(
    cuda: pytest.MonkeyPatch, capability: tuple[int, int], left_out: bool
) -> None:
    cuda.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert platform.empty_groups_are_left_out() == left_out


@pytest.mark.parametrize(("capability", "there"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_float8_is_multiplied_from_ada_on(cuda: pytest.MonkeyPatch, capability: tuple[int, int], there: bool) -> None:
    cuda.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert platform.multiplies_float8() == there
    cuda.setattr(platform, "HAS_CUDA", False)
    assert not platform.multiplies_float8()


def test_an_empty_group_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the product leaves there is not looked at."""
    rows, grad, ends = torch.randn(5, 8), torch.randn(5, 4), torch.tensor([2, 2, 5, 5], dtype=torch.int32)
    wanted = weight_gradient(rows, grad, ends)

    def leaves_out(*arguments: Any, **how: Any) -> torch.Tensor:
        found = wanted.clone()
        found[[1, 3]] = torch.nan
        return found

    monkeypatch.setattr("megatron.vlm.models.mixture.groups.grouped_mm", leaves_out)
    monkeypatch.setattr(platform, "empty_groups_are_left_out", lambda: True)
    found = weight_gradient(rows, grad, ends)
    assert torch.equal(found, wanted)
    assert not found[[1, 3]].any()


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("adds_in_fp32", [False, True])
@pytest.mark.parametrize(
    ("dtype", "total"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_a_product_is_added_in_the_precision_of_the_sum(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, adds_in_fp32: bool, dtype: torch.dtype, total: torch.dtype
) -> None:
    """To half of the sum's last bit, but where torch has no such product: there to the last of the factors."""
    really = torch.addmm

    def of_cuda(sum: torch.Tensor, *factors: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        assert out is sum
        really(sum, *(factor.to(out_dtype) for factor in factors), out=out)

    monkeypatch.setattr(torch, "addmm", of_cuda)
    monkeypatch.setattr(platform, "HAS_CUDA", cuda)
    monkeypatch.setattr(platform, "ADDS_IN_FP32", adds_in_fp32)
    generator = torch.Generator().manual_seed(3)
    grad, rows = (torch.randn(7, width, generator=generator).to(dtype) for width in (3, 5))
    found = torch.randn(3, 5, generator=generator).to(total)
    wanted = found.double() + grad.double().t() @ rows.double()
    address = found.data_ptr()
    platform.add_product(found, grad.t(), rows)
    coarse = torch.bfloat16 if cuda and not adds_in_fp32 and dtype == torch.bfloat16 else total
    assert torch.allclose(found.double(), wanted, rtol=0, atol=2 * torch.finfo(coarse).eps * wanted.abs().max().item())
    assert (found.dtype, found.data_ptr()) == (total, address)


@pytest.mark.parametrize("apex", [False, True])
def test_softmax_is_fused_with_apex_alone(monkeypatch: pytest.MonkeyPatch, apex: bool) -> None:
    monkeypatch.setattr(platform, "HAS_APEX", apex)
    assert ("masked_softmax_fusion" in platform.megatron_defaults()) == (not apex), "a default with Apex"


def test_what_works_is_not_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for the norm, an optimizer that keeps its state, a start that finds what it compiles."""
    optimizer, norm = distrib_optimizer.DistributedOptimizer, object()
    before, compiles = optimizer.state_dict, object()
    monkeypatch.setattr(clip_grads, "l2_norm_impl", norm)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(dataset_utils, "compile_helpers", compiles)
    monkeypatch.setattr(optional, "installed", lambda _: False)
    for mend in (core_patches.patch_gradient_norm, core_patches.patch_distributed_optimizer, core_patches.patch_start):
        mend.__wrapped__()
    found = (clip_grads.l2_norm_impl, optimizer.state_dict, dataset_utils.compile_helpers)
    assert found == (norm, before, compiles)


ASK = """
import json, sys
from pathlib import Path
import torch
gpu = int((Path(sys.path[0]) / "gpu").read_text())
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (gpu, 0)
from megatron.vlm import core_patches, optional, platform
platform.prepare()
import apex, flash_attn
kernels = platform.HAS_FLASH_ATTENTION, platform.HAS_LINEAR_ATTENTION
print(json.dumps([*kernels, platform.HAS_APEX, apex.__name__, optional.UNUSABLE]))
"""


FUNCTIONS = {
    "flash_attn": "flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "dropout_p=0.0, softmax_scale=None, causal=False)",
    "fla/ops/gated_delta_rule": "chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=None, chunk_indices=None, **_)",
    "fla/modules/causal_conv1d": "causal_conv1d(x, weight, bias=None, cu_seqlens=None, chunk_indices=None)",
    "amp_C": "multi_tensor_l2norm()",
    "fused_weight_gradient_mlp_cuda": "wgrad_gemm_accum_fp32()",
}
"""Functions that are asked for, as packages with them declare these."""
REFUSED = {"fla": "its gradients are wrong on Hopper GPUs with Triton 3.4 to 3.7.0 (torch 2.13 brings 3.7.1)"}


KERNELS: list[tuple[str, int, dict[str, str]]] = [
    ("3.7.1", 9, {}), ("3.6.0", 9, REFUSED), ("3.6.0", 8, {}), ("3.10.0", 9, {}), ("3.3.1", 9, {}),
    ("3.4.0+git1", 9, REFUSED),
]  # fmt: skip
"""Version of Triton, generation of the GPU, and what is refused."""


@pytest.mark.starts
def test_kernels_count_where_they_work(tmp_path: Path) -> None:
    """And Megatron finds them. Hopper GPUs were refused by flash-linear-attention at a first backward."""
    folders = [tmp_path / f"{triton} on {generation}" for triton, generation, _ in KERNELS]
    for folder, (triton, generation, _) in zip(folders, KERNELS, strict=True):
        for module in ("apex", "fla", "fla/ops", "fla/modules", "triton", *FUNCTIONS):
            (folder / module).mkdir(parents=True)
            function = f"def {FUNCTIONS[module]}: pass\n" if module in FUNCTIONS else ""
            (folder / module / "__init__.py").write_text(function)
        (folder / "triton/__init__.py").write_text(f"__version__ = {triton!r}\n")
        (folder / "gpu").write_text(str(generation))
    found = map(json.loads, behind_torch(ASK, folders))
    assert [*found] == [[True, not refused, True, "apex", refused] for *_, refused in KERNELS]


@pytest.mark.parametrize(("name", "file"), [("NVIDIA L4", "nvidia-l4"), ("NVIDIA H100 80GB HBM3", "h100")])
def test_a_verdict_is_kept_under_the_gpu_s_name(
    cuda: pytest.MonkeyPatch, name: str, file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cuda.setattr(platform, "device_name", lambda: name)
    cuda.setattr(gpu, "PARTS", {"nothing": lambda _: None})
    cuda.setattr(gpu, "run_part", lambda *_, **__: None)
    cuda.setattr(gpu, "RESULTS", tmp_path / "results")
    cuda.setattr("sys.argv", ["gpu.py", "--minutes", "1"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    assert f"{file}.json: all within their limits" in capsys.readouterr().out.replace("\n", "")
    assert json.loads((tmp_path / f"results/{file}.json").read_text())["device"] == name
