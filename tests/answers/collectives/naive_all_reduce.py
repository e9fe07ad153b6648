"""Answers to the naive all-reduce."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def peers(group):
    """Rank, and the number of ranks, in the group."""
    return dist.get_rank(group), dist.get_world_size(group)


@right("all receives at once, global ranks")
def at_once(reference):
    def naive_all_reduce(tensor, group=None):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        root, others = ranks[0], ranks[1:]
        if dist.get_rank() != root:
            dist.isend(tensor, root, group=group).wait()
            dist.irecv(tensor, root, group=group).wait()
            return
        parts = [torch.zeros_like(tensor) for _ in others]
        for work in [dist.irecv(part, rank, group=group) for part, rank in zip(parts, others, strict=True)]:
            work.wait()
        for part in parts:
            tensor.add_(part)
        for work in [dist.isend(tensor, rank, group=group) for rank in others]:
            work.wait()

    return naive_all_reduce


@right("from the last rank to the first, a new sum copied in")
def backwards(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank == 0:
            parts = [tensor.clone()]
            for other in reversed(range(1, p)):
                parts.append(torch.empty_like(tensor))
                dist.recv(parts[-1], group=group, group_src=other)
            tensor.copy_(torch.stack(parts).sum(0))
            for other in range(1, p):
                dist.send(tensor, group=group, group_dst=other)
        else:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=0)

    return naive_all_reduce


@wrong("the ready all-reduce", case="sends its own messages")
def ready(reference):
    return lambda tensor, group=None: dist.all_reduce(tensor, group=group)


@wrong("the ready broadcast for the way back", case="sends its own messages")
def ready_broadcast(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        incoming = torch.empty_like(tensor)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
        for other in range(1, p) if rank == 0 else ():
            dist.recv(incoming, group=group, group_src=other)
            tensor.add_(incoming)
        dist.broadcast(tensor, group=group, group_src=0)

    return naive_all_reduce


@wrong("the sum in a new tensor", case="every rank holds the sum")
def not_in_place(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        incoming = torch.empty_like(tensor)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(incoming, group=group, group_src=0)
            return
        for other in range(1, p):
            dist.recv(incoming, group=group, group_src=other)
            tensor = tensor + incoming
        for other in range(1, p):
            dist.send(tensor, group=group, group_dst=other)

    return naive_all_reduce


@wrong("nothing is sent back", case="every rank holds the sum")
def never_back(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            return
        incoming = torch.empty_like(tensor)
        for other in range(1, p):
            dist.recv(incoming, group=group, group_src=other)
            tensor += incoming

    return naive_all_reduce


@wrong("sent back before all have come in", case="any number of ranks")
def too_early(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=0)
            return
        incoming = torch.empty_like(tensor)
        for other in range(1, p):
            dist.recv(incoming, group=group, group_src=other)
            tensor += incoming
            dist.send(tensor, group=group, group_dst=other)

    return naive_all_reduce


@wrong("the root sends first, too", case="comes to an end on every rank")
def root_sends(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        for other in range(p):
            if other != rank:
                dist.send(tensor, group=group, group_dst=other)
        incoming = torch.empty_like(tensor)
        for other in range(p):
            if other != rank:
                dist.recv(incoming, group=group, group_src=other)
                tensor += incoming

    return naive_all_reduce


@wrong("everybody to everybody", case="all goes to the first rank")
def everybody(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        mine, incoming = tensor.clone(), torch.empty_like(tensor)
        for shift in range(1, p):
            reference.exchange(mine, (rank + shift) % p, incoming, (rank - shift) % p, group)
            tensor += incoming

    return naive_all_reduce


@wrong("a sum of two, whatever p is", case="any number of ranks")
def pairs(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        incoming = torch.empty_like(tensor)
        partner = rank ^ 1
        if partner < p:
            reference.exchange(tensor.clone(), partner, incoming, partner, group)
            tensor += incoming

    return naive_all_reduce


@wrong("one rank sends to itself", case="one rank alone")
def to_itself(reference):
    def naive_all_reduce(tensor, group=None):
        if dist.get_world_size(group) == 1:
            dist.send(tensor, group=group, group_dst=0)
        reference.naive_all_reduce(tensor, group)

    return naive_all_reduce


@wrong("one rank takes the sum twice", case="one rank alone")
def doubled(reference):
    def naive_all_reduce(tensor, group=None):
        reference.naive_all_reduce(tensor, group)
        if dist.get_world_size(group) == 1:
            tensor += tensor

    return naive_all_reduce


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda tensor, group=None: reference.naive_all_reduce(tensor)


@wrong("group ranks given as global ones", case="stays in its group")
def untranslated(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, 0, group=group)
            dist.recv(tensor, 0, group=group)
            return
        incoming = torch.empty_like(tensor)
        for other in range(1, p):
            dist.recv(incoming, other, group=group)
            tensor += incoming
        for other in range(1, p):
            dist.send(tensor, other, group=group)

    return naive_all_reduce


@wrong("a flat buffer", case="tensors of any shape and dtype")
def flat_buffer(reference):
    def naive_all_reduce(tensor, group=None):
        if dist.get_rank(group) > 0:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=0)
            return
        incoming = torch.empty(tensor.numel(), dtype=tensor.dtype)
        for rank in range(1, dist.get_world_size(group)):
            dist.recv(incoming, group=group, group_src=rank)
            tensor += incoming
        for rank in range(1, dist.get_world_size(group)):
            dist.send(tensor, group=group, group_dst=rank)

    return naive_all_reduce


@wrong("a ready reduce and a ready broadcast", case="every rank holds the sum")
def ready_in_two(reference):
    def naive_all_reduce(tensor, group=None):
        dist.reduce(tensor, group=group, group_dst=0)
        dist.broadcast(tensor, group=group, group_src=0)

    return naive_all_reduce


@wrong("the sum passed on from rank to rank", case="the sum comes back from it")
def passed_on(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=rank - 1)
        else:
            parts = [torch.empty_like(tensor) for _ in range(1, p)]
            for other, part in enumerate(parts, start=1):
                dist.recv(part, group=group, group_src=other)
            for part in parts:
                tensor += part
        if rank + 1 < p:
            dist.send(tensor, group=group, group_dst=rank + 1)

    return naive_all_reduce


@wrong("a tree", case="all goes to the first rank")
def tree(reference):
    return lambda tensor, group=None: reference.tree_all_reduce(tensor, group)


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 6 or reference.naive_all_reduce(tensor, group)


@wrong("nothing done with eight ranks", case="any number of ranks")
def idle_with_eight(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 8 or reference.naive_all_reduce(tensor, group)


@right("received from whoever is first, and a barrier between the two ways")
def from_anybody(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
        parts = [torch.empty_like(tensor) for _ in range(1, p)] if rank == 0 else []
        for part in parts:
            dist.irecv(part, group=group).wait()
            tensor += part
        dist.barrier(group)
        for other in range(1, p) if rank == 0 else ():
            dist.send(tensor, group=group, group_dst=other)
        if rank:
            dist.irecv(tensor, group=group).wait()

    return naive_all_reduce


@wrong("other memory put in the tensor's place", case="every rank holds the sum")
def other_memory(reference):
    def naive_all_reduce(tensor, group=None):
        whole = tensor.clone()
        reference.naive_all_reduce(whole, group)
        tensor.data = whole

    return naive_all_reduce


@wrong("a buffer of one dtype, whatever the tensor's is", case="tensors of any shape and dtype")
def fixed_dtype(reference):
    def naive_all_reduce(tensor, group=None):
        rank, p = peers(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=0)
            return
        incoming = torch.zeros(tensor.shape, dtype=torch.float64)
        for other in range(1, p):
            dist.recv(incoming, group=group, group_src=other)
            tensor += incoming
        for other in range(1, p):
            dist.send(tensor, group=group, group_dst=other)

    return naive_all_reduce
