"""Tables of a line, measured."""

from pathlib import Path

import numpy as np

from megatron.vlm.preprocessing.line_media import LineMedia
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.modality import TABLE
from omnibal_ext.modalities.table.architecture import Table, TableArchitecture, TableRule


def table(line: LineMedia, reference: str) -> Table:
    """Measure a table. Raises `Rejected`."""
    path, file, place = line.found(reference, "table")
    rule = line.recipe.rules[TABLE]
    assert isinstance(rule, TableRule)
    try:
        numbers = np.loadtxt(file, np.float32, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise Rejected("unreadable_table", f"{file}: {error}") from error
    if not len(numbers) or numbers.shape[1] != rule.numbers:
        raise Rejected("unreadable_table", f"{file}: {numbers.shape[1]} numbers a row, the model reads {rule.numbers}")
    return Table(path, len(numbers), len(numbers) * rule.tokens_a_row, place, line.crcs([file], place, "table"))


def rule_of(model: Architecture) -> TableRule:
    """Return how a model that takes tables reads them."""
    table = TableArchitecture.among(model.further)
    return TableRule(table.numbers, table.tokens_a_row)


def rule_in(folder: Path, rule: TableRule) -> tuple[TableRule, str]:
    """Return the rule, which config.json says alone."""
    return rule, "config.json"
