"""First come, first served, with KV reserved for the whole answer: plans are judged step by step by a referee.

One case serves a few requests on the simulated clock, and compares the moments of their tokens.
"""

from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.continuous_batching import _clock as clock
from servelab.exercises.continuous_batching import _server as server
from servelab.exercises.continuous_batching._server import add, limits

ANSWERS = ("Scheduler",)
COMPARED = False
PLANS, JOINS, ENDS = "a prompt, then a token a step", "joins while others run", "ends at EOS or at max_tokens"
ORDER, SEATS, BUDGET = "first come, first served", "keeps max_num_seqs", "keeps the token budget"
ROOM, FREES = "reserves room for the whole answer", "frees what has finished"
REFUSES, ABORTS = "refuses what can never run", "forgets what is aborted"
TIMES, LONG = "the times of a served trace", "long runs"
CASES = (
    CaseSpec(PLANS, hint=2, weight=2),
    CaseSpec(JOINS, hint=1, weight=2),
    CaseSpec(ENDS, hint=2, weight=2),
    CaseSpec(SEATS, hint=2),
    CaseSpec(BUDGET, hint=2),
    CaseSpec(ORDER, hint=2, weight=2),
    CaseSpec(ROOM, hint=2, weight=2),
    CaseSpec(FREES, hint=2),
    CaseSpec(REFUSES, hint=3, weight=2),
    CaseSpec(ABORTS, hint=3, weight=2),
    CaseSpec(TIMES, hint=1),
    CaseSpec(LONG, hint=3, weight=2),
)
RULES = server.Rules(whole_answer=True, recompute=False)


# case, (max_num_seqs, budget), (blocks, block size), events, EOS after so many tokens
DIRECTED: tuple[tuple[str, tuple[int, int], tuple[int, int], list[list], dict[str, int]], ...] = (
    (PLANS, (1, 8), (2, 4), [add(0, "a", 3, 3)], {}),
    (PLANS, (2, 8), (4, 4), [add(0, "a", 5, 4), add(0, "b", 2, 2)], {}),
    (PLANS, (2, 8), (4, 4), [add(0, "a", 1, 1), add(3, "b", 1, 2)], {}),  # nothing runs in between
    (JOINS, (2, 8), (8, 4), [add(0, "a", 2, 6), add(2, "b", 3, 2)], {}),
    (JOINS, (2, 8), (8, 4), [add(0, "a", 2, 9), add(0, "b", 2, 2), add(0, "c", 2, 2), add(0, "d", 2, 2)], {}),
    (JOINS, (3, 8), (8, 4), [add(1, "a", 2, 9), add(4, "b", 2, 2), [4, "add during", "c", 2, 2]], {}),
    (ENDS, (1, 8), (4, 4), [add(0, "a", 2, 5)], {"a": 3}),
    (ENDS, (1, 8), (4, 4), [add(0, "a", 2, 5)], {"a": 1}),  # EOS is the first token
    (ENDS, (2, 8), (4, 4), [add(0, "a", 2, 4), add(0, "b", 2, 1)], {"a": 4, "b": 1}),
    (ENDS, (2, 8), (4, 4), [add(0, "a", 2, 1), add(0, "b", 2, 2), add(1, "c", 2, 1)], {}),
    (SEATS, (1, 8), (8, 4), [add(0, "a", 1, 2), add(0, "b", 1, 2)], {}),
    (SEATS, (2, 8), (8, 4), [add(0, id, 1, n) for id, n in (("a", 3), ("b", 1), ("c", 4), ("d", 2), ("e", 1))], {}),
    (BUDGET, (3, 8), (9, 4), [add(0, "a", 5, 3), add(0, "b", 3, 3), add(0, "c", 6, 2)], {}),
    (BUDGET, (3, 6), (9, 4), [add(0, "a", 1, 6), add(1, "b", 6, 2), add(2, "c", 4, 2)], {}),
    (BUDGET, (4, 4), (9, 4), [add(0, id, 1, 4) for id in "abcd"], {}),
    (ORDER, (3, 8), (9, 4), [add(0, "z", 6, 2), add(0, "y", 3, 2), add(0, "x", 2, 2)], {}),  # a step has room for x
    (ORDER, (3, 9), (4, 4), [add(0, "d", 3, 6), add(0, "c", 2, 8), add(0, "b", 1, 2)], {}),  # the KV has room for b
    (ORDER, (1, 9), (9, 4), [add(0, "b", 2, 3), add(1, "d", 2, 2), add(1, "a", 2, 2), add(2, "c", 1, 1)], {}),
    (ROOM, (2, 9), (3, 4), [add(0, "a", 3, 6), add(0, "b", 1, 4), add(0, "c", 1, 1)], {}),
    (ROOM, (2, 9), (3, 4), [add(0, "a", 3, 7), add(0, "b", 1, 4)], {}),
    (ROOM, (3, 9), (6, 1), [add(0, "a", 1, 3), add(0, "b", 2, 2), add(0, "c", 1, 1)], {"a": 1}),
    (FREES, (2, 9), (2, 4), [add(0, "a", 4, 2), add(0, "b", 4, 4)], {}),
    (FREES, (1, 9), (4, 4), [add(0, "a", 2, 2), add(2, "a", 3, 3), add(4, "b", 1, 1), add(4, "a", 1, 1)], {}),
    (FREES, (2, 9), (4, 2), [add(0, "a", 3, 2), add(0, "b", 2, 1), add(0, "c", 3, 4), add(0, "d", 2, 3)], {"c": 2}),
    (REFUSES, (1, 5), (4, 4), [add(0, "a", 6, 1), add(0, "b", 5, 1)], {}),  # a prompt that no step can hold
    (REFUSES, (1, 9), (2, 4), [add(0, "a", 4, 6), add(0, "b", 4, 5), add(0, "c", 9, 1), add(0, "d", 8, 1)], {}),
    (REFUSES, (1, 9), (2, 4), [add(0, "a", 4, 6), add(0, "a", 4, 2), add(0, "a", 3, 1)], {}),  # refused: not there
    (REFUSES, (1, 9), (4, 4), [add(0, "a", 2, 3), add(0, "b", 1, 1), add(0, "b", 2, 9), add(1, "a", 1, 1)], {}),
    (REFUSES, (2, 9), (2, 4), [add(0, "a", 4, 5), add(1, "b", 4, 5)], {}),  # no room now, but later
    (ABORTS, (1, 9), (4, 4), [[0, "abort", "a"], add(0, "a", 2, 3), [1, "abort", "b"], [4, "abort", "a"]], {}),
    (ABORTS, (1, 9), (4, 4), [add(0, "a", 2, 6), add(0, "b", 2, 2), [2, "abort", "a"], [2, "abort", "a"]], {}),
    (
        ABORTS,
        (1, 9),
        (4, 4),
        [*(add(0, id, 2, 3) for id in "abcde"), [1, "abort", "b"], [1, "abort", "d"], [4, "abort", "e"]],
        {},
    ),
    # the head that no step has room for leaves: the next one's turn has come
    (ABORTS, (3, 6), (9, 4), [add(0, "a", 2, 4), add(0, "b", 6, 2), add(0, "c", 2, 2), [1, "abort", "b"]], {}),
    # vLLM pull requests 18485 and 25067: an abort before the first block, and one after the end
    (ABORTS, (1, 9), (2, 4), [add(0, "a", 2, 1), add(0, "b", 2, 2), [0, "abort", "b"], [1, "abort", "a"]], {}),
    # while the step runs: its token still comes
    (
        ABORTS,
        (2, 9),
        (2, 4),
        [add(0, "a", 2, 3), add(0, "b", 2, 3), [1, "abort during", "a"], add(2, "c", 3, 2)],
        {},
    ),
    (ABORTS, (2, 9), (2, 4), [add(0, "a", 2, 1), add(0, "b", 2, 2), [0, "abort during", "a"]], {}),
    (ABORTS, (1, 9), (4, 4), [add(0, "a", 2, 3), [1, "abort", "a"], add(1, "a", 4, 2)], {}),
    (ABORTS, (1, 9), (4, 4), [add(0, "a", 2, 3), add(0, "b", 2, 2), [1, "abort", "b"], add(1, "b", 4, 3)], {}),
    (ABORTS, (2, 9), (9, 4), [*(add(0, id, 2, 3) for id in "abcd"), [0, "abort during", "a"]], {}),
    # a new one of that id has a new place
    (ABORTS, (1, 9), (9, 4), [*(add(0, id, 2, 2) for id in "abc"), [1, "abort", "b"], add(1, "b", 3, 2)], {}),
    # the token of a step that was running belongs to the request that was aborted, not to the new one of that id
    (ABORTS, (2, 9), (9, 4), [add(0, "a", 2, 3), [1, "abort during", "a"], [1, "add during", "a", 3, 2]], {}),
)

# (max_num_seqs, budget), jobs: id, prompt, max_tokens, arrival, tokens of the answer
SERVED: tuple[tuple[tuple[int, int], list[list]], ...] = (
    ((2, 16), [["a", 8, 4, 0.0, 4], ["b", 6, 3, 2.5, 3]]),
    (
        (3, 16),
        [["a", 8, 6, 0.0, 5], ["b", 4, 2, 0.5, 2], ["c", 4, 6, 0.5, 2], ["d", 12, 3, 3.0, 3], ["e", 2, 1, 20.0, 1]],
    ),
    (
        (2, 12),
        [["a", 4, 3, 1.0, 2], ["b", 2, 8, 1.0, 8], ["c", 12, 2, 1.5, 2], ["d", 1, 4, 2.0, 1], ["e", 3, 2, 4.0, 2]],
    ),
)


def challenges(rng: Random) -> list[dict]:
    """Directed cases, smallest first, then other EOS tokens, served traces, random runs."""
    directed = [
        server.challenge(case, limits(*most), blocks, events, eos) for case, most, blocks, events, eos in DIRECTED
    ]
    others = [
        server.challenge(ENDS, limits(1, 8, eos_token_id=id), (4, 4), [add(0, "a", 2, 6)], {"a": 4}) for id in (0, 1, 7)
    ]
    long = [server.queue(LONG), *(server.drawn(rng, LONG, n) for n in (8, 30, 90))]
    served = [clock.challenge(TIMES, limits(*most), jobs) for most, jobs in SERVED]
    return [*directed, *others, *served, clock.drawn(rng, TIMES, limits(3, 16), 12), *long]


def drive(challenge: dict, scheduler_class) -> list[dict] | dict:
    """Run the script and write down every plan and who holds how many blocks; or serve, and write down the moments."""
    return (clock if "jobs" in challenge else server).drive(challenge, scheduler_class)


def judge(challenge: dict, transcript: Any, expected: None) -> list[Case]:
    """Follow the run with the referee, who has seen neither the reference's plans nor the scheduler's inside."""
    if "jobs" in challenge:
        return clock.judged(challenge, transcript, chunked=False)
    return server.judged(challenge, RULES, transcript, {"order": 2, "refusal": 3})


def show(challenge: dict) -> str:
    """The run as Python."""
    return (clock if "jobs" in challenge else server).show(challenge, "Scheduler(config, kv)")
