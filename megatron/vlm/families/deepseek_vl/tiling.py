"""DeepSeek-VL's images: one square, into which the image is scaled, grey around it."""

from typing import Any

from PIL import Image

from megatron.vlm.data.media.tiling import OneTile, Processor

GREY = (127, 127, 127)
"""Transformers' ground: the mean of the pixels, cut to whole numbers of 255."""
LEAST_SIDE = 14
"""Pixels that a scaled image has a side at least."""


class Letterbox(OneTile):
    """Scaled by its longer side into one tile, at its centre."""

    name = "letterbox"

    def resize(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Scaled, then padded."""
        scale = size[0] / max(image.size)
        inner = super().resize(image, tuple(max(round(side * scale), LEAST_SIDE) for side in image.size))
        square = Image.new("RGB", size, GREY)
        square.paste(inner, ((size[0] - inner.width) // 2, (size[1] - inner.height) // 2))
        return square

    def limits(self, processor: Processor) -> dict[str, Any]:
        """None; the ground is as grey as the mean."""
        wanted = {"do_pad": True, "min_size": LEAST_SIDE, "image_mean": [0.5] * 3}
        for name, value in wanted.items() if processor.fields else ():
            if processor.fields.get(name, value) != value:
                raise processor.fault(f"{name} is {processor.fields[name]!r}; supported: {value!r}")
        return {}
