"""Real ranks: functions on gloo processes, what they say when something is wrong, and that nothing of them stays."""

import atexit
import enum
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import irecv, isend, send

from servelab.ranks import (
    BufferChangedError,
    Cluster,
    DeadlockError,
    MismatchError,
    RankError,
    RankInterruptError,
    RankTimeoutError,
    UnwaitedError,
    device,
    pool,
    span,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as if the functions below stood in a notebook's cells

STALL = 0.3  # seconds; how long these tests let blocked ranks be before a deadlock is looked for


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The fork server has imported torch, so that no test waits for that."""
    Cluster(1, backend="gloo").run(dist.get_rank)
    yield
    pool.dismiss_idle()


@pytest.fixture(autouse=True)
def nothing_stays(warm, monkeypatch, tmp_path):
    """No test leaves a process (but the fork server, or idle ranks of a pool), a descriptor or a folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children, descriptors, *rest = leftovers()
    yield
    pool.dismiss_idle()
    for _ in range(100):  # what is closed by another thread, or by an earlier test, may take its time
        now = leftovers()
        if [now[0], *now[2:]] == [children, *rest] and now[1] <= descriptors:
            return
        gc.collect()
        time.sleep(0.05)
    assert now == (children, descriptors, *rest)


def leftovers() -> tuple:
    me = psutil.Process()
    descriptors = me.num_fds() if hasattr(me, "num_fds") else 0
    zombies = [child.pid for child in me.children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]
    return (
        len(me.children(recursive=True)),
        descriptors,
        zombies,
        set(Path(tempfile.gettempdir()).glob("servelab-ranks-*")),
    )


def cluster(world_size: int, **options) -> Cluster:
    return Cluster(world_size, backend="gloo", **{"stall": STALL, **options})


def report(function, world_size: int = 2, error: type = RankError, **options) -> str:
    """The text of the error that a run ends with; its class must be exactly ``error``."""
    with pytest.raises(error) as caught:
        cluster(world_size, **options).run(function)
    assert type(caught.value) is error
    return str(caught.value)


# What ranks do


def summed(start):
    tensor = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item(), dist.get_world_size(), dist.get_backend()


@pytest.mark.parametrize("world_size", [1, 8])
def test_every_rank_returns_its_value(world_size):
    run = cluster(world_size).run(summed, start=10)
    expected = sum(10 + rank for rank in range(world_size))
    assert run.values == [(expected, world_size, "gloo")] * world_size
    assert run.seconds > 0


def world():
    random_numbers = random.random(), torch.rand(1).item()
    return os.environ.get("SERVELAB_TEST"), os.getcwd(), sys.path[0], torch.get_num_threads(), device(), random_numbers


def test_ranks_live_in_the_caller_s_world(monkeypatch, tmp_path):
    monkeypatch.setenv("SERVELAB_TEST", "set after the fork server started")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    first, second = cluster(2, seed=7).run(world).values
    assert first == second == cluster(1, seed=7).run(world).values[0] != cluster(1, seed=8).run(world).values[0]
    random.seed(7)
    torch.manual_seed(7)
    expected = random.random(), torch.rand(1).item()
    assert first == (
        "set after the fork server started",
        str(tmp_path),
        str(tmp_path / "modules"),
        1,
        torch.device("cpu"),
        expected,
    )


def talks():
    print("one line\nhalf a line of rank", dist.get_rank(), end="")
    print("to stderr", file=sys.stderr)


def test_printed_lines_carry_their_rank(capfd):
    cluster(2).run(talks)
    out, err = capfd.readouterr()
    lines = [f"[rank {rank}] {text}" for rank in (0, 1) for text in ("one line", f"half a line of rank {rank}")]
    assert sorted(out.splitlines()) == sorted(lines)
    assert sorted(err.splitlines()) == ["[rank 0] to stderr", "[rank 1] to stderr"]


STEP = 1


class Counter:
    """A class of a cell: what ranks return is of the same class here."""

    def __init__(self, count):
        self.count = count

    def next(self):
        return self.count + STEP


def counters(counter):
    counter.count += dist.get_rank() + 1
    return counter


def test_arguments_are_copied_and_classes_of_cells_come_back_as_they_were(monkeypatch):
    counter, method = Counter(5), Counter.next
    run = cluster(2).run(counters, counter)
    assert [value.count for value in run.values] == [6, 7] and counter.count == 5
    assert all(type(value) is Counter for value in run.values)
    monkeypatch.setitem(globals(), "STEP", 10)
    assert Counter.next is method and [value.next() for value in run.values] == [16, 17]


def test_what_an_earlier_unit_built_works_on_ranks(part_of_the_learners):
    made, boxed = part_of_the_learners, part_of_the_learners.boxed
    for box in cluster(2).run(lambda: boxed(made.boxed(dist.get_rank()))).values:
        assert type(box) is type(box.content) is made.Box and box.calls() == 0


def colours():
    class Colour(enum.Enum):
        RED = 1

    return [Colour.RED, Shade.DARK]


class Shade(enum.Enum):
    DARK = 1


def test_classes_that_a_rank_makes_come_back_too():
    (red, dark), _ = cluster(2).run(colours).values
    assert red.name == "RED" and dark is Shade.DARK


def backward():
    weight = torch.ones(3, requires_grad=True)
    (weight * dist.get_rank()).sum().backward()
    dist.all_reduce(weight.grad)
    return weight.grad


def test_gradients_come_back():
    assert torch.equal(cluster(3).run(backward).values[2], torch.full((3,), 3.0))


# What is recorded


def ring_step():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.full((5,), float(rank)), torch.empty(5)
    with span("F0", seconds=0.01):
        pass
    sending = isend(mine, (rank + 1) % size, tag=3)
    irecv(theirs, (rank - 1) % size, tag=3).wait()
    sending.wait()
    dist.all_reduce(theirs)
    return theirs[0].item()


def test_events_of_messages_spans_and_collectives():
    run = cluster(3).run(ring_step)
    assert run.values == [3.0] * 3
    for rank in range(3):
        events = run.of_rank(rank)
        assert [(event.kind, event.name) for event in events] == [
            ("compute", "F0"),
            ("send", "isend"),
            ("recv", "irecv"),
            ("wait", "irecv"),
            ("wait", "isend"),
            ("collective", "all_reduce"),
        ]
        compute, sent, received, waited, *_, collective = events
        assert compute.end - compute.start >= 0.01
        assert (sent.peer, sent.nbytes, sent.elements, sent.tag) == ((rank + 1) % 3, 20, 5, 3)
        assert (received.peer, received.nbytes) == ((rank - 1) % 3, 20)
        assert (waited.peer, waited.nbytes) == ((rank - 1) % 3, 0)
        assert (collective.nbytes, collective.ranks) == (20, (0, 1, 2))
        assert all(0 <= event.start <= event.end <= run.seconds for event in events)
    assert run.sent(0) == 20


def every_collective():
    rank, size = dist.get_rank(), dist.get_world_size()
    one, two, parts = torch.ones(2), torch.ones(2 * size), [torch.ones(2) for _ in range(size)]
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.broadcast(one, src=0)
    dist.reduce(one, dst=1)
    dist.all_gather(parts, one)
    dist.all_gather_single(two, one)
    dist.gather(one, parts if rank == 0 else None, dst=0)
    dist.scatter(one, parts if rank == 1 else None, src=1)
    dist.reduce_scatter(one, parts)
    dist.reduce_scatter_single(one, two)
    dist.all_to_all_single(two, torch.ones(2 * size))
    dist.barrier()
    dist.all_reduce(one, async_op=True).wait()
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        dist.all_gather_into_tensor(two, one)
        dist.reduce_scatter_tensor(one, two)


def test_every_collective_leaves_one_event_with_its_payload():
    run = cluster(2).run(every_collective)
    events = [(event.name, event.elements) for event in run.collectives(1)]
    assert events == [
        ("all_reduce", 2),
        ("broadcast", 2),
        ("reduce", 2),
        ("all_gather", 2),
        ("all_gather_single", 2),
        ("gather", 2),
        ("scatter", 2),
        ("reduce_scatter", 4),
        ("reduce_scatter_single", 4),
        ("all_to_all_single", 4),
        ("barrier", 0),
        ("all_reduce", 2),
        ("all_gather_single", 2),  # the deprecated names last
        ("reduce_scatter_single", 4),
    ]
    assert [event.name for event in run.of_rank(1) if event.kind == "wait"] == ["all_reduce"]


def groups_and_batches():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, tensor = pairs[rank // 2], torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    theirs = torch.empty(1)
    peer = rank ^ 1
    operations = [
        dist.P2POp(dist.isend, tensor, peer, group),
        dist.P2POp(dist.irecv, theirs, group_peer=peer % 2, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor.item(), theirs.item()


def test_groups_use_global_ranks_and_batches_are_recorded():
    run = cluster(4).run(groups_and_batches)
    assert run.values == [(1.0, 1.0)] * 2 + [(5.0, 5.0)] * 2
    assert [(event.name, event.peer, event.ranks) for event in run.of_rank(3) if event.kind != "wait"] == [
        ("all_reduce", None, (2, 3)),
        ("isend", 2, ()),
        ("irecv", 2, ()),
    ]


def from_anybody():
    if dist.get_rank() == 0:
        tensors = [torch.empty(1), torch.empty(1)]
        sources = [dist.recv(tensor) for tensor in tensors]
        return sorted(zip(sources, (tensor.item() for tensor in tensors), strict=True))
    send(torch.tensor([float(dist.get_rank())]), 0)
    return None


def test_receives_from_any_source_name_their_source():
    run = cluster(3).run(from_anybody)
    assert run.values[0] == [(1, 1.0), (2, 2.0)]
    assert sorted(event.peer for event in run.of_rank(0)) == [1, 2]


# Deadlocks


def both_receive():
    tensor = torch.zeros(4)
    if dist.get_rank() < 2:
        dist.recv(tensor, 1 - dist.get_rank())


def test_a_deadlock_says_who_waits_for_what_from_whom_and_where():
    text = report(both_receive, 3, DeadlockError)
    assert "in recv(src=1, tag=0, (4,) float32): rank 1 has sent nothing that matches" in text
    assert "in recv(src=0, tag=0, (4,) float32): rank 0 has sent nothing that matches" in text
    assert "test_real_ranks.py, line" in text and "dist.recv(tensor, 1 - dist.get_rank())" in text
    assert "rank 2: has finished" in text
    assert "messages 0 -> 1, tag 0: 0 sent, 1 received or waited for" in text


def both_send():
    dist.send(torch.zeros(1), 1 - dist.get_rank())
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


def waits_for_a_message_that_nobody_sends():
    if dist.get_rank() == 0:
        dist.irecv(torch.zeros(1), 1, tag=2).wait()
    else:
        dist.isend(torch.zeros(1), 0, tag=1).wait()


def from_nobody():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1))


@pytest.mark.parametrize(
    "function, waits",
    [
        (both_send, "in send(dst=1, tag=0, (1,) float32): rank 1 has received nothing that matches"),
        (waits_for_a_message_that_nobody_sends, "in irecv(src=1, tag=2, (1,) float32): rank 1 has sent nothing"),
        (from_nobody, "in recv(src=None, tag=0, (1,) float32): rank 1 has sent nothing that matches"),
    ],
)
def test_other_deadlocks_of_messages(function, waits):
    assert waits in report(function, 2, DeadlockError)


def one_is_missing():
    if dist.get_rank() != 1:
        dist.barrier()


def one_makes_no_group():
    if dist.get_rank() != 1:
        dist.new_group([0, 2])


def test_a_collective_that_a_rank_leaves_out():
    assert "in barrier(): rank 1 has not called it" in report(one_is_missing, 3, DeadlockError)
    text = report(one_makes_no_group, 3, MismatchError)
    assert "rank 1 ended without calling a collective" in text and "ranks 0 and 2: new_group(ranks=[0, 2])" in text


def slow_partner():
    if dist.get_rank() == 0:
        time.sleep(3 * STALL)
    dist.barrier()
    return "fine"


def test_a_slow_rank_is_no_deadlock():
    assert cluster(2).run(slow_partner).values == ["fine", "fine"]


# Mismatches


def different_collectives():
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)


def different_sizes():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def different_reductions():
    dist.all_reduce(torch.ones(1), op=dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)


def different_roots():
    dist.broadcast(torch.ones(1), src=dist.get_rank())


def sends_more():
    dist.send(torch.ones(8), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(2), 0)


def sends_less():
    dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(8), 0)


def sends_another_type():
    dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(2, dtype=torch.int32), 0)


def other_splits():
    rank = dist.get_rank()
    splits = [1, 3] if rank == 0 else [2, 2]
    dist.all_to_all_single(torch.ones(4), torch.ones(4), splits, splits)


@pytest.mark.parametrize(
    "function, words",
    [
        (different_collectives, ["different collectives", "rank 0: all_reduce(", "rank 1: broadcast("]),
        (different_sizes, ["disagree in all_reduce", "rank 0: all_reduce((4,)", "rank 1: all_reduce((5,)"]),
        (different_reductions, ["disagree in all_reduce", "op=MAX", "op=SUM"]),
        (different_roots, ["disagree in broadcast", "root=0", "root=1"]),
        (sends_more, ["rank 0 sends 8 x float32 (32 bytes), but rank 1 receives into 2 x float32 (8 bytes)"]),
        (sends_less, ["rank 0 sends 2 x float32 (8 bytes), but rank 1 receives into 8 x float32 (32 bytes)"]),
        (sends_another_type, ["rank 0 sends 2 x float32 (8 bytes), but rank 1 receives into 2 x int32 (8 bytes)"]),
        (other_splits, ["rank 0 sends 3 elements to rank 1, which expects 2"]),
    ],
)
def test_calls_that_do_not_fit_are_named(function, words):
    text = report(function, 2, MismatchError)
    assert all(word in text for word in words), text
    assert "test_real_ranks.py, line" in text


# Buffers and waits


def changes_its_buffer():
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        tensor[1] = float("nan")
        work.wait()
    else:
        dist.recv(tensor, 0)


def changes_another_row():
    table = torch.zeros(2, 3)
    if dist.get_rank() == 0:
        work = dist.isend(table[0], 1)
        table[1] = 1.0
        work.wait()
    else:
        dist.recv(table[0], 0)


def never_waits():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(3), 0)


def test_a_send_buffer_changed_before_wait_is_named():
    text = report(changes_its_buffer, 2, BufferChangedError)
    assert text.startswith("rank 0: the buffer of isend(dst=1, tag=0, (3,) float32) was changed before wait()")
    assert "work.wait()" in text
    cluster(2, check_buffers=False).run(changes_its_buffer)
    cluster(2).run(changes_another_row)


def test_a_call_that_is_never_waited_for_is_named():
    text = report(never_waits, 2, UnwaitedError)
    assert "isend(dst=1, tag=0, (3,) float32)" in text and "dist.isend(torch.ones(3), 1)" in text


# Errors and deaths


def fails_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("the shard has 3 rows")
    dist.recv(torch.ones(1), 1)


def exits_on_rank_1():
    sys.exit(3) if dist.get_rank() == 1 else dist.barrier()


def returns_a_lock():
    return threading.Lock()


def test_the_root_cause_comes_first_with_rank_and_line():
    text = report(fails_on_rank_1, 3)
    first, place, source, *_ = text.splitlines()
    assert first == "rank 1 raised ValueError: the shard has 3 rows"
    assert "test_real_ranks.py, line" in place and place.endswith("in fails_on_rank_1")
    assert source.strip() == 'raise ValueError("the shard has 3 rows")'
    assert "rank 0: waits" in text and "rank 2: waits" in text
    assert "rank 1 raised SystemExit: 3" in report(exits_on_rank_1)
    assert "the return value" in report(returns_a_lock) and "cannot pickle" in report(returns_a_lock)


LOCK = threading.Lock()


def uses_a_lock():
    return LOCK


def test_what_cannot_be_sent_to_a_rank_is_named_before_anything_starts():
    with pytest.raises(TypeError, match="'LOCK', which uses_a_lock uses, cannot be sent"):
        cluster(2).run(uses_a_lock)


def dies(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
@pytest.mark.parametrize("name, meaning", [("SIGKILL", "out of memory"), ("SIGSEGV", "memory that is not its own")])
def test_a_rank_that_dies_is_named_with_its_signal_and_what_that_means(name, meaning):
    with pytest.raises(RankError) as caught:
        cluster(2).run(dies, getattr(signal, name))
    text = str(caught.value)
    assert text.startswith(f"rank 1 died: killed by {name} (") and meaning in text
    assert "rank 0" in text
    if name == "SIGSEGV":
        assert "os.kill(os.getpid(), number)" in text


def never_ends():
    while True:
        time.sleep(0.01)


def test_a_timeout_says_where_the_ranks_are():
    text = report(never_ends, 2, RankTimeoutError, timeout=0.5)
    assert "rank 1: is running" in text and "time.sleep(0.01)" in text


def waits_for_an_interrupt():
    if dist.get_rank() == 0:
        print("ready")
        time.sleep(0.1)
    dist.recv(torch.ones(1), 1 - dist.get_rank())


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot interrupt itself there")
def test_an_interrupt_ends_the_run_with_a_report(monkeypatch):
    def interrupt(*args, **kwargs):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr("builtins.print", interrupt)
    text = report(waits_for_an_interrupt, 2, RankInterruptError, stall=60)
    assert text.startswith("interrupted") and "rank 1 has sent nothing that matches" in text
    assert cluster(2).run(dist.get_rank).values == [0, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot interrupt itself there")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_interrupt_while_ranks_start_leaves_nothing(method, monkeypatch):
    start, started = pool.Member.__init__, []

    def interrupted_at_the_second(self, method):
        started.append(self)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        start(self, method)

    monkeypatch.setattr(pool.Member, "__init__", interrupted_at_the_second)
    assert report(never_ends, 4, RankInterruptError, start_method=method) == "interrupted\n  the ranks had not started"
    assert len(started) == 2


def starts_ranks():
    return Cluster(2).run(dist.get_rank)


def test_ranks_cannot_start_ranks():
    assert "ranks cannot start ranks" in report(starts_ranks)
    with pytest.raises(ValueError, match="at least 1 rank"):
        Cluster(0)


# Under torchrun, whose part is played here: the command itself is in test_ranks_in_programs.py


def one_of_a_job(rank, port, report):
    os.environ |= {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    try:
        cluster(2, timeout=20).run(fails_on_rank_1)
    except RankError as error:
        Path(report).write_text(str(error), encoding="utf-8")
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


@pytest.mark.skipif(sys.platform == "win32", reason="torchrun over several nodes is not for Windows")
def test_under_torchrun_the_rank_that_failed_says_so_and_the_others_end(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    context, reports = multiprocessing.get_context(pool.START_METHOD), [tmp_path / "0", tmp_path / "1"]
    ranks = [context.Process(target=one_of_a_job, args=(rank, port, reports[rank])) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 1
        process.close()
    assert reports[0].read_text().startswith("another rank of the job ended first; its own report says why")
    first, place, source = reports[1].read_text().splitlines()[:3]
    assert first == "rank 1 raised ValueError: the shard has 3 rows"
    assert place.endswith("in fails_on_rank_1") and source.strip() == 'raise ValueError("the shard has 3 rows")'


# Processes that are kept for the next run, as spawned ones are


def process_and_sum(group_size):
    group, tensor = dist.new_group(list(range(group_size))), torch.ones(1)
    if dist.get_rank() < group_size:
        dist.all_reduce(tensor, group=group)
    return os.getpid(), tensor.item()


def test_processes_are_kept_for_the_next_run_and_not_after_a_failure(monkeypatch):
    monkeypatch.setattr(pool, "KEPT", (pool.START_METHOD,))
    (first, total), (second, other) = cluster(2).run(process_and_sum, 2).values
    assert (total, other) == (2.0, 2.0)
    assert cluster(2).run(process_and_sum, 1).values == [(first, 1.0), (second, 1.0)]
    assert cluster(1).run(process_and_sum, 1).values == [(first, 1.0)]
    assert "the shard has 3 rows" in report(fails_on_rank_1, 2)
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


# GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two ranks")
def test_ranks_on_gpus():
    def step():
        rank = dist.get_rank()
        mine, theirs = torch.full((4,), float(rank), device=device()), torch.empty(4, device=device())
        peer = 1 - rank
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        dist.all_reduce(mine)
        return mine.cpu(), theirs.cpu(), str(device())

    run = Cluster(2).run(step)
    for rank, (total, theirs, where) in enumerate(run.values):
        assert total.tolist() == [1.0] * 4 and theirs.tolist() == [1.0 - rank] * 4 and where == f"cuda:{rank}"
