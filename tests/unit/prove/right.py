"""Right ways to make a batch of a LLaVA's samples: each gives the model what the samples give it one by one."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from omnibal_ext.integrations.torch_loops import collate
from tests.unit.prove.faults import alone_mask
from tests.unit.prove.folders import Features

IGNORED, PADDING = -100, 121


def pixels(features: list[Features]) -> Features:
    given = [one["pixel_values"] for one in features if "pixel_values" in one]
    return {"pixel_values": torch.cat(given)} if given else {}


def in_rows(features: list[Features], left: bool) -> Features:
    most = max(len(one["input_ids"]) for one in features)

    def rows(values: list[Tensor], filler: int) -> Tensor:
        gaps = [most - len(value) for value in values]
        sides = [(gap, 0) if left else (0, gap) for gap in gaps]
        return torch.stack([pad(value, side, value=filler) for value, side in zip(values, sides, strict=True)])

    ids = [one["input_ids"] for one in features]
    labels = [one["labels"].clone() for one in features]
    for one in labels:
        one[0] = IGNORED
    return {"input_ids": rows(ids, PADDING), "labels": rows(labels, IGNORED),
            "attention_mask": rows([torch.ones_like(one) for one in ids], 0), **pixels(features)}  # fmt: skip


def padded(features: list[Features]) -> Features:
    return in_rows(features, left=False)


def padded_left(features: list[Features]) -> Features:
    return in_rows(features, left=True)


def masked(features: list[Features]) -> Features:
    return collate(features) | {"attention_mask": alone_mask(features)[None, None]}


def masked_and_counted_on(features: list[Features]) -> Features:
    """Positions of the sequence: rotations read differences alone."""
    batch = masked(features)
    return batch | {"position_ids": torch.arange(batch["input_ids"].numel())[None]}


def added_masks(features: list[Features]) -> Features:
    hidden = ~alone_mask(features)
    return collate(features) | {"attention_mask": (hidden * torch.finfo(torch.float32).min)[None, None]}


def other_order(features: list[Features]) -> Features:
    return collate(features[::-1])


def boundaries(features: list[Features]) -> Features:
    batch = collate(features)
    ends = torch.tensor([0, *(len(one["input_ids"]) for one in features)]).cumsum(0).int()
    longest = int(ends.diff().max())
    return batch | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def one_sample(features: list[Features]) -> Features:
    return collate(features)


def filled_up(features: list[Features]) -> Features:
    """To a multiple of 64, by a sequence that no one sees."""
    batch = collate(features)
    gap = -batch["input_ids"].numel() % 64
    fillers = {"input_ids": PADDING, "labels": IGNORED}
    longer = {name: pad(batch[name], (0, gap), value=filler) for name, filler in fillers.items()}
    places = torch.cat([batch["position_ids"], torch.arange(gap)[None]], dim=1)
    return batch | longer | {"position_ids": places}


def separated(features: list[Features]) -> Features:
    """A token of padding behind each sample, which is a sequence of its own."""
    between = [{**one, "input_ids": pad(one["input_ids"], (0, 1), value=PADDING),
                "labels": pad(one["labels"], (0, 1), value=IGNORED)} for one in features]  # fmt: skip
    return collate(between)


def shifted_labels(features: list[Features]) -> Features:
    """As context parallelism needs them."""
    batch = collate(features)
    return batch | {"shift_labels": pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)}


def counted(features: list[Features]) -> Features:
    """Trainer's number of labels, which is what a loss is divided by."""
    batch = collate(features)
    return batch | {"num_items_in_batch": torch.tensor(int((batch["labels"][:, 1:] != IGNORED).sum()))}


def two_packs(features: list[Features]) -> Features:
    """Two rows of two samples each, with masks."""
    both = [features[:2], features[2:]]
    batch, most = in_rows([{name: torch.cat([one[name] for one in two]) for name in ("input_ids", "labels")}
                           for two in both], left=False), 0  # fmt: skip
    most = batch["input_ids"].shape[1]
    masks, places = torch.zeros(2, 1, most, most).bool(), torch.zeros(2, most).long()
    masks[:, :, range(most), range(most)] = True
    for row, two in enumerate(both):
        own, at = alone_mask(two), 0
        masks[row, 0, : len(own), : len(own)] = own
        for one in two:
            count = len(one["input_ids"])
            places[row, at : at + count] = torch.arange(count)
            batch["labels"][row, at] = IGNORED
            at += count
    return batch | {"attention_mask": masks, "position_ids": places} | pixels(features)


def rounded(features: list[Features]) -> Features:
    """Pixels in half precision, in which the model then runs the samples alone too."""
    batch = collate(features)
    return batch | {"pixel_values": batch["pixel_values"].bfloat16()}


def of_text(features: list[Features]) -> Features:
    """Transformers' own collator, of samples without images."""
    from transformers import DataCollatorWithFlattening

    return dict(DataCollatorWithFlattening()(features))


def of_text_with_boundaries(features: list[Features]) -> Features:
    from transformers import DataCollatorWithFlattening

    return dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features))


EVERYWHERE, WITH_MASKS = ["eager", "sdpa", "flash"], ["sdpa"]
RIGHT: dict[Any, list[str]] = {
    padded: EVERYWHERE, padded_left: EVERYWHERE, masked: WITH_MASKS, masked_and_counted_on: WITH_MASKS,
    added_masks: ["eager", "sdpa"], other_order: EVERYWHERE, one_sample: EVERYWHERE,
    filled_up: EVERYWHERE, separated: EVERYWHERE, shifted_labels: EVERYWHERE, counted: EVERYWHERE,
    two_packs: WITH_MASKS, rounded: EVERYWHERE, of_text: EVERYWHERE, of_text_with_boundaries: EVERYWHERE,
}  # fmt: skip
"""And the kernels that read them."""
