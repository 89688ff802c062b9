"""ms-swift's packs: its template of each model joins what its `PackingDataset` has chosen; budgets choose, no more."""

from types import SimpleNamespace
from typing import Any

from benchmarks.verdicts.folders import IMAGE, PADDING, VIDEO, kind_of, model_of
from benchmarks.verdicts.ways import Features, Way, listed

PACKAGE = "ms-swift"
WAYS = {"packing": Way("--packing true", ("flash",), refusal="does not support padding free or packing")}
TEMPLATES = {"llava": "llava1_5_hf", "internvl": "internvl_hf", "qwen": "qwen2_5_vl", "gemma": "gemma3_vision"}
PLACES = {"image_token_id": IMAGE, "video_token_id": VIDEO}
ALONG_TOKENS = ("input_ids", "labels", "token_type_ids")


def packing(features: list[Features], config: Any) -> Features:
    """Return what the template makes of samples, as the trainer hands it on."""
    template = _template(kind_of(config))
    rows: list[Features] = []
    for one in features:
        media = {name: value for name, value in one.items() if name not in (*ALONG_TOKENS, "attention_mask")}
        rows.append({**listed(one, *ALONG_TOKENS), **media, "length": len(one["input_ids"])})
    batch = dict(template.data_collator(rows))
    batch.pop("text_position_ids", None)  # as Seq2SeqTrainer.compute_loss
    return batch


def _template(kind: str) -> Any:
    """The template as `--packing true` has it, if `SwiftSft._prepare_template` lets it."""
    from swift.pipelines.train.sft import SwiftSft
    from swift.template import TEMPLATE_MAPPING

    meta = TEMPLATE_MAPPING[TEMPLATES[kind]]
    template = meta.template_cls(None, meta)
    template.processor = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=PADDING), **PLACES)
    template.model_meta = SimpleNamespace(is_multimodal=True)
    template.init_env_args()
    given = SimpleNamespace(
        get_template=lambda _: template, padding_free=True, packing=True, template=TEMPLATES[kind],
        model_meta=template.model_meta,
    )  # fmt: skip
    SwiftSft._prepare_template(SimpleNamespace(args=given, processor=None, model=model_of(kind)))
    template.packing = template.padding_free = True  # as PackingDataset sets it
    return template
