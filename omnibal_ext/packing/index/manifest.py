"""Schema of a packed index's manifest, and its hash."""

from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.packing.costs import COSTS
from omnibal_ext.packing.options import LAST_ITERATION, METHODS
from omnibal_ext.packing.packs import LOADS
from omnibal_ext.packing.widths import check_widths
from omnibal_ext.reading.checks import (
    MOST_ITEMS,
    anything,
    finite,
    flag,
    integer,
    listing,
    mapping,
    maybe,
    one_of,
    record,
    text,
)
from omnibal_ext.reading.document import check_seal

VERSION, READABLE, SEALED = 3, (1, 2, 3, 4), 3
WIDE = 4
"""Version of an index whose packs may be wider than a rank."""
FILES = ("pack_loads.npy", "pack_offsets.npy", "rejected.jsonl", "sample_ids.npy")
WIDE_FILES = ("pack_seats.npy", "pack_widths.npy", "share_loads.npy")
MOST_PACKS = 2**40
MOST_BATCH = 2**20

_MANIFEST = record(
    {
        "packs": integer(0, MOST_PACKS),
        "samples": integer(0, MOST_PACKS),
        "method": one_of(*METHODS),
        "vit_budget": integer(),
        "llm_budget": integer(),
        "sample_vit_budget": integer(),
        "sample_llm_budget": integer(),
        "global_batch": integer(1, MOST_BATCH),
        "pad": flag,
        "seed": integer(),
        "last_iteration": one_of(*LAST_ITERATION),
        "epoch_packs": listing(integer(1, MOST_PACKS), least=1),
        "rejected": integer(),
        "sources": listing(record({"name": text, "samples": integer(), "weight": finite()})),
        "built_from": mapping(anything),
        "checksums": record(dict.fromkeys(FILES, text), dict.fromkeys(WIDE_FILES, text)),
    },
    {
        "data_parallel_size": integer(1, MOST_BATCH),
        "micro_batches": integer(1, MOST_BATCH),
        "samples_per_pack": integer(1),
        "pipeline_model_parallel_size": maybe(integer(1)),
        "loads": listing(text, least=len(LOADS), most=64),
        "costs": COSTS,
        "epoch_parts": listing(listing(integer(0, MOST_PACKS), most=MOST_ITEMS)),
        "one_sum": flag,
        "budgets": mapping(integer()),
        "epochs": maybe(integer(1)),
        "seconds": finite(),
        "wait": finite(),
        "widths": listing(integer(1, MOST_BATCH), least=1, most=64),
        "narrow_first": integer(1),
        "epoch_seats": listing(integer(1, MOST_PACKS), least=1),
    },
)


def check_manifest(where: str, manifest: Any) -> dict[str, Any]:
    """Return the manifest if it is valid. Raises UserError naming the invalid field."""
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if not (isinstance(version, int) and version in READABLE):
        raise UserError(f"is no packed index of version {VERSION}")
    if version >= SEALED:
        check_seal(manifest)
    checked: dict[str, Any] = _MANIFEST(where, manifest)
    _check_counts(checked)
    _check_widths(checked, version)
    return checked


def _check_counts(manifest: dict[str, Any]) -> None:
    """Raise UserError unless epochs have all packs, sub-epochs fit theirs, and loads and files are known ones."""
    epochs, batch = manifest["epoch_packs"], manifest["global_batch"]
    if sum(epochs) != manifest["packs"]:
        raise UserError(f"epoch_packs sum to {sum(epochs)}, not to the {manifest['packs']} packs")
    parts = manifest.get("epoch_parts", [])
    if parts and len(parts) != len(epochs):
        raise UserError(f"epoch_parts has {len(parts)} epochs, epoch_packs {len(epochs)}")
    for epoch, (groups, packs) in enumerate(zip(parts, manifest.get("epoch_seats", epochs), strict=False)):
        if sum(groups) > packs // batch:
            raise UserError(f"epoch_parts[{epoch}] are {sum(groups)} groups of {batch} packs, more than its {packs}")
    if (loads := tuple(manifest.get("loads", LOADS)))[: len(LOADS)] != LOADS:
        raise UserError(f"loads must begin with {', '.join(LOADS)}, got {', '.join(map(repr, loads[: len(LOADS)]))}")
    files = (*FILES, *WIDE_FILES) if "epoch_seats" in manifest else FILES
    if set(manifest["checksums"]) != set(files):
        raise UserError(f"checksums must be those of {', '.join(files)}")


def _check_widths(manifest: dict[str, Any], version: int) -> None:
    """Raise UserError for fields of wide packs in versions other than 4, or slots that fill no complete iterations."""
    needed = ("widths", "epoch_seats", "data_parallel_size", "micro_batches")
    has = [name in manifest for name in needed]
    if version != WIDE:
        if any(has[:2]):
            raise UserError(f"has {' and '.join(needed[:2])}, which only version {WIDE} has")
        return
    if not all(has):
        raise UserError(f"is of version {WIDE} and lacks {needed[has.index(False)]}")
    check_widths(manifest["widths"], manifest["data_parallel_size"])
    batch, slots = manifest["global_batch"], manifest["epoch_seats"]
    if len(slots) != len(manifest["epoch_packs"]) or any(count % batch for count in slots):
        raise UserError(f"epoch_seats are {slots}, which must be whole iterations of {batch} for each epoch")
