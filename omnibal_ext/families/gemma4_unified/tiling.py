"""Tiling of images of Gemma 4 without towers, of which a patch is an entire square."""

from typing import Any

from omnibal_ext.families.gemma4.tiling import Gemma4
from omnibal_ext.families.processor_fields import SIDE
from omnibal_ext.families.towers.tiling import patches
from omnibal_ext.modalities.vision.tiling import Processor


class Gemma4Unified(Gemma4):
    """Patches as large as a square of the processor's patches; images are scaled as Gemma 4's."""

    name, read_as, square, usual = "gemma4_unified", "large patches", 1, patches(1, 280)

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return the most patches of an image, as a flag. Raises UserError for patches that are not the model's."""
        where, fields, wanted = processor.where, processor.fields, processor.model.vision.patch_size
        usual = {"patch_size": 16, "pooling_kernel_size": 3}
        patch, square = (SIDE(f"{where}: {name}", fields.get(name) or usual[name]) for name in usual)
        if fields and patch * square != wanted:
            made = f"patches of {patch} pixels, {square} a side"
            raise processor.fault(f"{made}, the model of config.json has {wanted} pixels")
        tokens = fields.get("max_soft_tokens")
        return {"max-tiles": tokens} if tokens else {}
