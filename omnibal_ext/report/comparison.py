"""The page of `tools/look.py`: one table and one drawing."""

from collections.abc import Sequence

from omnibal_ext.report import draw
from omnibal_ext.report.page import TEMPLATES


def comparison_page(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    times: Sequence[tuple[str, float]],
    said: Sequence[str],
    commands: Sequence[str],
) -> str:
    """The HTML page about ways to batch samples.

    Args:
        columns: and `rows`, of the table, as printed.
        times: (way, time as a multiple of balanced packs'), drawn as bars.
        said: sentences.
        commands: to type next.
    """
    bars = draw.bars("Time for the same samples, balanced packs = 1", [(name, [("data", n)]) for name, n in times], "x")
    return TEMPLATES.get_template("comparison.html").render(
        title=title, columns=columns, rows=rows, bars=bars, said=said, commands=commands
    )
