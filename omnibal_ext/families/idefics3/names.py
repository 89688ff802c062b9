"""Names of Idefics 3's connector; those of its ViT are SigLIP's."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, norm


def connector_weights() -> Iterator[Weight]:
    """With the last norm of the ViT."""
    yield from norm("projector", "vision_norm", "vision_tower.post_layernorm")
    yield Weight("projector", "linear.weight", ("connector.modality_projection.proj.weight",))
