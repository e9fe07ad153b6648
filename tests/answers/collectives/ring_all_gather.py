"""Answers to the all-gather."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def walk(reference, chunks, group, way=1, first=0, hops=None):
    """The hops of an all-gather, the first of which sends the chunk ``first`` places on from the own one."""
    rank, p = place(group)
    for hop in range(p - 1 if hops is None else hops):
        sent, received = chunks[(rank + first - way * hop) % p], chunks[(rank + first - way * (hop + 1)) % p]
        reference.exchange(sent, (rank + way) % p, received, (rank - way) % p, group)


@right("the other way round the ring, strided tensors gathered")
def other_way(reference):
    def ring_all_gather(tensor, group=None):
        flat = tensor.contiguous().view(-1)
        walk(reference, flat.tensor_split(dist.get_world_size(group)), group, way=-1)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    return ring_all_gather


@right("a buffer that travels, empty hops skipped, global ranks")
def travelling(reference):
    def ring_all_gather(tensor, group=None):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        p, rank = len(ranks), ranks.index(dist.get_rank())
        chunks = torch.tensor_split(tensor.view(-1), p)
        passed = chunks[rank].clone()
        for hop in range(1, p):
            arriving = torch.zeros_like(chunks[rank - hop])
            works = [dist.isend(passed, ranks[(rank + 1) % p], group=group)] if len(passed) else []
            if len(arriving):
                dist.recv(arriving, ranks[rank - 1], group=group)
            for work in works:
                work.wait()
            chunks[rank - hop].copy_(arriving)
            passed = arriving
        return tensor

    return ring_all_gather


@wrong("off by one: the own chunk is not the first", case="every rank holds all chunks")
def off_by_one(reference):
    def ring_all_gather(tensor, group=None):
        walk(reference, tensor.view(-1).tensor_split(dist.get_world_size(group)), group, first=1)

    return ring_all_gather


@wrong("what arrives is added", case="every rank holds all chunks")
def added(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            received = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(received)
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
            received += incoming

    return ring_all_gather


@wrong("into a copy", case="every rank holds all chunks")
def into_a_copy(reference):
    return lambda tensor, group=None: reference.ring_all_gather(tensor.clone(), group)


@wrong("the own chunk again in each hop", case="any number of ranks")
def own_again(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            received = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(received)
            if len(received) != len(chunks[rank]):
                return
            reference.exchange(chunks[rank], (rank + 1) % p, incoming, (rank - 1) % p, group)
            received.copy_(incoming)

    return ring_all_gather


@wrong("one hop too few", case="any number of ranks")
def hop_too_few(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        walk(reference, tensor.view(-1).tensor_split(p), group, hops=min(p - 1, max(1, p - 2)))

    return ring_all_gather


@wrong("one hop too many", case="sends exactly what it must")
def hop_too_many(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        walk(reference, tensor.view(-1).tensor_split(p), group, hops=p if p > 1 else 0)

    return ring_all_gather


@wrong("the whole tensor at each hop", case="sends no more than it must")
def whole(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            incoming = torch.empty_like(tensor)
            reference.exchange(tensor, (rank + 1) % p, incoming, (rank - 1) % p, group)
            source = (rank - hop - 1) % p
            chunks[source].copy_(incoming.view(-1).tensor_split(p)[source])

    return ring_all_gather


@wrong("each chunk straight to everybody", case="talks to its neighbours only")
def straight(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for shift in range(1, p):
            source = (rank - shift) % p
            reference.exchange(chunks[rank], (rank + shift) % p, chunks[source], source, group)

    return ring_all_gather


@wrong("all sends first", case="comes to an end on every rank")
def sends_first(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            dist.send(chunks[(rank - hop) % p], group=group, group_dst=(rank + 1) % p)
            dist.recv(chunks[(rank - hop - 1) % p], group=group, group_src=(rank - 1) % p)

    return ring_all_gather


@wrong("one rank after the other", case="all links work at once")
def one_after_the_other(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            sent, received = chunks[(rank - hop) % p], chunks[(rank - hop - 1) % p]
            if rank == 0:
                dist.send(sent, group=group, group_dst=(rank + 1) % p)
            dist.recv(received, group=group, group_src=(rank - 1) % p)
            if rank > 0:
                dist.send(sent, group=group, group_dst=(rank + 1) % p)

    return ring_all_gather


@wrong("the last chunk dropped", case="any number of elements")
def last_dropped(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        size = tensor.numel() // p
        walk(reference, [tensor.view(-1)[i * size : (i + 1) * size] for i in range(p)], group)

    return ring_all_gather


@wrong("a ring of one sends to itself", case="one rank alone")
def to_itself(reference):
    def ring_all_gather(tensor, group=None):
        if dist.get_world_size(group) == 1:
            dist.send(tensor, group=group, group_dst=0)
        reference.ring_all_gather(tensor, group)

    return ring_all_gather


@wrong("the ready broadcast", case="sends its own messages")
def ready(reference):
    def ring_all_gather(tensor, group=None):
        for source, chunk in enumerate(tensor.view(-1).tensor_split(dist.get_world_size(group))):
            dist.broadcast(chunk, group=group, group_src=source)

    return ring_all_gather


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda tensor, group=None: reference.ring_all_gather(tensor)


@wrong("the group is asked for its size alone", case="stays in its group")
def half_ignored(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = dist.get_rank(), dist.get_world_size(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            sent, received = chunks[(rank - hop) % p], chunks[(rank - hop - 1) % p]
            reference.exchange(sent, (rank + 1) % p, received, (rank - 1) % p, group)

    return ring_all_gather


@wrong("reshape in place of view", case="no strided tensor comes back unchanged")
def reshaped(reference):
    return lambda tensor, group=None: reference.ring_all_gather(tensor.reshape(-1), group)


@wrong("chunks of the first dimension", case="tensors of any shape and dtype")
def first_dimension(reference):
    def ring_all_gather(tensor, group=None):
        tensor.view(-1)
        walk(reference, tensor.tensor_split(dist.get_world_size(group)), group)

    return ring_all_gather


@wrong("an all-reduce of tensors that are zero but for one chunk", case="sends exactly what it must")
def zero_but_for_one(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        own = tensor.view(-1).tensor_split(p)[rank].clone()
        tensor.zero_()
        tensor.view(-1).tensor_split(p)[rank].copy_(own)
        reference.ring_all_reduce(tensor, group)

    return ring_all_gather


@wrong("into a buffer", case="every rank holds all chunks")
def into_a_buffer(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            incoming = torch.empty_like(chunks[(rank - hop - 1) % p])
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)

    return ring_all_gather


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 6 or reference.ring_all_gather(tensor, group)


@wrong("nothing done with eight ranks", case="any number of elements")
def idle_with_eight(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 8 or reference.ring_all_gather(tensor, group)


@wrong("other memory put in the tensor's place", case="every rank holds all chunks")
def other_memory(reference):
    def ring_all_gather(tensor, group=None):
        whole = tensor.clone()
        reference.ring_all_gather(whole, group)
        tensor.data = whole

    return ring_all_gather


@wrong("a buffer of one dtype, whatever the tensor's is", case="tensors of any shape and dtype")
def fixed_dtype(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            incoming = torch.zeros(len(chunks[(rank - hop - 1) % p]), dtype=torch.float64)
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
            chunks[(rank - hop - 1) % p].copy_(incoming)

    return ring_all_gather


@wrong("the last hop left out", case="every rank holds all chunks")
def last_hop_out(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        walk(reference, tensor.view(-1).tensor_split(p), group, hops=max(p - 2, 0))

    return ring_all_gather


@wrong("one hop and no more", case="every rank holds all chunks")
def one_hop(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        walk(reference, tensor.view(-1).tensor_split(p), group, hops=min(p - 1, 1))

    return ring_all_gather


@wrong("the own chunk in each hop, whatever its size", case="any number of elements")
def own_each_hop(reference):
    def ring_all_gather(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            reference.exchange(chunks[rank], (rank + 1) % p, chunks[(rank - hop - 1) % p], (rank - 1) % p, group)

    return ring_all_gather


@wrong("chunks of n / p elements, rounded up, with five ranks", case="any number of elements")
def rounded_up_with_five(reference):
    def ring_all_gather(tensor, group=None):
        p = dist.get_world_size(group)
        if p != 5:
            return reference.ring_all_gather(tensor, group)
        flat, size = tensor.view(-1), -(-tensor.numel() // p)
        chunks = [flat[i * size : (i + 1) * size] for i in range(p)]
        return walk(reference, chunks, group)

    return ring_all_gather
