"""Three steps of LLaMA-Factory on our packs, in a process of its own:

    python tests/unit/integrations/train_llama_factory.py FOLDER KIND TEMPLATE VIT_BUDGET ['NAME: VALUE'...]

makes the model FOLDER/KIND and FOLDER/data; FOLDER/KIND.pt gets the packs that were made, a batch of each by the
collator, the steps' batches, and what LLaMA-Factory's own collator makes of its own samples one by one.
"""

import sys
from copy import copy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bare_torchvision  # noqa: F401
import torch
import trained_folders
import yaml
from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
from llamafactory.data.loader import get_dataset
from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

from omnibal_ext.errors import run_tool
from omnibal_ext.integrations.llama_factory import install

CUTOFF = 1200
noted: dict[str, Any] = {"batches": []}


class Noting(workflow.CustomSeq2SeqTrainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        noted["batches"].append(dict(inputs))
        return super().compute_loss(model, inputs, *given, **named)

    def train(self, *given: Any, **named: Any) -> Any:
        noted["packs"], noted["image_token"] = list(self.train_dataset), self.model.config.image_token_id
        noted["joined"] = [self.data_collator([pack]) for pack in noted["packs"]]
        return super().train(*given, **named)


def one_by_one(template: Any, model_args: Any, data_args: Any, *others: Any, **modules: Any) -> list[dict[str, Any]]:
    """LLaMA-Factory's own samples, with `alone`: what its own collator makes of one, without masks and positions."""
    unpacked = copy(data_args)
    unpacked.packing, unpacked.cutoff_len = False, 2**20
    rows = get_dataset(template, model_args, unpacked, *others, **modules)["train_dataset"]
    parts = {key: modules[key] for key in ("tokenizer", "processor")}
    encode = MultiModalDataCollatorForSeq2Seq(**parts, template=template)
    made = []
    for row in rows:
        whole = {key: row[key] for key in ("input_ids", "labels")}
        batch = encode([dict(row)]) if row["images"] else {}  # others are given a blank one
        media = {key: value for key, value in batch.items() if key not in ("attention_mask", "position_ids")}
        if "image_grid_thw" in media:  # by which transformers' model tells images from words
            media["mm_token_type_ids"] = (torch.tensor(row["input_ids"]) == noted["image_token"]).long()
        made.append({**whole, "images": row["images"] or [], "alone": {**media, **whole}})
    return made


def main() -> None:
    """Train, and write what was seen."""
    where, kind, template, vit_budget, *changed = sys.argv[1:]
    folder = Path(where)
    getattr(trained_folders, kind)(folder / kind)
    if not (folder / "data").exists():
        trained_folders.sharegpt(folder / "data")
    install(vit_budget=int(vit_budget))
    load = workflow.get_dataset

    def noting(*given: Any, **named: Any) -> Any:
        noted["read"] = given, {key: value for key, value in named.items() if key != "stage"}
        return load(*given, **named)

    workflow.get_dataset, workflow.CustomSeq2SeqTrainer = noting, Noting
    run_exp({
        "model_name_or_path": f"{folder}/{kind}", "stage": "sft", "do_train": True, "finetuning_type": "full",
        "freeze_vision_tower": False, "freeze_multi_modal_projector": False, "dataset": "some",
        "dataset_dir": f"{folder}/data", "template": template, "cutoff_len": CUTOFF, "packing": True,
        "output_dir": f"{folder}/{kind}-out", "per_device_train_batch_size": 1, "max_steps": 3, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "overwrite_cache": True, "flash_attn": "sdpa",
        **yaml.safe_load("\n".join(changed) or "{}"),
    })  # fmt: skip
    given, named = noted.pop("read")
    torch.save({**noted, "samples": one_by_one(*given, **named, stage="sft")}, folder / f"{kind}.pt")


if __name__ == "__main__":
    run_tool(main)
