"""The text that models expect around images, by the names in dataset manifests."""

from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.registry import FAMILIES

MARKUPS = {markup.name: markup for family in FAMILIES for markup in family.markups}


def image_markup(name: str) -> ImageMarkup:
    """The markup of that name. Raises `UserError` naming the known ones."""
    if name not in MARKUPS:
        raise UserError(f"unknown image markup {name!r}; known: {', '.join(MARKUPS)}")
    return MARKUPS[name]
