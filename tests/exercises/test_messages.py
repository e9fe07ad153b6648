"""What a learner reads when a block pool, a table or a cache goes wrong: the step, and what came in place of what."""

from random import Random

import numpy as np
import pytest

from servelab import exercise
from servelab.reference import paged_kv as reference


def first_failure(name, *answers):
    """The first failed case, with the listing of its smallest failing input."""
    subject = exercise.find(f"paged_kv.{name}")
    right = tuple(getattr(reference, answer) for answer in subject.answers)
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), right)
    recorded = [exercise.record(subject, probe.challenge, answers) for probe in probes]
    case = exercise.judge(subject, probes, recorded).first_failure
    return case, subject.show(probes[case.failed_on].challenge)


def allocator(**methods):
    return type("Answer", (reference.BlockAllocator,), methods)


def broken(self, blocks):
    return self.nothing


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"free": broken}, "but your code raised AttributeError: 'Answer' object has no attribute 'nothing'"),
        ({"free": lambda self, blocks: {}["a"]}, "but your code raised KeyError: 'a'"),
        ({"num_free": lambda self: 0}, "num_free: expected 1, got a method; keep the @property above it"),
        ({"allocate": lambda self, n: np.arange(n)}, "got an array or tensor of int64 with shape [0]; it must be"),
        ({"allocate": lambda self, n: (i for i in range(n))}, "got a generator; it must be a list of int"),
        ({"allocate": lambda self, n: None}, "but it returned None"),
        ({"ref_count": lambda self, block: 7}, "ref_count(0): expected 0, got 7"),
    ],
)
def test_the_allocator(methods, text):
    case, _ = first_failure("block_allocator", allocator(**methods))
    assert text in case.message


def test_a_method_that_is_not_written_is_named():
    def free(self, blocks):
        raise NotImplementedError

    case, _ = first_failure("block_allocator", allocator(free=free))
    assert "is not written yet" in case.message


def test_a_message_quotes_the_numbered_line_of_the_listing():
    class Answer(reference.PrefixCache):
        def share(self, blocks):
            cached = [block for block in blocks if block in self._cached]
            super().share(blocks)
            self._cached |= dict.fromkeys(cached)

    case, listing = first_failure("prefix_cache", Answer)
    number, line = case.message.removeprefix("after step ").split(", ", 1)
    quoted = next(row for row in listing.splitlines() if row.endswith(f"# step {number}"))
    assert line.startswith(quoted.partition("  # ")[0])


def test_lines_of_an_admission_are_numbered_one_by_one():
    subject = exercise.find("paged_kv.prefix_cache")
    challenge = next(c for c in subject.challenges(Random(1)) if "admit" in str(c["ops"]) and "allocation" in c["case"])
    rows = [row for row in subject.show(challenge).splitlines() if "# step " in row]
    numbers = [int(row.partition("# step ")[2].partition(";")[0]) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    assert any("if it raises: cache.free(" in row for row in rows)


def test_pairs_are_shown_as_pairs():
    class Answer(reference.ForkableTable):
        def append(self, n_tokens):
            return [(new, old) for old, new in super().append(n_tokens)]

    case, _ = first_failure("fork", Answer, reference.copy_blocks)
    assert "expected [(3, 1)], got [(1, 3)]" in case.message and case.spec.hint == 3


def test_of_long_lists_the_first_difference_is_shown():
    class Answer(reference.BlockTable):
        def slots(self, start, stop):
            slots = super().slots(start, stop)
            return slots[:12] + [slot + 1 for slot in slots[12:]]

    case, _ = first_failure("block_table", Answer)
    assert "at index 12, got" in case.message and len(case.message) < 120


def test_a_listing_of_tables_can_be_pasted():
    subject = exercise.find("paged_kv.fork")
    challenge = next(c for c in subject.challenges(Random(1)) if c["case"] == "forks share")
    scope = {"ForkableTable": reference.ForkableTable}
    exec(subject.show(challenge), scope)
    assert scope["t1"].blocks == scope["t0"].blocks


def test_a_pasted_listing_goes_on_behind_a_call_that_must_be_refused(capsys):
    class Answer(reference.BlockAllocator):
        def allocate(self, n):
            return super().allocate(max(n, 0))

    case, listing = first_failure("block_allocator", Answer)
    assert case.message == "step 4, g0 = pool.allocate(-1): expected ValueError, but it returned []"
    exec(listing, {"BlockAllocator": Answer})
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "pool.ref_count(2)  # step 1  -> raised ValueError: no block 2 among 2"
    assert printed[3:5] == ["pool.ref_count(1)  # step 3  -> 0", "g0 = pool.allocate(-1)  # step 4  -> []"]


def test_a_pasted_admission_that_fails_gives_its_hit_back(capsys):
    subject = exercise.find("paged_kv.prefix_cache")
    challenge = next(c for c in subject.challenges(Random(1)) if "admit" in str(c["ops"]) and "allocation" in c["case"])
    scope = {"PrefixCache": reference.PrefixCache}
    exec(subject.show(challenge), scope)
    out = capsys.readouterr().out
    assert "-> raised OutOfBlocks" in out and "\ncache.free(c)  -> None\n" in out


def test_a_duplicate_that_raises_names_the_hint():
    class Answer(reference.PrefixCache):
        def insert(self, tokens, blocks, key=None):
            for block, digest in zip(blocks, self._hashes(tokens, key), strict=False):
                self._hash_of[block], self._blocks_of[digest] = digest, {block: None}

    case = failures("prefix_cache", Answer)["lives with duplicates"]
    assert "KeyError" in case.message and case.failure_hint == 3


def failures(name, *answers):
    """All failed cases, by name."""
    subject = exercise.find(f"paged_kv.{name}")
    right = tuple(getattr(reference, answer) for answer in subject.answers)
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), right)
    recorded = [exercise.record(subject, probe.challenge, answers) for probe in probes]
    return {case.spec.name: case for case in exercise.judge(subject, probes, recorded).cases if case.message}


def test_a_hit_that_raises_says_what_was_expected():
    class Answer(reference.PrefixCache):
        def match(self, tokens, key=None):
            if len(tokens) > 1:
                raise KeyError(7)
            return [], 0

    case, _ = first_failure("prefix_cache", Answer)
    assert "expected a hit of 0 blocks, but your code raised KeyError: 7" in case.message


def test_a_wrong_fork_is_not_a_second_fault_of_the_copy():
    class Answer(reference.ForkableTable):
        def fork(self):
            child = super().fork()
            child.num_tokens = 0
            return child

    found = failures("fork", Answer, reference.copy_blocks)
    assert "num_tokens" in found["forks share"].message
    assert found["puts the copy in place"].message == "not reached: no copy was made"


def test_copies_that_should_not_have_been_made_are_shown_as_pairs():
    class Answer(reference.ForkableTable):
        def append(self, n_tokens):
            return super().append(n_tokens) if n_tokens >= 0 else super().append(1)

    assert (
        "expected ValueError, but it returned [(3, 1)]"
        in failures("fork", Answer, reference.copy_blocks)["copies only when needed"].message
    )
