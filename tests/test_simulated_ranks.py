"""Simulated ranks: programs as learners write them, exact reports of what goes wrong, and nothing left behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce, distributed_c10d, get_rank, get_world_size, irecv, isend, recv, send
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from servelab.ranks import (
    BufferChangedError,
    DeadlockError,
    Link,
    MismatchError,
    RankError,
    RankInterruptError,
    RankTimeoutError,
    SimCluster,
    UnwaitedError,
    device,
    span,
)
from servelab.ranks.simulated import MOST_RANKS

SIZES = range(10)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Every run gives back what it borrows, whatever comes of it."""
    before = borrowed()
    yield
    assert borrowed() == before
    assert not dist.is_initialized()


def borrowed() -> tuple:
    patched = (distributed_c10d._world, dist.send, dist.all_reduce, random.random, sys.stdout, sys.stderr)
    return (*map(id, patched), torch.get_num_threads(), torch.get_rng_state().sum().item(), random.getstate())


def failure(kind: type, fn, world_size: int = 3, **options) -> str:
    """The message of the error that a function ends with."""
    with pytest.raises(kind) as caught:
        SimCluster(world_size, **options).run(fn)
    assert type(caught.value) is kind
    return str(caught.value)


# Programs


def chunks(tensor):
    p, n = get_world_size(), tensor.numel()
    return [tensor[n * i // p : n * (i + 1) // p] for i in range(p)]


def swap_by_isend(out, into):
    p, rank = get_world_size(), get_rank()
    for work in [isend(out, (rank + 1) % p), irecv(into, (rank - 1) % p)]:
        work.wait()


def swap_by_batch(out, into):
    p, rank = get_world_size(), get_rank()
    ops = [dist.P2POp(dist.isend, out, (rank + 1) % p), dist.P2POp(dist.irecv, into, (rank - 1) % p)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def ring_all_reduce(tensor, swap):
    p, rank, parts = get_world_size(), get_rank(), chunks(tensor)
    for step in range(p - 1):
        buffer = torch.empty_like(parts[(rank - step - 1) % p])
        swap(parts[(rank - step) % p], buffer)
        parts[(rank - step - 1) % p] += buffer
    for step in range(p - 1):
        swap(parts[(rank + 1 - step) % p], parts[(rank - step) % p])


def rings_of_all_sizes(swap):
    results = []
    for size in SIZES:
        mine = torch.arange(size, dtype=torch.float32) + get_rank()
        expected = mine.clone()
        all_reduce(expected)
        ring_all_reduce(mine, swap)
        results.append(torch.equal(mine, expected))
    return results


@pytest.mark.parametrize(
    ("world_size", "swap"), [*((p, swap_by_isend) for p in range(1, 9)), *((p, swap_by_batch) for p in (1, 2, 5))]
)
def test_a_ring_all_reduce_of_any_size(world_size, swap):
    run = SimCluster(world_size).run(rings_of_all_sizes, swap)
    assert run.values == [[True] * len(SIZES)] * world_size
    elements = [sum(e.elements for e in run.of_rank(r) if e.kind == "send") for r in range(world_size)]
    assert sum(elements) == 2 * (world_size - 1) * sum(SIZES)


class _FromTensorParallel(torch.autograd.Function):
    """Megatron's f: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.forward_thread = threading.get_ident()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        assert threading.get_ident() == ctx.forward_thread
        gradient = gradient.clone()
        all_reduce(gradient)
        return gradient


class _ToTensorParallel(torch.autograd.Function):
    """Megatron's g: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def tensor_parallel_mlp(x, up, down):
    p, rank = get_world_size(), get_rank()
    x = x.clone().requires_grad_()
    mine_up = up.chunk(p, dim=1)[rank].clone().requires_grad_()
    mine_down = down.chunk(p, dim=0)[rank].clone().requires_grad_()
    hidden = torch.nn.functional.gelu(_FromTensorParallel.apply(x) @ mine_up)
    _ToTensorParallel.apply(hidden @ mine_down).square().sum().backward()
    return x.grad, mine_up.grad, mine_down.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_megatron_mlp_has_the_gradients_of_the_dense_one(world_size):
    seeded = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(shape, generator=seeded) for shape in ((3, 8), (8, 16), (16, 8)))
    run = SimCluster(world_size).run(tensor_parallel_mlp, x, up, down)
    dense = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    (torch.nn.functional.gelu(dense[0] @ dense[1]) @ dense[2]).square().sum().backward()
    for gradient, _, _ in run.values:
        torch.testing.assert_close(gradient, dense[0].grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([v[1] for v in run.values], 1), dense[1].grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.cat([v[2] for v in run.values], 0), dense[2].grad, rtol=1e-4, atol=1e-3)
    assert [event.name for event in run.collectives(0)] == ["all_reduce", "all_reduce"]


def one_forward_one_backward(microbatches, forward, backward):
    """The 1F1B schedule; activations and gradients are one number."""
    p, rank = get_world_size(), get_rank()
    token, pending = torch.zeros(1), []

    def do(name, seconds, source, target):
        if 0 <= source < p:
            recv(token, source)
        with span(name, seconds):
            pass
        if 0 <= target < p:
            pending.append(isend(token.clone(), target))

    warm = min(p - rank - 1, microbatches)
    for index in range(microbatches + warm):
        if index < microbatches:
            do(f"F{index}", forward, rank - 1, rank + 1)
        if index >= warm:
            do(f"B{index - warm}", backward, rank + 1, rank - 1)
    for work in pending:
        work.wait()


def test_a_pipeline_has_the_bubble_of_the_theory():
    run = SimCluster(4).run(one_forward_one_backward, 8, 0.020, 0.040)
    assert run.seconds == pytest.approx(0.660)
    busy = sum(event.end - event.start for event in run.events if event.kind == "compute")
    assert 1 - busy / (4 * run.seconds) == pytest.approx(3 / 11)


# Every function of torch.distributed


def every_collective():
    p, rank = get_world_size(), get_rank()
    own, found = torch.tensor([rank + 1.0, 2.0 * (rank + 1)]), {}

    def keep(name, tensors):
        found[name] = [t.tolist() for t in (tensors if isinstance(tensors, list) else [tensors])]

    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        keep(op, tensor := own.clone())
        all_reduce(tensor, getattr(dist.ReduceOp, op))
        keep(op, tensor)
    dist.broadcast(tensor := own.clone(), src=p - 1)
    keep("broadcast", tensor)
    dist.reduce(tensor := own.clone(), dst=p - 1)
    keep("reduce", tensor)
    dist.all_gather(parts := [torch.zeros(2) for _ in range(p)], own)
    keep("all_gather", parts)
    dist.all_gather_single(tensor := torch.zeros(2 * p), own)
    keep("all_gather_single", tensor)
    dist.gather(own, parts := [torch.zeros(2) for _ in range(p)] if rank == 0 else None, dst=0)
    keep("gather", parts or [])
    dist.scatter(tensor := torch.zeros(2), [own * i for i in range(p)] if rank == 0 else None, src=0)
    keep("scatter", tensor)
    dist.reduce_scatter(tensor := torch.zeros(2), [own * i for i in range(p)])
    keep("reduce_scatter", tensor)
    dist.reduce_scatter_single(tensor := torch.zeros(2), torch.cat([own * i for i in range(p)]))
    keep("reduce_scatter_single", tensor)
    dist.all_to_all(parts := [torch.zeros(1) for _ in range(p)], [torch.tensor([10.0 * rank + i]) for i in range(p)])
    keep("all_to_all", parts)
    dist.all_to_all_single(tensor := torch.zeros(p), torch.tensor([10.0 * rank + i for i in range(p)]))
    keep("all_to_all_single", tensor)
    dist.barrier()
    return found


def expected_of_every_collective(p: int, rank: int) -> dict:
    firsts = [r + 1.0 for r in range(p)]
    total, own = sum(firsts), [firsts[rank], 2 * firsts[rank]]
    each = [[first, 2 * first] for first in firsts]
    product = 1.0
    for first in firsts:
        product *= first
    return {
        "SUM": [[total, 2 * total]],
        "AVG": [[total / p, 2 * total / p]],
        "MAX": [each[-1]],
        "MIN": [each[0]],
        "PRODUCT": [[product, product * 2**p]],
        "broadcast": [each[-1]],
        "reduce": [[total, 2 * total]] if rank == p - 1 else [own],
        "all_gather": each,
        "all_gather_single": [[value for pair in each for value in pair]],
        "gather": each if rank == 0 else [],
        "scatter": [[1.0 * rank, 2.0 * rank]],
        "reduce_scatter": [[rank * total, 2 * rank * total]],
        "reduce_scatter_single": [[rank * total, 2 * rank * total]],
        "all_to_all": [[10.0 * sender + rank] for sender in range(p)],
        "all_to_all_single": [[10.0 * sender + rank for sender in range(p)]],
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_collective_gives_what_it_should(world_size):
    run = SimCluster(world_size).run(every_collective)
    for rank, found in enumerate(run.values):
        assert found == expected_of_every_collective(world_size, rank)
    names = [event.name for event in run.collectives(0)]
    assert names == ["all_reduce"] * 5 + [name for name in run.values[0] if name.islower()] + ["barrier"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_deprecated_names_are_recorded_as_what_they_are_called_now():
    def old():
        dist.all_gather_into_tensor(gathered := torch.zeros(2), torch.ones(1))
        dist.reduce_scatter_tensor(torch.zeros(1), gathered)

    names = [event.name for event in SimCluster(2).run(old).collectives(1)]
    assert names == ["all_gather_single", "reduce_scatter_single"]


def test_all_to_all_with_uneven_splits_and_empty_pieces():
    def exchange():
        rank, rows = get_rank(), torch.arange(6.0).view(3, 2) + 100 * get_rank()
        splits = [[0, 3], [2, 1]]
        output = torch.full((splits[0][rank] + splits[1][rank], 2), -1.0)
        dist.all_to_all_single(output, rows, [splits[0][rank], splits[1][rank]], splits[rank])
        return output[:, 0].tolist()

    assert SimCluster(2).run(exchange).values == [[100, 102], [0, 2, 4, 104]]


def test_subgroups_count_their_own_ranks():
    def grouped():
        evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = odds if get_rank() % 2 else evens
        all_reduce(tensor := torch.tensor([1.0 + get_rank()]), group=mine)
        dist.broadcast(first := torch.tensor([get_rank()]), group_src=1, group=mine)
        places = (dist.get_rank(mine), get_world_size(mine), dist.get_rank(evens), dist.get_process_group_ranks(mine))
        return (
            tensor.item(),
            first.item(),
            *places,
            dist.get_global_rank(mine, 0),
            dist.get_group_rank(mine, get_rank()),
        )

    assert SimCluster(4).run(grouped).values == [
        (4.0, 2, 0, 2, 0, [0, 2], 0, 0),
        (6.0, 3, 0, 2, -1, [1, 3], 1, 0),
        (4.0, 2, 1, 2, 1, [0, 2], 0, 1),
        (6.0, 3, 1, 2, -1, [1, 3], 1, 1),
    ]


def test_a_group_that_only_its_members_make():
    def some():
        if get_rank() != 1:
            group = dist.new_group([0, 2], use_local_synchronization=True)
            all_reduce(tensor := torch.ones(1), group=group)
            return tensor.item()

    assert SimCluster(3).run(some).values == [2.0, None, 2.0]


def test_objects_tags_any_source_and_messages_to_oneself():
    def messages():
        rank = get_rank()
        dist.all_gather_object(objects := [None] * 3, {"rank": rank})
        if rank == 0:
            first, second, own = torch.zeros(1), torch.zeros(1), torch.zeros(1)
            recv(second, 1, tag=2)
            recv(first, 1, tag=1)
            works = [irecv(own, 0), isend(torch.tensor([9.0]), 0)]
            [work.wait() for work in works]
            return objects, first.item(), second.item(), own.item(), recv(torch.zeros(0))
        if rank == 1:
            works = [isend(torch.tensor([1.0]), 0, tag=1), isend(torch.tensor([2.0]), 0, tag=2)]
            [work.wait() for work in works]
        if rank == 2:
            send(torch.zeros(0), 0)

    values = SimCluster(3).run(messages).values
    assert values[0] == ([{"rank": 0}, {"rank": 1}, {"rank": 2}], 1.0, 2.0, 9.0, 2)


def test_device_meshes():
    def meshed():
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        all_reduce(tensor := torch.tensor([float(get_rank())]), group=mesh.get_group("tp"))
        return tensor.item()

    assert SimCluster(4).run(meshed).values == [1.0, 1.0, 5.0, 5.0]


def test_data_comes_with_wait_and_not_earlier():
    def early():
        into = torch.zeros(1)
        work = irecv(into, 1 - get_rank())
        other = isend(torch.ones(1), 1 - get_rank())
        other.wait()
        before = into.item()
        work.wait()
        handle = all_reduce(into, async_op=True)
        kept = into.item()
        handle.wait()
        return before, kept, into.item(), handle.is_completed(), handle.wait()

    assert SimCluster(2).run(early).values == [(0.0, 1.0, 2.0, True, True)] * 2


def test_asking_whether_a_work_is_complete_takes_time_and_ends():
    def ask():
        if get_rank() == 1:
            with span("late", 0.01):
                pass
            return send(torch.ones(1), 0)
        work = irecv(into := torch.zeros(1), 1)
        while not work.is_completed():
            pass
        return into.item()

    run = SimCluster(2).run(ask)
    assert run.values == [1.0, None]
    assert run.seconds == pytest.approx(0.01, abs=1e-4)


# Time

LINK = Link(alpha=1e-3, bandwidth=1e6)


def test_a_message_takes_alpha_and_its_bytes():
    def message():
        send(torch.zeros(1000), 1) if get_rank() == 0 else recv(torch.zeros(1000), 0)

    run = SimCluster(2, link=LINK).run(message)
    sent, received = run.events
    assert (sent.kind, sent.peer, sent.nbytes, sent.elements) == ("send", 1, 4000, 1000)
    assert (sent.end, received.end) == pytest.approx((0.004, 0.005))


def test_messages_queue_on_a_link_and_not_on_its_way_back():
    def messages():
        rank = get_rank()
        works = [(isend if rank == 0 else irecv)(torch.zeros(1000), 1 - rank) for _ in range(3)]
        works.append((irecv if rank == 0 else isend)(torch.zeros(500), 1 - rank))
        for work in works:
            work.wait()

    run = SimCluster(2, link=LINK, links={(1, 0): Link(5e-3, 1e6)}).run(messages)
    waits = [event.end for event in run.of_rank(1) if event.kind == "wait"]
    assert waits == pytest.approx([0.005, 0.009, 0.013, 0.013])
    assert [event.end for event in run.of_rank(0)][-1] == pytest.approx(0.012)


def test_a_message_starts_when_both_sides_have_called():
    def late():
        if get_rank() == 0:
            send(torch.zeros(1000), 1)
        else:
            with span("busy", 0.5):
                pass
            recv(torch.zeros(1000), 0)

    (sent,) = SimCluster(2, link=LINK).run(late).of_rank(0)
    assert (sent.start, sent.began, sent.end) == pytest.approx((0.0, 0.5, 0.504))


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda: dist.all_reduce(torch.zeros(1000)), 6 * 2e-3),
        (lambda: dist.all_gather([torch.zeros(250) for _ in range(4)], torch.zeros(250)), 3 * 2e-3),
        (lambda: dist.reduce_scatter(torch.zeros(250), [torch.zeros(250) for _ in range(4)]), 3 * 2e-3),
        (lambda: dist.broadcast(torch.zeros(1000), 2), 3e-3 + 4e-3),
        (lambda: dist.all_to_all_single(torch.zeros(1000), torch.zeros(1000)), 3 * 2e-3),
        (lambda: dist.barrier(), 6e-3),
    ],
)
def test_collectives_cost_what_their_ring_costs(call, seconds):
    def late():
        with span("work", 0.1 * get_rank()):
            pass
        call()

    run = SimCluster(4, link=LINK).run(late)
    assert run.seconds == pytest.approx(0.3 + seconds)
    assert SimCluster(1, link=LINK).run(lambda: all_reduce(torch.ones(4))).seconds == 0


def test_the_slowest_link_of_the_ring_sets_the_pace():
    run = SimCluster(4, link=LINK, links={(2, 3): Link(9e-3, 1e6)}).run(lambda: all_reduce(torch.zeros(1000)))
    assert run.seconds == pytest.approx(6 * 10e-3)


def test_runs_are_equal_and_independent():
    def draw():
        with span("x", 0.001 * random.random()):
            pass
        all_reduce(tensor := torch.rand(3) * random.random())
        return tensor.tolist(), random.random(), str(device())

    runs = [SimCluster(4, link=LINK, seed=seed).run(draw) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(map(str, runs[0].values))) == 1  # all ranks start with the same seed


def test_each_rank_has_its_own_arguments_and_output_lines(capsys):
    def append(items):
        items.append(get_rank())
        print("items", end=" ")
        print(items)
        print("unfinished", end="")
        return items

    items = []
    assert SimCluster(2).run(append, items).values == [[0], [1]]
    assert items == []
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] items [0]",
        "[rank 1] items [1]",
        "[rank 0] unfinished",
        "[rank 1] unfinished",
    ]


def test_what_a_rank_returns_is_of_the_notebooks_own_class():
    class Answer:
        def rank(self):
            return get_rank()

    method = Answer.rank
    run = SimCluster(2).run(lambda: (Answer(), Answer().rank()))
    assert [(type(answer) is Answer, rank) for answer, rank in run.values] == [(True, 0), (True, 1)]
    assert Answer.rank is method


def test_what_an_earlier_unit_built_works_on_ranks(part_of_the_learners):
    made, boxed = part_of_the_learners, part_of_the_learners.boxed
    for box in SimCluster(2).run(lambda: boxed(made.Box(get_rank()))).values:
        assert type(box) is type(box.content) is made.Box
    assert made.calls == made.Box(0).calls() == 0  # each rank had a copy


# Reports


def test_receives_that_wait_for_each_other():
    def dead():
        if get_rank() < 2:
            recv(torch.zeros(4), 1 - get_rank())

    start = time.perf_counter()
    message = failure(DeadlockError, dead, timeout=600)
    assert time.perf_counter() - start < 60
    lines = message.splitlines()
    assert lines[0] == "deadlock: no unfinished rank can go on"
    assert lines[1] == "  rank 0: in recv(src=1, tag=0, (4,) float32), waits for rank 1"
    assert "test_simulated_ranks.py, line" in lines[2] and lines[2].endswith("in dead")
    assert lines[3].strip() == "recv(torch.zeros(4), 1 - get_rank())"
    assert lines[7:] == [
        "  rank 2: finished",
        "  messages 0 -> 1, tag 0: 0 sent, 1 received or waited for",
        "  messages 1 -> 0, tag 0: 0 sent, 1 received or waited for",
    ]


@pytest.mark.parametrize("elements", [0, 1, 1_000_000])
def test_sends_do_not_buffer(elements):
    def ring():
        p, rank = get_world_size(), get_rank()
        send(torch.zeros(elements), (rank + 1) % p)
        recv(torch.zeros(elements), (rank - 1) % p)

    message = failure(DeadlockError, ring)
    assert message.count("in send(dst=") == 3


def test_a_rank_that_is_missing_in_a_collective():
    def missing():
        if get_rank() != 1:
            dist.barrier()

    message = failure(DeadlockError, missing)
    assert "rank 0: in barrier(), collective 1 of group [0, 1, 2], waits for rank 1" in message
    assert "rank 1: finished" in message


def test_groups_made_in_different_orders():
    def confused():
        if get_rank() == 0:
            dist.new_group([0, 1])
        dist.barrier(dist.new_group([0, 1, 2]))

    assert "every rank must call new_group for the same groups" in failure(DeadlockError, confused)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rank: dist.barrier() if rank else all_reduce(torch.ones(2)), "in different collectives"),
        (lambda rank: all_reduce(torch.ones(2 + rank)), "(2,) float32"),
        (lambda rank: all_reduce(torch.ones(2).to([torch.float32, torch.float64][rank])), "(2,) float64"),
        (lambda rank: all_reduce(torch.ones(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank]), "op=MAX"),
        (lambda rank: dist.broadcast(torch.ones(2), src=rank), "root=1"),
        (
            lambda rank: dist.all_to_all_single(torch.ones(2), torch.ones(2), None, [1 + rank, 1 - rank]),
            "which expects",
        ),
        (lambda rank: recv(torch.ones(2), 0) if rank else send(torch.ones(3), 1), "sends 3 x float32"),
        (lambda rank: recv(torch.ones(2).int(), 0) if rank else send(torch.ones(2), 1), "into 2 x int32"),
    ],
)
def test_what_does_not_match_is_named(call, words):
    message = failure(MismatchError, lambda: call(get_rank()), 2)
    assert words in message
    assert "rank 0: " in message and "rank 1: " in message and message.count("test_simulated_ranks.py, line") == 2


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_send_buffer_that_changes_before_wait(value):
    def hasty(change):
        if get_rank() == 0:
            tensor = torch.full((3,), value)
            work = isend(tensor, 1)
            tensor += change
            work.wait()
        else:
            recv(torch.zeros(3), 0)

    assert len(SimCluster(2).run(hasty, 0.0).values) == 2
    if value == value:
        message = failure(BufferChangedError, lambda: hasty(1.0), 2)
        assert message.startswith("rank 0 changed the buffer of isend(dst=1, tag=0, (3,) float32) before wait()")
        assert message.count("in hasty") == 2


def start_all_reduce(waits: bool):
    work = all_reduce(torch.ones(1), async_op=True)
    if waits:
        work.wait()


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (lambda rank: recv(torch.zeros(1), 0) if rank else isend(torch.zeros(1), 1), "isend"),
        (lambda rank: irecv(torch.zeros(1), 0) if rank else None, "irecv"),
        (lambda rank: start_all_reduce(waits=rank > 0), "all_reduce"),
    ],
)
def test_what_nobody_waits_for(start, name):
    assert f"  {name}(" in failure(UnwaitedError, lambda: start(get_rank()) and None, 2)


def test_an_error_on_one_rank_comes_first():
    def helper():
        raise ValueError("bad shard")

    def failing():
        if get_rank() == 2:
            helper()
        recv(torch.zeros(1), 2)

    with pytest.raises(RankError) as caught:
        SimCluster(4).run(failing)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 2 raised ValueError: bad shard"
    assert [line.rpartition(" in ")[2] for line in lines[1:5:2]] == ["failing", "helper"]
    assert "  rank 0: in recv(src=2, tag=0, (1,) float32), waits for rank 2" in lines
    assert "  rank 3: not started yet" in lines
    assert (caught.value.rank, type(caught.value.cause)) == (2, ValueError)


def test_a_rank_cannot_hide_the_error_of_another():
    def stubborn():
        dist.barrier()
        if get_rank() == 2:
            raise ValueError("the cause")
        while True:
            with contextlib.suppress(BaseException):
                recv(torch.zeros(1), 2)

    assert failure(RankError, stubborn).startswith("rank 2 raised ValueError: the cause")


def test_a_stub_raises_what_it_raises():
    def stub():
        raise NotImplementedError

    with pytest.raises(NotImplementedError) as caught:
        SimCluster(2).run(lambda: stub())
    assert caught.traceback[-1].name == "stub"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: send(torch.zeros(1), 7), "there is no rank 7 in a group of 3"),
        (lambda: send(torch.zeros(1), -1), "there is no rank -1"),
        (lambda: dist.broadcast(torch.zeros(1), 3), "there is no rank 3"),
        (lambda: all_reduce(torch.zeros(2, 3).t()), "is not contiguous"),
        (lambda: all_reduce(torch.zeros(2).int(), dist.ReduceOp.AVG), "average of integers"),
        (lambda: dist.all_gather([torch.zeros(1)], torch.zeros(1)), "expected 3 output tensors"),
        (lambda: dist.all_gather([torch.zeros(2)] * 3, torch.zeros(1)), "expected 1 elements"),
        (lambda: dist.all_gather_single(torch.zeros(2), torch.zeros(1)), "must have 3 x 1 elements"),
        (lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4)), "cannot be split evenly"),
        (lambda: span("x", -1.0).__enter__() or span("x", -1.0).__exit__(None, None, None), "at least 0"),
        (lambda: SimCluster(2).run(get_rank), "inside a simulated run"),
    ],
)
def test_wrong_calls_are_refused_on_the_rank_that_makes_them(call, words):
    message = failure(RankError, lambda: call())
    assert message.startswith("rank 0 raised ") and words in message


def test_a_rank_in_an_endless_loop_is_stopped():
    def endless():
        if get_rank() == 1:
            while True:
                pass
        dist.barrier()

    message = failure(RankTimeoutError, endless, timeout=0.2)
    head = "not finished after 0.2 s (the argument timeout of SimCluster); rank 1 could go on, so this is no deadlock"
    assert message.splitlines()[0] == head
    assert "rank 1: running" in message and "in endless" in message
    assert "rank 0: in barrier()" in message
    assert not [thread for thread in threading.enumerate() if thread.name == "rank 1" and alive_after(thread)]


def alive_after(thread: threading.Thread) -> bool:
    thread.join(10)
    return thread.is_alive()


@pytest.mark.skipif(sys.platform == "win32", reason="no signal can be sent to oneself alone")
@pytest.mark.parametrize("action", [lambda: None, lambda: time.sleep(3)])
def test_an_interrupt_ends_the_run(action):
    def busy():
        if get_rank() == 0:
            os.kill(os.getpid(), signal.SIGINT)
        while True:
            action()

    with pytest.raises(KeyboardInterrupt) as caught:
        SimCluster(2).run(busy)
    assert type(caught.value) is RankInterruptError
    assert "rank 0: running" in str(caught.value)
    assert SimCluster(2).run(get_rank).values == [0, 1]


class Keeper:
    """One for all ranks: classes of modules are not copied."""

    group: dist.ProcessGroup | None = None


def keeps_its_group_on_a_class():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    Keeper.group = groups[get_rank() // 2]
    dist.barrier()
    if get_rank() > 1:
        dist.all_reduce(torch.ones(2), group=Keeper.group)


def test_the_group_object_of_another_rank_is_refused():
    text = failure(RankError, keeps_its_group_on_a_class, 4)
    assert (
        "rank 2 raised ForeignGroupError: all_reduce: rank 2 called the group object of rank 3; each rank has its"
        in text
    )


def keeps_its_group_for_the_next_run():
    if Keeper.group is None:
        Keeper.group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=Keeper.group)


def test_the_group_object_of_an_earlier_run_is_refused(monkeypatch):
    monkeypatch.setattr(Keeper, "group", None)
    SimCluster(1).run(lambda: setattr(Keeper, "group", dist.new_group([0])))
    text = failure(RankError, keeps_its_group_for_the_next_run, 2)
    assert "ForeignGroupError: all_reduce: this group object is left over from an earlier run" in text


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_a_default_group_is_the_runs_own():
    for size in (2, 3):
        run = SimCluster(size).run(lambda: torch.distributed.nn.functional.all_reduce(torch.ones(1)).item())
        assert run.values == [size] * size


def functional_collectives():
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][get_rank() // 2]
    rank = torch.full((2,), float(get_rank()))
    made = [
        functional.all_reduce(rank, "sum", group),
        functional.broadcast(rank, 1, group),
        functional.all_gather_single(rank, 0, group),
        functional.reduce_scatter_single(torch.arange(4.0), "sum", 0, group),
        functional.all_to_all_single(torch.arange(4.0), None, None, group),
    ]
    return [tensor.tolist() for tensor in made]


def test_functional_collectives_are_recorded():
    run = SimCluster(4).run(functional_collectives)
    assert run.values[2] == [[5, 5], [3, 3], [2, 2, 3, 3], [0, 2], [0, 1, 0, 1]]
    assert run.values[3] == [[5, 5], [3, 3], [2, 2, 3, 3], [4, 6], [2, 3, 2, 3]]
    names = ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"]
    for rank in range(4):
        assert [e.name for e in run.events if e.rank == rank and e.kind == "collective"] == names


def reduces_a_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    return partial.redistribute(mesh, [Replicate()]).to_local().tolist()


def test_what_dtensor_sends_is_recorded():
    run = SimCluster(2).run(reduces_a_dtensor)
    assert run.values == [[2, 2, 2]] * 2
    assert [(e.name, e.nbytes) for e in run.events if e.kind == "collective"] == [("all_reduce", 12)] * 2


def sends_in_a_thread():
    group, raised = dist.group.WORLD, []

    def send():
        try:
            group.send([torch.ones(2)], 1, 0)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    return raised


def test_a_thread_of_a_ranks_own_is_refused():
    said = ["send: called in a thread of its own; a rank is one thread"]
    assert SimCluster(2).run(sends_in_a_thread).values == [said, said]


def test_a_time_limit_of_the_caller_passes_through():
    class Limit(BaseException):
        pass

    def limit(*_):
        raise Limit

    def forever():
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            pass

    before = signal.signal(signal.SIGTERM, limit)
    try:
        with pytest.raises(Limit):
            SimCluster(2).run(forever)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_two_runs_at_once_are_refused():
    def long():
        while not os.path.exists(sys.argv[0] + ".never"):
            pass

    background = threading.Thread(target=lambda: failure(RankTimeoutError, long, timeout=0.5))
    background.start()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="another simulated run is going on"):
        SimCluster(1).run(get_rank)
    background.join()


def test_what_cannot_be_copied_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        SimCluster(2).run(lambda: lock)


@pytest.mark.parametrize("arguments", [{"world_size": 0}, {"world_size": MOST_RANKS + 1}, {"world_size": 2.0}])
def test_numbers_of_ranks_that_are_refused(arguments):
    with pytest.raises(ValueError, match="world_size"):
        SimCluster(**arguments)


def test_links_between_ranks_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="links"):
        SimCluster(2, links={(0, 2): Link()})


def test_importing_ranks_does_not_import_torch():
    code = "import sys, servelab.ranks, servelab.plots.timeline_ranks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_spans_outside_of_ranks_do_nothing():
    with span("alone", 1.0):
        assert device() == torch.device("cpu")
