"""Named answers to `paged_kv.token_exact`."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from servelab.answers import right, wrong
from servelab.llm.generate import greedy
from servelab.serving import FlatBatch


def _answers(reference, generate, **parts):
    """The reference's parts, some of them replaced, under a `generate`."""
    names = "BlockAllocator", "ForkableTable", "PrefixCache", "write_kv", "paged_attention"
    return generate, *(parts.get(name, getattr(reference, name)) for name in names)


def _with(**parts):
    """The reference, with other parts; each is made from the reference's."""
    return lambda reference: _answers(
        reference, reference.generate, **{name: make(getattr(reference, name)) for name, make in parts.items()}
    )


class Loop:
    """`generate` in small steps, each of which can be replaced."""

    def __init__(self, reference):
        self.copy_blocks = reference.copy_blocks

    def __call__(self, model, pages, table, tokens, max_tokens):
        new, said = self.first(table, tokens), 0
        while said < self.most(max_tokens):
            start, copies = table.num_tokens, table.append(len(new))
            self.copy(pages, copies)
            batch = FlatBatch(**self.fields(table, new, start))
            token = self.choose(model, self.forward(model, pages, batch, table))
            said += 1
            if self.ends(model, token):
                yield from self.end(table, token)
                return
            yield token
            new = self.after(token, tokens)

    def first(self, table, tokens):
        return [*tokens][table.num_tokens :]

    def most(self, max_tokens):
        return max_tokens

    def copy(self, pages, copies):
        for pair in pages.caches:
            self.copy_blocks(*pair, copies)

    def fields(self, table, new, start):
        return {
            "tokens": torch.tensor(new),
            "positions": torch.tensor([start + at for at in range(len(new))]),
            "query_lens": [len(new)],
            "context_lens": [start + len(new)],
            "slot_mapping": torch.tensor(table.slots(start, start + len(new))),
            "block_tables": torch.tensor(table.blocks).unsqueeze(0),
        }

    def forward(self, model, pages, batch, table):
        return model.forward(batch.tokens, batch.positions, pages.bind(batch))

    def choose(self, model, hidden):
        return model.logits(hidden).argmax(dim=-1)[-1].item()

    def ends(self, model, token):
        return token == model.config.eos_token_id

    def end(self, table, token):
        yield token

    def after(self, token, tokens):
        return [token]


def _loop(change):
    """An answer whose `generate` is the loop that ``change`` makes out of it."""
    return lambda reference: _answers(reference, change(Loop)(reference))


@right("a loop in small steps, logits of all rows")
@_loop
def in_steps(base):
    return base


@right("an iterator that remembers where it is, padded tables, other pools, torch's own attention")
def iterator(reference):
    class Answer:
        def __init__(self, model, pages, table, tokens, max_tokens):
            self.model, self.pages, self.table, self.left = model, pages, table, max_tokens
            self.new = tuple(tokens)[table.num_tokens :]

        def __iter__(self):
            return self

        @torch.inference_mode()
        def __next__(self):
            if not self.left:
                raise StopIteration
            start = self.table.num_tokens
            copies = self.table.append(len(self.new))
            for layer in range(self.model.config.num_layers if copies else 0):
                reference.copy_blocks(*self.pages.caches[layer], copies)
            positions, stop = torch.arange(start, self.table.num_tokens), self.table.num_tokens
            slots = torch.tensor(self.table.slots(start, stop))
            row = torch.tensor([[*self.table.blocks, -1, -1]])
            batch = FlatBatch(torch.tensor(self.new), positions, (len(self.new),), (stop,), slots, row)
            hidden = self.model.forward(batch.tokens, positions, self.pages.bind(batch))
            token = self.model.logits(hidden[-1:])[0].topk(1).indices.numpy()[0]
            self.new, self.left = (token,), self.left - 1
            if token == self.model.config.eos_token_id:
                self.left = 0
            return token

    class FirstIn(reference.BlockAllocator):
        def allocate(self, n):
            self._free.reverse()
            taken = super().allocate(n)
            self._free.reverse()
            return taken

    def attention(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        out, start = [], 0
        for row, query, context in zip(block_tables.tolist(), query_lens, context_lens, strict=True):
            k, v = (cache[[b for b in row if b >= 0]].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
            mask = torch.ones(query, context, dtype=torch.bool).tril(context - query)
            heads = (x.transpose(0, 1) for x in (q[start : start + query], k, v))
            mixed = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
            out.append(mixed.transpose(0, 1))
            start += query
        return torch.cat(out)

    return _answers(reference, Answer, BlockAllocator=FirstIn, paged_attention=attention)


@wrong("positions begin at 0 in every pass", case="one request")
@_loop
def positions_from_0(base):
    class Answer(base):
        def fields(self, table, new, start):
            return super().fields(table, new, start) | {"positions": torch.arange(len(new))}

    return Answer


@wrong("the first row says what comes next", case="one request")
@_loop
def first_row(base):
    class Answer(base):
        def choose(self, model, hidden):
            return int(model.logits(hidden[0]).argmax())

    return Answer


@wrong("a context without its new tokens", case="one request")
@_loop
def short_context(base):
    class Answer(base):
        def fields(self, table, new, start):
            return super().fields(table, new, start) | {"context_lens": [max(start, len(new))]}

    return Answer


@wrong("slots are positions", case="requests in turn")
@_loop
def slots_are_positions(base):
    class Answer(base):
        def fields(self, table, new, start):
            given = super().fields(table, new, start)
            return given | {"slot_mapping": given["positions"]}

    return Answer


@wrong("everything is in one piece: slots and blocks as for a table of its own", case="requests in turn")
@_loop
def one_piece(base):
    class Answer(base):
        def fields(self, table, new, start):
            given = super().fields(table, new, start)
            rows = torch.arange(len(table.blocks)).unsqueeze(0)
            return given | {"slot_mapping": given["positions"], "block_tables": rows}

    return Answer


@wrong("goes on with the last token of the prompt", case="one request")
@_loop
def same_token(base):
    class Answer(base):
        def after(self, token, tokens):
            return [tokens[-1]]

    return Answer


@wrong("the unlikeliest token", case="one request")
@_loop
def unlikeliest(base):
    class Answer(base):
        def choose(self, model, hidden):
            return int(model.logits(hidden[-1]).argmin())

    return Answer


wrong_writes = wrong("write_kv writes nothing", case="one request")(
    _with(write_kv=lambda right: lambda k_cache, v_cache, k, v, slot_mapping: None)
)
wrong_keys = wrong("write_kv writes the keys twice", case="one request")(
    _with(write_kv=lambda right: lambda k_cache, v_cache, k, v, slots: right(k_cache, v_cache, k, k, slots))
)
wrong_mask = wrong("paged_attention hides nothing in a chunk", case="one request")(
    _with(
        paged_attention=lambda right: (
            lambda q, k, v, rows, queries, contexts, scale: right(
                q, k, v, rows.repeat_interleave(queries[0], 0), [1] * queries[0], contexts * queries[0], scale
            )
        )
    )
)


@wrong("end-of-sequence is a token like any other", case="stops in time")
@_loop
def never_ends(base):
    class Answer(base):
        def ends(self, model, token):
            return False

    return Answer


def _numbered(copied=lambda number: True, ends=lambda token, eos, number, tokens: token == eos):
    """A `generate` that knows the number of its pass."""

    def make(reference):
        def generate(model, pages, table, tokens, max_tokens):
            loop, new = Loop(reference), [*tokens][table.num_tokens :]
            for number in range(max_tokens):
                start, copies = table.num_tokens, table.append(len(new))
                if copied(number):
                    loop.copy(pages, copies)
                batch = FlatBatch(**loop.fields(table, new, start))
                token = loop.choose(model, loop.forward(model, pages, batch, table))
                yield token
                if ends(token, model.config.eos_token_id, number, tokens):
                    return
                new = [token]

        return _answers(reference, generate)

    return make


not_at_first = wrong("end-of-sequence is not looked for in the first pass", case="stops in time")(
    _numbered(ends=lambda token, eos, number, tokens: number > 0 and token == eos)
)
in_the_prompt = wrong("end-of-sequence in the prompt ends the answer", case="stops in time")(
    _numbered(ends=lambda token, eos, number, tokens: eos in [*tokens, token])
)
early_copies = wrong("copies before the first pass only", case="a fork goes on")(
    _numbered(copied=lambda number: number == 0)
)


@wrong("end-of-sequence is not a token of the answer", case="stops in time")
@_loop
def silent_end(base):
    class Answer(base):
        def end(self, table, token):
            yield from ()

    return Answer


@wrong("one token more than asked for", case="stops in time")
@_loop
def one_more(base):
    class Answer(base):
        def most(self, max_tokens):
            return max_tokens + 1

    return Answer


@wrong("no limit", case="stops in time")
@_loop
def no_limit(base):
    class Answer(base):
        def most(self, max_tokens):
            return 10**9

    return Answer


@wrong("room for the end-of-sequence token", case="stops in time")
@_loop
def room_for_the_end(base):
    class Answer(base):
        def end(self, table, token):
            table.append(1)
            yield token

    return Answer


@wrong("the plain loop, beside the pages", case="each token is computed once")
def beside_the_pages(reference):
    def generate(model, pages, table, tokens, max_tokens):
        new = len(tokens) - table.num_tokens
        for token in greedy(model, tokens, max_tokens):
            table.append(new)
            new = 1
            yield token

    return _answers(reference, generate)


@wrong("all tokens are computed again in every pass", case="each token is computed once")
def all_again(reference):
    def generate(model, pages, table, tokens, max_tokens):
        known, new = [*tokens], len(tokens) - table.num_tokens
        for _ in range(max_tokens):
            copies = table.append(new)
            for pair in pages.caches:
                reference.copy_blocks(*pair, copies)
            fields = Loop(reference).fields(table, known, 0)
            batch = FlatBatch(**fields)
            known.append(
                int(model.logits(model.forward(batch.tokens, batch.positions, pages.bind(batch))[-1]).argmax())
            )
            new = 1
            yield known[-1]
            if known[-1] == model.config.eos_token_id:
                return

    return _answers(reference, generate)


@wrong("each pass is made twice", case="each token is computed once")
@_loop
def twice(base):
    class Answer(base):
        def forward(self, model, pages, batch, table):
            super().forward(model, pages, batch, table)
            return super().forward(model, pages, batch, table)

    return Answer


@wrong("positions count from 1: rotations are relative, so the tokens are right", case="each token is computed once")
@_loop
def positions_from_1(base):
    class Answer(base):
        def fields(self, table, new, start):
            given = super().fields(table, new, start)
            return given | {"positions": given["positions"] + 1}

    return Answer


@wrong("a prompt is computed a token at a time", case="each token is computed once")
@_loop
def token_by_token(base):
    class Answer(base):
        def forward(self, model, pages, batch, table):
            for at, position in enumerate(batch.positions.tolist()):
                one = slice(at, at + 1)
                parts = batch.tokens[one], batch.positions[one], [1], [position + 1], batch.slot_mapping[one]
                single = FlatBatch(*parts, batch.block_tables)
                hidden = super().forward(model, pages, single, table)
            return hidden

    return Answer


@wrong("room for a token as soon as it is known", case="room for what is computed")
def room_at_once(reference):
    def generate(model, pages, table, tokens, max_tokens):
        loop, new, start = Loop(reference), [*tokens][table.num_tokens :], table.num_tokens
        copies = table.append(len(new))
        for _ in range(max_tokens):
            loop.copy(pages, copies)
            batch = FlatBatch(**loop.fields(table, new, start))
            token = loop.choose(model, loop.forward(model, pages, batch, table))
            start, new, copies = start + len(new), [token], table.append(1)
            yield token
            if token == model.config.eos_token_id:
                return

    return _answers(reference, generate)


@wrong("room for the longest answer at once", case="room for what is computed")
def room_for_all(reference):
    def generate(model, pages, table, tokens, max_tokens):
        loop, start = Loop(reference), table.num_tokens
        new = [*tokens][start:]
        loop.copy(pages, table.append(len(new) + max_tokens))
        for _ in range(max_tokens):
            batch = FlatBatch(**loop.fields(table, new, start))
            token = loop.choose(model, loop.forward(model, pages, batch, table))
            start, new = start + len(new), [token]
            yield token
            if token == model.config.eos_token_id:
                return

    return _answers(reference, generate)


@wrong("a list of the whole answer, not one token at a time", case="requests in turn")
def whole_answer(reference):
    return _answers(reference, lambda *given: list(reference.generate(*given)))


@wrong("one pass ahead of what it yields", case="requests in turn")
def one_ahead(reference):
    def generate(*given):
        ready = []
        for token in reference.generate(*given):
            ready.append(token)
            if len(ready) > 1:
                yield ready.pop(0)
        yield from ready

    return _answers(reference, generate)


@wrong("all requests go on with the token that came last", case="requests in turn")
@_loop
def shared_token(base):
    class Answer(base):
        def choose(self, model, hidden):
            self.last = super().choose(model, hidden)
            return self.last

        def fields(self, table, new, start):
            given = super().fields(table, new, start)
            return given if len(new) > 1 else given | {"tokens": torch.tensor([getattr(self, "last", new[0])])}

    return Answer


@wrong("copies are not made", case="a fork goes on")
@_loop
def no_copies(base):
    class Answer(base):
        def copy(self, pages, copies):
            pass

    return Answer


@wrong("copies in the first layer only", case="a fork goes on")
@_loop
def first_layer(base):
    class Answer(base):
        def copy(self, pages, copies):
            self.copy_blocks(*pages.caches[0], copies)

    return Answer


@wrong("copies after the pass", case="a fork goes on")
@_loop
def late_copies(base):
    class Answer(base):
        def copy(self, pages, copies):
            self.due = copies

        def forward(self, model, pages, batch, table):
            hidden = super().forward(model, pages, batch, table)
            super().copy(pages, self.due)
            return hidden

    return Answer


@wrong("copies the other way round", case="a fork goes on")
@_loop
def reversed_copies(base):
    class Answer(base):
        def copy(self, pages, copies):
            super().copy(pages, [(destination, source) for source, destination in copies])

    return Answer


@wrong("copy_blocks moves the keys only", case="a fork goes on")
@_loop
def keys_only(base):
    class Answer(base):
        def copy(self, pages, copies):
            for k_cache, _ in pages.caches:
                self.copy_blocks(k_cache, k_cache, copies)

    return Answer


wrong_table = wrong("the table writes into shared blocks", case="a fork goes on")(
    _with(ForkableTable=lambda right: type("Answer", (right,), {"append": right.__mro__[1].append}))
)


@wrong("computes the whole prompt, whatever the table holds", case="a cached prefix is not computed")
def all_of_the_prompt(reference):
    def generate(model, pages, table, tokens, max_tokens):
        held = table.blocks
        table.blocks, table.num_tokens = [], 0
        table.pool.free(held)
        yield from reference.generate(model, pages, table, tokens, max_tokens)

    return _answers(reference, generate)


@wrong("appends the whole prompt behind what the table holds", case="a cached prefix is not computed")
@_loop
def behind_the_hit(base):
    class Answer(base):
        def first(self, table, tokens):
            return [*tokens]

    return Answer


@wrong("positions of a prompt count from the end of the hit", case="a cached prefix is not computed")
@_loop
def positions_from_the_hit(base):
    class Answer(base):
        def fields(self, table, new, start):
            given = super().fields(table, new, start)
            return given | ({"positions": torch.arange(len(new))} if len(new) > 1 else {})

    return Answer


@wrong("only the last token of the prompt is computed", case="a cached prefix is not computed")
@_loop
def last_only(base):
    class Answer(base):
        def first(self, table, tokens):
            return [*tokens][-1:] if table.num_tokens else [*tokens]

    return Answer


def _finds_less(right):
    """A cache that leaves out a block of every hit."""

    class Answer(right):
        def match(self, tokens, key=None):
            blocks, found = super().match(tokens, key)
            return (blocks, found) if not blocks else (blocks[:-1], found - self.block_size)

    return Answer


wrong_match = wrong("the cache drops the last block that it found", case="a cached prefix is not computed")(
    _with(PrefixCache=_finds_less)
)
wrong_hash = wrong("the cache looks at lengths, not at tokens", case="a cached prefix is not computed")(
    _with(
        PrefixCache=lambda right: type(
            "Answer", (right,), {"_hashes": lambda self, tokens, key: right._hashes(self, [0] * len(tokens), key)}
        )
    )
)


@wrong("writes the answer into the caller's prompt", case="leaves its arguments unchanged")
@_loop
def appended(base):
    class Answer(base):
        def after(self, token, tokens):
            tokens.append(token)
            return tokens[-1:]

    return Answer
