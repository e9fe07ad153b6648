"""Named answers to `continuous_batching.token_exact`: the rows, and the unit's other parts around them."""

from dataclasses import replace

import numpy as np

from servelab.answers import right, wrong
from servelab.exercises.continuous_batching.token_exact import (
    ANSWERS,
    BOTH,
    CHUNKS,
    COUNTS,
    ENDS,
    PAGED,
    PREEMPTED,
    ROWS,
    WHOLE,
)


def parts(reference, **changed):
    """All that the check takes, some of it changed."""
    return tuple(changed.get(name, getattr(reference, name)) for name in ANSWERS)


def rows_of(reference, rows):
    """With ``rows(plan, tokens, num_computed)`` in place of the reference's."""
    return parts(reference, sampled_rows=rows)


def ends(plan):
    """Behind which row each request's tokens end."""
    return dict(zip(plan.scheduled, np.cumsum(list(plan.scheduled.values())).tolist(), strict=True))


def complete(plan, tokens, done):
    return [id for id, n in plan.scheduled.items() if done[id] + n == len(tokens[id])]


@right("numpy's cumulative sum, the last request first")
def cumulative(reference):
    def sampled_rows(plan, tokens, num_computed):
        last = np.cumsum(np.array(list(plan.scheduled.values()))) - 1
        found = dict(zip(plan.scheduled, last, strict=True))
        return {id: found[id] for id in reversed(complete(plan, tokens, num_computed))}

    return rows_of(reference, sampled_rows)


@right("row by row: where the last known token of a request is computed")
def row_by_row(reference):
    def sampled_rows(plan, tokens, num_computed):
        owners = [(id, num_computed[id] + i) for id, n in plan.scheduled.items() for i in range(n)]
        return {id: row for row, (id, place) in enumerate(owners) if place == len(tokens[id]) - 1}

    return rows_of(reference, sampled_rows)


@right("rows as tensors of no dimension")
def tensors(reference):
    def sampled_rows(plan, tokens, num_computed):
        import torch

        return {id: torch.tensor(row) for id, row in reference.sampled_rows(plan, tokens, num_computed).items()}

    return rows_of(reference, sampled_rows)


@right("a scheduler that also admits in a step that preempted, and takes the tokens out of outputs")
def admits_at_once(reference):
    class Eager(reference.PagedScheduler):
        def schedule(self):
            plan = super().schedule()
            if plan.preempted:
                self._admit(plan)
            return plan

        def finish_step(self, plan, outputs):
            return super().finish_step(plan, {id: outputs.pop(id) for id in list(outputs)})

    return parts(reference, PagedScheduler=Eager)


@wrong("a row for every request, unfinished prompts too", case=ROWS)
def everybody(reference):
    return rows_of(reference, lambda plan, tokens, done: {id: end - 1 for id, end in ends(plan).items()})


@wrong("the first row of each", case=ROWS)
def first_row(reference):
    def sampled_rows(plan, tokens, done):
        return {id: ends(plan)[id] - plan.scheduled[id] for id in complete(plan, tokens, done)}

    return rows_of(reference, sampled_rows)


@wrong("rows counted within the request", case=ROWS)
def within(reference):
    return rows_of(
        reference, lambda plan, tokens, done: {id: plan.scheduled[id] - 1 for id in complete(plan, tokens, done)}
    )


@wrong("positions in place of rows", case=ROWS)
def positions(reference):
    return rows_of(
        reference, lambda plan, tokens, done: {id: len(tokens[id]) - 1 for id in complete(plan, tokens, done)}
    )


@wrong("rows counted from 1", case=ROWS)
def from_one(reference):
    return rows_of(reference, lambda plan, tokens, done: {id: ends(plan)[id] for id in complete(plan, tokens, done)})


@wrong("rows counted from the batch's end", case=ROWS)
def from_the_end(reference):
    def sampled_rows(plan, tokens, done):
        return {id: ends(plan)[id] - 1 - plan.num_tokens for id in complete(plan, tokens, done)}

    return rows_of(reference, sampled_rows)


@wrong("rows of requests without a token are not counted", case=ROWS)
def passed_over(reference):
    def sampled_rows(plan, tokens, done):
        ready = complete(plan, tokens, done)
        last = np.cumsum([plan.scheduled[id] for id in ready]) - 1
        return dict(zip(ready, last.tolist(), strict=True))

    return rows_of(reference, sampled_rows)


@wrong("in the order of the known tokens, not of the plan", case=ROWS)
def other_order(reference):
    def sampled_rows(plan, tokens, done):
        ordered = replace(plan, scheduled={id: plan.scheduled[id] for id in tokens if id in plan.scheduled})
        return {id: ends(ordered)[id] - 1 for id in complete(plan, tokens, done)}

    return rows_of(reference, sampled_rows)


@wrong("decodes and whole prompts only: none behind the last chunk", case=ROWS)
def no_last_chunk(reference):
    def sampled_rows(plan, tokens, done):
        ready = complete(plan, tokens, done)
        return {id: ends(plan)[id] - 1 for id in ready if plan.scheduled[id] == 1 or not done[id]}

    return rows_of(reference, sampled_rows)


@wrong("one token is a decode, also where it is a chunk", case=ROWS)
def one_is_a_decode(reference):
    def sampled_rows(plan, tokens, done):
        ready = complete(plan, tokens, done)
        return {id: ends(plan)[id] - 1 for id, n in plan.scheduled.items() if n == 1 or id in ready}

    return rows_of(reference, sampled_rows)


@wrong("rows as floats", case=ROWS)
def floats(reference):
    return rows_of(reference, lambda *given: {id: float(row) for id, row in reference.sampled_rows(*given).items()})


@wrong("the numbers without the ids", case=ROWS)
def a_list(reference):
    def sampled_rows(plan, tokens, done):
        return [ends(plan)[id] - 1 for id in complete(plan, tokens, done)]

    return rows_of(reference, sampled_rows)


@wrong("counts the tokens as computed", case=ROWS)
def counts_them(reference):
    def sampled_rows(plan, tokens, done):
        for id, n in plan.scheduled.items():
            done[id] += n
        return {id: end - 1 for id, end in ends(plan).items() if done[id] == len(tokens[id])}

    return rows_of(reference, sampled_rows)


@wrong("raises at an unfinished prompt", case=CHUNKS)
def raises(reference):
    def sampled_rows(plan, tokens, done):
        if len(complete(plan, tokens, done)) < len(plan.scheduled):
            raise ValueError("a prompt is not finished")
        return reference.sampled_rows(plan, tokens, done)

    return rows_of(reference, sampled_rows)


def batch_of(reference, change):
    """With the fields that ``change(batch, plan, tokens, num_computed, kv)`` gives put into the flat batch."""

    def flatten_batch(*arguments):
        batch = reference.flatten_batch(*arguments)
        return replace(batch, **change(batch, *arguments))

    return parts(reference, flatten_batch=flatten_batch)


@wrong("positions from 0 in every step", case=WHOLE)
def from_zero(reference):
    def change(batch, plan, tokens, done, kv):
        import torch

        return {"positions": torch.cat([torch.arange(n) for n in batch.query_lens])}

    return batch_of(reference, change)


@wrong("the flat batch counts its tokens as computed", case=WHOLE)
def counted_too_early(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        batch = reference.flatten_batch(plan, tokens, num_computed, kv)
        for id, n in plan.scheduled.items():
            num_computed[id] += n
        return batch

    return parts(reference, flatten_batch=flatten_batch)


@wrong("tables in the order of the blocks' numbers", case=PAGED)
def sorted_tables(reference):
    class Sorted:
        def __init__(self, kv):
            self.kv, self.block_size = kv, kv.block_size

        def blocks(self, name):
            return sorted(self.kv.blocks(name))

    def flatten_batch(plan, tokens, num_computed, kv):
        return reference.flatten_batch(plan, tokens, num_computed, Sorted(kv))

    return parts(reference, flatten_batch=flatten_batch)


@wrong("slots counted in the table, without the block's number", case=WHOLE)
def slots_in_the_table(reference):
    return batch_of(reference, lambda batch, plan, tokens, done, kv: {"slot_mapping": batch.positions.clone()})


@wrong("an answer ends a token early", case=WHOLE)
def early(reference):
    class Early(reference.Scheduler):
        def add(self, request):
            super().add(replace(request, max_tokens=max(1, request.max_tokens - 1)))

    return parts(reference, Scheduler=Early)


@wrong("goes on behind EOS", case=ENDS)
def deaf(reference):
    class Deaf(reference.Scheduler):
        def __init__(self, config, kv):
            super().__init__(replace(config, eos_token_id=-1), kv)

    return parts(reference, Scheduler=Deaf)


@wrong("takes no block for the answer", case=PAGED)
def no_block(reference):
    class Stays(reference.PagedScheduler):
        def _make_room(self, seq, n, plan):
            return True

    return parts(reference, PagedScheduler=Stays)


@wrong("the table of a preempted request is remembered", case=PREEMPTED)
def remembered(reference):
    first: dict = {}

    class Remembered:
        def __init__(self, kv):
            self.kv, self.block_size = kv, kv.block_size
            first.setdefault(id(kv), (kv, {}))  # keeps it alive, so that its id is not another's

        def blocks(self, name):
            tables = first[id(self.kv)][1]
            before = tables.get(name, [])
            tables[name] = before + self.kv.blocks(name)[len(before) :]
            return tables[name]

    def flatten_batch(plan, tokens, done, kv):
        return reference.flatten_batch(plan, tokens, done, Remembered(kv))

    return parts(reference, flatten_batch=flatten_batch)


def forgetful(reference, name, forget):
    """A scheduler of that name that calls ``forget(sequence)`` whenever it has preempted."""

    class Forgetful(getattr(reference, name)):
        def _preempt(self, seq, plan):
            before = seq.num_computed
            super()._preempt(seq, plan)
            forget(seq, before)

    return parts(reference, **{name: Forgetful})


@wrong("a preempted request goes on with its next token", case=PREEMPTED)
def goes_on(reference):
    return forgetful(reference, "PagedScheduler", lambda seq, before: setattr(seq, "num_computed", before))


@wrong("a preempted request loses its answer", case=PREEMPTED)
def loses(reference):
    return forgetful(reference, "PagedScheduler", lambda seq, before: seq.outputs.clear())


@wrong("all known tokens as context, also behind a chunk", case=CHUNKS)
def all_known(reference):
    return batch_of(
        reference,
        lambda batch, plan, tokens, done, kv: {"context_lens": [len(tokens[id]) for id in plan.scheduled]},
    )


@wrong("a chunk sees itself only", case=CHUNKS)
def itself_only(reference):
    def change(batch, plan, tokens, done, kv):
        chunks = zip(batch.query_lens, batch.context_lens, strict=True)
        return {"context_lens": [n if 1 < n < context else context for n, context in chunks]}

    return batch_of(reference, change)


@wrong("a chunk is counted when it is planned, and when it is finished", case=CHUNKS)
def twice(reference):
    class Twice(reference.ChunkedScheduler):
        def _schedule(self, seq, n, plan):
            super()._schedule(seq, n, plan)
            seq.num_computed += n if n < seq.missing else 0

    return parts(reference, ChunkedScheduler=Twice)


@wrong("with chunks, a preempted request goes on", case=BOTH)
def chunk_goes_on(reference):
    return forgetful(reference, "ChunkedScheduler", lambda seq, before: setattr(seq, "num_computed", before))


@wrong("with chunks, a preempted request loses its answer", case=BOTH)
def chunk_loses(reference):
    return forgetful(reference, "ChunkedScheduler", lambda seq, before: seq.outputs.clear())


@wrong("the whole context again in every step", case=COUNTS)
def no_cache(reference):
    def whole(plan, done):
        return replace(plan, scheduled={id: done[id] + n for id, n in plan.scheduled.items()})

    def flatten_batch(plan, tokens, done, kv):
        return reference.flatten_batch(whole(plan, done), tokens, dict.fromkeys(done, 0), kv)

    def sampled_rows(plan, tokens, done):
        return reference.sampled_rows(whole(plan, done), tokens, dict.fromkeys(done, 0))

    return parts(reference, flatten_batch=flatten_batch, sampled_rows=sampled_rows)


@wrong("one request at a time", case=COUNTS)
def one_at_a_time(reference):
    class Alone(reference.Scheduler):
        def __init__(self, config, kv):
            super().__init__(replace(config, max_num_seqs=1), kv)

    return parts(reference, Scheduler=Alone)


@wrong("room for whole answers in place of preemption", case=COUNTS)
def never_preempts(reference):
    return parts(reference, PagedScheduler=reference.Scheduler)


@wrong("whole prompts where chunks were asked for", case=COUNTS)
def no_chunks(reference):
    class Whole(reference.ChunkedScheduler):
        def __init__(self, config, kv, *key):
            super().__init__(replace(config, max_num_batched_tokens=99), kv, *key)

    return parts(reference, ChunkedScheduler=Whole)
