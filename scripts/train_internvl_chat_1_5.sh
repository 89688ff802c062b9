#!/usr/bin/env bash
# InternVL-Chat-1.5 (InternViT-6B + InternLM2-20B) on one node of 8 GPUs; for several nodes see scripts/slurm/train.sbatch.
#   FROM=... DATA=... PACKS=... RUN_DIR=... bash scripts/train_internvl_chat_1_5.sh [Megatron's flags]
# FROM is the model's folder, Hugging Face's or converted. Started again, the run goes on from RUN_DIR/checkpoints.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${FROM:?folder of the first weights}" "${DATA:?dataset folder}" "${PACKS:?packed index}"
: "${RUN_DIR:?folder for plan, metrics and checkpoints}"
source scripts/gpu_environment.sh
exec python tools/launch.py --model "${PRESET:-$FROM}" --from "$FROM" --data "$DATA" --packs "$PACKS" \
    --run-dir "$RUN_DIR" --nproc-per-node 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --memory-gib "${MEMORY_GIB:-72}" --epochs "${EPOCHS:-1}" -- \
    --bf16 --use-distributed-optimizer "${OVERLAP[@]}" --lr 1e-5 --min-lr 0 --lr-decay-style cosine --weight-decay 0.05 \
    --clip-grad 1.0 --log-interval 10 --save "$RUN_DIR/checkpoints" --save-interval 200 "$@"
