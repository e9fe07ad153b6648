"""Answers to the all-to-all."""

import torch
import torch.distributed as dist

from servelab.answers import right, wrong


def place(group):
    return dist.get_rank(group), dist.get_world_size(group)


@right("everything under way at once, global ranks, empty parts skipped")
def at_once(reference):
    def all_to_all(outputs, inputs, group=None):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        me, works = ranks.index(dist.get_rank()), []
        for index, rank in enumerate(ranks):
            if index == me:
                outputs[me].copy_(inputs[me])
                continue
            if outputs[index].numel():
                works.append(dist.irecv(outputs[index], rank, group=group))
            if inputs[index].numel():
                works.append(dist.isend(inputs[index], rank, group=group))
        for work in works:
            work.wait()

    return all_to_all


@right("pair by pair, the lower rank sends first")
def pair_by_pair(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank][:] = inputs[rank]
        for low in range(p):
            for high in range(low + 1, p):
                if rank == low:
                    dist.send(inputs[high], group=group, group_dst=high)
                    dist.recv(outputs[high], group=group, group_src=high)
                elif rank == high:
                    dist.recv(outputs[low], group=group, group_src=low)
                    dist.send(inputs[low], group=group, group_dst=low)

    return all_to_all


@wrong("all sends first", case="comes to an end on every rank")
def sends_first(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank].copy_(inputs[rank])
        for other in range(p):
            if other != rank:
                dist.send(inputs[other], group=group, group_dst=other)
        for other in range(p):
            if other != rank:
                dist.recv(outputs[other], group=group, group_src=other)

    return all_to_all


@wrong("not transposed: part j goes to output j", case="part j of rank i becomes part i of rank j")
def not_transposed(reference):
    def all_to_all(outputs, inputs, group=None):
        for output, part in zip(outputs, inputs, strict=True):
            if output.numel() == part.numel():
                output.copy_(part)

    return all_to_all


@wrong("outputs put into the list as new tensors", case="part j of rank i becomes part i of rank j")
def new_outputs(reference):
    def all_to_all(outputs, inputs, group=None):
        made = [torch.empty_like(output) for output in outputs]
        reference.all_to_all(made, inputs, group)
        outputs = made

    return all_to_all


@wrong("the own input put into the list of outputs", case="part j of rank i becomes part i of rank j")
def own_input_put(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank] = inputs[rank]
        for shift in range(1, p):
            to, source = (rank + shift) % p, (rank - shift) % p
            reference.exchange(inputs[to], to, outputs[source], source, group)

    return all_to_all


@wrong("every output replaced in the list", case="part j of rank i becomes part i of rank j")
def replaced(reference):
    def all_to_all(outputs, inputs, group=None):
        made = [torch.empty_like(output) for output in outputs]
        reference.all_to_all(made, inputs, group)
        outputs[:] = made

    return all_to_all


@wrong("the own part left out", case="one rank alone")
def own_left_out(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        for shift in range(1, p):
            to, source = (rank + shift) % p, (rank - shift) % p
            reference.exchange(inputs[to], to, outputs[source], source, group)

    return all_to_all


@wrong("a message to itself", case="sends each part once")
def to_itself(reference):
    def all_to_all(outputs, inputs, group=None):
        works = [dist.isend(part, group=group, group_dst=to) for to, part in enumerate(inputs)]
        works += [dist.irecv(part, group=group, group_src=source) for source, part in enumerate(outputs)]
        for work in works:
            work.wait()

    return all_to_all


@wrong("partners by exclusive or", case="any number of ranks")
def by_xor(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        for mask in range(1 << (p - 1).bit_length()):
            partner = rank ^ mask
            if partner >= p:
                break
            reference.exchange(inputs[partner], partner, outputs[partner], partner, group)

    return all_to_all


@wrong("equal sizes taken for granted", case="any number of elements")
def equal_sizes(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        size = inputs[0].numel()
        for shift in range(p):
            to, source = (rank + shift) % p, (rank - shift) % p
            part, room = torch.zeros(size), torch.zeros(size)
            part[: inputs[to].numel()] = inputs[to][:size]
            reference.exchange(part, to, room, source, group)
            outputs[source].copy_(room[: outputs[source].numel()])

    return all_to_all


@wrong("everything to everybody", case="sends each part once")
def everything(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        for shift in range(1, p):
            to, source = (rank + shift) % p, (rank - shift) % p
            reference.exchange(inputs[to], to, outputs[source], source, group)
            reference.exchange(inputs[to], to, outputs[source], source, group)
        outputs[rank].copy_(inputs[rank])

    return all_to_all


@wrong("by way of the first rank", case="sends each part once")
def through_the_root(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        sizes = [part.numel() for part in inputs]
        table = torch.zeros(p, p, dtype=torch.int64)
        table[rank] = torch.tensor(sizes)
        reference.naive_all_reduce(table, group)
        reference.all_to_all(outputs, inputs, group)

    return all_to_all


@wrong("inputs emptied on the way", case="leaves its inputs alone")
def emptied(reference):
    def all_to_all(outputs, inputs, group=None):
        reference.all_to_all(outputs, inputs, group)
        for part in inputs:
            part.zero_()

    return all_to_all


@wrong("the ready all-to-all", case="sends its own messages")
def ready(reference):
    return lambda outputs, inputs, group=None: dist.all_to_all(list(outputs), list(inputs), group=group)


@wrong("the group is ignored", case="stays in its group")
def group_ignored(reference):
    return lambda outputs, inputs, group=None: reference.all_to_all(outputs, inputs)


@wrong("group ranks given as global ones", case="stays in its group")
def untranslated(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank].copy_(inputs[rank])
        for shift in range(1, p):
            work = dist.isend(inputs[(rank + shift) % p], (rank + shift) % p, group=group)
            dist.recv(outputs[(rank - shift) % p], (rank - shift) % p, group=group)
            work.wait()

    return all_to_all


@wrong("nothing done with six ranks", case="any number of ranks")
def idle_with_six(reference):
    def all_to_all(outputs, inputs, group=None):
        if dist.get_world_size(group) != 6:
            reference.all_to_all(outputs, inputs, group)

    return all_to_all


@wrong("nothing done with eight ranks", case="any number of elements")
def idle_with_eight(reference):
    def all_to_all(outputs, inputs, group=None):
        if dist.get_world_size(group) != 8:
            reference.all_to_all(outputs, inputs, group)

    return all_to_all


@wrong("other memory put in the outputs' place", case="part j of rank i becomes part i of rank j")
def other_memory(reference):
    def all_to_all(outputs, inputs, group=None):
        made = [torch.empty_like(output) for output in outputs]
        reference.all_to_all(made, inputs, group)
        for output, part in zip(outputs, made, strict=True):
            output.data = part

    return all_to_all


@wrong("the own part by its memory alone", case="part j of rank i becomes part i of rank j")
def own_memory(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        for shift in range(1, p):
            to, source = (rank + shift) % p, (rank - shift) % p
            reference.exchange(inputs[to], to, outputs[source], source, group)
        outputs[rank].data = inputs[rank].data

    return all_to_all


@wrong("buffers of one dtype, whatever the parts' is", case="any dtype")
def fixed_dtype(reference):
    def all_to_all(outputs, inputs, group=None):
        made = [torch.zeros(output.shape, dtype=torch.float32) for output in outputs]
        reference.all_to_all(made, inputs, group)
        for output, part in zip(outputs, made, strict=True):
            output.copy_(part)

    return all_to_all


@wrong("a message for each element", case="sends each part once")
def by_element(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank].copy_(inputs[rank])
        works = []
        for other in range(p):
            if other != rank:
                works += [dist.isend(element, group=group, group_dst=other) for element in inputs[other]]
                works += [dist.irecv(element, group=group, group_src=other) for element in outputs[other]]
        for work in works:
            work.wait()

    return all_to_all


@wrong("the last shift left out", case="any number of ranks")
def last_shift_out(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        for shift in range(p - 1):
            to, source = (rank + shift) % p, (rank - shift) % p
            reference.exchange(inputs[to], to, outputs[source], source, group)

    return all_to_all


@wrong("all of it in one batch, with one rank, too", case="one rank alone")
def empty_batch(reference):
    def all_to_all(outputs, inputs, group=None):
        rank, p = place(group)
        outputs[rank].copy_(inputs[rank])
        others = [other for other in range(p) if other != rank]
        operations = [dist.P2POp(dist.isend, inputs[other], group=group, group_peer=other) for other in others]
        operations += [dist.P2POp(dist.irecv, outputs[other], group=group, group_peer=other) for other in others]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return all_to_all
