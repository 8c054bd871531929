#!/usr/bin/env bash
# A small GPT on real text, stock and with --memo, on one GPU with TransformerEngine's layers: 50 steps, with evaluation before, between and after.
#   bash benchmarks/training_curve.sh OUT_FOLDER [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:?OUT_FOLDER}
PYTHON=${2:-python3}
mkdir -p "$OUT"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1
CORPUS=$OUT/corpus/python
[ -f "$CORPUS.idx" ] || "$PYTHON" scripts/prepare_corpus.py --output "$CORPUS" > /dev/null
RUN=(
    --num-layers 8 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 4096 --max-position-embeddings 4096 --hidden-dropout 0 --attention-dropout 0 --bf16 --transformer-impl transformer_engine
    --tokenizer-type NullTokenizer --vocab-size 257 --micro-batch-size 1 --global-batch-size 4 --train-iters 50 --lr 1e-3 --min-lr 1e-4
    --lr-warmup-iters 5 --clip-grad 1.0 --seed 1234 --data-path "$CORPUS" --split '90,5,5' --no-create-attention-mask-in-dataloader
    --log-interval 1 --eval-interval 25 --eval-iters 2
)
for name in stock memo; do
    FLAGS=()
    [ $name = stock ] || FLAGS=(--memo --memo-alpha 0.5 --memo-tiles 4 --memo-report "$OUT")
    MASTER_PORT=$((29600 + RANDOM % 300)) "$PYTHON" -u pretrain_gpt.py "${RUN[@]}" "${FLAGS[@]}" > "$OUT/$name.log" 2>&1 || { tail -n 15 "$OUT/$name.log"; exit 1; }
    grep -E 'memo:|validation loss' "$OUT/$name.log" | cut -c1-200
done
"$PYTHON" benchmarks/training_curve.py "$OUT"
