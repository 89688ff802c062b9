"""What Gemma's language models have alike in a config.json: grouped heads of a width of their own."""

from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import language_sizes


def grouped_sizes(section: Section, mixture: bool = False) -> tuple[dict[str, Any], int]:
    """`language_sizes`, and the width of a head. Raises UserError as `check_groups` does."""
    head_size = section.take("head_dim")
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
