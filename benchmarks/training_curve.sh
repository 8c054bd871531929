#!/usr/bin/env bash
# A small GPT on real text, stock and with --memo, on one GPU with TransformerEngine's layers: 50 steps, with evaluation before, between and after.
# Then ten steps with dropout, and one step and one evaluation of a smaller model at a million tokens.
#   bash benchmarks/training_curve.sh OUT_FOLDER [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:?OUT_FOLDER}
PYTHON=${2:-python3}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1
CORPUS=$OUT/corpus/python
[ -f "$CORPUS.idx" ] || "$PYTHON" scripts/prepare_corpus.py --output "$CORPUS" > /dev/null
COMMON=(
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --bf16 --transformer-impl transformer_engine --tokenizer-type NullTokenizer --vocab-size 257
    --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0 --seed 1234 --data-path "$CORPUS" --no-create-attention-mask-in-dataloader
    --log-interval 1
)
NO_DROPOUT=(--hidden-dropout 0 --attention-dropout 0)
DROPOUT=(--hidden-dropout 0.1 --attention-dropout 0.1)
CURVE=(
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 4 --train-iters 50 --lr-warmup-iters 5 --split '90,5,5'
    --eval-interval 25 --eval-iters 2
)
# The corpus is a few million tokens: a third of it each for training, validation and test.
MILLION=(
    --num-layers 2 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 4 --seq-length 1048576 --max-position-embeddings 1048576
    --global-batch-size 1 --train-iters 1 --split '1,1,1' --eval-interval 1 --eval-iters 1
)
FAILED=0
run() {  # run NAME FLAGS...; a run that fails takes no other one with it
    echo "== $1"
    if MASTER_PORT=$((29600 + RANDOM % 300)) "$PYTHON" -u pretrain_gpt.py "${COMMON[@]}" "${@:2}" > "$OUT/$1.log" 2>&1; then
        grep -E 'memo:|validation loss' "$OUT/$1.log" | cut -c1-200
    else
        tail -n 15 "$OUT/$1.log"
        FAILED=1
    fi
}
run curve_stock "${CURVE[@]}" "${NO_DROPOUT[@]}"
run curve_memo "${CURVE[@]}" "${NO_DROPOUT[@]}" --memo --memo-alpha 0.5 --memo-tiles 4 --memo-report "$OUT/curve"
run dropout_stock "${CURVE[@]}" "${DROPOUT[@]}" --train-iters 10 --eval-interval 10
run dropout_memo "${CURVE[@]}" "${DROPOUT[@]}" --train-iters 10 --eval-interval 10 --memo --memo-alpha 0 --memo-keep-layers 0 --memo-tiles 1 --memo-report "$OUT/dropout"
run million_stock "${MILLION[@]}" "${NO_DROPOUT[@]}"
run million_memo "${MILLION[@]}" "${NO_DROPOUT[@]}" --memo --memo-alpha 0.5 --memo-tiles 16 --memo-report "$OUT/million"
"$PYTHON" benchmarks/training_curve.py "$OUT" || FAILED=1
exit $FAILED
