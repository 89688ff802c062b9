"""Names of the weights of Qwen's ViT and merger."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, linear, native_blocks, native_perceptron, norm


def qwen2_weights(later: bool) -> Iterator[Weight]:
    """Yield names of the weights of Qwen2-VL's ViT and merger or, if `later`, of Qwen2.5-VL's."""
    layer, merger = "visual.blocks.{n}", "visual.merger"
    yield Weight("patch_embed", "projection.weight", ("visual.patch_embed.proj.weight",))
    yield from native_blocks()
    if later:
        yield from native_perceptron()
    else:
        yield from linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
        yield from linear("vit", "mlp.linear_fc2", f"{layer}.mlp.fc2")
    yield from norm("projector", "norm", f"{merger}.ln_q")
    yield from linear("projector", "linear_fc1", f"{merger}.mlp.0")
    yield from linear("projector", "linear_fc2", f"{merger}.mlp.2")


def qwen3_weights() -> Iterator[Weight]:
    """Yield names of the weights of Qwen3-VL's ViT and mergers."""
    layer = "visual.blocks.{n}"
    yield from linear("patch_embed", "projection", "visual.patch_embed.proj")
    yield Weight("patch_embed", "positions", ("visual.pos_embed.weight",))
    yield from native_blocks()
    yield from linear("vit", "mlp.linear_fc1", f"{layer}.mlp.linear_fc1")
    yield from linear("vit", "mlp.linear_fc2", f"{layer}.mlp.linear_fc2")
    for ours, theirs in (("", "visual.merger"), ("feature_{f}.", "visual.deepstack_merger_list.{f}")):
        yield from norm("projector", f"{ours}norm", f"{theirs}.norm")
        yield from linear("projector", f"{ours}linear_fc1", f"{theirs}.linear_fc1")
        yield from linear("projector", f"{ours}linear_fc2", f"{theirs}.linear_fc2")
