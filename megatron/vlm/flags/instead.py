"""Remedies for Megatron flags that are not supported here.

Each remedy has glob patterns of its flags; the first that matches counts. Flags that only have another name here are in
`omnibal_ext.flag_synonyms`.
"""

from fnmatch import fnmatchcase

INSTEAD = {
    "leave it out: there is no inference and no reinforcement learning here":
        "--*inference-* --rl-* --*-rl-* --grpo-*",
    "leave it out: shapes change from pack to pack, which CUDA graphs do not support":
        "--*cuda-graph* --te-rng-tracker",
    "chunks per rank are set by --virtual-pipeline-model-parallel-size of tools/plan_layout.py":
        "--num-layers-per-virtual-pipeline-stage --microbatch-group-size-*",
    "the plan (--plan) sets pipeline stages and schedule":
        "--decoder-*-pipeline-* --decoder-num-layers --account-for-* --pipeline-model-parallel-* --*overlap-p2p-* "
        "--delay-wgrad-* --defer-embedding-*",
    "--use-distributed-optimizer shards the optimizer's state, which stays in fp32 on the device":
        "--optimizer-* --*fsdp* --*precision-aware-* --main-*-dtype --exp-avg-* --num-distributed-optimizer-* "
        "--data-parallel-sharding-*",
    "the plan sets what is recomputed: plan with --memory-gib":
        "--recompute-* --checkpoint-activations --distribute-saved-activations --cpu-offloading-* --*offload*",
    "samples of a pack are isolated; long ones are split over ranks by --widths of tools/pack_data.py":
        "--*context-parallel* --cp-comm-* --max-seqlen-per-* --sft --reset-* --no-create-attention-*",
    "FP8 has --fp8-format, --fp8-recipe and --first-last-layers-bf16 only":
        "--*fp8* --*fp4* --te-precision-*",
    "--optimizer is adam or sgd": "--muon-* --lion-*",
    "overlapped communication has --overlap-grad-reduce and --overlap-param-gather only":
        "--*tp-comm-* --*-align-* --ddp-* --*moe-*-comm --overlap-*",
    "--model sets the experts; only --moe-aux-loss-coeff and --moe-router-dtype can be given":
        "--moe-* --*-moe-*",
    "--model sets the architecture":
        "--use-checkpoint-args --use-mcore-models --apply-* --*rotary-* --*rope-* --yarn-* --mrope-* --*mtp-* "
        "--mamba-* --hybrid-* --is-hybrid-* --heterogeneous-* --multi-latent-* --*-lora-rank --qk-* --v-head-dim "
        "--linear-* --dsa-* --attention-output-* --window-* --softmax-type --squared-relu --openai-gelu --quick-geglu "
        "--img-* --patch-dim --num-channels --num-classes --vision-* --dino-* --spec --padded-vocab-size",
    "leave it out: the attention kernel is chosen by what the machine supports": "--attention-backend --*flash-*",
    "--seed alone sets the initial weights, the same in every layout":
        "--no-initialization --data-parallel-random-* --init-method-* --deterministic-mode",
    "tokens are made by --tokenizer-model and --chat-template of tools/preprocess_data.py":
        "--*tokenizer-* --*tiktoken-* --vocab-* --merge-file --trust-remote-code --chat-template",
    "evaluation data are set by --eval-data and --eval-packs":
        "--valid-data-path --test-data-path --full-validation --test-mode --*validation-set*",
    "training data are set by --data and --packs":
        "--data-* --*-data-path --mock-data --split --*mmap* --eod-mask-loss --*-seq-length --fim-* --dataloader-* "
        "--*dataset* --*-data-args-path --mask-prob --short-seq-prob --iterations-to-skip",
    "--from loads initial weights, --load resumes a run":
        "--pretrained-checkpoint --load-main-* --use-dist-ckpt --auto-detect-ckpt-* --ckpt-convert-*",
    "--save and --save-interval write full checkpoints": "--non-persistent-* --replication* --async-ckpt-* --ckpt-*",
    "start the job again: --load resumes it":
        "--inprocess-* --adlr-* --enable-ft-* --ft-* --calc-ft-*",
    "the log has samples and useful tokens a second, every --log-interval": "--log-throughput --log-progress",
}  # fmt: skip


def instead_of(flag: str) -> str:
    """Return the remedy for a flag; "" if no pattern matches."""
    return next((said for said, many in INSTEAD.items() if any(fnmatchcase(flag, one) for one in many.split())), "")
