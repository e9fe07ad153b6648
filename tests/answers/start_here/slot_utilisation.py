"""Named answers to the warm-up."""

from servelab.answers import right, wrong


@right("numpy over padded rows")
def padded(reference):
    import numpy as np

    def slot_utilisation(lengths, batch_size):
        if not lengths or batch_size < 1 or min(lengths) < 1:
            raise ValueError("bad input")
        rows = -(-len(lengths) // batch_size)
        grid = np.zeros(rows * batch_size, dtype=int)
        grid[: len(lengths)] = lengths
        grid = grid.reshape(rows, batch_size)
        return np.float64(grid.sum() / (grid.max(axis=1).sum() * batch_size))

    return slot_utilisation


@right("step by step, as a server would run it")
def simulated(reference):
    def slot_utilisation(lengths, batch_size):
        if batch_size < 1 or not lengths or any(n < 1 for n in lengths):
            raise ValueError("bad input")
        waiting, useful, spent = list(lengths), 0, 0
        while waiting:
            running, waiting = waiting[:batch_size], waiting[batch_size:]
            while any(running):
                useful += sum(left > 0 for left in running)
                spent += batch_size
                running = [max(left - 1, 0) for left in running]
        return useful / spent

    return slot_utilisation


@wrong("the mean length over the longest of all requests", case="several batches")
def one_batch(reference):
    return lambda lengths, batch_size: _checked(lengths, batch_size) and sum(lengths) / (len(lengths) * max(lengths))


@wrong("empty slots of the last batch not counted", case="the last batch may be partly filled")
def only_filled(reference):
    def slot_utilisation(lengths, batch_size):
        _checked(lengths, batch_size)
        batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
        return sum(lengths) / sum(len(batch) * max(batch) for batch in batches)

    return slot_utilisation


@wrong("the last, partly filled batch dropped", case="the last batch may be partly filled")
def dropped(reference):
    def slot_utilisation(lengths, batch_size):
        _checked(lengths, batch_size)
        full = lengths[: len(lengths) // batch_size * batch_size]
        return reference.slot_utilisation(full, batch_size) if full else 0.0

    return slot_utilisation


@wrong("waste instead of utilisation", case="one full batch")
def waste(reference):
    return lambda lengths, batch_size: 1 - reference.slot_utilisation(lengths, batch_size)


@wrong("sorts the caller's list", case="leaves its input alone")
def sorts(reference):
    def slot_utilisation(lengths, batch_size):
        value = reference.slot_utilisation(lengths, batch_size)
        lengths.sort()
        return value

    return slot_utilisation


@wrong("lengths sorted first, so that like sits with like", case="several batches")
def grouped(reference):
    return lambda lengths, batch_size: reference.slot_utilisation(sorted(lengths), batch_size)


@wrong("no check of its arguments", case="refuses misuse")
def unchecked(reference):
    def slot_utilisation(lengths, batch_size):
        if not lengths or batch_size < 1 or min(lengths) < 1:
            return 0.0
        return reference.slot_utilisation(lengths, batch_size)

    return slot_utilisation


def _checked(lengths, batch_size) -> bool:
    if not lengths or batch_size < 1 or min(lengths) < 1:
        raise ValueError("bad input")
    return True
