"""Blocks as tokens come, and preemption when they run out: plans are judged step by step by a referee.

In every directed case all that differs from the first scheduler is forced: who is admitted, who is preempted, and what
is computed again. When a block is taken is not: with the step that needs it, or after the step before.
"""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.continuous_batching import _server as server
from servelab.exercises.continuous_batching._server import add, limits

ANSWERS = ("PagedScheduler",)
COMPARED = False
SERVES, ADMITS, TAKES = "serves when there is room", "admits what fits now", "takes blocks as tokens come"
PREEMPTS, RESUMES = "preempts the latest arrival", "resumes with all its tokens"
FRONT, WATERMARK = "waits in front of the queue", "keeps the watermark"
LIMITS, REFUSES = "keeps the limits of a step", "refuses what can never run"
ABORTS, LONG = "forgets what is aborted", "long runs"
CASES = (
    CaseSpec(SERVES, hint=1, weight=2),
    CaseSpec(ADMITS, hint=1, weight=2),
    CaseSpec(TAKES, hint=1, weight=2),
    CaseSpec(PREEMPTS, hint=2, weight=3),
    CaseSpec(RESUMES, hint=2, weight=3),
    CaseSpec(FRONT, hint=3, weight=2),
    CaseSpec(LIMITS, hint=2),
    CaseSpec(WATERMARK, hint=3, weight=2),
    CaseSpec(REFUSES, hint=3),
    CaseSpec(ABORTS, hint=3),
    CaseSpec(LONG, hint=3, weight=2),
)
RULES = server.Rules()
TIGHT = [add(0, "a", 7, 6), add(0, "b", 6, 5)]  # with 4 blocks of 4 the second is preempted in step 2

# case, limits, (blocks, block size), events, EOS after so many tokens
DIRECTED: tuple[tuple[str, dict, tuple[int, int], list[list], dict[str, int]], ...] = (
    (SERVES, limits(1, 8), (2, 4), [add(0, "a", 3, 3)], {}),
    (SERVES, limits(2, 9), (9, 4), [add(0, "a", 5, 4), add(0, "b", 5, 2), add(0, "c", 1, 2)], {"a": 2}),
    (SERVES, limits(2, 9), (9, 4), [add(1, "d", 2, 6), add(1, "c", 1, 1), add(1, "b", 2, 2), add(6, "a", 3, 1)], {}),
    (ADMITS, limits(2, 16), (3, 4), [add(0, "a", 4, 9), add(0, "b", 4, 1)], {}),  # 3 blocks are for both
    (ADMITS, limits(3, 16), (3, 4), [add(0, "a", 3, 9), add(0, "c", 5, 4), add(0, "b", 2, 1)], {"a": 2, "c": 2}),
    (ADMITS, limits(2, 16), (3, 4), [add(0, "a", 4, 5), add(0, "b", 4, 9)], {"b": 1}),  # b's answer may need all
    (ADMITS, limits(3, 16), (3, 4), [add(0, "a", 5, 3), add(0, "c", 5, 4), add(0, "b", 2, 1)], {}),  # nobody overtakes
    (TAKES, limits(1, 16), (4, 4), [add(0, "a", 3, 10)], {}),
    (TAKES, limits(2, 16), (9, 1), [add(0, "a", 1, 4), add(0, "b", 2, 3)], {}),
    (TAKES, limits(2, 16), (4, 4), [add(0, "a", 4, 5), add(0, "b", 4, 5)], {}),  # the last block is taken, none lacks
    (PREEMPTS, limits(2, 16), (4, 4), TIGHT, {}),
    (PREEMPTS, limits(3, 16), (4, 3), [add(0, "c", 3, 6), add(0, "b", 3, 6), add(0, "a", 3, 6)], {}),
    (PREEMPTS, limits(2, 16), (4, 4), [add(0, "a", 5, 8), add(1, "b", 8, 5)], {}),  # the latest finds no block itself
    # two victims in one step
    (PREEMPTS, limits(4, 16), (9, 1), [add(0, "a", 3, 5), add(0, "b", 2, 5), add(1, "c", 1, 3), add(1, "d", 1, 3)], {}),
    (PREEMPTS, limits(3, 16), (6, 2), [add(0, "a", 2, 7), add(0, "b", 4, 3), add(0, "c", 4, 3)], {}),  # one is enough
    (RESUMES, limits(2, 16), (4, 4), [add(0, "a", 8, 5), add(0, "b", 6, 6)], {}),
    (RESUMES, limits(2, 16), (4, 4), TIGHT, {"b": 4}),  # EOS counts from the first token on
    (RESUMES, limits(2, 16), (4, 4), TIGHT, {"b": 3}),  # EOS comes with the step that resumes
    (RESUMES, limits(2, 16), (5, 2), [add(0, "a", 3, 7), add(0, "b", 2, 8)], {}),
    (RESUMES, limits(3, 16), (6, 2), [add(0, "a", 3, 7), add(0, "b", 3, 8), add(0, "c", 3, 6)], {}),
    (FRONT, limits(2, 16), (4, 4), [*TIGHT, add(0, "c", 1, 2), add(2, "d", 1, 2)], {}),
    (FRONT, limits(3, 16), (5, 2), [add(0, "a", 3, 7), add(0, "b", 2, 3), add(0, "c", 2, 3), add(1, "d", 2, 3)], {}),
    (
        FRONT,
        limits(4, 16),
        (9, 1),
        [add(0, "a", 3, 5), add(0, "b", 2, 5), add(1, "c", 1, 3), add(1, "d", 1, 3), add(1, "e", 1, 1)],
        {},
    ),
    (LIMITS, limits(2, 12), (9, 4), [add(0, id, 2, n) for id, n in (("a", 3), ("b", 6), ("c", 2), ("d", 2))], {}),
    # tokens that are computed again count, too: in step 6 the KV has room for c, the step has not
    (LIMITS, limits(3, 9), (22, 1), [add(0, "a", 1, 9), add(0, "b", 3, 6), add(0, "c", 4, 6)], {}),
    (LIMITS, limits(2, 16), (4, 4), [*TIGHT, add(7, "c", 1, 2)], {}),
    (LIMITS, limits(2, 16), (5, 2), [add(0, "a", 3, 7), add(0, "b", 2, 8), add(1, "c", 1, 1)], {}),
    (WATERMARK, limits(2, 16, watermark_blocks=2), (4, 4), [add(0, "a", 4, 2), add(0, "b", 4, 2)], {}),
    (WATERMARK, limits(2, 16, watermark_blocks=2), (4, 4), [add(0, "a", 4, 4), add(1, "b", 1, 1)], {}),
    (WATERMARK, limits(1, 16, watermark_blocks=2), (2, 4), [add(0, "a", 5, 2)], {}),  # nothing runs: it is ignored
    (
        WATERMARK,
        limits(2, 16, watermark_blocks=3),
        (4, 4),
        [add(0, "a", 5, 3), add(0, "b", 1, 1), add(9, "c", 1, 1)],
        {},
    ),
    (WATERMARK, limits(2, 16, watermark_blocks=1), (5, 2), [add(0, "a", 3, 7), add(0, "b", 2, 8)], {}),
    # in step 6 there is room for c, but not for the watermark as well
    (
        WATERMARK,
        limits(3, 16, watermark_blocks=7),
        (22, 1),
        [add(0, "a", 1, 9), add(0, "b", 3, 6), add(0, "c", 4, 6)],
        {},
    ),
    (REFUSES, limits(1, 9), (9, 4), [add(0, "a", 5, 6), add(0, "b", 5, 5), add(0, "c", 10, 1)], {}),
    (REFUSES, limits(1, 99), (2, 4), [add(0, "a", 4, 6), add(0, "b", 4, 5), add(0, "c", 9, 1)], {}),
    (REFUSES, limits(2, 16), (4, 4), [*TIGHT, add(3, "b", 1, 1), add(9, "b", 1, 1)], {}),  # preempted is not finished
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [3, "abort", "b"], [4, "abort", "b"], add(4, "c", 1, 2)], {}),
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [1, "abort during", "a"]], {}),
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [4, "abort", "a"]], {}),  # it makes room for b at once
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [3, "abort", "b"], add(3, "b", 2, 2)], {}),
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [2, "abort during", "b"], [2, "add during", "b", 3, 2]], {}),
    (ABORTS, limits(2, 16), (4, 4), [*TIGHT, [2, "abort", "a"], add(2, "c", 3, 2)], {}),
)


def challenges(rng: Random) -> list[dict]:
    """Directed cases, smallest first, then random runs in too little memory."""
    directed = [server.challenge(*row) for row in DIRECTED]
    drawn = [server.drawn(rng, LONG, n, watermark) for n, watermark in ((9, 0), (30, 0), (60, 0), (90, 1))]
    return [*directed, server.queue(LONG), *drawn]


def drive(challenge: dict, scheduler_class) -> list[dict]:
    """Run the script and write down every plan and who holds how many blocks."""
    return server.drive(challenge, scheduler_class)


def judge(challenge: dict, transcript: list, expected: list) -> list[Case]:
    """Follow the run with the referee, who has seen neither the reference's plans nor the scheduler's inside."""
    return server.judged(challenge, RULES, transcript, {"order": 3, "refusal": 3})


def show(challenge: dict) -> str:
    """The run as Python."""
    return server.show(challenge, "PagedScheduler(config, kv)")
