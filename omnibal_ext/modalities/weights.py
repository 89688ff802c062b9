"""Shapes of weights that are no matrices, as modalities share them."""

Shape = tuple[int, ...]


def norm(name: str, width: int) -> dict[str, Shape]:
    """Return {name: shape} of the weight and the bias that a norm may have."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def layer_norms(width: int) -> dict[str, Shape]:
    """Return {name: shape} of the weights that the norms before attention and before the MLP may have."""
    return norm("input_layernorm", width) | norm("pre_mlp_layernorm", width)
