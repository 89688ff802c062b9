"""LLaMA-Factory: `packing: true` with two budgets, of images too, where no sample of a pack sees another.

# packed.py: `torchrun --nproc-per-node 8 packed.py config.yaml` in place of `llamafactory-cli train config.yaml`
from llamafactory.train.tuner import run_exp
from omnibal_ext.integrations.llama_factory import install
install(vit_budget=16384), run_exp()
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import wraps
from inspect import unwrap
from itertools import chain, islice
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.samples import Packer, size_of
from omnibal_ext.integrations.torch_loops import collate
from omnibal_ext.joining.checks import packs_of
from omnibal_ext.packing import warm_up
from omnibal_ext.packing.costs import PackCosts

TOKENS, MEDIA, LENGTHS = ("input_ids", "labels"), ("images", "videos", "audios"), "omnibal_lengths"
"""Columns of a pack: all its samples' in turn; a list of each sample; and how many tokens each has."""
KERNELS = ("eager", "sdpa", "flash_attention_2")
"""Kernels of attention that keep samples apart by their positions."""
OF_EVALUATION = "per_device_eval_batch_size"
MUST_BE = {"packing": True, "per_device_train_batch_size": 1, OF_EVALUATION: 1, "predict_with_generate": False,
           "shift_attn": False, "use_unsloth": False, "use_kt": False}  # fmt: skip
"""Arguments that make a batch a pack, and attention transformers' own."""


def sample_of(reader: Any, ids: Sequence[int], labels: Sequence[int], *media: Sequence[Any] | None) -> dict[str, Any]:
    """Return a sample as its model's processor makes it; `media`: lists of images, videos and sounds, or None. `reader`
    has a `template`, its tokenizer and processor."""
    given = [each or [] for each in media]
    counts = ([len(each)] for each in given)
    fields = reader.template.mm_plugin.get_mm_inputs(*given, *counts, [ids], reader.processor)
    return {"input_ids": ids, "labels": labels, **fields, "video_metadata": None}


def pack_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return encoded samples as one row of a pack: the tokens of all in turn, lists of media and lengths by sample."""
    tokens = {key: [*chain.from_iterable(row[key] for row in rows)] for key in TOKENS}
    media = {kind: [row[kind] or [] for row in rows] for kind in MEDIA}
    return {**tokens, **media, LENGTHS: [len(row["input_ids"]) for row in rows]}


def samples_of(reader: Any, pack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the samples of a pack's row, as `sample_of`; where it is bare (`is_bare`) also the blank one, last."""
    tokens = [iter(pack[key]) for key in TOKENS]
    for count, *media in zip(*(pack[key] for key in (LENGTHS, *MEDIA)), strict=True):
        yield sample_of(reader, *([*islice(each, count)] for each in tokens), *media)
    if is_bare(reader, pack):
        yield blank(reader)


def is_bare(reader: Any, pack: Mapping[str, Any]) -> bool:
    """Say whether a pack gives an encoder no work: with sharded weights the other ranks would wait for it."""
    plugin, (images, videos, sounds) = reader.template.mm_plugin, (any(pack[kind]) for kind in MEDIA)
    return bool((plugin.image_token and not (images or videos)) or (plugin.audio_token and not sounds))


def blank(reader: Any) -> dict[str, Any]:
    """Return as a sample of its own the blank image, and sound, that LLaMA-Factory adds to a batch without any."""
    from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq

    fill = MultiModalDataCollatorForSeq2Seq(reader.tokenizer, template=reader.template, processor=reader.processor)
    return {**fill([{"input_ids": [], "attention_mask": [], "labels": []}]), "attention_mask": None}


class TwoBudgetProcessor(NamedTuple):
    """Stand-in for LLaMA-Factory's processor of packs: `theirs` encodes samples, `packer` says which go together."""

    theirs: Any
    packer: Packer

    def preprocess_dataset(self, examples: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Encode a buffer, return its packs as columns. Those that get a blank sample have room, unless a text leaves
        none."""
        encoded, size = self.theirs.preprocess_dataset(examples), itemgetter("size")
        rows = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
        groups = self.packer.groups([{**row, "size": self._size(row)} for row in rows], size)
        if bare := [row for group in groups if is_bare(self.theirs, pack_of(group)) for row in group]:
            groups = [group for group in groups if not is_bare(self.theirs, pack_of(group))]
            room = max(1, self.packer.llm_budget - size_of(blank(self.theirs))[1])
            groups += self.packer._replace(llm_budget=room, beyond="alone").groups(bare, size)
        packs = [pack_of(group) for group in groups]
        return {key: [pack[key] for pack in packs] for key in pack_of([])}

    def _size(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return (tiles, tokens); one token beyond the budget for a sample that may have been cut within its images."""
        tiles, tokens = size_of(sample_of(self.theirs, *(row[key] for key in (*TOKENS, *MEDIA))))
        return tiles, tokens + (any(row[kind] for kind in MEDIA) and tokens == self.packer.llm_budget)

    def print_data_example(self, example: Mapping[str, Any]) -> None:
        """Print a pack, as LLaMA-Factory prints an encoded sample."""
        self.theirs.print_data_example(example)


class PackCollator:
    """Stand-in for LLaMA-Factory's collator: hands its model a pack, whose samples do not see each other."""

    def __init__(self, template: Any, model: Any, tokenizer: Any, processor: Any = None, compute_dtype: Any = None,
                 **_: Any) -> None:  # fmt: skip
        """Refuse, with UserError, a model whose attention or layers do not keep samples apart."""
        self.reader = SimpleNamespace(template=template, tokenizer=tokenizer, processor=processor)
        self.config, self.dtype = model.config, compute_dtype
        kernel, kind = self.config.get_text_config()._attn_implementation, self.config.model_type
        if kernel not in KERNELS or packs_of(self.config).linear_attention:
            raise UserError(f"packs of {kind} with {kernel}: flash_attn must be auto, sdpa, disabled or fa2, and no "
                            "layer of linear attention, which LLaMA-Factory replaces by its own")  # fmt: skip

    def __call__(self, packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of one pack. Raises UserError for several packs, or rows that `pack_of` did not make."""
        if len(packs) > 1 or LENGTHS not in packs[0]:
            raise UserError("batches must be one pack of omnibal: batch sizes of 1, and no tokenized_path of others")
        batch = collate([*samples_of(self.reader, packs[0])], self.config)
        floats = {key for key, value in batch.items() if getattr(value, "is_floating_point", bool)()}
        return batch | {key: batch[key].to(self.dtype) for key in floats}


def install(
    vit_budget: int, costs: PackCosts | None = None, beyond: str = "drop", seconds: float | None = None
) -> None:
    """Replace the packs of `packing: true` in SFT by packs of two budgets; that of tokens is `cutoff_len`.

    Args:
        vit_budget: most tiles of a pack, of patches for models at native resolution (Qwen-VL: 4 a visual token).
        costs, beyond, seconds: as in `omnibal_ext.packing.pack`.

    Training then raises UserError for arguments under which samples of a pack would see each other.
    """
    from llamafactory.data import loader
    from llamafactory.train.sft import workflow

    warm_up()
    theirs = unwrap(workflow.get_dataset)

    def processor(data_args: Any, **parts: Any) -> TwoBudgetProcessor:
        encoder = loader.SupervisedDatasetProcessor(data_args=data_args, **parts)
        return TwoBudgetProcessor(encoder, Packer(vit_budget, data_args.cutoff_len, costs, beyond, seconds))

    @wraps(theirs)
    def get_dataset(template: Any, *arguments: Any, **modules: Any) -> Any:
        check({name: value for group in arguments for name, value in vars(group).items()})
        kept, loader.PackedSupervisedDatasetProcessor = loader.PackedSupervisedDatasetProcessor, processor
        try:
            return theirs(template, *arguments, **modules)
        finally:  # other stages have collators of their own
            loader.PackedSupervisedDatasetProcessor = kept

    workflow.get_dataset, workflow.SFTDataCollatorWith4DAttentionMask = get_dataset, PackCollator


def check(arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless arguments (`MUST_BE`) make each batch one pack, and attention transformers' own."""
    for name, wanted in MUST_BE.items():
        if (arguments.get(name) or False) != wanted and (name != OF_EVALUATION or arguments["do_eval"]):
            raise UserError(f"{name}: {arguments.get(name)}: must be {str(wanted).lower()} with omnibal's packs")


def proved(samples: Sequence[Mapping[str, Any]], config: Any) -> dict[str, Any]:
    """Return processors' samples as one batch, joined as packs are in training; for `omnibal prove`."""
    import torch

    plugin = SimpleNamespace(image_token=None, audio_token=None, get_mm_inputs=lambda images, *_: images[0])
    shown = [{key: value for key, value in one.items() if key not in TOKENS} for one in samples]
    rows = [{key: torch.as_tensor(one[key]).reshape(-1).tolist() for key in TOKENS} for one in samples]
    pack = pack_of(
        [{**row, **dict.fromkeys(MEDIA), "images": [fields]} for row, fields in zip(rows, shown, strict=True)]
    )
    template, model = SimpleNamespace(mm_plugin=plugin), SimpleNamespace(config=config)
    return PackCollator(template, model, None, compute_dtype=torch.float32)([pack])
