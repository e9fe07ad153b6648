"""Answers to the exchange."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


@right("isend and irecv, the receive first")
def receive_first(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if to == source == dist.get_rank(group):
            incoming[...] = outgoing
            return
        arriving = dist.irecv(incoming, group=group, group_src=source)
        leaving = dist.isend(outgoing, group=group, group_dst=to)
        arriving.wait()
        leaving.wait()

    return exchange


@right("isend beside a blocking recv, global ranks")
def blocking_receive(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if ranks[to] == dist.get_rank():
            incoming.copy_(outgoing)
            return
        work = dist.isend(outgoing, ranks[to], group=group)
        dist.recv(incoming, ranks[source], group=group)
        work.wait()

    return exchange


def started(outgoing, to, incoming, source, group):
    """Both messages under way."""
    return [
        dist.isend(outgoing, group=group, group_dst=to),
        dist.irecv(incoming, group=group, group_src=source),
    ]


def alone(to, group):
    return to == dist.get_rank(group)


@wrong("send first", case="comes to an end on every rank")
def send_first(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
            return
        dist.send(outgoing, group=group, group_dst=to)
        dist.recv(incoming, group=group, group_src=source)

    return exchange


@wrong("waits for the send before it receives", case="comes to an end on every rank")
def wait_between(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
            return
        dist.isend(outgoing, group=group, group_dst=to).wait()
        dist.irecv(incoming, group=group, group_src=source).wait()

    return exchange


@wrong("never waits", case="comes to an end on every rank")
def never_waits(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
            return
        started(outgoing, to, incoming, source, group)

    return exchange


@wrong("even ranks send first, odd ones receive", case="sends and receives at the same time")
def by_turns(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
        elif to > dist.get_rank(group):
            dist.send(outgoing, group=group, group_dst=to)
            dist.recv(incoming, group=group, group_src=source)
        else:
            dist.recv(incoming, group=group, group_src=source)
            dist.send(outgoing, group=group, group_dst=to)

    return exchange


@wrong("returns a new tensor", case="receives what the other rank sent")
def new_tensor(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        received = torch.empty_like(incoming)
        reference.exchange(outgoing, to, received, source, group)
        return received

    return exchange


@wrong("to and source mixed up", case="receives what the other rank sent")
def mixed_up(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        reference.exchange(outgoing, source, incoming, to, group)

    return exchange


@wrong("outgoing is overwritten", case="leaves outgoing alone")
def overwritten(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        reference.exchange(outgoing, to, incoming, source, group)
        outgoing.zero_()

    return exchange


@wrong("a message to itself", case="a rank with itself")
def to_itself(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        for work in started(outgoing, to, incoming, source, group):
            work.wait()

    return exchange


@wrong("nothing to do with itself", case="a rank with itself")
def nothing_to_do(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if not alone(to, group):
            reference.exchange(outgoing, to, incoming, source, group)

    return exchange


@wrong("by the ready all-gather", case="sends its own messages")
def ready(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([outgoing.numel()]), group=group)
        reference.exchange(outgoing, to, incoming, source, group)

    return exchange


@wrong("a barrier around it", case="sends and receives at the same time")
def barrier(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        dist.barrier(group=group)
        reference.exchange(outgoing, to, incoming, source, group)

    return exchange


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda outgoing, to, incoming, source, group=None: reference.exchange(outgoing, to, incoming, source)


@wrong("group ranks given as global ones", case="stays in its group")
def untranslated(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
            return
        work = dist.isend(outgoing, to, group=group)
        dist.recv(incoming, source, group=group)
        work.wait()

    return exchange


@wrong("nothing but the copy to itself", case="sends and receives at the same time")
def copy_only(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if to == dist.get_rank(group):
            incoming.copy_(outgoing)

    return exchange


@wrong("nothing done with six ranks", case="receives what the other rank sent")
def idle_with_six(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if dist.get_world_size(group) != 6:
            reference.exchange(outgoing, to, incoming, source, group)

    return exchange


@wrong("nothing done with eight ranks", case="receives what the other rank sent")
def idle_with_eight(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if dist.get_world_size(group) != 8:
            reference.exchange(outgoing, to, incoming, source, group)

    return exchange


@wrong("other memory put in incoming's place", case="receives what the other rank sent")
def other_memory(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        arrived = torch.empty_like(incoming)
        reference.exchange(outgoing, to, arrived, source, group)
        incoming.data = arrived

    return exchange


@wrong("a buffer of one dtype, whatever incoming's is", case="any dtype")
def fixed_dtype(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        arrived = torch.zeros(incoming.shape, dtype=torch.float64)
        reference.exchange(outgoing, to, arrived, source, group)
        incoming.copy_(arrived)

    return exchange


@wrong("sent first by even ranks, whoever is the partner", case="receives what the other rank sent")
def even_first(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
        elif dist.get_rank(group) % 2 == 0:
            dist.send(outgoing, group=group, group_dst=to)
            dist.recv(incoming, group=group, group_src=source)
        else:
            dist.recv(incoming, group=group, group_src=source)
            dist.send(outgoing, group=group, group_dst=to)

    return exchange


@wrong("global ranks asked of a group that is None", case="comes to an end on every rank")
def none_translated(reference):
    def exchange(outgoing, to, incoming, source, group=None):
        if alone(to, group):
            incoming.copy_(outgoing)
            return
        work = dist.isend(outgoing, dist.get_global_rank(group, to), group=group)
        dist.recv(incoming, dist.get_global_rank(group, source), group=group)
        work.wait()

    return exchange
