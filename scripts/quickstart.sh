#!/usr/bin/env bash
# Everything once, on a laptop: demo data, preprocess, pack, profile, plan, train on two pipeline ranks, evaluate;
# the balanced way and the unbalanced one, on the same samples; and, for its speed, an epoch of what a careful user does
# today: ISF packs, the paper's cuts, nothing recomputed. What is there already is not done again.
#   [EPOCHS=6] bash scripts/quickstart.sh [output folder, default runs/quickstart]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo
OUT="${1:-runs/quickstart}"
SAMPLES=4000 EPOCHS="${EPOCHS:-3}" VIT_BUDGET=40 LLM_BUDGET=320 HELDOUT=800
export PYTHONWARNINGS=ignore
mkdir -p "$OUT"
[[ -e "$OUT/.epochs" ]] || echo "$EPOCHS" >"$OUT/.epochs"
if [[ "$(cat "$OUT/.epochs")" != "$EPOCHS" ]]; then
    echo "error: $OUT has runs of $(cat "$OUT/.epochs") epochs, not of $EPOCHS: name another output folder" >&2
    exit 2
fi

# step MARK TITLE COMMAND...: run COMMAND unless it ended well before
step() {
    local mark="$OUT/.done-$1"
    printf '\n== %s ==\n' "$2"
    if [[ -e "$mark" ]]; then
        echo "(there already)"
    else
        "${@:3}"
        touch "$mark"
    fi
}

preprocess() { # NAME
    python tools/preprocess_data.py --input "$OUT/demo/$1.jsonl" --image-root "$OUT/demo" --workers 2 \
        --tokenizer-model "$OUT/demo/tokenizer.model" --chat-template internlm2-chat --output-dir "$OUT/$1" \
        --tile-size 32 --tokens-per-tile 4 --max-tiles 32
}

pack() { # NAME FLAGS...
    python tools/pack_data.py --data "$OUT/train" --output-dir "$OUT/packs-$1" --vit-budget "$VIT_BUDGET" \
        --llm-budget "$LLM_BUDGET" "${@:2}"
}

launch() { # NAME EPOCHS FLAGS...
    python tools/launch.py --model tiny --from-scratch --data "$OUT/train" --packs "$OUT/packs-$1" --run-dir "$OUT/$1" \
        --nproc-per-node 2 --pipeline-model-parallel-size 2 --epochs "$2" "${@:3}" -- --lr 3e-3 --min-lr 1e-4 \
        --lr-decay-style cosine --lr-warmup-iters 40 --init-method-std 0.1 --adam-beta2 0.95 --weight-decay 0.01 \
        --clip-grad 1.0 --log-interval 20 --save "$OUT/$1/checkpoints" --save-interval 100000
}

evaluate() { # NAME
    python tools/evaluate_demo.py --model tiny --load "$OUT/$1/checkpoints" --data "$OUT/heldout" \
        --tokenizer-model "$OUT/demo/tokenizer.model" --json >"$OUT/$1/evaluation.json"
}

# An iteration is 4 packs of about 9 samples, or 13 padded microbatches of 4.
BALANCED=(balanced "$EPOCHS" --method joint)
CAREFUL=(careful 1 --method bmp --profile "$OUT/balanced/profile.json")
BASELINE=(baseline "$EPOCHS" --method parameters --recompute full)

step demo "demo data: real handwriting, 1 to 30 digits a picture" \
    python tools/make_demo_data.py --output-dir "$OUT/demo" --samples "$SAMPLES" --heldout-samples "$HELDOUT"
step train "preprocess" preprocess train
step heldout "preprocess the held-out pictures" preprocess heldout
step packs-balanced "pack, balanced" pack balanced --method balanced --micro-batches 4
step packs-baseline "pack, baseline: random batches of 4, padded" \
    pack baseline --method random --samples-per-pack 4 --micro-batches 13
step packs-careful "pack, careful: ISF" pack careful --method isf --micro-batches 4
step plan-balanced "profile and plan, balanced" launch "${BALANCED[@]}" --dry-run
step plan-careful "plan, careful: the paper's cuts, nothing recomputed" launch "${CAREFUL[@]}" --dry-run
step plan-baseline "plan, baseline: cut by parameters, all recomputed" launch "${BASELINE[@]}" --dry-run
step train-balanced "train, balanced" launch "${BALANCED[@]}" --progress
step train-careful "train, careful: an epoch, for its speed" launch "${CAREFUL[@]}" --progress
step train-baseline "train, baseline" launch "${BASELINE[@]}" --progress
step eval-balanced "read the held-out pictures, balanced" evaluate balanced
step eval-baseline "read the held-out pictures, baseline" evaluate baseline
printf '\n== summary ==\n'
python tools/compare_runs.py --baseline "$OUT/baseline" --run "$OUT/careful" --run "$OUT/balanced"
python tools/report.py --run "$OUT/balanced" --run "$OUT/baseline" --output "$OUT/report.html" >/dev/null
printf '\nwhere the time went, both runs side by side: %s\n' "$OUT/report.html"
