"""What Gemma's language models have alike in a config.json: grouped heads, and layers with a window and without."""

from collections.abc import Callable
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import FULL, SLIDING, WIDTH, language_sizes
from omnibal_ext.reading.checks import listing, shown, text


def grouped_sizes(section: Section, mixture: bool = False) -> tuple[dict[str, Any], int]:
    """`language_sizes`, and the width of a head. Raises UserError as `check_groups` does."""
    head_size = section.take("head_dim", WIDTH)
    sizes = language_sizes(section, head_size, mixture)
    check_groups(section, sizes["heads"], sizes["kv_heads"], head_size)
    return sizes, head_size


def check_groups(section: Section, heads: int, kv_heads: int, head_size: int) -> None:
    """Raise UserError for heads that are not in groups of one size, or cannot turn pair by pair."""
    if heads % kv_heads or head_size % 2:
        raise UserError(
            f"{section.where}: {heads} heads of width {head_size} and {kv_heads} of keys and values; supported: "
            "heads of an even width, in groups of one size"
        )


def kinds_of_layers(section: Section, layers: int, usual: Callable[[int], str]) -> list[str]:
    """`SLIDING` or `FULL` of each layer, as `usual` has it by number where the file is silent. Raises UserError for
    others, and for more or fewer than there are layers."""
    kinds = section.take_if("layer_types", listing(text)) or [usual(number) for number in range(layers)]
    if len(kinds) != layers or set(kinds) - {SLIDING, FULL}:
        raise UserError(
            f"{section.where}.layer_types are {shown(kinds)}; supported: {SLIDING!r} or {FULL!r} for each layer"
        )
    return kinds
