#!/usr/bin/env bash
# A small GPT on real text, stock and with --memo, on one GPU with TransformerEngine's layers: 50 steps, with evaluation before, between and after.
# Then one step and one evaluation of a smaller model at a million tokens.
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
    --hidden-dropout 0 --attention-dropout 0 --bf16 --transformer-impl transformer_engine --tokenizer-type NullTokenizer --vocab-size 257
    --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --clip-grad 1.0 --seed 1234 --data-path "$CORPUS" --no-create-attention-mask-in-dataloader
    --log-interval 1
)
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
run() {  # run NAME FLAGS...
    MASTER_PORT=$((29600 + RANDOM % 300)) "$PYTHON" -u pretrain_gpt.py "${COMMON[@]}" "${@:2}" > "$OUT/$1.log" 2>&1 || { tail -n 15 "$OUT/$1.log"; return 1; }
    grep -E 'memo:|validation loss' "$OUT/$1.log" | cut -c1-200
}
run stock "${CURVE[@]}"
run memo "${CURVE[@]}" --memo --memo-alpha 0.5 --memo-tiles 4 --memo-report "$OUT"
run million_stock "${MILLION[@]}"
run million_memo "${MILLION[@]}" --memo --memo-alpha 0.5 --memo-tiles 16 --memo-report "$OUT/million"
"$PYTHON" benchmarks/training_curve.py "$OUT"
