"""Adapters: how many numbers they are, what they cost, and which are refused. Models have them in unit/hf."""

from argparse import Namespace
from dataclasses import replace

import pytest

from omnibal_ext.adapters import Adapters, adapted_matrices, adapter_parameters, check_adapters
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import KINDS, PARTS, gradient_mode
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.errors import UserError
from omnibal_ext.trained import Trained

TINY, INTERNVL, MOE = (preset(name) for name in ("tiny", "internvl3-8b", "internvl3.5-30b-a3b"))
BOTH = Adapters(16, 32.0, ("vit", "llm"))


def test_flags_say_what_has_adapters_and_that_all_else_is_frozen() -> None:
    flags = Namespace(lora_rank=8, lora_alpha=None, lora_targets=None)
    assert Adapters.of(flags) == Adapters(8, 16.0, ("llm",))
    assert Adapters.of(flags).frozen(()) == tuple(PARTS)
    given = Adapters.of(Namespace(lora_rank=8, lora_alpha=4.0, lora_targets=["llm", "vit"]))
    assert given == Adapters(8, 4.0, ("vit", "llm"))
    assert given.scale == 0.5
    assert Adapters.from_record(given.to_record()) == given
    none = Adapters.of(Namespace(lora_rank=0, lora_alpha=None, lora_targets=None))
    assert (none, none.frozen(("vit",)), none.flags, none.to_record()) == (Adapters(), ("vit",), [], None)


@pytest.mark.parametrize(
    ("targets", "modes"),
    [
        (("llm",), (*["idle"] * 10, "adapted", "frozen")),
        (("projector",), (*["idle"] * 5, "adapted", "idle", "idle", "adapted", "frozen", "frozen", "frozen")),
        (("vit", "llm"), (*["idle", "adapted", "frozen"] * 3, "frozen", "adapted", "frozen")),
    ],
)
def test_gradients_begin_with_the_first_adapters(targets: tuple[str, ...], modes: tuple[str, ...]) -> None:
    assert tuple(gradient_mode(kind, PARTS, targets) for kind in KINDS[-len(modes) :]) == modes


def test_numbers_are_those_of_the_published_layers() -> None:
    """InternVL3-8B: InternViT-300M (1024 wide, 4096 inside), Qwen2.5-7B (3584 wide, 28 heads of 128, 4 groups, 18944
    inside). Every query, key, value, gate and up has an A of its own."""
    r, numbers = 16, adapter_parameters(INTERNVL, BOTH)
    assert numbers["vit"] == r * (3 * (1024 + 1024) + (1024 + 1024) + (1024 + 4096) + (4096 + 1024))
    attention = (3584 + 3584) + 2 * (3584 + 512) + (3584 + 3584)
    assert numbers["llm"] == r * (attention + 3 * (3584 + 18944))
    on_two = adapter_parameters(INTERNVL, BOTH, 2)
    columns = 3 * 3584 + 3584 / 2 + 2 * 3584 + 18944 / 2  # A of a column-parallel layer is whole on every rank
    assert on_two["llm"] == r * (columns + (3584 + 2 * 512) / 2 + 3584 + 2 * 18944 / 2 + 3584)
    assert set(numbers) == {"vit", "llm"}
    assert [matrix.name for matrix in adapted_matrices(MOE)["llm"]] == [
        "self_attention.linear_qkv", "self_attention.linear_proj"
    ]  # fmt: skip


def test_a_layer_with_adapters_trains_them_alone() -> None:
    """Its matrices have no gradient, no state and nothing for W; what enters them is kept for A all the same."""
    budgets = ("h100", {"tiles": 9, "tokens": 4096})
    whole = analytic_profile(INTERNVL, *budgets)
    none = analytic_profile(INTERNVL, *budgets, frozen=tuple(PARTS))
    adapted, frozen = analytic_profile(INTERNVL, *budgets, adapters=BOTH), none.trained.frozen
    assert adapted.trained == Trained(frozen, 16, ("vit", "llm"))
    sizes = {"vit": (3 * 1024 + 1024 + 4096 + 1024, 2 * 1024 + 1024 + 4096)}
    sizes["llm"] = (3584 + 2 * 512 + 3584 + 2 * 18944 + 3584, 3584 + 3584 + 3584 + 18944)
    for kind, parts in (("vit", 6), ("llm", 7)):
        tokens, (rows, columns) = (9 * 1025 if kind == "vit" else 4096), sizes[kind]
        cost, trained, numbers = adapted.layers[kind], whole.layers[kind], adapter_parameters(INTERNVL, BOTH)[kind]
        assert cost.weight_bytes == pytest.approx(2 * whole.parameters[kind] + 18 * numbers)
        inner = 16 * 2 * tokens * parts
        scaled = 2 * tokens * 2 * 1024 if kind == "vit" else 0  # both branches, for the gradient of LayerScale
        assert cost.kept_bytes == pytest.approx(trained.kept_bytes + inner - scaled)
        assert (cost.weight_gradient_seconds, cost.late_bytes) == (0.0, 0.0)
        products, moved = 2 * tokens * numbers / (989e12 * 0.6), 2 * tokens / (3.35e12 * 0.8)
        forward = products + moved * (2 * rows + columns)
        backward = 2 * products + moved * (2 * rows + 5 * columns) - (trained.weight_gradient_seconds or 0.0)
        assert cost.forward_seconds == pytest.approx(trained.forward_seconds + forward)
        assert cost.backward_seconds == pytest.approx(trained.backward_seconds + backward)
        assert cost.step_seconds < 0.05 * trained.step_seconds
    assert adapted.layers["patch_embed"].backward_seconds == 0.0
    head = replace(none.layers["head"], backward_seconds=adapted.layers["head"].backward_seconds,
                   kept_bytes=adapted.layers["head"].kept_bytes)  # fmt: skip
    assert head.weight_bytes == adapted.layers["head"].weight_bytes == 2 * none.parameters["head"]
    assert adapted.layers["head"].backward_seconds > 0.0 == none.layers["head"].backward_seconds


def test_state_of_adapters_is_shared_out_by_the_distributed_optimizer() -> None:
    alone, shared = (
        analytic_profile(INTERNVL, "h100", {"tiles": 9, "tokens": 4096}, 2, d, adapters=BOTH).layers["llm"]
        for d in (1, 4)
    )
    numbers = adapter_parameters(INTERNVL, BOTH, 2)["llm"]
    assert alone.weight_bytes - shared.weight_bytes == pytest.approx(numbers * 12 * 3 / 4)
    assert DEVICES["h100"].memory_bytes > shared.weight_bytes


def test_operations_count_the_matrices_twice_and_the_adapters_three_times() -> None:
    frozen, adapted = (ModelOperations.of(TINY, adapters=Adapters(4, 8.0, (part,))) for part in ("projector", "llm"))
    whole = ModelOperations.of(TINY)
    numbers = adapter_parameters(TINY, Adapters(4, 8.0, ("llm",)))["llm"] * TINY.language.layers
    assert adapted.units["tokens"] == pytest.approx(whole.units["tokens"] * 2 / 3 + 6 * numbers)
    assert frozen.units["tokens"] == pytest.approx(whole.units["tokens"] * 2 / 3)
    assert adapted.units["tiles"] < frozen.units["tiles"] < whole.units["tiles"]


def test_what_can_have_no_adapters_is_refused_by_name() -> None:
    gemma = preset("gemma-3-4b")
    check_adapters(Adapters(8, 16.0, ("vit", "llm")), gemma)
    least = TINY.language.hidden_size  # as much as all heads
    check_adapters(Adapters(least, 16.0, ("llm",)), TINY)
    check_adapters(Adapters(), gemma)
    check_adapters(Adapters(8, 16.0, ("vit", "llm")), preset("qwen3.5-9b"))
    for rank, targets, model, said in (
        (8, ("projector",), gemma, r"--lora-targets projector: the projector of .* is a bare matrix"),
        (least + 1, ("llm",), TINY, f"--lora-rank {least + 1}: llm's .* has {least} rows or columns"),
        (8, ("vit", "llm"), preset("gemma-4-12b"), "--lora-targets vit: the vit of gemma-4-12b has no layers"),
    ):
        with pytest.raises(UserError, match=said):
            check_adapters(Adapters(rank, 16.0, targets), model)
