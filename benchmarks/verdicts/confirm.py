"""Which sample sees which, by changing one: transformers' model and a trainer's collator, nothing of `omnibal prove`.

    python benchmarks/verdicts/confirm.py --model FOLDER --collator benchmarks.verdicts.with_trl:packing --samples words

Each of the four samples of `folders.py` in turn gets other words and pictures before the collator is asked; a sample
sees it if logits at its own words move by more than a ten-thousandth of the largest. Words of a sample are known by
their numbers. Prints by kernel a list for each sample, of those that it sees, or why there is none. Flash-attention is
a package of that name which attends to one sequence after the other by PyTorch's own function.
"""

import argparse
import importlib
import inspect
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.verdicts.folders import BEGIN, SAMPLES, WORDS, kind_of, samples_of

KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2"}


def seen(model: Any, batches: list[dict[str, Any]]) -> list[list[int]]:
    """Return for each sample those that it sees; `batches`: of all samples as they are, then with one changed each."""
    with torch.no_grad():
        first, *others = [model(**batch).logits for batch in batches]
    ids, found = batches[0]["input_ids"], []
    for number in range(SAMPLES):
        own = (ids < BEGIN) & (ids // WORDS == number)
        moved = [float((other - first)[own].abs().max() / first.abs().max()) for other in others]
        found.append([other for other, by in enumerate(moved) if other != number and not by <= 1e-4])
    return found


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attend to one sequence after the other: flash-attention's function of this name, of queries [T, heads, D]."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k), "queries and keys of other lengths"
    out, ends = torch.zeros_like(q), cu_seqlens_q.tolist()
    for begin, end in pairwise(ends):
        own = [one[begin:end].transpose(0, 1)[None] for one in (q, k, v)]
        how = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
        out[begin:end] = scaled_dot_product_attention(*own, **how)[0].transpose(0, 1)
    return out


def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False,
                    **_: Any) -> torch.Tensor:  # fmt: skip
    """Attend within each row: of queries [B, T, heads, D]."""
    own = [one.transpose(1, 2) for one in (q, k, v)]
    how = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": True}
    return scaled_dot_product_attention(*own, **how).transpose(1, 2)


def install_flash() -> None:
    """Let transformers find a package `flash_attn` with the functions above."""
    from transformers import modeling_flash_attention_utils as theirs
    from transformers import modeling_utils

    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func,
                         flash_attn_with_kvcache=None)  # fmt: skip
    vars(padding).update(pad_input=theirs._pad_input, unpad_input=theirs._unpad_input)
    sys.modules.update({"flash_attn": package, "flash_attn.bert_padding": padding})
    theirs.is_flash_attn_2_available = lambda: True
    modeling_utils.PreTrainedModel._flash_attn_import_error = lambda *_, **__: None


def confirmed(folder: Path, collate: Any, images: bool) -> dict[str, Any]:
    """Return by kernel for each sample those that it sees, or why it cannot be run."""
    import transformers

    install_flash()
    told: dict[str, Any] = {}
    for kernel, name in KERNELS.items():
        try:
            model = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=name)
            model = model.float().eval()
            model.config.use_cache = model.config.get_text_config().use_cache = False
            more = {"config": model.config} if "config" in inspect.signature(collate).parameters else {}
            made = [samples_of(kind_of(model.config), images, changed) for changed in (None, *range(SAMPLES))]
            told[kernel] = seen(model, [dict(collate(samples, **more)) for samples in made])
        except Exception as error:  # whatever a batch makes of the model
            told[kernel] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return told


def main() -> None:
    """Read what is asked, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--collator", required=True)
    parser.add_argument("--samples", choices=("images", "words"), required=True)
    given = parser.parse_args()
    module, _, name = given.collator.partition(":")
    collate = getattr(importlib.import_module(module), name)
    print(json.dumps(confirmed(given.model, collate, given.samples == "images")))


if __name__ == "__main__":
    main()
