"""Shapes of weights that are no matrices, as modalities share them."""

Shape = tuple[int, ...]


def norm(name: str, width: int) -> dict[str, Shape]:
    """Return the weights that a norm may have."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def layer_norms(width: int) -> dict[str, Shape]:
    """Return the weights of the two norms in front of attention and perceptron."""
    return norm("input_layernorm", width) | norm("pre_mlp_layernorm", width)
