"""Traces for the planner's tests: random ones with brute force beside, and a made-up transformer step."""

import itertools
import random

from megatron_memo.plan.records import Buffer


def random_trace(seed, count, instants=12, largest=9, layers=0):
    """``count`` buffers at random; with ``layers`` most have a layer label."""
    draw = random.Random(seed)
    buffers = []
    for index in range(count):
        lower, upper = sorted(draw.sample(range(instants), 2))
        layer = f"{draw.randrange(layers)}/forward" if layers and draw.random() < 0.7 else ""
        buffers.append(Buffer(f"b{index}", lower, upper, draw.randint(1, largest), layer))
    return buffers


def smallest_peak(buffers):
    """By trying all: in some best plan each buffer rests on another one or on the ground, so some order of stacking gives it."""
    best = sum(buffer.size_bytes for buffer in buffers)
    for order in itertools.permutations(buffers):
        placed, peak = [], 0
        for buffer in order:
            floor = max((end for other, end in placed if other.lower < buffer.upper and buffer.lower < other.upper), default=0)
            placed.append((buffer, floor + buffer.size_bytes))
            peak = max(peak, floor + buffer.size_bytes)
            if peak >= best:
                break
        best = min(best, peak)
    return best


def overlaps(buffers, offsets):
    """Pairs of ids that share a byte at some instant, by comparing all pairs."""
    return [
        (a.id, b.id)
        for (a, x), (b, y) in itertools.combinations(zip(buffers, offsets), 2)
        if a.lower < b.upper and b.lower < a.upper and x < y + b.size_bytes and y < x + a.size_bytes
    ]


class Step:
    """Records allocations and frees of a made-up training step."""

    def __init__(self):
        self.instant = 0
        self.live = {}
        self.buffers = []

    def alloc(self, name, size_bytes, layer=""):
        self.live[name] = self.instant, size_bytes, layer
        self.instant += 1

    def free(self, name):
        lower, size_bytes, layer = self.live.pop(name)
        self.buffers.append(Buffer(name, lower, self.instant, size_bytes, layer))
        self.instant += 1


def transformer_step(layers, unit=1000):
    """Forward and backward of ``layers`` equal layers, each with transients, and a loss between them."""
    step = Step()
    for n in range(layers):
        f = f"{n}/forward"
        step.alloc(f"{n} x", unit, f)
        step.alloc(f"{n} qkv", 3 * unit + 7, f)
        step.alloc(f"{n} scratch", 5 * unit, f)
        step.alloc(f"{n} o", unit, f)
        step.free(f"{n} scratch")
        step.free(f"{n} qkv")
        step.alloc(f"{n} fc1", 4 * unit + 13, f)
        step.alloc(f"{n} act", 4 * unit, f)
        step.free(f"{n} fc1")
        step.alloc(f"{n} y", unit, f)
        step.free(f"{n} act")
        step.free(f"{n} y")
    step.alloc("logits", 30 * unit)
    step.free("logits")
    for n in reversed(range(layers)):
        b = f"{n}/backward"
        step.alloc(f"{n} d act", 4 * unit, b)
        step.alloc(f"{n} d fc1", 4 * unit + 13, b)
        step.free(f"{n} d act")
        step.alloc(f"{n} dx", 2 * unit, b)
        step.free(f"{n} d fc1")
        step.free(f"{n} o")
        step.free(f"{n} x")
        step.free(f"{n} dx")
    return sorted(step.buffers, key=lambda buffer: buffer.lower)
