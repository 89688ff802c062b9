"""The words around images that models know, by the name that datasets keep of them."""

from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.registry import FAMILIES

MARKUPS = {markup.name: markup for family in FAMILIES for markup in family.markups}


def image_markup(name: str) -> ImageMarkup:
    """The markup of that name; `UserError` naming the known ones if there is none."""
    if name not in MARKUPS:
        raise UserError(f"unknown image markup {name!r}; known: {', '.join(MARKUPS)}")
    return MARKUPS[name]
