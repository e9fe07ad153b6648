"""Named answers to `paged_kv.block_table`."""

import numpy as np

from servelab.answers import right, wrong
from servelab.kv import OutOfBlocks


@right("one block at a time, with a roll-back")
def roll_back(reference):
    class Answer:
        def __init__(self, pool):
            self.pool, self.blocks, self.num_tokens = pool, [], 0

        def append(self, n_tokens):
            if n_tokens < 0:
                raise ValueError
            taken = []
            try:
                while self.num_tokens + n_tokens > self.pool.block_size * (len(self.blocks) + len(taken)):
                    taken += self.pool.allocate(1)
            except OutOfBlocks:
                self.pool.free(taken)
                raise
            self.blocks.extend(taken)
            self.num_tokens += n_tokens
            return ()

        def slots(self, start, stop):
            if start < 0 or stop < start or stop > self.num_tokens:
                raise ValueError
            size = self.pool.block_size
            rows = np.array(self.blocks, dtype=int)[:, None] * size + np.arange(size)
            return tuple(rows.reshape(-1)[start:stop])

        def release(self):
            if self.blocks:
                self.pool.free(self.blocks)
            self.blocks, self.num_tokens = [], 0

    return Answer


@right("asks num_free first, turns round what it was given, keeps a tuple")
def looks_first(reference):
    class Answer:
        def __init__(self, pool):
            self.pool, self.size = pool, pool.block_size
            self.blocks, self.num_tokens = (), 0

        def append(self, n_tokens):
            if n_tokens < 0:
                raise ValueError
            room = len(self.blocks) * self.size - self.num_tokens
            missing = max(0, (n_tokens - room + self.size - 1) // self.size)
            if missing > self.pool.num_free:
                raise OutOfBlocks
            self.blocks += tuple(reversed(self.pool.allocate(missing)))
            self.num_tokens += n_tokens
            return []

        def slots(self, start, stop):
            if not (0 <= start <= stop <= self.num_tokens):
                raise ValueError
            return [block * self.size + offset for block in self.blocks for offset in range(self.size)][start:stop]

        def release(self):
            for block in self.blocks:
                self.pool.free([block])
            self.blocks, self.num_tokens = (), 0

    return Answer


@wrong("rounds up every append on its own", case="takes blocks as needed")
def every_append(reference):
    class Answer(reference.BlockTable):
        def append(self, n_tokens):
            self.blocks += self.pool.allocate(-(-n_tokens // self.pool.block_size))
            self.num_tokens += n_tokens
            return []

    return Answer


@wrong("takes the next block when the last is full", case="takes blocks as needed")
def too_early(reference):
    class Answer(reference.BlockTable):
        def _missing(self, n_tokens):
            return (self.num_tokens + n_tokens) // self.pool.block_size + 1 - len(self.blocks)

    return Answer


@wrong("takes at most one block", case="takes blocks as needed")
def at_most_one(reference):
    class Answer(reference.BlockTable):
        def _missing(self, n_tokens):
            return min(1, super()._missing(n_tokens))

    return Answer


@wrong("reserves for the longest answer", case="takes blocks as needed")
def reserves(reference):
    class Answer(reference.BlockTable):
        def _missing(self, n_tokens):
            return max(super()._missing(n_tokens), 2 - len(self.blocks))

    return Answer


@wrong("all tables share one list", case="takes blocks as needed")
def one_list(reference):
    everything = []

    class Answer(reference.BlockTable):
        def __init__(self, pool):
            super().__init__(pool)
            self.blocks = everything

    return Answer


@wrong("reports a copy of every new block", case="takes blocks as needed")
def reports(reference):
    class Answer(reference.BlockTable):
        def append(self, n_tokens):
            before = len(self.blocks)
            super().append(n_tokens)
            return [(block, block) for block in self.blocks[before:]]

    return Answer


@wrong("slots as if blocks were contiguous", case="finds slots")
def contiguous(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            slots = super().slots(start, stop)
            first = self.blocks[0] * self.pool.block_size if self.blocks else 0
            return [first + start + i for i, _ in enumerate(slots)]

    return Answer


@wrong("slots without the table", case="finds slots")
def no_table(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            return list(range(start, start + len(super().slots(start, stop))))

    return Answer


@wrong("stop is included", case="finds slots")
def inclusive(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            return super().slots(start, min(stop + 1, max(stop, self.num_tokens)))

    return Answer


@wrong("pairs of block and offset", case="finds slots")
def pairs(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            return [divmod(slot, self.pool.block_size) for slot in super().slots(start, stop)]

    return Answer


@wrong("room in the last block has slots, too", case="refuses bad ranges")
def room(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            held, self.num_tokens = self.num_tokens, len(self.blocks) * self.pool.block_size
            try:
                return super().slots(start, stop)
            finally:
                self.num_tokens = held

    return Answer


@wrong("bad ranges are cut to size", case="refuses bad ranges")
def cut(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            stop = min(stop, self.num_tokens)
            return super().slots(min(max(start, 0), stop), max(stop, 0))

    return Answer


@wrong("negative positions count from the end", case="refuses bad ranges")
def from_the_end(reference):
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            if start < 0:
                start, stop = start + self.num_tokens, stop + self.num_tokens if stop < 0 else stop
            return super().slots(start, max(stop, start))

    return Answer


@wrong("appends a negative number of tokens", case="all or nothing")
def shrinks(reference):
    class Answer(reference.BlockTable):
        def _missing(self, n_tokens):
            return max(0, -(-(self.num_tokens + n_tokens) // self.pool.block_size) - len(self.blocks))

    return Answer


@wrong("partial allocation kept on failure", case="all or nothing")
def partial(reference):
    class Answer(reference.BlockTable):
        def append(self, n_tokens):
            for _ in range(self._missing(n_tokens)):
                self.blocks += self.pool.allocate(1)
            self.num_tokens += n_tokens
            return []

    return Answer


@wrong("tokens counted before the blocks are there", case="all or nothing")
def counted_first(reference):
    class Answer(reference.BlockTable):
        def append(self, n_tokens):
            missing = self._missing(n_tokens)
            self.num_tokens += n_tokens
            self.blocks += self.pool.allocate(missing)
            return []

    return Answer


@wrong("appends what fits", case="all or nothing")
def what_fits(reference):
    class Answer(reference.BlockTable):
        def append(self, n_tokens):
            try:
                return super().append(n_tokens)
            except OutOfBlocks:
                return []

    return Answer


@wrong("ref count lost on abort: the list is dropped, the blocks are not freed", case="gives everything back")
def dropped(reference):
    class Answer(reference.BlockTable):
        def release(self):
            self.blocks, self.num_tokens = [], 0

    return Answer


@wrong("second release frees again", case="gives everything back")
def frees_again(reference):
    class Answer(reference.BlockTable):
        def release(self):
            self.pool.free(self.blocks)

    return Answer


@wrong("the part-filled block is not given back", case="gives everything back")
def keeps_the_last(reference):
    class Answer(reference.BlockTable):
        def release(self):
            self.pool.free(self.blocks[: self.num_tokens // self.pool.block_size])
            self.blocks, self.num_tokens = [], 0

    return Answer


@wrong("tokens still counted after release", case="gives everything back")
def still_counted(reference):
    class Answer(reference.BlockTable):
        def release(self):
            self.pool.free(self.blocks)
            self.blocks = []

    return Answer


@wrong("release before the first append fails", case="gives everything back")
def release_fails(reference):
    class Answer(reference.BlockTable):
        def release(self):
            self.pool.free([self.blocks[0], *self.blocks[1:]])
            self.blocks, self.num_tokens = [], 0

    return Answer


@wrong("remembers the slots of a range for ever", case="long runs")
def remembers(reference):
    class Answer(reference.BlockTable):
        def __init__(self, pool):
            super().__init__(pool)
            self.found = {}

        def slots(self, start, stop):
            slots = super().slots(start, stop)
            return self.found.setdefault((start, stop), slots)

    return Answer
