"""Answers to the tree."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


@right("recursive doubling; the ranks beyond a power of two fold in and out")
def recursive_doubling(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        core = 1 << (p.bit_length() - 1)
        incoming = torch.zeros_like(tensor)
        if rank >= core:
            dist.send(tensor, group=group, group_dst=rank - core)
            dist.recv(tensor, group=group, group_src=rank - core)
            return
        if rank + core < p:
            dist.recv(incoming, group=group, group_src=rank + core)
            tensor += incoming
        bit = 1
        while bit < core:
            reference.exchange(tensor, rank ^ bit, incoming, rank ^ bit, group)
            tensor += incoming
            bit *= 2
        if rank + core < p:
            dist.send(tensor, group=group, group_dst=rank + core)

    return tree_all_reduce


@right("halving the ranks from above, recursively, global ranks")
def halving(reference):
    def reduce(tensor, ranks, group):
        if len(ranks) == 1:
            return
        half = (len(ranks) + 1) // 2
        low, high = ranks[:half], ranks[half:]
        me = dist.get_rank()
        if me in high:
            partner = low[high.index(me)]
            dist.isend(tensor, partner, group=group).wait()
            dist.recv(tensor, partner, group=group)
            return
        index = low.index(me)
        if index < len(high):
            incoming = torch.empty_like(tensor)
            dist.recv(incoming, high[index], group=group)
            tensor.add_(incoming)
        reduce(tensor, low, group)
        if index < len(high):
            dist.send(tensor, high[index], group=group)

    def tree_all_reduce(tensor, group=None):
        reduce(tensor, dist.get_process_group_ranks(group or dist.group.WORLD), group)

    return tree_all_reduce


def scatter(reference, tensor, rank, span, group):
    """Recursive halving, then doubling, among ``span`` ranks: of what two hold together each sums one half."""
    if span == 1:
        return
    bit = span // 2
    upper = rank & bit
    low, high = tensor.tensor_split(2)
    kept, other = (high, low) if upper else (low, high)
    incoming = torch.empty_like(kept)
    reference.exchange(other, rank ^ bit, incoming, rank ^ bit, group)
    kept += incoming
    scatter(reference, kept, rank, bit, group)
    reference.exchange(kept, rank ^ bit, other, rank ^ bit, group)


@right("recursive halving and doubling; the ranks beyond a power of two fold in and out")
def halving_doubling(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        core = 1 << (p.bit_length() - 1)
        if rank >= core:
            dist.send(tensor, group=group, group_dst=rank - core)
            dist.recv(tensor, group=group, group_src=rank - core)
            return
        if rank + core < p:
            incoming = torch.empty_like(tensor)
            dist.recv(incoming, group=group, group_src=rank + core)
            tensor += incoming
        scatter(reference, tensor.view(-1), rank, core, group)
        if rank + core < p:
            dist.send(tensor, group=group, group_dst=rank + core)

    return tree_all_reduce


@wrong("the naive algorithm", case="few rounds")
def naive(reference):
    return lambda tensor, group=None: reference.naive_all_reduce(tensor, group)


@wrong("the naive algorithm, all messages at once", case="no rank is overloaded")
def naive_at_once(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        if rank:
            dist.send(tensor, group=group, group_dst=0)
            dist.recv(tensor, group=group, group_src=0)
            return
        parts = [torch.empty_like(tensor) for _ in range(1, p)]
        works = [dist.irecv(part, group=group, group_src=other) for other, part in enumerate(parts, start=1)]
        for work in works:
            work.wait()
        for part in parts:
            tensor += part
        for work in [dist.isend(tensor, group=group, group_dst=other) for other in range(1, p)]:
            work.wait()

    return tree_all_reduce


@wrong("a ring", case="few rounds")
def ring(reference):
    return lambda tensor, group=None: reference.ring_all_reduce(tensor, group)


@wrong("a chain up and down", case="few rounds")
def chain(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming = torch.empty_like(tensor)
        if rank + 1 < p:
            dist.recv(incoming, group=group, group_src=rank + 1)
            tensor += incoming
        if rank:
            dist.send(tensor, group=group, group_dst=rank - 1)
            dist.recv(tensor, group=group, group_src=rank - 1)
        if rank + 1 < p:
            dist.send(tensor, group=group, group_dst=rank + 1)

    return tree_all_reduce


@wrong("everybody to everybody at once", case="no rank is overloaded")
def everybody(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        mine, works = tensor.clone(), []
        parts = {other: torch.empty_like(tensor) for other in range(p) if other != rank}
        for other, part in parts.items():
            works.append(dist.isend(mine, group=group, group_dst=other))
            works.append(dist.irecv(part, group=group, group_src=other))
        for work in works:
            work.wait()
        for part in parts.values():
            tensor += part

    return tree_all_reduce


@wrong("recursive doubling for powers of two only", case="any number of ranks")
def powers_only(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming, bit = torch.empty_like(tensor), 1
        while bit < p:
            partner = rank ^ bit
            if partner < p:
                reference.exchange(tensor, partner, incoming, partner, group)
                tensor += incoming
            bit *= 2

    return tree_all_reduce


@wrong("one level too few", case="any number of ranks")
def level_too_few(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming = torch.empty_like(tensor)
        distances = [2**level for level in range(p.bit_length() - 1)]
        for distance in distances:
            if rank % (2 * distance) == distance:
                dist.send(tensor, group=group, group_dst=rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < p:
                dist.recv(incoming, group=group, group_src=rank + distance)
                tensor += incoming
        for distance in distances[::-1]:
            if rank % (2 * distance) == distance:
                dist.recv(tensor, group=group, group_src=rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < p:
                dist.send(tensor, group=group, group_dst=rank + distance)

    return tree_all_reduce


@wrong("not looked whether the partner exists", case="any number of ranks")
def partner_missing(reference):
    def tree_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        if p & (p - 1):
            dist.recv(torch.empty_like(tensor), group=group, group_src=p)
        reference.tree_all_reduce(tensor, group)

    return tree_all_reduce


def up(tensor, group, distances):
    rank, p = place(group)
    incoming = torch.empty_like(tensor)
    for distance in distances:
        if rank % (2 * distance) == distance:
            dist.send(tensor, group=group, group_dst=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < p:
            dist.recv(incoming, group=group, group_src=rank + distance)
            tensor += incoming


@wrong("up only", case="every rank holds the sum")
def up_only(reference):
    def tree_all_reduce(tensor, group=None):
        up(tensor, group, [2**level for level in range((dist.get_world_size(group) - 1).bit_length())])

    return tree_all_reduce


@wrong("both of a pair send first", case="comes to an end on every rank")
def both_send(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming, bit = torch.empty_like(tensor), 1
        while bit < p:
            if rank ^ bit < p:
                dist.send(tensor, group=group, group_dst=rank ^ bit)
                dist.recv(incoming, group=group, group_src=rank ^ bit)
                tensor += incoming
            bit *= 2

    return tree_all_reduce


@wrong("a tree of one sends to itself", case="one rank alone")
def to_itself(reference):
    def tree_all_reduce(tensor, group=None):
        if dist.get_world_size(group) == 1:
            dist.send(tensor, group=group, group_dst=0)
        reference.tree_all_reduce(tensor, group)

    return tree_all_reduce


@wrong("the ready all-reduce", case="sends its own messages")
def ready(reference):
    return lambda tensor, group=None: dist.all_reduce(tensor, group=group)


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda tensor, group=None: reference.tree_all_reduce(tensor)


@wrong("group ranks given as global ones", case="stays in its group")
def untranslated(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming = torch.empty_like(tensor)
        distances = [2**level for level in range((p - 1).bit_length())]
        for distance in distances:
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance, group=group)
            elif rank % (2 * distance) == 0 and rank + distance < p:
                dist.recv(incoming, rank + distance, group=group)
                tensor += incoming
        for distance in distances[::-1]:
            if rank % (2 * distance) == distance:
                dist.recv(tensor, rank - distance, group=group)
            elif rank % (2 * distance) == 0 and rank + distance < p:
                dist.send(tensor, rank + distance, group=group)

    return tree_all_reduce


@wrong("only as much of a tensor as it is long", case="tensors of any shape and dtype")
def first_dimension_only(reference):
    def tree_all_reduce(tensor, group=None):
        flat = tensor.view(-1)[: len(tensor)]
        reference.tree_all_reduce(flat, group)

    return tree_all_reduce


@wrong("the ready all-reduce for other numbers of ranks than powers of two", case="any number of ranks")
def ready_for_others(reference):
    def tree_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        (dist.all_reduce if p & (p - 1) else reference.tree_all_reduce)(tensor, group=group)

    return tree_all_reduce


@wrong("one shift of the whole tensor", case="few rounds")
def one_shift(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        incoming = torch.empty_like(tensor)
        reference.exchange(tensor, (rank + 1) % p, incoming, (rank - 1) % p, group)
        tensor += incoming

    return tree_all_reduce


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 6 or reference.tree_all_reduce(tensor, group)


@wrong("nothing done with eight ranks", case="every rank holds the sum")
def idle_with_eight(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 8 or reference.tree_all_reduce(tensor, group)


@wrong("other memory put in the tensor's place", case="every rank holds the sum")
def other_memory(reference):
    def tree_all_reduce(tensor, group=None):
        whole = tensor.clone()
        reference.tree_all_reduce(whole, group)
        tensor.data = whole

    return tree_all_reduce


@wrong("the sum built in one dtype, whatever the tensor's is", case="tensors of any shape and dtype")
def fixed_dtype(reference):
    def tree_all_reduce(tensor, group=None):
        whole = tensor.double()
        reference.tree_all_reduce(whole, group)
        tensor += whole - tensor

    return tree_all_reduce


@wrong("children 2r + 1 and 2r + 2, sent to both at once", case="few rounds")
def heap(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < p]
        parts = [torch.empty_like(tensor) for _ in children]
        for work in [
            dist.irecv(part, group=group, group_src=child) for part, child in zip(parts, children, strict=True)
        ]:
            work.wait()
        for part in parts:
            tensor += part
        if rank:
            dist.send(tensor, group=group, group_dst=(rank - 1) // 2)
            dist.recv(tensor, group=group, group_src=(rank - 1) // 2)
        for work in [dist.isend(tensor, group=group, group_dst=child) for child in children]:
            work.wait()

    return tree_all_reduce


@wrong("the last level left out", case="every rank holds the sum")
def last_level_out(reference):
    def tree_all_reduce(tensor, group=None):
        rank, p = place(group)
        distances = [2**level for level in range((p - 1).bit_length())][:-1]
        up(tensor, group, distances)
        for distance in distances[::-1]:
            if rank % (2 * distance) == distance:
                dist.recv(tensor, group=group, group_src=rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < p:
                dist.send(tensor, group=group, group_dst=rank + distance)

    return tree_all_reduce
