"""Fields that are read of a folder's processors, and the check of each: any family's, of images, videos and sounds, and
the limits of tiles in InternVL's own config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.folder import read_config
from omnibal_ext.reading.checks import LARGEST, Check, anything, finite, flag, integer, mapping, maybe
from omnibal_ext.reading.fields import Fields

SIDE = integer(1, 2**14)
TOKENS = integer(1, 2**20)
_COUNT = integer(0, 2**40)
_SIDES = mapping(maybe(_COUNT))


def _size(where: str, value: Any) -> Any:
    return _COUNT(where, value) if isinstance(value, int) else _SIDES(where, value)


_TABLE: tuple[tuple[Check[Any], str], ...] = (
    (flag, "do_resize do_rescale do_pan_and_scan do_center_crop do_image_splitting cap_pixels_per_frame"),
    (flag, "use_thumbnail dynamic_image_size"),
    (_size, "size crop_size max_image_size"),
    (_COUNT, "min_pixels max_pixels min_frames max_frames max_video_tokens"),
    (integer(0, 2**10), "min_patches max_patches min_dynamic_patch max_dynamic_patch"),
    (TOKENS, "max_soft_tokens"),
    (SIDE, "spatial_merge_size"),
    (finite(-LARGEST, LARGEST), "rescale_factor"),
    (finite(0, 1e9), "fps max_duration"),
    # Compared with the one value that is supported, or checked where they are read.
    (anything, "resample image_mean image_std do_normalize do_pad min_size patch_size temporal_patch_size merge_size"),
    (anything, "pooling_kernel_size num_frames image_processor_type feature_size dither padding_value"),
    (anything, "sampling_rate n_fft hop_length chunk_length feature_extractor_type"),
    (mapping(anything), "image_processor video_processor feature_extractor audio_processor"),
)
CHECKS: Mapping[str, Check[Any]] = {field: check for check, fields in _TABLE for field in fields.split()}
"""Check of each field."""


def read_fields(file: Path) -> Fields:
    """Return the fields of a processor's JSON file, none if it is not there. Raises UserError if it is damaged."""
    return Fields(file, read_config(file) if file.is_file() else {}, CHECKS)


def section(fields: Fields, name: str) -> Fields:
    """Return the fields of the object that is a field of this name, none if it is not there."""
    return Fields(fields.where, fields.get(name) or {}, CHECKS)
