#!/usr/bin/env bash
# Trains a small GPT twice on real text, stock and with --memo, and sets the two runs side by side. Uses the GPU if there is one.
#   bash scripts/quickstart.sh [--no-install]
# Exit status: not 0 when a run fails, or when the losses differ by more than 1e-3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh "$@"
PYTHON=$PWD/.venv/bin/python
[ "${1:-}" != --no-install ] || PYTHON=$(command -v python || command -v python3)
export PYTHONPATH=$PWD PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1
# Threads that wait for each other on a busy machine would take longer than this model does on one.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

CORPUS=corpus/python
RUNS=runs/quickstart
if [ -f $CORPUS.idx ]; then
    echo "quickstart.sh: corpus $CORPUS is there"
else
    echo "quickstart.sh: writing the corpus from Python's standard library"
    "$PYTHON" scripts/prepare_corpus.py --output $CORPUS
fi
rm -rf $RUNS
mkdir -p $RUNS

MODEL=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257
)
TRAINING=(
    --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --seed 1234
    --data-path "$CORPUS" --split '90,5,5' --data-cache-path corpus/cache --no-create-attention-mask-in-dataloader
    --log-interval 1 --eval-interval 1000 --eval-iters 2
)
case $("$PYTHON" -c 'import importlib.util as u, torch; print("cpu" if not torch.cuda.is_available() else "te" if u.find_spec("transformer_engine") else "local")') in
    cpu)
        DEVICE=(--memo-cpu)
        echo "quickstart.sh: no GPU: training on the CPU"
        ;;
    te)
        DEVICE=(--bf16 --transformer-impl transformer_engine)
        echo "quickstart.sh: training on the GPU, TransformerEngine's layers"
        ;;
    local)
        DEVICE=(--bf16 --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion)
        echo "quickstart.sh: training on the GPU, Megatron's own layers (transformer_engine is not installed)"
        ;;
esac

# What is shown of a run's output while it goes.
SHOWN=(
    -e 's/^.*iteration *\([0-9]*\)\/ *\([0-9]*\) |.*(ms): \([0-9.]*\) |.* lm loss: \([^ ]*\) .*/  step \1 of \2: loss \4, \3 ms/p'
    -e 's/^ *\(validation loss at .*\) | lm loss value: \([^ ]*\) .*/  \1: \2/p'
    -e '/^--memo/p' -e '/^megatron_memo/p'
)

train() { # train NAME [FLAGS]: one run; its whole output goes to $RUNS/NAME.log
    local name=$1
    shift
    echo
    echo "quickstart.sh: $name (all output: $RUNS/$name.log)"
    MASTER_PORT=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
    export MASTER_PORT
    if ! MEMO_LIVE_BYTES=$RUNS/$name.bytes.json "$PYTHON" -u pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "${DEVICE[@]}" "$@" 2>&1 |
        tee $RUNS/"$name".log | sed -un "${SHOWN[@]}"; then
        tail -n 20 $RUNS/"$name".log >&2
        echo "quickstart.sh: the $name run failed: see $RUNS/$name.log" >&2
        exit 1
    fi
}

train stock
train memo --memo --memo-alpha 0.5 --memo-tiles 4 --memo-keep-layers 1 --memo-report $RUNS
echo
"$PYTHON" scripts/compare_runs.py --stock-log $RUNS/stock.log --memo-log $RUNS/memo.log --report $RUNS/report.rank0.json \
    --stock-bytes $RUNS/stock.bytes.json --memo-bytes $RUNS/memo.bytes.json
