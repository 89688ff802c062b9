#!/usr/bin/env bash
# Everything once, on a laptop: demo data, preprocess, pack, profile, plan, train on two ranks, evaluate. Three ways on
# the same samples: `baseline`, random padded batches; `careful`, what a careful user does today, ISF packs; `balanced`.
# First two replicas, where data is all that differs: the rank with less to do waits. Then a pipeline of two:
# `baseline` is cut by parameters and recomputes all, `careful` has the paper's cuts and recomputes nothing,
# `balanced` our plan. The three ways take turns of two seconds, so that what else the machine does falls on all alike.
# What is there already is not done again.
#   [EPOCHS=3] bash scripts/quickstart.sh [output folder, default runs/quickstart]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" demo
OUT="${1:-runs/quickstart}"
SAMPLES=4000 EPOCHS="${EPOCHS:-1}" HELDOUT=800
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

pack() { # RANKS WAY FLAGS...
    python tools/pack_data.py --data "$OUT/train" --output-dir "$OUT/$1/packs-$2" "${@:3}"
}

launch() { # RANKS WAY EPOCHS FLAGS...: the command, in a line
    printf '%q ' python tools/launch.py --model tiny --from-scratch --data "$OUT/train" --packs "$OUT/$1/packs-$2" \
        --run-dir "$OUT/$1/$2" --nproc-per-node 2 --progress --epochs "$3" "${@:4}" -- --lr 3e-3 --min-lr 1e-4 \
        --lr-decay-style cosine --lr-warmup-fraction 0.1 --init-method-std 0.1 --adam-beta2 0.95 --weight-decay 0.01 \
        --clip-grad 1.0 --log-interval 1
    echo
}

evaluate() { # WAY
    python examples/demo/evaluate.py --model tiny --load "$OUT/replicas/$1/checkpoints" --data "$OUT/heldout" \
        --tokenizer-model "$OUT/demo/tokenizer.model" --json >"$OUT/replicas/$1/evaluation.json"
}

compare() { # RANKS TITLE
    printf '\n== %s ==\n' "$2"
    python examples/demo/compare.py --baseline "$OUT/$1/baseline" --run "$OUT/$1/careful" --run "$OUT/$1/balanced"
    python tools/report.py --run "$OUT/$1/balanced" --run "$OUT/$1/careful" --run "$OUT/$1/baseline" \
        --output "$OUT/$1/report.html" >/dev/null
}

step demo "demo data: real handwriting, 1 to 30 digits a picture" \
    python tools/make_demo_data.py --output-dir "$OUT/demo" --samples "$SAMPLES" --heldout-samples "$HELDOUT"
step train "preprocess" preprocess train
step heldout "preprocess the held-out pictures" preprocess heldout

# Two replicas: an iteration is 2 packs of about 15 samples, or 8 padded batches of 4. The budgets that are chosen for
# the balanced packs are those of the careful ones.
LIKE=(--like "$OUT/replicas/packs-balanced") SAME_PROFILE=(--profile "$OUT/replicas/balanced/profile.json")
step replicas-pack-balanced "two replicas: pack, balanced" pack replicas balanced --data-parallel-size 2
step replicas-pack-careful "two replicas: pack, careful" pack replicas careful "${LIKE[@]}" --method isf
step replicas-pack-baseline "two replicas: pack, baseline" \
    pack replicas baseline --method random --samples-per-pack 4 --micro-batches 4 --data-parallel-size 2
train_replicas() {
    python examples/demo/take_turns.py <<END
$(launch replicas balanced "$EPOCHS")
$(launch replicas careful 1 "${SAME_PROFILE[@]}" --no-save)
$(launch replicas baseline "$EPOCHS")
END
}
step replicas-train "two replicas: profile, plan, train, in turns" train_replicas
step replicas-eval-balanced "read the held-out pictures, balanced" evaluate balanced
step replicas-eval-baseline "read the held-out pictures, baseline" evaluate baseline

# A pipeline of two: 8 packs, or 30 padded batches.
PIPELINE=(--pipeline-model-parallel-size 2 --no-save)
step pipeline-pack-balanced "a pipeline of two: pack, balanced" \
    pack pipeline balanced "${LIKE[@]}" --data-parallel-size 1 --micro-batches 8
step pipeline-pack-careful "a pipeline of two: pack, careful" \
    pack pipeline careful "${LIKE[@]}" --method isf --data-parallel-size 1 --micro-batches 8
step pipeline-pack-baseline "a pipeline of two: pack, baseline" \
    pack pipeline baseline --method random --samples-per-pack 4 --micro-batches 30
train_pipeline() {
    python examples/demo/take_turns.py <<END
$(launch pipeline balanced 1 "${SAME_PROFILE[@]}" "${PIPELINE[@]}")
$(launch pipeline careful 1 "${SAME_PROFILE[@]}" --method bmp "${PIPELINE[@]}")
$(launch pipeline baseline 1 --profile "$OUT/replicas/baseline/profile.json" --method parameters --recompute full \
    "${PIPELINE[@]}")
END
}
step pipeline-train "a pipeline of two: plan, train, in turns" train_pipeline

compare replicas "two replicas"
compare pipeline "a pipeline of two"
printf '\nwhere the time went, the runs side by side: %s, %s\n' "$OUT/pipeline/report.html" "$OUT/replicas/report.html"
