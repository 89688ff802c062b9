"""Tiling of DeepSeek-VL's images: one square, into which the image is scaled, grey around it."""

from typing import TYPE_CHECKING, Any

from omnibal_ext.modalities.vision.tiling import OneTile, Processor
from omnibal_ext.reading.checks import shown

if TYPE_CHECKING:
    from PIL import Image

GREY = (127, 127, 127)
"""Transformers' ground: the mean of the pixels, cut to whole numbers of 255."""
LEAST_SIDE = 14
"""Shortest side of a scaled image, in pixels."""


class Letterbox(OneTile):
    """Rule that scales an image by its longer side into one tile, at its centre, on grey."""

    name = "letterbox"

    def resize(self, image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
        """Return the image scaled into `size` and padded with grey."""
        from PIL import Image  # at first use: deciding needs none

        scale = size[0] / max(image.size)
        width, height = (max(round(side * scale), LEAST_SIDE) for side in image.size)
        square = Image.new("RGB", size, GREY)
        square.paste(super().resize(image, (width, height)), ((size[0] - width) // 2, (size[1] - height) // 2))
        return square

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return no flags. Raises UserError if the folder's processor pads otherwise, or with another colour."""
        usual = {"do_pad": True, "min_size": LEAST_SIDE, "image_mean": None}
        for name, wanted in (usual | {"image_mean": [0.5] * 3}).items() if processor.fields else ():
            if (given := processor.fields.get(name, usual[name])) != wanted:
                raise processor.fault(f"{name} is {shown(given)}; supported: {wanted!r}")
        return {}
