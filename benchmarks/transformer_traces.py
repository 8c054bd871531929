"""Made-up memory traces of training steps: the tensors of a GPT layer in the order in which Megatron makes and drops them, sizes by arithmetic.

No model is run. They stand in for recorded traces where shapes, depths or schedules are wanted that no machine at hand can run; a plan
for one proves the planner, not the memory of a training run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Tuple

from megatron_memo.plan.records import Buffer


@dataclass(frozen=True)
class GptShape:
    """One rank of a tensor-parallel GPT with sequence parallelism; bf16.

    Attributes:
        jitter: each tensor's size is multiplied by a factor from [1 - jitter, 1 + jitter] of its name, so that sizes have no common divisor.
        loss_rows: rows of the sequence whose logits exist at a time.
    """

    layers: int
    tokens: int = 131_072
    hidden: int = 4096
    ffn: int = 16_384
    heads: int = 32
    vocabulary: int = 50_304
    tp: int = 8
    jitter: float = 0.0
    loss_rows: int = 4096


# What becomes of a layer's activations between its forward and backward pass.
KEEP, SWAP, RECOMPUTE = "keep", "swap", "recompute"


class TraceMaker:
    """Allocates and frees by name; gives buffers in order of their birth."""

    def __init__(self, shape: GptShape, policy: str, seed: int = 0) -> None:
        self._shape, self._policy = shape, policy
        self._random = random.Random(seed)
        self._factor: Dict[str, float] = {}
        self._live: Dict[str, Tuple[int, int, str]] = {}
        self._done: List[Buffer] = []
        self._instant = 0
        rows = shape.tokens // shape.tp
        self._bytes = {
            "shard": rows * shape.hidden * 2,  # [rows of this rank, hidden]
            "gathered": shape.tokens * shape.hidden * 2,
            "heads": shape.tokens * shape.hidden // shape.tp * 2,  # [tokens, heads of this rank]
            "qkv": shape.tokens * 3 * shape.hidden // shape.tp * 2,
            "float heads": shape.tokens * shape.hidden // shape.tp * 4,
            "ffn": shape.tokens * shape.ffn // shape.tp * 2,
            "row": rows * 4,
            "statistics": shape.tokens * shape.heads // shape.tp * 4,
            "workspace": 32 << 20,
            "fc weight": shape.hidden * shape.ffn // shape.tp * 2,
            "logits": shape.loss_rows * shape.vocabulary // shape.tp * 2,
        }

    def alloc(self, name: str, kind: str, layer: str = "") -> None:
        base = name.rpartition(" ")[2]
        factor = self._factor.setdefault(base, 1 + self._random.uniform(-self._shape.jitter, self._shape.jitter))
        self._live[name] = self._instant, -(-int(self._bytes[kind] * factor) // 512) * 512, layer
        self._instant += 1

    def free(self, *names: str) -> None:
        for name in names:
            lower, size_bytes, layer = self._live.pop(name)
            self._done.append(Buffer(str(len(self._done)), lower, self._instant, size_bytes, layer))
            self._instant += 1

    def finish(self) -> List[Buffer]:
        if self._live:
            raise ValueError(f"never freed: {sorted(self._live)}")
        return sorted(self._done, key=lambda buffer: buffer.lower)

    def forward(self, key: str, label: str, keep: bool) -> None:
        """One layer forward. ``keep``: what the backward pass needs stays; else only its input does (its caller's) and all is freed in order."""
        make = lambda name, kind: self.alloc(f"{key} {name}", kind, label)
        drop = lambda *names: self.free(*(f"{key} {name}" for name in names))
        make("mean1", "row"), make("norm1", "shard"), make("gather1", "gathered"), make("qkv", "qkv")
        drop("gather1")
        make("q", "heads"), make("k", "heads"), make("v", "heads")
        drop("qkv")
        make("workspace", "workspace"), make("o", "heads"), make("lse", "statistics")
        drop("workspace")
        make("proj", "gathered"), make("projected", "shard")
        drop("proj")
        make("residual", "shard")
        drop("projected")
        make("mean2", "row"), make("norm2", "shard"), make("gather2", "gathered"), make("fc1", "ffn")
        drop("gather2")
        make("act", "ffn"), make("fc2", "gathered"), make("mlp", "shard")
        drop("fc2")
        make("y", "shard")
        drop("mlp")
        if not keep:
            drop("mean1", "norm1", "q", "k", "v", "o", "lse", "residual", "mean2", "norm2", "fc1", "act")

    def backward(self, key: str, label: str, gradient: str) -> str:
        """One layer backward: uses up ``gradient`` and all that its forward left but y; gives the name of its input's gradient."""
        make = lambda name, kind: self.alloc(f"{key} d{name}", kind, label)
        drop = lambda *names: self.free(*(f"{key} {name}" for name in names))
        make("gather", "gathered"), make("act", "ffn"), make("w2", "fc weight")
        drop("dw2", "act", "dgather")
        make("fc1", "ffn")
        drop("fc1", "dact")
        make("gather2", "gathered"), make("norm2g", "gathered"), make("w1", "fc weight")
        drop("dw1", "dfc1", "dgather2", "norm2")
        make("norm2", "shard")
        drop("dnorm2g")
        make("residual", "shard")
        drop("residual", "mean2", "dnorm2")
        self.free(gradient)
        make("gatherp", "gathered"), make("o", "heads")
        drop("dgatherp")
        make("q32", "float heads"), make("q", "heads"), make("k", "heads"), make("v", "heads")
        drop("dq32", "do", "q", "k", "v", "o", "lse")
        make("qkv", "qkv")
        drop("dq", "dk", "dv")
        make("gather1", "gathered"), make("norm1g", "gathered")
        drop("dqkv", "dgather1", "norm1")
        make("norm1", "shard")
        drop("dnorm1g")
        make("x", "shard")
        drop("dnorm1", "mean1", "dresidual")
        return f"{key} dx"

    def backward_of(self, key: str, layer: int, batch: int, gradient: str) -> str:
        """The backward pass of a layer under the policy: what was given up is made again, or comes back, first."""
        if self._policy == SWAP:
            for name, kind in (("mean1", "row"), ("norm1", "shard"), ("q", "heads"), ("k", "heads"), ("v", "heads"), ("o", "heads"), ("lse", "statistics"),
                               ("residual", "shard"), ("mean2", "row"), ("norm2", "shard"), ("fc1", "ffn"), ("act", "ffn")):
                self.alloc(f"{key} {name}", kind, f"{layer}/backward {batch}")
        elif self._policy == RECOMPUTE:
            self.free(f"{key} y")
            self.forward(key, f"{layer}/recompute {batch}", keep=True)
        result = self.backward(key, f"{layer}/backward {batch}", gradient)
        self.free(f"{key} y")
        return result

    def loss(self, rows: Optional[int] = None) -> None:
        """Output layer and cross entropy, a chunk of rows after the other; leaves the gradient of the last layer's output, "dy"."""
        self.alloc("final norm", "shard")
        self.alloc("dy", "shard")
        for _ in range(max(1, self._shape.tokens // self._shape.loss_rows // 8)):
            self.alloc("logits", "logits"), self.alloc("softmax", "logits"), self.free("logits"), self.alloc("dlogits", "logits")
            self.free("softmax", "dlogits")
        self.free("final norm")


def whole_step(shape: GptShape, policy: str, seed: int = 0) -> List[Buffer]:
    """Embedding, all layers forward, loss, all layers backward."""
    maker = TraceMaker(shape, policy, seed)
    maker.alloc("embedding gather", "gathered"), maker.alloc("embedding", "shard"), maker.free("embedding gather")
    for layer in range(shape.layers):
        maker.forward(str(layer), f"{layer}/forward", keep=policy == KEEP)
    maker.loss()
    gradient = "dy"
    for layer in reversed(range(shape.layers)):
        gradient = maker.backward_of(str(layer), layer, 0, gradient)
    maker.free(gradient, "embedding")
    return maker.finish()


def pipeline_step(shape: GptShape, policy: str, stages: int, stage: int, batches: int, chunks: int = 1, seed: int = 0) -> List[Buffer]:
    """One stage's step under 1F1B, interleaved when it has several chunks of ``shape.layers`` layers each."""
    maker = TraceMaker(shape, policy, seed)
    for forward, batch, chunk in schedule(stages, stage, batches, chunks):
        keys = [(f"{batch}.{chunk}.{layer}", chunk * shape.layers + layer) for layer in range(shape.layers)]
        if forward:
            maker.alloc(f"{batch}.{chunk} received", "shard")
            for key, layer in keys:
                maker.forward(key, f"{layer}/forward {batch}", keep=policy == KEEP)
        else:
            gradient = f"{batch}.{chunk} gradient"
            maker.alloc(gradient, "shard")
            for key, layer in reversed(keys):
                gradient = maker.backward_of(key, layer, batch, gradient)
            maker.free(gradient, f"{batch}.{chunk} received")
    return maker.finish()


def schedule(stages: int, stage: int, batches: int, chunks: int) -> Iterator[Tuple[bool, int, int]]:
    """(forward?, micro-batch, chunk) in 1F1B order; interleaved for more than one chunk, in groups of ``stages`` micro-batches as Megatron has it."""
    total = batches * chunks
    warm_up = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    warm_up = min(warm_up, total)

    def nth(index: int, forward: bool) -> Tuple[bool, int, int]:
        if chunks == 1:
            return forward, index, 0
        group, within = divmod(index, stages * chunks)
        chunk = within // stages
        return forward, group * stages + within % stages, chunk if forward else chunks - 1 - chunk

    for index in range(warm_up):
        yield nth(index, True)
    for index in range(warm_up, total):
        yield nth(index, True)
        yield nth(index - warm_up, False)
    for index in range(total - warm_up, total):
        yield nth(index, False)
