"""Tables as datasets list them."""

from collections.abc import Mapping
from typing import Any

from megatron.vlm.data.schemas.schema import MOST_INPUTS, Schema, as_tuples, place_check
from omnibal_ext.modalities.table.architecture import Table, TableRule
from omnibal_ext.reading.checks import Check, integer, listing, record, text

MOST = 2**20
_INPUTS: Check[list[dict[str, Any]]] = listing(
    record(
        {"path": text, "rows": integer(1, MOST), "tokens": integer(1, MOST), "place": place_check,
         "crcs": listing(integer(0, 2**32), most=1)}
    ),
    most=MOST_INPUTS,
)  # fmt: skip


def _made(tables: list[dict[str, Any]]) -> list[Table]:
    for number, table in enumerate(tables):
        as_tuples(table, f"tables[{number}]")
    return [Table(**table) for table in tables]


def _made_rule(said: Mapping[str, Any]) -> TableRule:
    return TableRule(**said)


SCHEMA = Schema(_INPUTS, _made, record({"numbers": integer(1), "tokens_a_row": integer(1)}), _made_rule)
