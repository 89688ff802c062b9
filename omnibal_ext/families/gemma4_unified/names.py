"""Names of the weights before the language model of Gemma 4 without towers, as published."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, linear


def embedder_weights() -> Iterator[Weight]:
    """Yield names in files of the norms and matrices of patches, whose colours are last there."""
    embedder = "vision_embedder"
    for which in ("weight", "bias"):
        yield Weight("patch_embed", f"pixel_norm.{which}", (f"{embedder}.patch_ln1.{which}",), "pixels")
    yield Weight("patch_embed", "projection.weight", (f"{embedder}.patch_dense.weight",), "patches")
    yield Weight("patch_embed", "projection.bias", (f"{embedder}.patch_dense.bias",))
    yield from linear("patch_embed", "norm", f"{embedder}.patch_ln2")
    yield Weight("patch_embed", "axis_positions", (f"{embedder}.pos_embedding",), "axes")
    yield from linear("patch_embed", "place_norm", f"{embedder}.pos_norm")
    yield Weight("projector", "linear.weight", ("embed_vision.embedding_projection.weight",))
