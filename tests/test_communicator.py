"""The communicator: the same values and the same record, whatever engine and whatever functions run below."""

import pytest

from servelab.exercises.tensor_parallel._ranks import drive

torch = pytest.importorskip("torch")
dist = torch.distributed

from servelab.ranks import Cluster, SimCluster  # noqa: E402
from servelab.ranks.communicator import Communicator, split  # noqa: E402


def own_all_reduce(tensor, group):
    """A sum by messages alone: everybody sends to everybody."""
    rank, mine = dist.get_rank(group), tensor.clone()
    others = [r for r in range(dist.get_world_size(group)) if r != rank]
    received = [torch.empty_like(tensor) for _ in others]
    sends = [dist.isend(mine, group=group, group_dst=r) for r in others]
    for buffer, r in zip(received, others, strict=True):
        dist.recv(buffer, group=group, group_src=r)
    for send in sends:
        send.wait()
    tensor += sum(received)


def own_all_gather(tensor, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    kept = tensor.chunk(size)[rank].clone()
    tensor.zero_()
    tensor.chunk(size)[rank].copy_(kept)
    own_all_reduce(tensor, group)


OWN = {"all_reduce": own_all_reduce, "all_gather": own_all_gather, "reduce_scatter": own_all_reduce}


def everything(own: dict) -> list:
    """All calls, on tensors that are contiguous, transposed and empty."""
    comm = Communicator(**own)
    t = torch.arange(24.0, dtype=torch.float64).view(4, 6) * (comm.rank + 1)
    return [
        comm.all_reduce(t.clone()),
        comm.all_reduce(t.clone().T),
        comm.all_reduce(t.clone(), "max"),
        comm.all_reduce(t[:0].clone()),
        comm.all_gather(t, 1),
        comm.all_gather(t.T, 0),
        comm.reduce_scatter(t, 1),
        comm.reduce_scatter(t[:, :2].clone(), -1),
        comm.broadcast(t.clone(), 1),
        split(comm, 1).all_reduce(t.clone()),
    ]


def record(run, rank: int) -> list[tuple]:
    return [(event.name, event.elements, event.nbytes, event.ranks) for event in run.collectives(rank)]


def test_values_on_two_ranks():
    full = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    total = 3 * full
    for rank, got in enumerate(SimCluster(2).run(everything, {}).values):
        mine = (rank + 1) * full
        whole = torch.cat([full, 2 * full], 1)
        wanted = [total, total.T, 2 * full, full[:0], whole, torch.cat([full.T, 2 * full.T])]
        wanted += [total.chunk(2, 1)[rank], total[:, rank : rank + 1], 2 * full, mine]
        assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def test_own_functions_leave_the_same_record():
    ready, own = (SimCluster(2).run(everything, functions) for functions in ({}, OWN))
    assert all(torch.equal(g, w) for g, w in zip(own.values[1], ready.values[1], strict=True))
    assert record(own, 0) == record(ready, 0)
    assert record(ready, 0)[0] == ("all_reduce", 24, 192, (0, 1))
    assert [name for name, *_ in record(ready, 0)] == [
        *["all_reduce"] * 4,
        *["all_gather"] * 2,
        *["reduce_scatter"] * 2,
        "broadcast",
    ]
    assert own.sent(0) > 0 == ready.sent(0)


def test_real_ranks_leave_the_same_record():
    for functions in ({}, OWN):
        real, simulated = (engine(2).run(everything, functions) for engine in (Cluster, SimCluster))
        assert all(torch.equal(g, w) for g, w in zip(real.values[1], simulated.values[1], strict=True))
        assert record(real, 1) == record(simulated, 1)


def test_one_rank_sends_nothing_and_hands_out_copies():
    def alone() -> bool:
        comm, t = Communicator(), torch.ones(4)
        made = [comm.all_gather(t), comm.reduce_scatter(t)]
        assert comm.all_reduce(t) is t and comm.broadcast(t) is t
        return all(torch.equal(t, other) and other.data_ptr() != t.data_ptr() for other in made)

    run = SimCluster(1).run(alone)
    assert run.values == [True] and not run.events
    assert alone()  # outside of ranks, too


def test_groups_of_consecutive_ranks():
    def ranks_of_groups() -> list:
        comm = Communicator()
        pair = split(comm, 2)
        with pytest.raises(ValueError, match="4 ranks cannot be split into groups of 3"):
            split(comm, 3)
        return [pair.ranks, pair.rank, split(comm, 4) is comm, split(pair, 1).ranks]

    values = SimCluster(4).run(ranks_of_groups).values
    assert values == [
        [(0, 1), 0, True, (0,)],
        [(0, 1), 1, True, (1,)],
        [(2, 3), 0, True, (2,)],
        [(2, 3), 1, True, (3,)],
    ]


def test_parts_must_be_equal():
    outcome = drive({"ranks": 2}, lambda challenge, comm: comm.reduce_scatter(torch.ones(3)))
    assert "3 along dimension 0 cannot be cut into 2 equal parts" in outcome["failed"]


def test_a_tensor_of_a_graph_is_refused_on_one_rank_already():
    comm, x = Communicator(), torch.ones(2, requires_grad=True)
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.broadcast):
        with pytest.raises(RuntimeError, match="autograd does not see"):
            call(x * 1)
        with torch.no_grad():
            assert call(x * 1).tolist() == [1, 1]
    with pytest.raises(TypeError, match="no part in the result"):
        comm.all_reduce(x.grad)
