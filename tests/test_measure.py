"""`servelab.measure`: costs that grow with the pool show as growing ratios, and an answer that fails is named."""

import time

import pytest

from servelab import measure
from servelab.reference import continuous_batching
from servelab.reference import paged_kv as reference


def ratios(capsys):
    """The last column of what was printed, a list for each table."""
    tables = []
    for line in capsys.readouterr().out.splitlines():
        if "ratio" in line:
            tables.append([])
        else:
            tables[-1].append(float(line.split()[-1]))
    return tables


class Scanning(reference.BlockAllocator):
    def allocate(self, n):
        taken = [block for block in range(self.num_blocks) if not self._holders[block]][:n]
        for block in taken:
            self._free.remove(block)
            self._holders[block] = 1
        return taken


class LongKeys(reference.PrefixCache):
    """A block's key covers all tokens before it, nested, instead of a hash of them."""

    def _hashes(self, tokens, key):
        hashes, parent = [], None
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = parent, tuple(tokens[start : start + self.block_size]), key
            hashes.append(parent)
        return hashes


def test_the_reference_stays_flat(capsys):
    measure.block_pool(reference.BlockAllocator)
    measure.prefix_cache(reference.PrefixCache)
    tables = ratios(capsys)
    assert [len(table) for table in tables] == [3, 3, 3]
    assert all(table[0] == 1 and max(table) < 8 for table in tables)


def test_growth_shows(capsys):
    measure.block_pool(Scanning)
    measure.prefix_cache(LongKeys)
    pool, _, prompt = ratios(capsys)
    assert pool[2] > 20 and prompt[2] > 5


def test_a_scheduler_that_looks_at_the_whole_queue_shows(capsys):
    class Looks(continuous_batching.Scheduler):
        def schedule(self):
            self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda seq: seq.request.arrival))
            return super().schedule()

    measure.scheduler(continuous_batching.Scheduler, (100, 10_000))
    measure.scheduler(Looks, (100, 10_000))
    flat, grows = ratios(capsys)
    assert flat[1] < 8 < grows[1]


def test_a_slow_answer_does_not_take_long():
    class Slow(reference.BlockAllocator):
        @property
        def num_free(self):
            return sum(count == 0 for count in self._holders)

    start = time.perf_counter()
    measure.block_pool(Slow)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotImplementedError(), "Answer is not written yet"),
        (KeyError("block"), "your code raised KeyError: 'block'"),
    ],
)
def test_an_answer_that_fails_is_named(error, text, capsys):
    class Answer:
        def __init__(self, num_blocks, block_size):
            raise error

    measure.block_pool(Answer)
    measure.prefix_cache(Answer)
    printed = capsys.readouterr().out
    assert printed.count(text) == 2 and "ratio" not in printed
