"""Answers to the ring all-reduce."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def ring(reference, chunks, group):
    """Both passes over chunks that are given."""
    rank, p = place(group)
    for hop in range(1, p):
        mine = chunks[(rank - hop - 1) % p]
        incoming = torch.empty_like(mine)
        reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
        mine += incoming
    for hop in range(p - 1):
        received = chunks[(rank - hop - 1) % p]
        reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, received, (rank - 1) % p, group)


@right("the short chunks first, the other way round, strided tensors reduced")
def short_first(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        flat, n = tensor.contiguous().view(-1), tensor.numel()
        chunks = flat.split([(n + c) // p for c in range(p)])
        for hop in range(2 * p - 2):
            sent, received = chunks[(rank + hop + 1) % p], chunks[(rank + hop + 2) % p]
            incoming = torch.zeros_like(received)
            works = [
                dist.irecv(incoming, group=group, group_src=(rank + 1) % p),
                dist.isend(sent, group=group, group_dst=(rank - 1) % p),
            ]
            for work in works:
                work.wait()
            received.copy_(received + incoming if hop < p - 1 else incoming)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    return ring_all_reduce


@right("empty hops skipped, refuses strided tensors itself")
def skipping(reference):
    def ring_all_reduce(tensor, group=None):
        if not tensor.is_contiguous():
            raise ValueError("not contiguous")
        rank, p = place(group)
        chunks = tensor.view(tensor.numel()).tensor_split(p)
        for hop in range(2 * (p - 1)):
            sent, received = chunks[(rank - hop - 1) % p], chunks[(rank - hop - 2) % p]
            incoming, operations = torch.empty_like(received), []
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % p))
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % p))
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
            received.mul_(hop < p - 1).add_(incoming)

    return ring_all_reduce


@right("the second half the other way round than the first")
def both_ways(reference):
    def ring_all_reduce(tensor, group=None):
        reference.ring_reduce_scatter(tensor, group)
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(p - 1):
            sent, received = chunks[(rank + hop) % p], chunks[(rank + hop + 1) % p]
            reference.exchange(sent, (rank - 1) % p, received, (rank + 1) % p, group)

    return ring_all_reduce


@wrong("the whole tensor at each hop", case="sends no more than it must")
def whole(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        passed = tensor.view(-1).view(tensor.shape).clone()
        for _ in range(p - 1):
            incoming = torch.empty_like(tensor)
            reference.exchange(passed, (rank + 1) % p, incoming, (rank - 1) % p, group)
            tensor += incoming
            passed = incoming

    return ring_all_reduce


@wrong("padded to a multiple of p", case="sends exactly what it must")
def padded(reference):
    def ring_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        room = torch.zeros(-(-tensor.numel() // p) * p, dtype=tensor.dtype)
        room[: tensor.numel()] = tensor.view(-1)
        reference.ring_all_reduce(room, group)
        tensor.copy_(room[: tensor.numel()].view(tensor.shape))

    return ring_all_reduce


@wrong("the rest in the last chunk", case="sends exactly what it must")
def rest_in_last(reference):
    def ring_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        size = tensor.numel() // p
        flat = tensor.view(-1)
        ring(reference, [*(flat[i * size : (i + 1) * size] for i in range(p - 1)), flat[(p - 1) * size :]], group)

    return ring_all_reduce


@wrong("the naive algorithm", case="sends exactly what it must")
def naive(reference):
    return lambda tensor, group=None: reference.naive_all_reduce(tensor, group)


@wrong("a tree", case="talks to its neighbours only")
def tree(reference):
    return lambda tensor, group=None: reference.tree_all_reduce(tensor, group)


@wrong("the reduce-scatter alone", case="every rank holds the sum")
def half(reference):
    def ring_all_reduce(tensor, group=None):
        reference.ring_reduce_scatter(tensor, group)

    return ring_all_reduce


@wrong("the all-gather first", case="every rank holds the sum")
def gather_first(reference):
    def ring_all_reduce(tensor, group=None):
        reference.ring_all_gather(tensor, group)
        reference.ring_reduce_scatter(tensor, group)

    return ring_all_reduce


@wrong("sent round, but nothing added", case="adds what arrives")
def nothing_added(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            incoming = torch.empty_like(chunks[(rank - hop - 1) % p])
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
        reference.ring_all_gather(tensor, group)

    return ring_all_reduce


@wrong("an average instead of a sum", case="every rank holds the sum")
def average(reference):
    def ring_all_reduce(tensor, group=None):
        reference.ring_all_reduce(tensor, group)
        tensor /= dist.get_world_size(group)

    return ring_all_reduce


@wrong("powers of two only", case="any number of ranks")
def powers_only(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        if p & (p - 1):
            p = 1 << (p.bit_length() - 1)
            if rank >= p:
                return
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(1, p):
            mine = chunks[(rank - hop - 1) % p]
            incoming = torch.empty_like(mine)
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, incoming, (rank - 1) % p, group)
            mine += incoming
        for hop in range(p - 1):
            sent, received = chunks[(rank - hop) % p], chunks[(rank - hop - 1) % p]
            reference.exchange(sent, (rank + 1) % p, received, (rank - 1) % p, group)

    return ring_all_reduce


@wrong("a ring of one divides by zero", case="one rank alone")
def alone(reference):
    def ring_all_reduce(tensor, group=None):
        assert tensor.numel() // (dist.get_world_size(group) - 1) >= 0
        reference.ring_all_reduce(tensor, group)

    return ring_all_reduce


@wrong("the last chunk dropped", case="any number of elements")
def last_dropped(reference):
    def ring_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        size = tensor.numel() // p
        ring(reference, [tensor.view(-1)[i * size : (i + 1) * size] for i in range(p)], group)

    return ring_all_reduce


@wrong("fewer elements than ranks: an error", case="any number of elements")
def too_few(reference):
    def ring_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        if tensor.numel() < p:
            raise ValueError("too small for a ring")
        reference.ring_all_reduce(tensor, group)

    return ring_all_reduce


@wrong("all sends first", case="comes to an end on every rank")
def sends_first(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(2 * (p - 1)):
            received = chunks[(rank - hop - 2) % p]
            incoming = torch.empty_like(received)
            dist.send(chunks[(rank - hop - 1) % p], group=group, group_dst=(rank + 1) % p)
            dist.recv(incoming, group=group, group_src=(rank - 1) % p)
            received.copy_(received + incoming if hop < p - 1 else incoming)

    return ring_all_reduce


@wrong("send, then receive, in turns of even and odd", case="all links work at once")
def by_turns(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(2 * (p - 1)):
            received = chunks[(rank - hop - 2) % p]
            incoming = torch.empty_like(received)
            if rank % 2:
                dist.recv(incoming, group=group, group_src=(rank - 1) % p)
            dist.send(chunks[(rank - hop - 1) % p], group=group, group_dst=(rank + 1) % p)
            if rank % 2 == 0:
                dist.recv(incoming, group=group, group_src=(rank - 1) % p)
            received.copy_(received + incoming if hop < p - 1 else incoming)

    return ring_all_reduce


@wrong("the ready all-reduce", case="sends its own messages")
def ready(reference):
    return lambda tensor, group=None: dist.all_reduce(tensor, group=group)


@wrong("the ready all-reduce, imported by name and asynchronous", case="sends its own messages")
def ready_by_name(reference):
    from torch.distributed import distributed_c10d

    return lambda tensor, group=None: distributed_c10d.all_reduce(tensor, group=group, async_op=True).wait()


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda tensor, group=None: reference.ring_all_reduce(tensor)


@wrong("the group is passed on to the first half only", case="stays in its group")
def half_passed(reference):
    def ring_all_reduce(tensor, group=None):
        reference.ring_reduce_scatter(tensor, group)
        reference.ring_all_gather(tensor)

    return ring_all_reduce


@wrong("chunks of the first dimension", case="tensors of any shape and dtype")
def first_dimension(reference):
    def ring_all_reduce(tensor, group=None):
        tensor.view(-1)
        ring(reference, tensor.tensor_split(dist.get_world_size(group)), group)

    return ring_all_reduce


@wrong("flat tensors only", case="tensors of any shape and dtype")
def flat_only(reference):
    def ring_all_reduce(tensor, group=None):
        assert tensor.dim() == 1
        reference.ring_all_reduce(tensor, group)

    return ring_all_reduce


@wrong("reshape in place of view", case="no strided tensor comes back unchanged")
def reshaped(reference):
    return lambda tensor, group=None: reference.ring_all_reduce(tensor.reshape(-1), group)


@wrong("made contiguous, not copied back", case="no strided tensor comes back unchanged")
def made_contiguous(reference):
    return lambda tensor, group=None: reference.ring_all_reduce(tensor.contiguous(), group)


@wrong("all tensors gathered by a ready collective, added here", case="every rank holds the sum")
def gathered(reference):
    def ring_all_reduce(tensor, group=None):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.view(-1).view(tensor.shape), group=group)
        tensor.copy_(sum(parts))

    return ring_all_reduce


@wrong("a ready collective where p does not divide the size", case="any number of elements")
def ready_if_uneven(reference):
    def ring_all_reduce(tensor, group=None):
        uneven = tensor.numel() % dist.get_world_size(group)
        (dist.all_reduce if uneven else reference.ring_all_reduce)(tensor, group=group)

    return ring_all_reduce


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 6 or reference.ring_all_reduce(tensor, group)


@wrong("nothing done with eight ranks", case="any number of elements")
def idle_with_eight(reference):
    return lambda tensor, group=None: dist.get_world_size(group) == 8 or reference.ring_all_reduce(tensor, group)


@right("refuses strided tensors by an assertion")
def asserting(reference):
    def ring_all_reduce(tensor, group=None):
        assert tensor.is_contiguous()
        reference.ring_all_reduce(tensor, group)

    return ring_all_reduce


@wrong("chunks of n / p elements, rounded up", case="sends exactly what it must")
def rounded_up(reference):
    def ring_all_reduce(tensor, group=None):
        _, p = place(group)
        flat, size = tensor.view(-1), -(-tensor.numel() // p)
        ring(reference, [flat[i * size : (i + 1) * size] for i in range(p)], group)

    return ring_all_reduce


@wrong("other memory put in the tensor's place", case="every rank holds the sum")
def other_memory(reference):
    def ring_all_reduce(tensor, group=None):
        whole = tensor.clone()
        reference.ring_all_reduce(whole, group)
        tensor.data = whole

    return ring_all_reduce


@wrong("the last hop left out", case="every rank holds the sum")
def last_hop_out(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        reference.ring_reduce_scatter(tensor, group)
        for hop in range(p - 2):
            received = chunks[(rank - hop - 1) % p]
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, received, (rank - 1) % p, group)

    return ring_all_reduce


@wrong("one hop too many", case="sends no more than it must")
def hop_too_many(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        reference.ring_reduce_scatter(tensor, group)
        for hop in range(p if p > 1 else 0):
            received = chunks[(rank - hop - 1) % p]
            reference.exchange(chunks[(rank - hop) % p], (rank + 1) % p, received, (rank - 1) % p, group)

    return ring_all_reduce


@wrong("two half rings in opposite directions", case="talks to its neighbours only")
def half_rings(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        low, high = zip(*(chunk.tensor_split(2) for chunk in tensor.view(-1).tensor_split(p)), strict=True)
        for hop in range(1, 2 * p - 1):
            works, arrivals = [], []
            for parts, way in ((low, 1), (high, -1)):
                mine, sent = parts[(rank - way * (hop + 1)) % p], parts[(rank - way * hop) % p]
                arrivals.append((mine, torch.empty_like(mine)))
                works.append(dist.isend(sent, group=group, group_dst=(rank + way) % p))
                works.append(dist.irecv(arrivals[-1][1], group=group, group_src=(rank - way) % p))
            for work in works:
                work.wait()
            for mine, incoming in arrivals:
                mine.copy_(mine + incoming if hop < p else incoming)

    return ring_all_reduce


@wrong("chunks of n / p elements, rounded up, with five ranks", case="any number of elements")
def rounded_up_with_five(reference):
    def ring_all_reduce(tensor, group=None):
        p = dist.get_world_size(group)
        if p != 5:
            return reference.ring_all_reduce(tensor, group)
        flat, size = tensor.view(-1), -(-tensor.numel() // p)
        chunks = [flat[i * size : (i + 1) * size] for i in range(p)]
        return ring(reference, chunks, group)

    return ring_all_reduce


@wrong("the rest in the last chunk, with five ranks", case="sends exactly what it must")
def rest_in_last_with_five(reference):
    def ring_all_reduce(tensor, group=None):
        p, flat = dist.get_world_size(group), tensor.view(-1)
        if p != 5:
            return reference.ring_all_reduce(tensor, group)
        size = tensor.numel() // p
        chunks = [*(flat[i * size : (i + 1) * size] for i in range(p - 1)), flat[(p - 1) * size :]]
        return ring(reference, chunks, group)

    return ring_all_reduce


@wrong("chunks of n / p elements, rounded up, with three ranks", case="sends exactly what it must")
def rounded_up_with_three(reference):
    def ring_all_reduce(tensor, group=None):
        p, flat = dist.get_world_size(group), tensor.view(-1)
        if p != 3:
            return reference.ring_all_reduce(tensor, group)
        size = -(-tensor.numel() // p)
        return ring(reference, [flat[i * size : (i + 1) * size] for i in range(p)], group)

    return ring_all_reduce


@wrong("sent round twice, but nothing added", case="adds what arrives")
def replaced(reference):
    def ring_all_reduce(tensor, group=None):
        rank, p = place(group)
        chunks = tensor.view(-1).tensor_split(p)
        for hop in range(2 * (p - 1)):
            received = chunks[(rank - hop - 2) % p]
            reference.exchange(chunks[(rank - hop - 1) % p], (rank + 1) % p, received, (rank - 1) % p, group)

    return ring_all_reduce


@wrong("a sum in a new tensor, returned", case="every rank holds the sum")
def returned_only(reference):
    def ring_all_reduce(tensor, group=None):
        tensor.view(-1)
        whole = tensor.clone()
        reference.ring_all_reduce(whole, group)
        return whole

    return ring_all_reduce
