"""True ranks that share one GPU: gradients of MEMO's tiled layers against stock Megatron's on the same ranks.

    torchrun --nproc-per-node 2 benchmarks/ranks_on_one_gpu.py --out ranks2.json

Tensor parallelism over all ranks with sequence parallelism. The ranks talk through megatron_memo.testing.staged (gloo over host memory):
exact and slow, so nothing here is a timing. The measure is stock's own difference from run to run.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # what Megatron asks for with tensor parallelism

import argparse
import traceback
from dataclasses import asdict
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist

from harness import Shape, Stack, build_block, choose_device, device, on_gpu, relative_difference, start_parallel, synchronize, versions, write_json
from modes import attach_memo, parse_mode
from table import ranks_table


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--query-groups", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=4096)
    parser.add_argument("--gelu", action="store_true", help="GELU instead of SwiGLU")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--alphas", default="0,0.5,1")
    parser.add_argument("--tiles", default="1,4")
    parser.add_argument("--float64", action="store_true", help="float64 (local spec on a CPU): differences of 1e-12 count")
    parser.add_argument("--cpu", action="store_true", help="try the script out with no GPU")
    parser.add_argument("--out", default=None, metavar="FILE")
    return parser.parse_args(argv)


def copies(stack: Stack) -> Dict[str, torch.Tensor]:
    synchronize()
    return {name: gradient.detach().clone() for name, gradient in stack.gradients().items()}


def worst_of_all_ranks(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """The largest relative difference of any parameter on any rank, and the parameter. All ranks call this."""
    names = list(expected)
    differences = torch.tensor([relative_difference(found[name], expected[name]) for name in names], dtype=torch.float64, device=device())
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    largest = int(differences.argmax())
    return {"difference": differences[largest].item(), "parameter": names[largest]}


def main(argv: Optional[List[str]] = None) -> Dict[str, Any]:
    args = arguments(argv)
    choose_device(args.cpu)
    if args.cpu:
        torch.set_num_threads(1)
    from megatron_memo.testing import staged

    if on_gpu():
        torch.cuda.set_device(0)
    staged.init()
    ranks = dist.get_world_size()
    start_parallel(ranks, seed=3)
    shape = Shape(
        args.tokens, args.layers, args.hidden, args.heads, args.query_groups, args.ffn, not args.gelu, args.micro_batch, ranks
    )
    dtype = torch.float64 if args.float64 else torch.bfloat16
    stack = Stack(shape, build_block(shape, dtype=dtype), seed=7 + dist.get_rank())

    def gradients() -> Dict[str, torch.Tensor]:
        stack.zero_main_grads()
        stack.step()
        return copies(stack)

    gradients()  # the first step overwrites main_grad by TransformerEngine's rules; first_step.py looks at that one
    stock = gradients()
    result: Dict[str, Any] = {
        "benchmark": "ranks_on_one_gpu", "tp": ranks, "shape": asdict(shape), "dtype": str(dtype), "versions": versions(),
        "noise": worst_of_all_ranks(gradients(), stock)["difference"], "cases": [],
    }
    for tiles in args.tiles.split(","):
        for alpha in args.alphas.split(","):
            entry: Dict[str, Any] = {"case": f"{tiles} tiles, alpha {alpha}"}
            session = attach_memo(stack, parse_mode(f"memo:{tiles}:{alpha}:0", "te"))
            found = gradients()
            session.end_step()
            entry["host_mib"] = session.report()["host_peak_bytes"] / 2**20
            session.detach()
            entry.update(worst_of_all_ranks(found, stock))
            result["cases"].append(entry)
            if dist.get_rank() == 0:
                write_json(args.out, result)
    if dist.get_rank() == 0:
        print(ranks_table([result]), flush=True)
    dist.barrier()
    return result


if __name__ == "__main__":
    # A rank that fails must not leave the others waiting in a collective: torchrun ends them when it exits.
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
