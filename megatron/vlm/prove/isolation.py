"""Packs against their samples alone: what a model makes of both, under one kernel of attention after another."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice, permutations
from math import isnan
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.vlm.prove import findings as judge
from megatron.vlm.prove.findings import IGNORED, Finding, Piece
from megatron.vlm.prove.models import Ran, attention, gradients, labels_of, run
from omnibal_ext.architectures.folder import token_ids
from omnibal_ext.errors import UserError
from omnibal_ext.joining.fields import OF_TOKENS, is_of_media

Batch = Mapping[str, Any]
Value = TypeVar("Value")
Rows = dict[str, tuple[list[int], list[int]]]
"""Row of the samples that each row of a batch is, and whose those are, by field of images or sounds."""
ALONG_TOKENS = (*OF_TOKENS, "input_ids", "attention_mask")
LOSS, LOGITS, GRADIENTS, SEEN = 1e-5, 1e-4, 1e-4, 1e-5
"""What rounding may change, relative to the largest; SEEN: of logits of which no input has changed."""
MOST_ORDERS = 120
"""Orders that are tried of samples with the same words."""
CHECKS = ("runs", "tokens", "labels", "media", "positions", "isolation", "logits", "normaliser", "loss", "gradients")


@dataclass
class Proof:
    """What was found of one pack: faults, each with its kernels of attention; kernels, or checks under one, that were
    not run, and why; by kernel the others that each sample sees, and how far results are from the samples'."""

    findings: dict[Finding, list[str]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    sees: dict[str, list[list[int]]] = field(default_factory=dict)
    differences: dict[str, dict[str, float]] = field(default_factory=dict)


def prove(
    model: Any, samples: Sequence[Batch], collator: Callable[[list[Any]], Batch], kernels: Sequence[str]
) -> Proof:
    """Compare what a model makes of a collator's batch and of its samples alone, under each kernel (of
    `models.ATTENTION`) that can be run. Raises UserError for samples without labels."""
    proof, features = Proof(), [_tensors(sample) for sample in samples]
    for kernel in kernels:
        try:
            with attention(model, kernel):
                for found in _under(kernel, model, features, _joined(collator, samples), proof):
                    proof.findings.setdefault(found, []).append(kernel)
        except UserError as error:
            proof.not_run[kernel] = str(error)
        except Exception as error:  # of a stranger's batch, which has fields of other kinds
            proof.not_run[kernel] = f"the batch cannot be compared: {type(error).__name__}: {error}"
    return proof


def _joined(collator: Callable[[list[Any]], Batch], samples: Sequence[Batch]) -> dict[str, Any]:
    with redirect_stdout(sys.stderr):  # which is ours
        batch = tried(lambda: dict(collator(deepcopy([dict(one) for one in samples]))), "the collator fails")
    if not isinstance(ids := batch.get("input_ids"), Tensor) or ids.dim() != 2:
        raise UserError(f"the collator's batch has {', '.join(batch)}: it needs input_ids [rows, tokens]")
    return {key: value for key, value in batch.items() if value is not None}


def _tensors(sample: Batch) -> dict[str, Tensor]:
    """Return a sample's fields as tensors, those along tokens as [T]. Raises UserError without input_ids or labels."""
    given = {key: value for key, value in sample.items() if value is not None}
    found = tried(lambda: {key: torch.as_tensor(value) for key, value in given.items()}, "a sample's fields")
    if not {"input_ids", "labels"} <= found.keys():
        raise UserError(f"a sample has {', '.join(found)}: it needs input_ids, and labels with -100 where none is")
    return found | {key: found[key].reshape(-1) for key in ALONG_TOKENS if key in found}


def _under(kernel: str, model: Any, samples: list[dict[str, Tensor]], batch: dict[str, Any], proof: Proof
           ) -> Iterable[Finding]:  # fmt: skip
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if kernel == "flash" and mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UserError("the batch has masks of tokens by tokens, which flash-attention does not read")
    exact = {key: value.dtype for key, value in batch.items()
             if is_of_media(key) and isinstance(value, Tensor) and value.is_floating_point()}  # fmt: skip
    samples = [{key: value.to(exact.get(key, value.dtype)) for key, value in one.items()} for one in samples]
    real = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
    pieces = _by_media(samples, batch, judge.find_pieces(ids, real, [one["input_ids"].numpy() for one in samples]))
    rows = _rows(samples, batch, pieces)
    alone = tried(lambda: [run(model, _alone(one)) for one in samples], "the model fails on a sample alone")
    yield from judge.judge_tokens(pieces, [len(one["input_ids"]) for one in samples])
    yield from judge.judge_labels(pieces, labels_of(batch), [one["labels"].numpy() for one in samples])
    for key, (found, owners) in rows.items():
        yield from judge.judge_rows(key, found, owners)
    try:
        whole = tried(lambda: run(model, batch), "the model fails on the pack")
    except UserError as error:
        yield Finding("runs", str(error))
        _skip(proof, kernel, CHECKS[4:], "the model fails on a pack")
        return
    positions = [one.positions[:, 0] for one in alone if one.positions is not None]
    if whole.positions is not None and len(positions) == len(alone):
        yield from judge.judge_positions(pieces, whole.positions, positions)
    else:
        _skip(proof, kernel, ["positions"], "the language model has no rotation by positions")
    noted = proof.differences.setdefault(kernel, {"logits": 0.0})
    for piece in pieces:
        own = alone[piece.sample].logits[0, piece.own]
        apart = float((whole.logits[piece.row, piece.columns] - own).abs().max() / own.abs().max())
        noted["logits"] = max(noted["logits"], apart, key=lambda value: (isnan(value), value))
        if not apart <= LOGITS:  # NaN is not
            yield Finding("logits", f"sample {piece.sample} has others than alone", (piece.sample,))
    if whole.loss is not None and whole.supervised and any(one.supervised for one in alone):
        yield from _loss(model, batch, whole, alone, noted)
    else:
        _skip(proof, kernel, CHECKS[7:], "the pack has no labels")
    seen = tried(lambda: _influence(model, samples, batch, pieces, rows, whole), "the model fails on other words")
    proof.sees[kernel] = seen
    for number, others in enumerate(proof.sees[kernel]):
        if others:
            says = f"sample {number} sees sample{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            yield Finding("isolation", says, (number, *others))


def _skip(proof: Proof, kernel: str, checks: Sequence[str], why: str) -> None:
    proof.not_run |= {f"{check} under {kernel}": why for check in checks}


def tried(work: Callable[[], Value], what: str) -> Value:
    """Return `work()`. Raises UserError, "WHAT: ...", for whatever a stranger's code raises."""
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _alone(sample: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the batch of a sample alone, without positions, which the model finds itself."""
    rows = {key: value[None] if key in ALONG_TOKENS else value for key, value in sample.items()}
    return {key: value for key, value in rows.items() if key != "position_ids"} | {"use_cache": False}


def _rows(samples: Sequence[Mapping[str, Tensor]], batch: Batch, pieces: Sequence[Piece]) -> Rows:
    """Find the samples' rows of images and sounds in a batch. Rows of zeros, which fill others up, are left out."""
    wanted: dict[str, list[tuple[int, Tensor]]] = {}
    for number in dict.fromkeys([*(piece.sample for piece in pieces), *range(len(samples))]):
        for key, value in samples[number].items():
            if is_of_media(key) and value.is_floating_point() and value.dim() > 1:
                there = key if key in batch else key.replace("_videos", "")  # films given as images
                given = [(number, row.float()) for row in judge.rows_of(value) if row.any()]
                wanted.setdefault(there, []).extend(given)
    there = {key: judge.rows_of(batch[key]) if key in batch else () for key in wanted}
    found = {key: [row.float() for row in rows if row.any()] for key, rows in there.items()}
    return {key: (judge.find_rows(found[key], [row for _, row in owned]), [number for number, _ in owned])
            for key, owned in wanted.items()}  # fmt: skip


def _by_media(samples: Sequence[Mapping[str, Tensor]], batch: Batch, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the pieces with samples of the same words told apart by their images and sounds."""
    alike: dict[bytes, list[int]] = {}
    for number, one in enumerate(samples):
        alike.setdefault(one["input_ids"].numpy().tobytes(), []).append(number)

    def faults(found: Sequence[Piece]) -> int:
        return sum(len(list(judge.judge_rows(key, *row))) for key, row in _rows(samples, batch, found).items())

    for group in alike.values():
        if len(group) > 1 and faults(pieces):
            others = islice(permutations(group), MOST_ORDERS)
            named = (dict(zip(group, order, strict=True)) for order in others)
            ways = ([one._replace(sample=new.get(one.sample, one.sample)) for one in pieces] for new in named)
            pieces = min(ways, key=faults)
    return pieces


def _loss(model: Any, batch: Batch, whole: Ran, alone: Sequence[Ran], noted: dict[str, float]) -> Iterable[Finding]:
    """Yield faults of a pack's own loss and its gradients against the samples'; put the differences into `noted`."""
    assert whole.loss is not None
    mean = torch.stack([one.summed for one in alone]).sum() / sum(one.supervised for one in alone)
    mean.backward()
    wanted, labels, summed = gradients(model), labels_of(batch), whole.summed.item()
    of_samples = sum(one.summed.item() / max(one.supervised, 1) for one in alone) / len(alone)
    divisors = {
        "num_items_in_batch": float(batch.get("num_items_in_batch", 0)), "all labels": float((labels != IGNORED).sum()),
        "all tokens": labels.numel(), "1": 1, "samples": len(alone), "each sample's own": summed / of_samples,
    }  # fmt: skip
    factor, found = judge.judge_loss(whole.loss.item(), summed, whole.supervised, divisors, LOSS)
    yield from found
    factor = factor or 1.0
    noted["loss"] = abs(whole.loss.item() / factor / mean.item() - 1)
    if not noted["loss"] <= LOSS:
        yield Finding("loss", "not the mean over the samples' supervised tokens")
    whole.loss.backward()
    most = {name: float(one.abs().max()) for name, one in wanted.items()}
    least = max(1e-2 * max(most.values()), 1e-30)
    apart = {name: float((one / factor - wanted[name]).abs().max()) / max(least, most[name])
             for name, one in gradients(model).items()}  # fmt: skip
    worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]))
    noted["gradients"] = apart[worst]
    if not apart[worst] <= GRADIENTS:
        yield Finding("gradients", f"not the samples', most of {worst}")


@torch.no_grad()
def _influence(
    model: Any, samples: Sequence[Batch], batch: Batch, pieces: Sequence[Piece], rows: Rows, whole: Ran
) -> list[list[int]]:
    """Return for each sample the others that it sees: if their words, images or sounds change, so do its logits."""
    named = set(token_ids(model.config.to_dict()))
    ids = sorted({int(token) for one in samples for token in one["input_ids"]} - named)
    words = dict(zip(ids, [*ids[1:], *ids[:1]], strict=True))
    sees: list[list[int]] = [[] for _ in samples]
    for other in range(len(samples)):
        changed = {key: batch[key].contiguous().clone() for key in ("input_ids", *rows) if key in batch}
        for piece in pieces:
            if piece.sample == other:
                part = changed["input_ids"][piece.row, piece.columns]
                new = torch.tensor([words.get(token, token) for token in part.tolist()])
                changed["input_ids"][piece.row, piece.columns] = new
        for key in rows.keys() & batch.keys():
            found, owners = rows[key]
            values = judge.rows_of(changed[key])  # a view
            there = values.flatten(1).any(1).nonzero()[:, 0]
            mine = there[[row >= 0 and owners[row] == other for row in found]]
            values[mine] = 0.5 - values[mine]
        apart = (run(model, {**batch, **changed}).logits - whole.logits).abs().amax(-1)
        moved = ~(apart <= SEEN * whole.logits.nan_to_num().abs().max())  # NaN has moved
        for number in {piece.sample for piece in pieces if moved[piece.row, piece.columns].any()} - {other}:
            sees[number].append(other)
    return sees
