"""Our names for flags of other trainers: transformers' Trainer, LLaMA-Factory, ms-swift, Megatron-LM's examples."""

import difflib
from collections.abc import Iterable

_FLAGS = {
    "--lr": "--learning-rate",
    "--train-iters": "--max-steps --train-samples",
    "--epochs of tools/launch.py": "--num-epochs --num-train-epochs",
    "--micro-batches of packing, whose packs are the microbatches":
        "--batch-size --rampup-batch-size --step-batch-size-schedule",
    "--micro-batches of packing": "--gradient-accumulation-steps",
    "--llm-budget and --vit-budget of packing: a microbatch is one pack, of at most that size":
        "--micro-batch-size --microbatch-size --per-device-train-batch-size --packing-seq-length --packing-buffer-size",
    "--lr-warmup-iters": "--warmup-steps --lr-warmup-samples --warmup",
    "--lr-warmup-fraction": "--warmup-ratio",
    "--lr-decay-style": "--lr-scheduler-type",
    "--lr-decay-iters": "--lr-decay-samples",
    "--lr-wsd-decay-iters": "--lr-wsd-decay-samples",
    "--clip-grad": "--max-grad-norm",
    "--adam-eps": "--adam-epsilon",
    "--save-interval": "--save-steps",
    "--log-interval": "--logging-steps",
    "--eval-interval": "--eval-steps",
    "--num-workers": "--dataloader-num-workers",
    "--model": "--model-name-or-path --language-model-type --vision-model-type",
    "--model, whose config.json says it": "--pixel-shuffle --disable-vision-class-token",
    "--llm-budget, and --max-tokens of preprocessing": "--max-length --cutoff-len --dataloader-seq-length",
    "--input of preprocessing": "--dataset-config --prompt-path",
    "--eval-data and --eval-packs": "--valid-path --online-evaluation-config",
    "--packs, whose place a save has": "--dataloader-save",
    "--chat-template of preprocessing": "--tokenizer-prompt-format --special-tokens --force-system-message",
    "--max-tiles of preprocessing": "--max-num-tiles",
    "--model, whose tiles and marks preprocessing makes":
        "--use-tiling --use-thumbnail --use-tile-tags --use-image-tag --image-tag-type "
        "--use-area-weighted-aspect-ratio --num-frames",
    "--loss-reduction": "--use-loss-scaling",
    "--memory-gib of planning, by which layers are recomputed": "--recompute-vision",
    "--freeze vit": "--freeze-vit --freeze-ViT --freeze-vision-tower",
    "--freeze llm": "--freeze-llm --freeze-LM",
    "--freeze, which takes parts of the model: vit, projector, llm": "--freeze-all-layers",
    "--lr-vit": "--vision-lr --vision-tower-lr --vit-lr",
    "--lr-projector": "--mm-projector-lr --aligner-lr --merger-lr",
    "--lr-vit and --lr-projector": "--decoupled-lr --decoupled-min-lr",
    "--lora-rank": "--lora-r",
    "--lora-targets, which takes parts of the model: vit, projector, llm": "--lora-target --lora-target-modules",
    "--lora-rank R": "--use-lora --use-llm-lora",
    "--lora-rank R --lora-targets vit": "--use-backbone-lora",
    "nothing: the machine says which kernels there are": "--use-te",
    "nothing: --from has weights for the whole model": "--allow-missing-vision-projection-checkpoint",
    "nothing: adapters have no dropout": "--lora-dropout",
    "nothing: Megatron's --use-distributed-optimizer shards the optimizer": "--deepspeed",
    "nothing: edit the profile.json that --output names, and take manifest_hash out of it": "--measured",
    "--output of tools/report.py, whose page draws the timelines": "--png",
    "RUN/checkpoints of tools/launch.py, unless it is told": "--save",
}  # fmt: skip
SYNONYMS = {flag: here for here, flags in _FLAGS.items() for flag in flags.split()}
"""Our flag, or a remark, by the other trainer's flag."""


def suggestion(flag: str, known: Iterable[str], near: float = 0.7) -> str:
    """For an unknown flag, its name here or the most similar flags of `known`, in words; "": none is similar."""
    if flag in SYNONYMS:
        return f"here it is {SYNONYMS[flag]}"
    nearest = difflib.get_close_matches(flag, [*known], 2, near)
    return f"the nearest is {' or '.join(nearest)}" if nearest else ""
