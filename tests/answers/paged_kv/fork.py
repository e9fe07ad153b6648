"""Named answers to `paged_kv.fork`."""

from servelab.answers import right, wrong
from servelab.kv import OutOfBlocks


@right("copies all blocks of a cache at once; looks before it takes")
def at_once(reference):
    class Answer(reference.BlockTable):
        def fork(self):
            child = Answer(self.pool)
            child.blocks, child.num_tokens = self.blocks[:], self.num_tokens
            for block in child.blocks:
                self.pool.share([block])
            return child

        def append(self, n_tokens):
            size = self.pool.block_size
            room = len(self.blocks) * size - self.num_tokens
            shared = room > 0 and self.pool.ref_count(self.blocks[-1]) != 1
            if n_tokens <= 0 or not shared:
                return super().append(n_tokens)
            if 1 + max(0, -(-(n_tokens - room) // size)) > self.pool.num_free:
                raise OutOfBlocks
            old, [self.blocks[-1]] = self.blocks[-1], self.pool.allocate(1)
            self.pool.free([old])
            super().append(n_tokens)
            return ((old, self.blocks[-1 - max(0, -(-(n_tokens - room) // size))]),)

    def copy_blocks(k_cache, v_cache, copies):
        if copies:
            sources, destinations = map(list, zip(*copies, strict=True))
            for cache in (k_cache, v_cache):
                cache.index_copy_(0, cache.new_tensor(destinations).long(), cache[sources])
        return k_cache, v_cache

    return Answer, copy_blocks


@right("turns round what it was given; copies by flat rows")
def turned(reference):
    class Answer(reference.ForkableTable):
        def append(self, n_tokens):
            before = list(self.blocks)
            copies = super().append(n_tokens)
            kept = len(before) - len(copies)
            self.blocks[kept:] = self.blocks[kept:][::-1]
            return [(source, self.blocks[kept]) for source, _ in copies]

    def copy_blocks(k_cache, v_cache, copies):
        for cache in (k_cache, v_cache):
            flat = cache.view(cache.shape[0], -1)
            for source, destination in copies:
                flat[destination].copy_(flat[source])

    return Answer, copy_blocks


def _table(change):
    """A wrong table with the reference's `copy_blocks`."""

    def make(reference):
        return change(reference.ForkableTable), reference.copy_blocks

    return make


@wrong("fork copying everything", case="forks share")
@_table
def copies_everything(base):
    class Answer(base):
        def fork(self):
            child = type(self)(self.pool)
            child.append(self.num_tokens)
            return child

    return Answer


@wrong("the fork is a plain BlockTable", case="forks share")
@_table
def other_class(base):
    class Answer(base):
        def fork(self):
            child = base.__mro__[1](self.pool)
            self.pool.share(self.blocks)
            child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
            return child

    return Answer


@wrong("fork returns nothing", case="forks share")
@_table
def nothing(base):
    class Answer(base):
        def fork(self):
            super().fork()

    return Answer


@wrong("fork without a share", case="forks share")
@_table
def no_share(base):
    class Answer(base):
        def fork(self):
            child = type(self)(self.pool)
            child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
            return child

    return Answer


@wrong("both tables hold one list", case="forks share")
@_table
def one_list(base):
    class Answer(base):
        def fork(self):
            child = super().fork()
            child.blocks = self.blocks
            return child

    return Answer


@wrong("the fork is an empty table", case="forks share")
@_table
def empty(base):
    class Answer(base):
        def fork(self):
            self.pool.share(self.blocks)
            return type(self)(self.pool)

    return Answer


@wrong("fork copies the part-filled block at once", case="forks share")
@_table
def eager(base):
    class Answer(base):
        def fork(self):
            child = super().fork()
            if self.num_tokens % self.pool.block_size:
                self.pool.free(child.blocks[-1:])
                child.blocks[-1:] = self.pool.allocate(1)
            return child

    return Answer


@wrong("only the full blocks are shared", case="forks share")
@_table
def full_only(base):
    class Answer(base):
        def fork(self):
            child = type(self)(self.pool)
            full = self.num_tokens // self.pool.block_size
            child.blocks, child.num_tokens = self.blocks[:full], full * self.pool.block_size
            self.pool.share(child.blocks)
            return child

    return Answer


def _without_copy(base):
    """The inherited append: writes wherever the table points."""
    return base.__mro__[1].append


@wrong("writes into shared blocks", case="copies on write")
@_table
def never(base):
    class Answer(base):
        append = _without_copy(base)

    return Answer


@wrong("a fork of a fork writes into shared blocks", case="copies on write")
@_table
def grandchild(base):
    class Plain(base):
        append = _without_copy(base)

    class Child(base):
        def fork(self):
            child = super().fork()
            child.__class__ = Plain
            return child

    class Answer(base):
        def fork(self):
            child = super().fork()
            child.__class__ = Child
            return child

    return Answer


@wrong("only the child copies", case="copies on write")
@_table
def child_only(base):
    class Answer(base):
        is_child = False

        def fork(self):
            child = super().fork()
            child.is_child = True
            return child

        def append(self, n_tokens):
            return super().append(n_tokens) if self.is_child else _without_copy(base)(self, n_tokens)

    return Answer


@wrong("source and destination swapped", case="puts the copy in place")
@_table
def swapped(base):
    class Answer(base):
        def append(self, n_tokens):
            return [(destination, source) for source, destination in super().append(n_tokens)]

    return Answer


@wrong("the copy is reported at the next append: the data would move after the write", case="puts the copy in place")
@_table
def late(base):
    class Answer(base):
        due = ()

        def append(self, n_tokens):
            due, self.due = self.due, super().append(n_tokens)
            return list(due)

    return Answer


@wrong("the old block keeps its holder", case="puts the copy in place")
@_table
def keeps_holder(base):
    class Answer(base):
        def append(self, n_tokens):
            copies = super().append(n_tokens)
            self.pool.share([source for source, _ in copies])
            return copies

    return Answer


@wrong("the copy goes to the end of the table", case="puts the copy in place")
@_table
def at_the_end(base):
    class Answer(base):
        def append(self, n_tokens):
            copies = super().append(n_tokens)
            if copies:
                self.blocks.remove(copies[0][1])
                self.blocks.append(copies[0][1])
            return copies

    return Answer


@wrong("the copy is a bare pair, not a list of one", case="puts the copy in place")
@_table
def bare_pair(base):
    class Answer(base):
        def append(self, n_tokens):
            copies = super().append(n_tokens)
            return copies[0] if copies else copies

    return Answer


@wrong("the tokens of a write that copied are not counted", case="puts the copy in place")
@_table
def not_counted(base):
    class Answer(base):
        def append(self, n_tokens):
            before = self.num_tokens
            copies = super().append(n_tokens)
            self.num_tokens = before if copies else self.num_tokens
            return copies

    return Answer


@wrong("all shared blocks are copied on the first write", case="copies on write")
@_table
def all_shared(base):
    class Answer(base):
        def append(self, n_tokens):
            copies = super().append(n_tokens)
            for index, block in enumerate(self.blocks if copies else []):
                if self.pool.ref_count(block) > 1:
                    self.pool.free([block])
                    [self.blocks[index]] = self.pool.allocate(1)
                    copies.append((block, self.blocks[index]))
            return copies

    return Answer


def _copying_if(condition):
    """A table that copies its last block on ``condition(table, n_tokens)``."""

    def change(base):
        class Answer(base):
            def append(self, n_tokens):
                if n_tokens < 0 or not self.blocks or not condition(self, n_tokens):
                    return _without_copy(base)(self, n_tokens)
                copy, *new = self.pool.allocate(1 + self._missing(n_tokens))
                old = self.blocks.pop()
                self.pool.free([old])
                self.blocks += [copy, *new]
                self.num_tokens += n_tokens
                return [(old, copy)]

        return Answer

    return _table(change)


def _shared(table):
    return table.pool.ref_count(table.blocks[-1]) > 1


def _has_room(table):
    return table.num_tokens % table.pool.block_size > 0


@wrong("copies a full block", case="copies only when needed")
@_copying_if
def full(table, n_tokens):
    return n_tokens > 0 and _shared(table)


@wrong("copies when nothing is written", case="copies only when needed")
@_copying_if
def nothing_written(table, n_tokens):
    return _has_room(table) and _shared(table)


@wrong("copies a block that nobody else holds", case="copies only when needed")
@_copying_if
def unshared(table, n_tokens):
    return n_tokens > 0 and _has_room(table)


@wrong("once forked, copies for ever", case="copies only when needed")
@_table
def forked_once(base):
    class Answer(base):
        forked = False

        def fork(self):
            child = super().fork()
            child.forked = self.forked = True
            return child

        def append(self, n_tokens):
            inside = n_tokens > 0 and self.num_tokens % self.pool.block_size
            if not (inside and self.forked) or self.pool.ref_count(self.blocks[-1]) > 1:
                return super().append(n_tokens)
            [copy] = self.pool.allocate(1)
            old, self.blocks[-1] = self.blocks[-1], copy
            self.pool.free([old])
            super().append(n_tokens)
            return [(old, copy)]

    return Answer


@wrong("the copy is kept although the new blocks are missing", case="all or nothing")
@_table
def copy_kept(base):
    class Answer(base):
        def append(self, n_tokens):
            copies = super().append(1) if n_tokens > 0 else []
            return copies + super().append(n_tokens - 1 if n_tokens > 0 else n_tokens)

    return Answer


@wrong("lets go of the old block before it has a new one", case="all or nothing")
@_table
def lets_go_first(base):
    class Answer(base):
        def append(self, n_tokens):
            if n_tokens <= 0 or not _has_room(self) or not _shared(self):
                return super().append(n_tokens)
            old = self.blocks.pop()
            self.pool.free([old])
            copy, *new = self.pool.allocate(self._missing(n_tokens))
            self.blocks += [copy, *new]
            self.num_tokens += n_tokens
            return [(old, copy)]

    return Answer


@wrong("without a block for the copy, writes into the shared one", case="all or nothing")
@_table
def writes_anyway(base):
    class Answer(base):
        def append(self, n_tokens):
            try:
                return super().append(n_tokens)
            except OutOfBlocks:
                return _without_copy(base)(self, n_tokens)

    return Answer


@wrong("copies before it looks at the number of tokens", case="copies only when needed")
@_table
def negative(base):
    class Answer(base):
        def append(self, n_tokens):
            return super().append(max(n_tokens, 0)) if self.blocks and _shared(self) else super().append(n_tokens)

    return Answer


@wrong("ref count lost on abort: a fork leaves without giving its blocks back", case="gives everything back")
@_table
def lost(base):
    class Answer(base):
        def release(self):
            self.pool.free([block for block in self.blocks if self.pool.ref_count(block) == 1])
            self.blocks, self.num_tokens = [], 0

    return Answer


@wrong("the first to leave takes the others' blocks away", case="gives everything back")
@_table
def takes_away(base):
    class Answer(base):
        def release(self):
            for block in self.blocks:
                self.pool.free([block] * self.pool.ref_count(block))
            self.blocks, self.num_tokens = [], 0

    return Answer


@wrong("a negative number takes tokens back, with a copy", case="copies only when needed")
@_table
def takes_back(base):
    class Answer(base):
        def append(self, n_tokens):
            if n_tokens >= 0 or not self.blocks or not _shared(self):
                return super().append(n_tokens)
            copies = super().append(0) + super().append(1)
            self.num_tokens += n_tokens - 1
            return copies

    return Answer


@wrong("one block too few is allocated: none for the copy", case="puts the copy in place")
@_table
def one_too_few(base):
    class Answer(base):
        def append(self, n_tokens):
            if n_tokens <= 0 or not _has_room(self) or not _shared(self):
                return super().append(n_tokens)
            copy, *new = self.pool.allocate(self._missing(n_tokens))
            old = self.blocks.pop()
            self.pool.free([old])
            self.blocks += [copy, *new]
            self.num_tokens += n_tokens
            return [(old, copy)]

    return Answer


@wrong("the copy takes the place of a new block", case="puts the copy in place")
@_table
def only_a_copy(base):
    class Answer(base):
        def append(self, n_tokens):
            if n_tokens <= 0 or not _has_room(self) or not _shared(self):
                return super().append(n_tokens)
            copy, *new = self.pool.allocate(max(1, self._missing(n_tokens)))
            old = self.blocks.pop()
            self.pool.free([old])
            self.blocks += [copy, *new]
            self.num_tokens += n_tokens
            return [(old, copy)]

    return Answer


@wrong("the fork counts no tokens", case="forks share")
@_table
def fork_counts_nothing(base):
    class Answer(base):
        def fork(self):
            child = super().fork()
            child.num_tokens = 0
            return child

    return Answer


def _copier(change):
    """A wrong `copy_blocks` with the reference's table."""
    return lambda reference: (reference.ForkableTable, change)


@wrong("data not moved", case="moves the data")
@_copier
def not_moved(k_cache, v_cache, copies):
    pass


@wrong("only the keys are moved", case="moves the data")
@_copier
def keys_only(k_cache, v_cache, copies):
    for source, destination in copies:
        k_cache[destination] = k_cache[source]


@wrong("the keys are copied over the values", case="moves the data")
@_copier
def keys_twice(k_cache, v_cache, copies):
    for source, destination in copies:
        k_cache[destination] = v_cache[destination] = k_cache[source]


@wrong("copies into new tensors", case="moves the data")
@_copier
def new_tensors(k_cache, v_cache, copies):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for source, destination in copies:
        k_cache[destination], v_cache[destination] = k_cache[source], v_cache[source]
    return k_cache, v_cache


@wrong("takes the copies off the caller's list", case="moves the data")
@_copier
def takes_off(k_cache, v_cache, copies):
    while copies:
        source, destination = copies.pop()
        k_cache[destination], v_cache[destination] = k_cache[source], v_cache[source]


@wrong("only the first copy is made", case="moves the data")
@_copier
def first_only(k_cache, v_cache, copies):
    for source, destination in copies[:1]:
        k_cache[destination], v_cache[destination] = k_cache[source], v_cache[source]


@wrong("only the first token of a block is copied", case="moves the data")
@_copier
def first_token(k_cache, v_cache, copies):
    for source, destination in copies:
        k_cache[destination, 0], v_cache[destination, 0] = k_cache[source, 0], v_cache[source, 0]


@wrong("only the first head is copied", case="moves the data")
@_copier
def first_head(k_cache, v_cache, copies):
    for source, destination in copies:
        k_cache[destination, :, 0], v_cache[destination, :, 0] = k_cache[source, :, 0], v_cache[source, :, 0]


@wrong("destinations are overwritten with nothing when there is nothing to copy", case="moves the data")
@_copier
def empty_list(k_cache, v_cache, copies):
    sources, destinations = zip(*copies, strict=True)
    k_cache[list(destinations)] = k_cache[list(sources)]
    v_cache[list(destinations)] = v_cache[list(sources)]


@wrong("from the third generation on, writes into shared blocks", case="long runs")
@_table
def third_generation(base):
    class Answer(base):
        generation = 0

        def fork(self):
            child = super().fork()
            child.generation = self.generation + 1
            return child

        def append(self, n_tokens):
            return super().append(n_tokens) if self.generation < 3 else _without_copy(base)(self, n_tokens)

    return Answer
