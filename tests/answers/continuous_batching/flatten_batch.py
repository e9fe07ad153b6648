"""Named answers to `continuous_batching.flatten_batch`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from servelab.answers import right, wrong
from servelab.serving import FlatBatch


def rows(plan, tokens, num_computed, kv):
    """Of each scheduled request: its new tokens, their positions, its table and the block size."""
    for id, n in plan.scheduled.items():
        start = num_computed[id]
        yield tokens[id][start : start + n], list(range(start, start + n)), kv.blocks(id), kv.block_size


def changed(reference, change):
    """The reference's batch with the fields that ``change`` makes from the arguments, as lists of rows."""

    def flatten_batch(plan, tokens, num_computed, kv):
        import torch

        fields = change(plan, tokens, num_computed, kv)
        made = {
            name: value if name.endswith("_lens") else torch.tensor(value, dtype=torch.int64)
            for name, value in fields.items()
        }
        return replace(reference.flatten_batch(plan, tokens, num_computed, kv), **made)

    return flatten_batch


def flat(parts):
    return [item for part in parts for item in part]


def padded(tables, filler=-1, width=0):
    width = max(width, *map(len, tables))
    return [table + [filler] * (width - len(table)) for table in tables]


@right("with numpy, a tuple of lengths, field by field")
def with_numpy(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        import torch

        ids = list(plan.scheduled)
        query_lens = tuple(np.int64(plan.scheduled[id]) for id in ids)
        ends = tuple(num_computed[id] + n for id, n in zip(ids, query_lens, strict=True))
        spans = [np.arange(end - n, end) for n, end in zip(query_lens, ends, strict=True)]
        tables = np.full((len(ids), max(len(kv.blocks(id)) for id in ids)), -1, dtype=np.int64)
        for row, id in zip(tables, ids, strict=True):
            row[: len(kv.blocks(id))] = kv.blocks(id)
        slots = [
            row[span // kv.block_size] * kv.block_size + span % kv.block_size
            for row, span in zip(tables, spans, strict=True)
        ]
        picked = [np.array(tokens[id])[span] for id, span in zip(ids, spans, strict=True)]
        columns = (torch.from_numpy(np.concatenate(parts)) for parts in (picked, spans, slots))
        picked, positions, slots = columns
        return FlatBatch(picked, positions, query_lens, ends, slots, torch.from_numpy(tables))

    return flatten_batch


@right("token by token, with torch")
def token_by_token(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        import torch

        found, tables = [], []
        for id, n in plan.scheduled.items():
            slots = [block * kv.block_size + offset for block in kv.blocks(id) for offset in range(kv.block_size)]
            for position in range(num_computed[id], num_computed[id] + n):
                found.append((tokens[id][position], position, slots[position]))
            tables.append(torch.tensor(kv.blocks(id), dtype=torch.int64))
        ids, positions, slots = torch.tensor(found, dtype=torch.int64).unbind(1)
        contexts = [num_computed[id] + n for id, n in plan.scheduled.items()]
        table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
        return FlatBatch(ids, positions, list(plan.scheduled.values()), contexts, slots, table)

    return flatten_batch


@wrong("an object of its own with the six fields", case="one request behind another")
def another_class(reference):
    def flatten_batch(*arguments):
        return SimpleNamespace(**vars(reference.flatten_batch(*arguments)))

    return flatten_batch


@wrong("the known tokens' first ones instead of the next", case="one request behind another")
def first_tokens(reference):
    return changed(
        reference, lambda plan, tokens, done, kv: {"tokens": flat(tokens[i][:n] for i, n in plan.scheduled.items())}
    )


@wrong("the last tokens, also of a chunk that has others behind it", case="one request behind another")
def last_tokens(reference):
    return changed(
        reference, lambda plan, tokens, done, kv: {"tokens": flat(tokens[i][-n:] for i, n in plan.scheduled.items())}
    )


@wrong("everybody who is known, scheduled or not", case="one request behind another")
def everybody(reference):
    def all_known(plan, tokens, done, kv):
        return {"tokens": flat(tokens.values()), "query_lens": [len(known) for known in tokens.values()]}

    return changed(reference, all_known)


@wrong("a rectangle, padded", case="one request behind another")
def rectangle(reference):
    def fields(plan, tokens, done, kv):
        return {"tokens": padded([list(picked) for picked, *_ in rows(plan, tokens, done, kv)], 0)}

    return changed(reference, fields)


@wrong("decodes first, lengths in the plan's order", case="one request behind another")
def other_order(reference):
    def fields(plan, tokens, done, kv):
        return {"tokens": flat(sorted((picked for picked, *_ in rows(plan, tokens, done, kv)), key=len))}

    return changed(reference, fields)


@wrong("in the order of the known tokens, not of the plan", case="one request behind another")
def order_of_tokens(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        ordered = {id: plan.scheduled[id] for id in tokens if id in plan.scheduled}
        return reference.flatten_batch(replace(plan, scheduled=ordered), tokens, num_computed, kv)

    return flatten_batch


@wrong("query_lens as offsets of the first tokens", case="one request behind another")
def offsets(reference):
    def fields(plan, tokens, done, kv):
        return {"query_lens": [0, *np.cumsum(list(plan.scheduled.values())).tolist()]}

    return changed(reference, fields)


@wrong("positions from 0 in every step", case="positions count from the request's start")
def from_zero(reference):
    def fields(plan, tokens, done, kv):
        return {"positions": flat(range(n) for n in plan.scheduled.values())}

    return changed(reference, fields)


@wrong("positions in the batch", case="positions count from the request's start")
def in_the_batch(reference):
    return changed(reference, lambda plan, tokens, done, kv: {"positions": list(range(plan.num_tokens))})


@wrong("positions from 1", case="positions count from the request's start")
def from_one(reference):
    def fields(plan, tokens, done, kv):
        return {"positions": flat([p + 1 for p in span] for _, span, *_ in rows(plan, tokens, done, kv))}

    return changed(reference, fields)


@wrong("a context without the new tokens", case="a context includes the new tokens")
def without_new(reference):
    return changed(reference, lambda plan, tokens, done, kv: {"context_lens": [done[id] for id in plan.scheduled]})


@wrong("all known tokens as context, also behind a chunk", case="a context includes the new tokens")
def all_known(reference):
    return changed(
        reference, lambda plan, tokens, done, kv: {"context_lens": [len(tokens[id]) for id in plan.scheduled]}
    )


@wrong("as much context as blocks", case="a context includes the new tokens")
def whole_blocks(reference):
    def fields(plan, tokens, done, kv):
        return {"context_lens": [len(table) * size for _, _, table, size in rows(plan, tokens, done, kv)]}

    return changed(reference, fields)


@wrong("the place in the table instead of the block", case="each token has its slot")
def place_in_table(reference):
    return changed(reference, lambda *args: {"slot_mapping": flat(span for _, span, *_ in rows(*args))})


@wrong("the block's number without its size", case="each token has its slot")
def block_number(reference):
    def fields(*args):
        return {"slot_mapping": flat([table[p // size] for p in span] for _, span, table, size in rows(*args))}

    return changed(reference, fields)


@wrong("offsets counted from the step's first token", case="each token has its slot")
def offset_in_step(reference):
    def fields(*args):
        slots = flat(
            [table[i // size] * size + i % size for i in range(len(span))] for _, span, table, size in rows(*args)
        )
        return {"slot_mapping": slots}

    return changed(reference, fields)


@wrong("all new tokens behind each other from the last block's start", case="each token has its slot")
def last_block(reference):
    def fields(*args):
        slots = flat([table[-1] * size + i for i in range(len(span))] for _, span, table, size in rows(*args))
        return {"slot_mapping": slots}

    return changed(reference, fields)


@wrong("blocks of 16 whatever the size", case="each token has its slot")
def sixteen(reference):
    def fields(*args):
        return {
            "slot_mapping": flat([table[p // size] * 16 + p % 16 for p in span] for _, span, table, size in rows(*args))
        }

    return changed(reference, fields)


@wrong("a slot mapping of int32", case="each token has its slot")
def short_integers(reference):
    def flatten_batch(*args):
        made = reference.flatten_batch(*args)
        return replace(made, slot_mapping=made.slot_mapping.int())

    return flatten_batch


@wrong("tables padded with 0", case="tables are padded with -1")
def with_zero(reference):
    return changed(reference, lambda *args: {"block_tables": padded([table for _, _, table, _ in rows(*args)], 0)})


@wrong("tables as wide as the memory has blocks", case="tables are padded with -1")
def too_wide(reference):
    return changed(
        reference,
        lambda plan, tokens, done, kv: {
            "block_tables": padded([table for _, _, table, _ in rows(plan, tokens, done, kv)], -1, kv.num_blocks)
        },
    )


@wrong("tables as lists of different lengths", case="tables are padded with -1")
def ragged(reference):
    def flatten_batch(*args):
        tables = [table for _, _, table, _ in rows(*args)]
        return replace(reference.flatten_batch(*args), block_tables=tables)

    return flatten_batch


@wrong("padded in front", case="tables are padded with -1")
def in_front(reference):
    def fields(*args):
        return {"block_tables": [row[::-1] for row in padded([table[::-1] for _, _, table, _ in rows(*args)])]}

    return changed(reference, fields)


@wrong("counts the tokens as computed", case="leaves its arguments unchanged")
def counts_them(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        made = reference.flatten_batch(plan, tokens, num_computed, kv)
        for id, n in plan.scheduled.items():
            num_computed[id] += n
        return made

    return flatten_batch


@wrong("empties the plan", case="leaves its arguments unchanged")
def empties(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        made = reference.flatten_batch(plan, tokens, num_computed, kv)
        while plan.scheduled:
            plan.scheduled.popitem()
        return made

    return flatten_batch


@wrong("gives the blocks back", case="leaves its arguments unchanged")
def gives_back(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        made = reference.flatten_batch(plan, tokens, num_computed, kv)
        for id in plan.scheduled:
            kv.release(id)
        return made

    return flatten_batch


@wrong("cuts the known tokens to the context", case="leaves its arguments unchanged")
def cuts(reference):
    def flatten_batch(plan, tokens, num_computed, kv):
        made = reference.flatten_batch(plan, tokens, num_computed, kv)
        for id, n in plan.scheduled.items():
            del tokens[id][num_computed[id] : num_computed[id] + n]
        return made

    return flatten_batch
