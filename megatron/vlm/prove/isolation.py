"""Packs against their samples alone: what a model makes of both, under one kernel of attention after another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.prove import findings as judge
from megatron.vlm.prove.findings import IGNORED, Finding
from megatron.vlm.prove.kernels import attention
from megatron.vlm.prove.subject import Ran, difference, gradients, labels_of, run
from omnibal_ext.architectures.folder import token_ids
from omnibal_ext.errors import UserError
from omnibal_ext.joining.fields import is_of_media

Collator = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
LOSS, LOGITS, GRADIENTS, SEEN = 1e-5, 1e-4, 1e-4, 1e-5
"""What rounding may change, relative to the largest; SEEN: of logits of which no input has changed."""
CHECKS = ("tokens", "labels", "media", "positions", "isolation", "logits", "normaliser", "loss", "gradients", "runs")
OF_TOKENS = ("input_ids", "labels", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass
class Proof:
    """What was found of one pack."""

    findings: dict[Finding, list[str]] = field(default_factory=dict)
    """Under which kernels."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Kernels, and why not."""
    sees: dict[str, list[list[int]]] = field(default_factory=dict)
    """By kernel, for each sample the others that it sees."""
    differences: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kernel, of logits, loss and gradients."""

    def add(self, kernel: str, found: Iterable[Finding]) -> None:
        """Note what was found under a kernel."""
        for one in found:
            self.findings.setdefault(one, []).append(kernel)


def features_of(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """A sample's fields as a model's processor makes them, those of tokens [T]. Raises UserError without labels."""
    found = {key: torch.as_tensor(value) for key, value in sample.items() if value is not None}
    if not {"input_ids", "labels"} <= found.keys():
        raise UserError(f"a sample has {', '.join(found)}: it needs input_ids, and labels with -100 where none is")
    return found | {key: found[key].reshape(-1) for key in OF_TOKENS if key in found}


def alone(features: Mapping[str, Tensor]) -> dict[str, Any]:
    """The batch of a sample alone; where its tokens stand is for the model to say."""
    rows = {key: value[None] if key in OF_TOKENS else value for key, value in features.items()}
    return {key: value for key, value in rows.items() if key != "position_ids"} | {"use_cache": False}


class Pack:
    """A collator's batch of samples."""

    def __init__(self, samples: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Any]) -> None:
        self.samples, self.batch = samples, batch
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        real = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
        self.pieces = judge.find_pieces(ids, real, [one["input_ids"].numpy() for one in samples])
        self.rows: dict[str, tuple[list[int], list[int]]] = {}
        """By field of images or sounds: which row of the samples' each of the batch's is, and whose those are."""
        begun = list(dict.fromkeys(piece.sample for piece in self.pieces))
        order = [*begun, *(number for number in range(len(samples)) if number not in begun)]
        wanted: dict[str, list[tuple[int, Tensor]]] = {}
        for number in order:
            for key, value in samples[number].items():
                if is_of_media(key) and value.is_floating_point() and value.dim() > 1:
                    there = key if key in batch else key.replace("_videos", "")  # films given as images
                    rows = [row.float() for row in judge.rows_of(value) if row.any()]  # zeros fill up
                    wanted.setdefault(there, []).extend((number, row) for row in rows)
        for key, owned in wanted.items():
            rows = [row.float() for row in judge.rows_of(batch[key]) if row.any()] if key in batch else []
            self.rows[key] = judge.find_rows(rows, [row for _, row in owned]), [number for number, _ in owned]

    def findings(self) -> Iterable[Finding]:
        """What is wrong with its values."""
        yield from judge.judge_tokens(self.pieces, [len(one["input_ids"]) for one in self.samples])
        if {"labels", "shift_labels"} & self.batch.keys():
            labels = [one["labels"].numpy() for one in self.samples]
            yield from judge.judge_labels(self.pieces, labels_of(self.batch), labels)
        for key, (found, owners) in self.rows.items():
            yield from judge.judge_rows(key, found, owners)

    def other_words(self, number: int, words: Mapping[int, int]) -> dict[str, Any]:
        """The batch with other words in one sample."""
        ids = self.batch["input_ids"].clone()
        for piece in self.pieces:
            if piece.sample == number:
                tokens = ids[piece.row, piece.columns].tolist()
                ids[piece.row, piece.columns] = torch.tensor([words.get(token, token) for token in tokens])
        return {**self.batch, "input_ids": ids}

    def other_media(self, number: int) -> dict[str, Any]:
        """The batch with other images and sounds in one sample."""
        other = dict(self.batch)
        for key, (found, owners) in self.rows.items():
            if key in other:
                other[key] = whole = other[key].clone()
                rows = judge.rows_of(whole)  # a view
                there = rows.flatten(1).any(1).nonzero()[:, 0]
                mine = there[[row >= 0 and owners[row] == number for row in found]]
                rows[mine] = 0.5 - rows[mine]
        return other


def prove(model: Any, samples: Sequence[Mapping[str, Any]], collator: Collator, kernels: Sequence[str]) -> Proof:
    """Compare a collator's pack with its samples, under each kernel of `kernels.NAMES` that can be run."""
    proof, features = Proof(), [features_of(sample) for sample in samples]
    for kernel in kernels:
        try:
            with attention(model, kernel):
                _under(kernel, model, features, collator, proof)
        except UserError as error:
            proof.not_run[kernel] = str(error)
    return proof


def _under(kernel: str, model: Any, features: list[dict[str, Tensor]], collator: Collator, proof: Proof) -> None:
    batch = dict(collator([dict(one) for one in features]))
    mask = batch.get("attention_mask")
    if kernel == "flash" and mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise UserError("the batch has masks of tokens by tokens, which flash-attention does not read")
    pack = Pack(features, batch)
    try:
        singles = [run(model, alone(one)) for one in features]
    except Exception as error:  # whatever a model says to a stranger's sample
        raise UserError(f"the model fails on a sample alone: {_said(error)}") from error
    total = sum(one.count for one in singles) or 1
    sum(one.summed for one in singles).div(total).backward()
    wanted = gradients(model)
    proof.add(kernel, pack.findings())
    try:
        whole = run(model, batch)
    except Exception as error:  # and to a stranger's batch
        proof.add(kernel, [Finding("runs", f"the model fails on the pack: {_said(error)}")])
        return
    places = [one.positions[:, 0] for one in singles if one.positions is not None]
    if whole.positions is not None and len(places) == len(singles):
        proof.add(kernel, judge.judge_positions(pack.pieces, whole.positions, places))
    proof.add(kernel, _compared(pack, whole, singles, proof.differences.setdefault(kernel, {})))
    proof.add(kernel, _loss(model, batch, whole, singles, wanted, proof.differences[kernel]))
    proof.sees[kernel] = _influence(model, pack, whole)
    for number, others in enumerate(proof.sees[kernel]):
        if others:
            proof.add(kernel, [Finding("isolation", f"sample {number} sees {_named(others)}", (number, *others))])


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def _named(samples: Sequence[int]) -> str:
    return f"sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples))}"


def _compared(pack: Pack, whole: Ran, singles: Sequence[Ran], noted: dict[str, float]) -> Iterable[Finding]:
    """Logits of the samples in the pack and alone."""
    unlike, noted["logits"] = dict[int, None](), 0.0
    for piece in pack.pieces:
        own = singles[piece.sample].logits[0, piece.own]
        apart = float((whole.logits[piece.row, piece.columns] - own).abs().max() / own.abs().max())
        noted["logits"] = max(noted["logits"], apart)
        unlike |= {piece.sample: None} if apart > LOGITS else {}
    if unlike:
        yield Finding("logits", f"other than alone: {_named([*unlike])}", tuple(unlike))


def _loss(
    model: Any, batch: Mapping[str, Any], whole: Ran, singles: Sequence[Ran], wanted: Mapping[str, Tensor],
    noted: dict[str, float],
) -> Iterable[Finding]:  # fmt: skip
    """The model's own loss, by what it is divided, and its gradients."""
    if whole.loss is None:
        return
    labels, mean = (
        labels_of(batch),
        sum(one.summed.item() for one in singles) / (sum(one.count for one in singles) or 1),
    )
    of_samples = sum(one.summed.item() / (one.count or 1) for one in singles) / len(singles)
    divisors = {
        "num_items_in_batch": float(batch.get("num_items_in_batch", 0)), "all labels": float((labels != IGNORED).sum()),
        "all tokens": labels.numel(), "1": 1, "samples": len(singles), "tokens of each sample": whole.summed.item() / of_samples,
    }  # fmt: skip
    factor, found = judge.judge_loss(whole.loss.item(), whole.summed.item(), whole.count, divisors, LOSS)
    yield from found
    noted["loss"] = abs(whole.loss.item() / factor - mean) / abs(mean)
    if noted["loss"] > LOSS:
        yield Finding("loss", "not the mean over the samples' supervised tokens")
    whole.loss.backward()
    noted["gradients"], where = difference(gradients(model), wanted, factor)
    if noted["gradients"] > GRADIENTS:
        yield Finding("gradients", f"not the samples', most of {where}")


@torch.no_grad()
def _influence(model: Any, pack: Pack, whole: Ran) -> list[list[int]]:
    """For each sample the others of which words, images or sounds move its logits."""
    named = set(token_ids(model.config.to_dict()))
    ids = sorted({int(token) for one in pack.samples for token in one["input_ids"]} - named)
    words = dict(zip(ids, [*ids[1:], *ids[:1]], strict=True))
    sees: list[list[int]] = [[] for _ in pack.samples]
    for other in range(len(pack.samples)):
        moved = set()
        for batch in (pack.other_words(other, words), pack.other_media(other)):
            change = (run(model, batch).logits - whole.logits).abs().amax(-1) > SEEN * whole.logits.abs().max()
            moved |= {piece.sample for piece in pack.pieces if change[piece.row, piece.columns].any()}
        for number in moved - {other}:
            sees[number].append(other)
    return sees
