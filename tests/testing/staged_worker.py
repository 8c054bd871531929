"""One rank of the staged tests: every case against gloo (or plain arithmetic); writes {case: "" or what differs} to the file named in argv."""

import json
import os
import sys

import torch
import torch.distributed as dist

from megatron_memo.testing import staged


def integers(seed, *shape, dtype):
    """Small whole numbers, different on each rank: their sums are exact in any order and type."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def equal(found, expected):
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"expected {expected.dtype} {list(expected.shape)}, found {found.dtype} {list(found.shape)}"
    if torch.equal(found, expected):
        return ""
    return f"expected {expected.flatten()[:6].tolist()}, found {found.flatten()[:6].tolist()}"


def all_reduce(gloo, op, dtype):
    found = integers(1, 3, 5, dtype=dtype)
    expected = found.clone()
    dist.all_reduce(found, op=op)
    dist.all_reduce(expected, op=op, group=gloo)
    return equal(found, expected)


def all_reduce_average(gloo):
    found = integers(2, 4, dtype=torch.bfloat16) * dist.get_world_size()
    expected = found.float()
    dist.all_reduce(found, op=dist.ReduceOp.AVG)
    dist.all_reduce(expected, group=gloo)
    return equal(found, (expected / dist.get_world_size()).bfloat16())


def all_reduce_rounds_once(gloo):
    """1 + 2^-8 + 2^-8 in bfloat16 (3 ranks): rounding after each term would lose both small ones."""
    mine = torch.tensor([1.0 if dist.get_rank() == 0 else 2.0**-8], dtype=torch.bfloat16)
    expected = torch.tensor([1.0 + 2.0**-8 * (dist.get_world_size() - 1)]).bfloat16()
    dist.all_reduce(mine)
    return equal(mine, expected)


def every_rank_gets_the_same_bits(gloo):
    mine = torch.randn(257, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(mine)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine, group=gloo)
    return next((equal(part, mine) for part in parts if not torch.equal(part, mine)), "")


def all_gather_into_tensor(gloo, dtype):
    mine = integers(3, 2, 3, dtype=dtype)
    found = torch.empty(2 * dist.get_world_size(), 3, dtype=dtype)
    expected = torch.empty_like(found)
    dist.all_gather_into_tensor(found, mine)
    dist.all_gather_into_tensor(expected, mine, group=gloo)
    return equal(found, expected)


def all_gather_list(gloo):
    mine = integers(4, 2, 3, dtype=torch.float64).t()
    found = [torch.empty(3, 2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    expected = [torch.empty(3, 2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    dist.all_gather(expected, mine.contiguous(), group=gloo)
    return equal(torch.stack(found), torch.stack(expected))


def reduce_scatter_tensor(gloo, dtype):
    n = dist.get_world_size()
    mine = integers(5, 2 * n, 3, dtype=dtype)
    total = mine.clone()
    found = torch.empty(2, 3, dtype=dtype)
    dist.reduce_scatter_tensor(found, mine)
    dist.all_reduce(total, group=gloo)
    return equal(found, total.chunk(n)[dist.get_rank()])


def coalesced_reduce_scatter(gloo):
    n = dist.get_world_size()
    mine = [integers(seed, 2 * n, dtype=torch.float32) for seed in (6, 7)]
    found = [torch.empty(2) for _ in mine]
    with dist._coalescing_manager() as _:
        for output, tensor in zip(found, mine):
            dist.reduce_scatter_tensor(output, tensor)
    expected = []
    for tensor in mine:
        total = tensor.clone()
        dist.all_reduce(total, group=gloo)
        expected.append(total.chunk(n)[dist.get_rank()])
    return equal(torch.stack(found), torch.stack(expected))


def broadcast(gloo, source):
    found = integers(8, 5, dtype=torch.bfloat16)
    expected = found.clone()
    dist.broadcast(found, source)
    dist.broadcast(expected, source, group=gloo)
    return equal(found, expected)


def scatter_and_gather(gloo):
    n, rank, root = dist.get_world_size(), dist.get_rank(), 1
    parts = [torch.tensor([10 * i, i]) for i in range(n)]
    mine = torch.empty(2, dtype=torch.int64)
    dist.scatter(mine, parts if rank == root else None, src=root)
    if difference := equal(mine, parts[rank]):
        return difference
    back = [torch.empty(2, dtype=torch.int64) for _ in range(n)]
    dist.gather(mine, back if rank == root else None, dst=root)
    return equal(torch.stack(back), torch.stack(parts)) if rank == root else ""


def all_to_all_single(gloo):
    n = dist.get_world_size()
    mine = integers(9, 2 * n, 3, dtype=torch.bfloat16)
    found, expected = torch.empty_like(mine), torch.empty(2 * n, 3)
    dist.all_to_all_single(found, mine)
    dist.all_to_all_single(expected, mine.float(), group=gloo)
    return equal(found, expected.bfloat16())


def all_to_all_single_uneven(gloo):
    """Rank r sends r + j + 1 rows to rank j, and to rank 0 one row less: rank 0 sends itself none."""
    n, rank = dist.get_world_size(), dist.get_rank()
    rows = lambda source, target: source + target + (1 if target else 0)
    sends, receives = [rows(rank, j) for j in range(n)], [rows(j, rank) for j in range(n)]
    mine = integers(10, sum(sends), 2, dtype=torch.float32)
    found, expected = torch.empty(sum(receives), 2), torch.empty(sum(receives), 2)
    dist.all_to_all_single(found, mine, receives, sends)
    dist.all_to_all_single(expected, mine, receives, sends, group=gloo)
    return equal(found, expected)


def all_to_all_list(gloo):
    n, rank = dist.get_world_size(), dist.get_rank()
    found = [torch.empty(j + 1) for j in range(n)]
    dist.all_to_all(found, [torch.full((rank + 1,), 10.0 * rank + j) for j in range(n)])
    return equal(torch.cat(found), torch.cat([torch.full((j + 1,), 10.0 * j + rank) for j in range(n)]))


def send_and_recv(gloo):
    """Around the ring, from each rank in turn."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = integers(11, 3, 2, dtype=torch.bfloat16)
    found, expected = torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, 2)
    for source in range(n):
        target = (source + 1) % n
        for group, out, into in ((None, mine, found), (gloo, mine.float(), expected)):
            if rank == source:
                dist.send(out, target, group=group)
            elif rank == target:
                dist.recv(into, source, group=group)
    return equal(found, expected.bfloat16())


def ring_of_batched_messages(gloo):
    """All ranks receive before they send: works only if neither blocks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine, found = torch.full((4,), float(rank)), torch.full((4,), -1.0)
    operations = [dist.P2POp(dist.irecv, found, (rank - 1) % n), dist.P2POp(dist.isend, mine, (rank + 1) % n)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return equal(found, torch.full((4,), float((rank - 1) % n)))


def a_subgroup_leaves_the_others_alone(gloo):
    ranks = [0, 1]
    group = dist.new_group(ranks, backend="nccl")
    value = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() in ranks:
        if group.getBackendName() != staged.NAME:
            return f"nccl gave {group.getBackendName()}"
        dist.all_reduce(value, group=group)
    return equal(value, torch.tensor([3.0 if dist.get_rank() in ranks else 1.0 + dist.get_rank()]))


def asynchronous_work_is_waited_for(gloo):
    value = torch.ones(3)
    dist.all_reduce(value, async_op=True).wait()
    return equal(value, torch.full((3,), float(dist.get_world_size())))


def empty_tensors(gloo):
    found = torch.empty(0, 4)
    dist.all_gather_into_tensor(found, torch.empty(0, 4))
    dist.all_reduce(found)
    return equal(found, torch.empty(0, 4))


def an_unknown_reduction_is_refused(gloo):
    try:
        dist.all_reduce(torch.ones(1, dtype=torch.int32), op=dist.ReduceOp.BXOR)
    except Exception as error:
        return "" if "BXOR" in str(error) else str(error)
    return "expected an error"


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
CASES = {
    "all_reduce sum float32": lambda g: all_reduce(g, SUM, torch.float32),
    "all_reduce sum bfloat16": lambda g: all_reduce(g, SUM, torch.bfloat16),
    "all_reduce sum int64": lambda g: all_reduce(g, SUM, torch.int64),
    "all_reduce max float64": lambda g: all_reduce(g, MAX, torch.float64),
    "all_reduce max bfloat16": lambda g: all_reduce(g, MAX, torch.bfloat16),
    "all_reduce avg bfloat16": all_reduce_average,
    "all_reduce rounds once": all_reduce_rounds_once,
    "every rank gets the same bits": every_rank_gets_the_same_bits,
    "all_gather_into_tensor bfloat16": lambda g: all_gather_into_tensor(g, torch.bfloat16),
    "all_gather_into_tensor bool": lambda g: all_gather_into_tensor(g, torch.bool),
    "all_gather list": all_gather_list,
    "reduce_scatter_tensor float32": lambda g: reduce_scatter_tensor(g, torch.float32),
    "reduce_scatter_tensor bfloat16": lambda g: reduce_scatter_tensor(g, torch.bfloat16),
    "coalesced reduce_scatter": coalesced_reduce_scatter,
    "broadcast from 0": lambda g: broadcast(g, 0),
    "broadcast from 1": lambda g: broadcast(g, 1),
    "scatter and gather": scatter_and_gather,
    "all_to_all_single": all_to_all_single,
    "all_to_all_single uneven": all_to_all_single_uneven,
    "all_to_all list": all_to_all_list,
    "send and recv": send_and_recv,
    "ring of batched messages": ring_of_batched_messages,
    "subgroup": a_subgroup_leaves_the_others_alone,
    "asynchronous work": asynchronous_work_is_waited_for,
    "empty tensors": empty_tensors,
    "unknown reduction": an_unknown_reduction_is_refused,
}


def main(path):
    torch.set_num_threads(1)
    staged.init()
    gloo = dist.new_group(backend="gloo")
    results = {}
    for name, case in CASES.items():
        results[name] = case(gloo)
    with open(path, "w") as file:
        json.dump(results, file)
    dist.barrier()
    staged.shutdown()
    if dist.new_group is not staged._new_group:
        raise SystemExit("new_group was not given back")


if __name__ == "__main__":
    main(sys.argv[1] + os.environ["RANK"])
