"""Three steps of axolotl on our packs, in a process of its own:

    python tests/unit/integrations/train_axolotl.py FOLDER KIND VIT_BUDGET ['NAME: VALUE'...]

makes the model FOLDER/KIND and FOLDER/data; FOLDER/KIND.pt gets the packs that were made, a batch of each by the
collator, the steps' batches, and what axolotl's own collator makes of its samples one by one.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bare_torchvision  # noqa: F401
import torch
import trained_folders
import yaml
from axolotl.cli import train as command
from axolotl.core.trainers import AxolotlTrainer

from omnibal_ext.errors import run_tool

SEQUENCE_LEN = 1200
noted: dict[str, Any] = {"batches": []}
compute_loss, train = AxolotlTrainer.compute_loss, AxolotlTrainer.train


def noting_loss(self: Any, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
    noted["batches"].append(dict(inputs))
    return compute_loss(self, model, inputs, *given, **named)


def noting_train(self: Any, *given: Any, **named: Any) -> Any:
    join = self.data_collator
    noted["packs"] = [list(pack["omnibal_samples"]) for pack in self.train_dataset]
    noted["joined"] = [join([pack]) for pack in self.train_dataset]
    noted["alone"] = [dict(join.encode([row])) for row in join.rows]
    noted["warmup_steps"] = self.args.warmup_steps
    done = train(self, *given, **named)
    noted["steps"] = self.state.global_step
    return done


def main() -> None:
    """Train, and write what was seen."""
    where, kind, vit_budget, *changed = sys.argv[1:]
    folder = Path(where)
    getattr(trained_folders, kind)(folder / kind)
    if not (folder / "data").exists():
        trained_folders.openai(folder / "data")
    AxolotlTrainer.compute_loss, AxolotlTrainer.train = noting_loss, noting_train
    settings = {
        "base_model": str(folder / kind), "processor_type": "AutoProcessor", "chat_template": "tokenizer_default",
        "plugins": ["omnibal_ext.integrations.axolotl.TwoBudgetPlugin"], "omnibal_vit_budget": int(vit_budget),
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "sequence_len": SEQUENCE_LEN,
        "skip_prepare_dataset": True, "remove_unused_columns": False, "sample_packing": False,
        "datasets": [{"path": str(folder / "data/some.jsonl"), "ds_type": "json", "type": "chat_template"}],
        "max_steps": 3, "num_epochs": 1, "optimizer": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler": "constant",
        "output_dir": str(folder / f"{kind}-out"), "dataset_prepared_path": str(folder / "prepared"),
        "attn_implementation": "sdpa", "bf16": False, "fp16": False, "tf32": False, "val_set_size": 0,
        "save_strategy": "no", "dataloader_pin_memory": False, "dataloader_num_workers": 0, "dataset_num_proc": 1,
        "use_cpu": True, **yaml.safe_load("\n".join(changed) or "{}"),
    }  # fmt: skip
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(settings))
    command.do_cli(str(folder / f"{kind}.yaml"))
    torch.save(noted, folder / f"{kind}.pt")


if __name__ == "__main__":
    run_tool(main)
