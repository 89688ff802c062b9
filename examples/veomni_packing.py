"""VeOmni's dynamic batches of two budgets, and images shared out by the ViT's work: start its trainer with it.

    torchrun --nproc-per-node 8 examples/veomni_packing.py config.yaml

In the config: `dyn_bsz: true`, `dyn_bsz_runtime: main`, and for Qwen3-VL mixtures `encoder_data_balance: true` with
`encoder_data_balance_sorting_algo: omnibal`.
"""

from veomni.arguments import parse_args
from veomni.trainer.vlm_trainer import VeOmniVLMArguments, VLMTrainer

from omnibal_ext.integrations.veomni import install

if __name__ == "__main__":
    install(vit_budget=16_384)
    VLMTrainer(parse_args(VeOmniVLMArguments)).train()
