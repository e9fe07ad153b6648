"""Answers to the reduce-scatter."""

from itertools import pairwise

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def walk(reference, chunks, group, way=1, hops=None):
    """The hops of a reduce-scatter over chunks that are given, ``way`` 1 or -1 round the ring."""
    rank, p = place(group)
    for hop in range(1, p if hops is None else hops):
        mine = chunks[(rank - way * (hop + 1)) % p]
        incoming = torch.empty_like(mine)
        sent = chunks[(rank - way * hop) % p]
        reference.exchange(sent, (rank + way) % p, incoming, (rank - way) % p, group)
        mine += incoming


@right("the other way round the ring, strided tensors reduced")
def other_way(reference):
    def ring_reduce_scatter(tensor, group=None):
        flat = tensor.contiguous().view(-1)
        chunks = flat.tensor_split(dist.get_world_size(group))
        walk(reference, chunks, group, way=-1)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return chunks[dist.get_rank(group)]

    return ring_reduce_scatter


@right("a sum that travels, empty hops skipped, bounds by hand, global ranks")
def travelling(reference):
    def ring_reduce_scatter(tensor, group=None):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        p, rank, n = len(ranks), ranks.index(dist.get_rank()), tensor.numel()
        bounds = [i * (n // p) + min(i, n % p) for i in range(p + 1)]
        cut = [slice(*pair) for pair in pairwise(bounds)]
        flat = tensor.flatten()
        travelling = flat[cut[rank - 1]].clone()
        for hop in range(2, p + 1):
            arriving = torch.zeros_like(flat[cut[(rank - hop) % p]])
            works = [dist.isend(travelling, ranks[(rank + 1) % p], group=group)] if travelling.numel() else []
            works += [dist.irecv(arriving, ranks[rank - 1], group=group)] if arriving.numel() else []
            for work in works:
                work.wait()
            travelling = arriving + flat[cut[(rank - hop) % p]]
        own = tensor.view(-1)[cut[rank]]
        own[:] = travelling
        return own

    return ring_reduce_scatter


@wrong("the whole tensor at each hop", case="sends no more than it must")
def whole(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        passed = tensor.clone()
        for _ in range(p - 1):
            incoming = torch.empty_like(tensor)
            reference.exchange(passed, (rank + 1) % p, incoming, (rank - 1) % p, group)
            tensor += incoming
            passed = incoming
        return tensor.view(-1).tensor_split(p)[rank]

    return ring_reduce_scatter


@wrong("chunks padded to equal sizes", case="sends exactly what it must")
def padded(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        room = [torch.zeros(len(chunks[0]), dtype=tensor.dtype) for _ in chunks]
        for one, chunk in zip(room, chunks, strict=True):
            one[: len(chunk)] = chunk
        walk(reference, room, group)
        chunks[rank].copy_(room[rank][: len(chunks[rank])])
        return chunks[rank]

    return ring_reduce_scatter


@wrong("each part straight to its owner", case="talks to its neighbours only")
def straight(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        mine = chunks[rank].clone()
        for shift in range(1, p):
            incoming = torch.empty_like(mine)
            reference.exchange(chunks[(rank + shift) % p], (rank + shift) % p, incoming, (rank - shift) % p, group)
            mine += incoming
        chunks[rank].copy_(mine)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("all sends first", case="comes to an end on every rank")
def sends_first(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(mine)
            dist.send(chunks[(rank - hop) % p], group=group, group_dst=(rank + 1) % p)
            dist.recv(incoming, group=group, group_src=(rank - 1) % p)
            mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("even ranks send first, odd ones receive", case="all links work at once")
def by_turns(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(mine)
            calls = [
                lambda c=chunks[(rank - hop) % p]: dist.send(c, group=group, group_dst=(rank + 1) % p),
                lambda b=incoming: dist.recv(b, group=group, group_src=(rank - 1) % p),
            ]
            for call in calls if rank % 2 == 0 else reversed(calls):
                call()
            mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("the buffer is overwritten before the send is done", case="comes to an end on every rank")
def overwritten(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        works = []
        for hop in range(1, p):
            mine, passed = chunks[(rank - hop - 1) % p], chunks[(rank - hop) % p]
            incoming = torch.empty_like(mine)
            works.append(dist.isend(passed, group=group, group_dst=(rank + 1) % p))
            passed.zero_()
            dist.recv(incoming, group=group, group_src=(rank - 1) % p)
            mine += incoming
        for work in works:
            work.wait()
        return chunks[rank]

    return ring_reduce_scatter


@wrong("the last chunk dropped", case="any number of elements")
def last_dropped(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        size = tensor.numel() // p
        chunks = [tensor.view(-1)[i * size : (i + 1) * size] for i in range(p)]
        walk(reference, chunks, group)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("the rest in the last chunk", case="any number of elements")
def rest_in_last(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        size = tensor.numel() // p
        ends = [i * size for i in range(p)] + [tensor.numel()]
        chunks = [tensor.view(-1)[a:b] for a, b in pairwise(ends)]
        walk(reference, chunks, group)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("the chunks of torch.chunk", case="any number of elements")
def torch_chunk(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = list(tensor.view(-1).chunk(p))
        chunks += [tensor.view(-1)[:0]] * (p - len(chunks))
        walk(reference, chunks, group)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("one hop too few", case="any number of ranks")
def hop_too_few(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        walk(reference, chunks, group, hops=max(p - 1, 2) if p > 1 else 1)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("rank r gets the chunk after its own", case="rank r holds the sum of chunk r")
def next_chunk(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        walk(reference, [*chunks[1:], chunks[0]], group)
        return chunks[(rank + 1) % p]

    return ring_reduce_scatter


@wrong("what arrives replaces the own share", case="adds what arrives")
def replaced(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            passed, mine = chunks[(rank - hop) % p], chunks[(rank - hop - 1) % p]
            reference.exchange(passed, (rank + 1) % p, mine, (rank - 1) % p, group)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("nothing returned", case="returns a view of its chunk")
def nothing_returned(reference):
    def ring_reduce_scatter(tensor, group=None):
        reference.ring_reduce_scatter(tensor, group)

    return ring_reduce_scatter


@wrong("the whole tensor returned", case="returns a view of its chunk")
def all_returned(reference):
    def ring_reduce_scatter(tensor, group=None):
        reference.ring_reduce_scatter(tensor, group)
        return tensor

    return ring_reduce_scatter


@wrong("one rank returns nothing", case="one rank alone")
def alone_none(reference):
    def ring_reduce_scatter(tensor, group=None):
        if dist.get_world_size(group) == 1:
            raise ValueError("a ring of one")
        return reference.ring_reduce_scatter(tensor, group)

    return ring_reduce_scatter


@wrong("the ready reduce-scatter", case="sends its own messages")
def ready(reference):
    def ring_reduce_scatter(tensor, group=None):
        whole = tensor.clone()
        dist.all_reduce(whole, group=group)
        chunks = tensor.view(-1).tensor_split(dist.get_world_size(group))
        rank = dist.get_rank(group)
        chunks[rank].copy_(whole.tensor_split(len(chunks))[rank])
        return chunks[rank]

    return ring_reduce_scatter


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda tensor, group=None: reference.ring_reduce_scatter(tensor)


@wrong("group ranks given as global ones", case="stays in its group")
def untranslated(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(mine)
            work = dist.isend(chunks[(rank - hop) % p], (rank + 1) % p, group=group)
            dist.recv(incoming, (rank - 1) % p, group=group)
            work.wait()
            mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("reshape in place of view", case="no strided tensor comes back unchanged")
def reshaped(reference):
    return lambda tensor, group=None: reference.ring_reduce_scatter(tensor.reshape(-1), group)


@wrong("chunks of the first dimension", case="tensors of any shape and dtype")
def first_dimension(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        tensor.view(-1)
        chunks = tensor.tensor_split(p)
        walk(reference, chunks, group)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("flat tensors only", case="tensors of any shape and dtype")
def flat_only(reference):
    def ring_reduce_scatter(tensor, group=None):
        assert tensor.dim() == 1
        return reference.ring_reduce_scatter(tensor, group)

    return ring_reduce_scatter


@wrong("a clone of its chunk returned", case="returns a view of its chunk")
def clone_returned(reference):
    return lambda tensor, group=None: reference.ring_reduce_scatter(tensor, group).clone()


@wrong("a whole all-reduce", case="sends exactly what it must")
def all_reduced(reference):
    def ring_reduce_scatter(tensor, group=None):
        reference.ring_all_reduce(tensor, group)
        rank, p = place(group)
        return tensor.view(-1).tensor_split(p)[rank]

    return ring_reduce_scatter


@wrong("one shift of the whole tensor", case="all links work at once")
def one_shift(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        incoming = torch.empty_like(tensor)
        reference.exchange(tensor, (rank + 1) % p, incoming, (rank - 1) % p, group)
        return tensor.view(-1).tensor_split(p)[rank]

    return ring_reduce_scatter


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 6 or reference.ring_reduce_scatter(tensor, group)


@wrong("nothing done with eight ranks", case="any number of elements")
def idle_with_eight(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 8 or reference.ring_reduce_scatter(tensor, group)


@right("received from whoever sends, after a barrier")
def from_anybody(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        dist.barrier(group)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(mine)
            works = [dist.isend(chunks[(rank - hop) % p], group=group, group_dst=(rank + 1) % p)]
            works.append(dist.irecv(incoming, group=group))
            for work in works:
                work.wait()
            mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("other memory put in the tensor's place", case="returns a view of its chunk")
def other_memory(reference):
    def ring_reduce_scatter(tensor, group=None):
        whole = tensor.clone()
        reference.ring_reduce_scatter(whole, group)
        tensor.data = whole
        return tensor.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]

    return ring_reduce_scatter


@wrong("a buffer of one dtype, whatever the tensor's is", case="tensors of any shape and dtype")
def fixed_dtype(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.zeros(mine.shape, dtype=torch.float64)
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
            mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("one rank returns the tensor as it is, not flat", case="one rank alone")
def alone_not_flat(reference):
    def ring_reduce_scatter(tensor, group=None):
        return tensor if dist.get_world_size(group) == 1 else reference.ring_reduce_scatter(tensor, group)

    return ring_reduce_scatter


@wrong("the last hop left out", case="rank r holds the sum of chunk r")
def last_hop_out(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        walk(reference, chunks, group, hops=p - 1)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("one hop too many", case="sends no more than it must")
def hop_too_many(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        walk(reference, chunks, group, hops=p + 1 if p > 1 else 1)
        return chunks[rank]

    return ring_reduce_scatter


@wrong("one hop and no more", case="rank r holds the sum of chunk r")
def one_hop(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        walk(reference, chunks, group, hops=min(p, 2))
        return chunks[rank]

    return ring_reduce_scatter


@wrong("two half rings in opposite directions", case="talks to its neighbours only")
def half_rings(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        low, high = zip(*(chunk.tensor_split(2) for chunk in chunks), strict=True)
        for hop in range(1, p):
            works, arrivals = [], []
            for parts, way in ((low, 1), (high, -1)):
                mine = parts[(rank - way * (hop + 1)) % p]
                arrivals.append((mine, torch.empty_like(mine)))
                sent = parts[(rank - way * hop) % p]
                works.append(dist.isend(sent, group=group, group_dst=(rank + way) % p))
                works.append(dist.irecv(arrivals[-1][1], group=group, group_src=(rank - way) % p))
            for work in works:
                work.wait()
            for mine, incoming in arrivals:
                mine += incoming
        return chunks[rank]

    return ring_reduce_scatter


@wrong("chunks of n / p elements, rounded up, with five ranks", case="any number of elements")
def rounded_up_with_five(reference):
    def ring_reduce_scatter(tensor, group=None):
        rank, p = place(group)
        if p != 5:
            return reference.ring_reduce_scatter(tensor, group)
        flat, size = tensor.view(-1), -(-tensor.numel() // p)
        chunks = [flat[i * size : (i + 1) * size] for i in range(p)]
        walk(reference, chunks, group)
        return chunks[rank]

    return ring_reduce_scatter
