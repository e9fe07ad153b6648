"""Named answers to `paged_kv.block_allocator`."""

from collections import Counter
from typing import ClassVar

import numpy as np

from servelab.answers import right, wrong
from servelab.exercises.paged_kv._pool import ScriptedPool
from servelab.kv import OutOfBlocks


@right("a bitmap that hands out the lowest ids")
def bitmap(reference):
    class Answer:
        def __init__(self, num_blocks, block_size):
            self.refs = np.zeros(num_blocks, dtype=int)

        @property
        def num_free(self):
            return (self.refs == 0).sum()

        def ref_count(self, block):
            if block not in range(len(self.refs)):
                raise ValueError
            return self.refs[block]

        def allocate(self, n):
            if n < 0:
                raise ValueError
            free = np.flatnonzero(self.refs == 0)
            if n > len(free):
                raise OutOfBlocks
            self.refs[free[:n]] = 1
            return tuple(free[:n])

        def change(self, blocks, by):
            if any(times > 1 or not self.ref_count(block) for block, times in Counter(blocks).items()):
                raise ValueError
            self.refs[list(blocks)] += by

        def share(self, blocks):
            self.change(blocks, 1)

        def free(self, blocks):
            self.change(blocks, -1)

    return Answer


@right("a set of free ids, a dictionary of holders, errors of its own kind")
def sets(reference):
    class DoubleFree(ValueError):
        pass

    class Answer:
        def __init__(self, num_blocks, block_size):
            self.ids, self.refs = range(num_blocks), {}
            self.idle = set(self.ids)

        num_free = property(lambda self: len(self.idle))

        def ref_count(self, block):
            if block not in self.ids:
                raise DoubleFree(block)
            return self.refs.get(block, 0)

        def allocate(self, n):
            if n < 0:
                raise ValueError(n)
            if n > len(self.idle):
                raise OutOfBlocks(n)
            return [self.take() for _ in range(n)]

        def take(self):
            block = max(self.idle)
            self.idle.remove(block)
            self.refs[block] = 1
            return block

        def share(self, blocks):
            if len({*blocks}) < len(blocks) or not {*blocks} <= self.refs.keys():
                raise DoubleFree(blocks)
            self.refs |= {block: self.refs[block] + 1 for block in blocks}
            return self

        def free(self, blocks):
            if len({*blocks}) < len(blocks) or not {*blocks} <= self.refs.keys():
                raise DoubleFree(blocks)
            for block in blocks:
                self.refs[block] -= 1
                if self.refs[block] == 0:
                    self.idle.add(block)
                    del self.refs[block]
            return list(blocks)

    return Answer


@right("goes ahead and takes back what it did when a call is refused")
def undo(reference):
    class Answer(reference.BlockAllocator):
        def share(self, blocks):
            self.all_or_none(blocks, super().share, super().free)

        def free(self, blocks):
            if any(self.ref_count(block) == 1 for block in blocks):  # what left the pool could not be taken back
                return super().free(blocks)
            return self.all_or_none(blocks, super().free, super().share)

        def all_or_none(self, blocks, do, undo):
            done = []
            try:
                for block in blocks:
                    if block in done:
                        raise ValueError
                    do([block])
                    done.append(block)
            except ValueError:
                undo(done)
                raise

    return Answer


@wrong("hands out one block too few", case="hands out free blocks")
def too_few(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            taken = super().allocate(n)
            self.free(taken[1:2])
            return taken[:1] + taken[2:]

    return Answer


@wrong("all pools have one list of free ids, which a new one fills", case="hands out free blocks")
def one_list(reference):
    class Answer(reference.BlockAllocator):
        ids: ClassVar[list] = []

        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks, block_size)
            self.ids[:] = self._free
            self._free = self.ids

    return Answer


@wrong("never hands out the last block", case="hands out free blocks")
def off_by_one(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            if n >= self.num_free:
                raise OutOfBlocks
            return super().allocate(n)

    return Answer


@wrong("a counter that never comes back to freed ids", case="hands out free blocks")
def counter(reference):
    class Answer(reference.BlockAllocator):
        next_id = 0

        def allocate(self, n):
            super().allocate(n)
            self.next_id += n
            return list(range(self.next_id - n, self.next_id))

    return Answer


@wrong("partial allocation kept on failure", case="all or nothing")
def partial(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            if n < 0:
                raise ValueError
            return [super(Answer, self).allocate(1)[0] for _ in range(n)]

    return Answer


@wrong("hands out what there is", case="all or nothing")
def what_there_is(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            return super().allocate(min(n, self.num_free))

    return Answer


@wrong("runs out with an IndexError", case="all or nothing")
def index_error(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            if n > self.num_free:
                raise IndexError("pop from empty list")
            return super().allocate(n)

    return Answer


@wrong("the first free takes a shared block away from the others", case="counts holders")
def no_counts(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            for block in blocks:
                for _ in range(self.ref_count(block)):
                    super().free([block])

    return Answer


@wrong("share does nothing", case="counts holders")
def share_nothing(reference):
    class Answer(reference.BlockAllocator):
        def share(self, blocks):
            self._require_held(blocks)

    return Answer


@wrong("a shared block is never free again", case="counts holders")
def leak(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            self._require_held(blocks)
            shared = [block for block in blocks if self.ref_count(block) > 1]
            super().free([block for block in blocks if block not in shared])

    return Answer


@wrong("num_free counts holders, not blocks", case="counts holders")
def counts_references(reference):
    class Answer(reference.BlockAllocator):
        @property
        def num_free(self):
            return max(0, self.num_blocks - sum(self._holders))

    return Answer


@wrong("free empties the caller's list", case="leaves its arguments unchanged")
def empties(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            super().free(blocks)
            blocks.clear()

    return Answer


@wrong("share sorts the caller's list", case="leaves its arguments unchanged")
def sorts(reference):
    class Answer(reference.BlockAllocator):
        def share(self, blocks):
            super().share(blocks)
            blocks.sort()

    return Answer


@wrong("double free accepted", case="refuses misuse")
def double_free(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            for block in blocks:
                self._holders[block] = max(0, self._holders[block] - 1)
                if not self._holders[block] and block not in self._free:
                    self._free.append(block)

    return Answer


@wrong("a double free makes the block free twice", case="refuses misuse")
def free_twice(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            for block in blocks:
                self._holders[block] -= 1
                if self._holders[block] <= 0:
                    self._free.append(block)

    return Answer


@wrong("a free that is refused is half done", case="refuses misuse")
def half_done(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            for block in blocks:
                super().free([block])

    return Answer


@wrong("the same id twice in one call accepted", case="refuses misuse")
def named_twice(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            if any(times > self.ref_count(block) for block, times in Counter(blocks).items()):
                raise ValueError
            for block in blocks:
                super().free([block])

    return Answer


@wrong("a free block can be shared", case="refuses misuse")
def share_free(reference):
    class Answer(reference.BlockAllocator):
        def share(self, blocks):
            for block in blocks:
                if not self.ref_count(block):
                    self._free.remove(block)
                self._holders[block] += 1

    return Answer


def _base(change):
    return lambda reference: change(reference.BlockAllocator)


@wrong("looks at each block when its turn comes: share", case="refuses misuse")
@_base
def share_in_turn(base):
    class Answer(base):
        def share(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in blocks:
                super().share([block])

    return Answer


@wrong("looks at each block when its turn comes, from the end: share", case="refuses misuse")
@_base
def share_from_the_end(base):
    class Answer(base):
        def share(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in reversed(blocks):
                super().share([block])

    return Answer


@wrong("looks at each block when its turn comes: free", case="refuses misuse")
@_base
def free_in_turn(base):
    class Answer(base):
        def free(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in blocks:
                super().free([block])

    return Answer


@wrong("looks at each block when its turn comes, from the end: free", case="refuses misuse")
@_base
def free_from_the_end(base):
    class Answer(base):
        def free(self, blocks):
            if len(set(blocks)) < len(blocks):
                raise ValueError
            for block in reversed(blocks):
                super().free([block])

    return Answer


@wrong("meets a block named twice only when its turn comes", case="refuses misuse")
@_base
def twice_in_turn(base):
    class Answer(base):
        def free(self, blocks):
            self._require_held(list(set(blocks)))
            seen = set()
            for block in blocks:
                if block in seen:
                    raise ValueError
                seen.add(block)
                super().free([block])

    return Answer


@wrong("looks at the first and the last block only", case="refuses misuse")
@_base
def ends_only(base):
    class Answer(base):
        def free(self, blocks):
            self._require_held(list({*blocks[:1], *blocks[-1:]}))
            for block in blocks:
                super().free([block])

    return Answer


@wrong("negative ids count from the end", case="refuses misuse")
def negative(reference):
    class Answer(reference.BlockAllocator):
        def free(self, blocks):
            super().free([range(self.num_blocks)[block] for block in blocks])

    return Answer


@wrong("an id past the end raises IndexError", case="refuses misuse")
def past_the_end(reference):
    class Answer(reference.BlockAllocator):
        def ref_count(self, block):
            if block < 0:
                raise ValueError
            return self._holders[block]

    return Answer


@wrong("a negative number of blocks accepted", case="refuses misuse")
def negative_number(reference):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            return super().allocate(max(n, 0))

    return Answer


@wrong("the scripted pool of the later checks", case="refuses misuse")
def double(reference):
    return lambda num_blocks, block_size: ScriptedPool(range(num_blocks), block_size)


@wrong("after many frees one block is gone", case="long runs")
def slow_leak(reference):
    class Answer(reference.BlockAllocator):
        frees = 0

        def free(self, blocks):
            super().free(blocks)
            self.frees += 1
            if self.frees % 10 == 0:
                self._free.pop()

    return Answer
