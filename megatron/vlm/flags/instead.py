"""Remedies for flags in Megatron users' scripts that are not obeyed here.

Each remedy has glob patterns of the flags it is for; the first that matches counts. Flags that only have another name
here are in `omnibal_ext.flag_synonyms`.
"""

from fnmatch import fnmatchcase

INSTEAD = {
    "leave it out: this trains on conversations, and neither generates nor rewards":
        "--*inference-* --rl-* --*-rl-* --grpo-*",
    "leave it out: packs have other shapes in every iteration, which no graph replays":
        "--*cuda-graph* --te-rng-tracker",
    "--virtual-pipeline-model-parallel-size of planning says how many chunks a rank has":
        "--num-layers-per-virtual-pipeline-stage --microbatch-group-size-*",
    "the plan says where the model is cut and in which order ranks work: give --plan":
        "--decoder-*-pipeline-* --decoder-num-layers --account-for-* --pipeline-model-parallel-* --*overlap-p2p-* "
        "--delay-wgrad-* --defer-embedding-*",
    "--use-distributed-optimizer shards the optimizer's state, which stays in fp32 on the device":
        "--optimizer-* --*fsdp* --*precision-aware-* --main-*-dtype --exp-avg-* --num-distributed-optimizer-* "
        "--data-parallel-sharding-*",
    "the plan says what is recomputed: plan with --memory-gib":
        "--recompute-* --checkpoint-activations --distribute-saved-activations --cpu-offloading-* --*offload*",
    "samples are isolated in a pack, which ranks run together where it was packed with --widths":
        "--*context-parallel* --cp-comm-* --max-seqlen-per-* --sft --reset-* --no-create-attention-*",
    "of eight bits --fp8-format, --fp8-recipe and --first-last-layers-bf16 are obeyed":
        "--*fp8* --*fp4* --te-precision-*",
    "--optimizer is adam or sgd": "--muon-* --lion-*",
    "of what communicates beside the work --overlap-grad-reduce and --overlap-param-gather are obeyed":
        "--*tp-comm-* --*-align-* --ddp-* --*moe-*-comm --overlap-*",
    "experts are those of --model; --moe-aux-loss-coeff and --moe-router-dtype are obeyed":
        "--moe-* --*-moe-*",
    "--model says what the model is":
        "--use-checkpoint-args --use-mcore-models --apply-* --*rotary-* --*rope-* --yarn-* --mrope-* --*mtp-* "
        "--mamba-* --hybrid-* --is-hybrid-* --heterogeneous-* --multi-latent-* --*-lora-rank --qk-* --v-head-dim "
        "--linear-* --dsa-* --attention-output-* --window-* --softmax-type --squared-relu --openai-gelu --quick-geglu "
        "--img-* --patch-dim --num-channels --num-classes --vision-* --dino-* --spec --padded-vocab-size",
    "leave it out: attention has the kernel that the machine has": "--attention-backend --*flash-*",
    "--seed draws all weights, alike in every layout":
        "--no-initialization --data-parallel-random-* --init-method-* --deterministic-mode",
    "tools/preprocess_data.py --tokenizer-model and --chat-template make the tokens":
        "--*tokenizer-* --*tiktoken-* --vocab-* --merge-file --trust-remote-code --chat-template",
    "--eval-data and --eval-packs are what is evaluated":
        "--valid-data-path --test-data-path --full-validation --test-mode --*validation-set*",
    "--data and --packs are what is trained on":
        "--data-* --*-data-path --mock-data --split --*mmap* --eod-mask-loss --*-seq-length --fim-* --dataloader-* "
        "--*dataset* --*-data-args-path --mask-prob --short-seq-prob --iterations-to-skip",
    "--from gives first weights, --load goes on with a run":
        "--pretrained-checkpoint --load-main-* --use-dist-ckpt --auto-detect-ckpt-* --ckpt-convert-*",
    "--save-interval and --save write whole checkpoints": "--non-persistent-* --replication* --async-ckpt-* --ckpt-*",
    "--load goes on where a job ended, when it is started again":
        "--inprocess-* --adlr-* --enable-ft-* --ft-* --calc-ft-*",
    "the log has samples and useful tokens a second, by --log-interval": "--log-throughput --log-progress",
}  # fmt: skip


def instead_of(flag: str) -> str:
    """The remedy for a flag; "" if no pattern matches."""
    return next((said for said, many in INSTEAD.items() if any(fnmatchcase(flag, one) for one in many.split())), "")
