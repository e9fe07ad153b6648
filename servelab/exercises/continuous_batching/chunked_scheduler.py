"""Chunks under a token budget: plans are judged step by step by a referee; the last run is 10,000 requests of a trace.

Without a key, and with blocks enough, the order of the budget determines every plan: decodes, the unfinished prompt,
new requests. When blocks run out, when they are taken is left to the scheduler, and with it who is the next victim.
One case serves a few requests on the simulated clock, and compares the moments of their tokens.
"""

from functools import cache
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.continuous_batching import _clock as clock
from servelab.exercises.continuous_batching import _server as server
from servelab.exercises.continuous_batching._policies import FEWEST, HIGHEST, KEYS, PolicyReferee, add, made
from servelab.exercises.continuous_batching._server import Broken, limits
from servelab.stepping import Live
from servelab.traces import Request as TraceRequest
from servelab.traces import read_trace

ANSWERS = ("ChunkedScheduler",)
COMPARED = False
CHUNKS, ENDS = "a prompt in chunks", "a token only after the last chunk"
FILLS, DECODES = "fills the budget", "decodes are never held up"
UNFINISHED, BY_KEY = "the unfinished prompt before new ones", "in the order of the key"
REFUSES, ABORTS = "refuses only what memory cannot hold", "forgets what is aborted"
ROOM, PREEMPTS = "all known tokens must fit", "begins again after a preemption"
REFUND, TIMES = "a victim's tokens go back to the budget", "the times of a served trace"
LONG, TRACE = "long runs", "10,000 requests"
CASES = (
    CaseSpec(CHUNKS, hint=2, weight=3),
    CaseSpec(ENDS, hint=2, weight=2),
    CaseSpec(FILLS, hint=1, weight=3),
    CaseSpec(DECODES, hint=1, weight=3),
    CaseSpec(UNFINISHED, hint=1, weight=2),
    CaseSpec(BY_KEY, hint=3),
    CaseSpec(REFUSES, hint=3, weight=2),
    CaseSpec(ABORTS, hint=2, weight=2),
    CaseSpec(ROOM, hint=2, weight=2),
    CaseSpec(PREEMPTS, hint=2, weight=2),
    CaseSpec(REFUND, hint=1),
    CaseSpec(TIMES, hint=1),
    CaseSpec(LONG, hint=1, weight=2),
    CaseSpec(TRACE, hint=1, weight=2),
)
WORKED = [add(0, "A", 4, 4), add(0, "B", 13, 3), add(0, "C", 5, 2)]
LATE = [add(0, "a", 2, 9), add(2, "b", 11, 3)]

# case, key, limits, (blocks, block size), events, EOS after so many tokens
DIRECTED: tuple[tuple[str, str, dict, tuple[int, int], list[list], dict[str, int]], ...] = (
    (CHUNKS, "", limits(1, 4), (4, 4), [add(0, "a", 10, 3)], {}),
    (CHUNKS, "", limits(1, 4), (4, 4), [add(0, "a", 8, 2)], {}),
    (CHUNKS, "", limits(1, 1), (4, 2), [add(0, "a", 3, 2)], {}),
    (CHUNKS, "", limits(2, 5), (9, 4), [add(0, "a", 4, 3), add(0, "b", 12, 3)], {}),
    (ENDS, "", limits(1, 4), (4, 4), [add(0, "a", 9, 1), add(0, "b", 4, 1)], {}),
    (ENDS, "", limits(2, 4), (9, 4), [add(0, "a", 9, 4), add(0, "b", 6, 4)], {"a": 1, "b": 2}),
    (FILLS, "", limits(3, 8), (9, 4), WORKED, {}),
    (FILLS, "", limits(4, 9), (9, 4), [add(0, id, n, 3) for id, n in (("a", 3), ("b", 2), ("c", 7), ("d", 1))], {}),
    (FILLS, "", limits(5, 7), (16, 4), [add(n, id, 3 + n, 4) for n, id in enumerate("abcde")], {}),
    (FILLS, "", limits(2, 8), (9, 4), [add(0, id, 3, 3) for id in "abcd"], {}),  # slots, not tokens, run out
    (DECODES, "", limits(2, 3), (9, 4), LATE, {}),
    (DECODES, "", limits(4, 4), (12, 4), [*(add(0, id, 1, 12) for id in "abc"), add(2, "d", 9, 3)], {}),
    (DECODES, "", limits(3, 6), (16, 4), [add(0, "a", 9, 9), add(1, "b", 14, 6), add(3, "c", 8, 2)], {}),
    (UNFINISHED, "", limits(3, 5), (16, 4), [*LATE, add(3, "c", 2, 2)], {}),
    (UNFINISHED, HIGHEST, limits(3, 5), (16, 4), [*LATE, add(3, "c", 2, 2, 9)], {}),
    (UNFINISHED, FEWEST, limits(4, 6), (16, 4), [*LATE, add(3, "c", 9, 2), add(3, "d", 1, 3)], {}),
    (BY_KEY, HIGHEST, limits(2, 4), (9, 4), [add(0, id, n, 3, n) for id, n in (("a", 5), ("b", 9), ("c", 7))], {}),
    (BY_KEY, FEWEST, limits(1, 4), (9, 4), [add(0, id, n, 3) for id, n in (("a", 9), ("b", 5), ("c", 7))], {}),
    (REFUSES, "", limits(1, 1), (4, 4), [add(0, "a", 9, 1)], {}),  # as many chunks as tokens
    (REFUSES, "", limits(1, 4), (4, 4), [add(0, "a", 15, 2), add(0, "b", 15, 3), add(0, "c", 17, 1)], {}),
    (
        REFUSES,
        "",
        limits(1, 2),
        (3, 4),
        [add(0, "a", 3, 10), add(0, "a", 1, 1), add(0, "b", 4, 10), add(1, "b", 1, 1)],
        {},
    ),
    (ABORTS, "", limits(2, 4), (9, 4), [add(0, "a", 11, 3), add(0, "b", 7, 2), [1, "abort", "a"]], {}),
    (ABORTS, "", limits(2, 4), (9, 4), [add(0, "a", 11, 3), add(0, "b", 7, 2), [1, "abort during", "a"]], {}),
    (ABORTS, "", limits(2, 4), (9, 4), [add(0, "a", 11, 3), [1, "abort", "a"], add(1, "a", 6, 2)], {}),
    # it makes room for b at once
    (ABORTS, "", limits(2, 16), (4, 4), [add(0, "a", 7, 6), add(0, "b", 6, 5), [4, "abort", "a"]], {}),
    (ABORTS, "", limits(2, 4), (9, 4), [add(0, "a", 7, 3), [1, "abort during", "a"], [1, "add during", "a", 6, 2]], {}),
    (
        ABORTS,
        "",
        limits(2, 5),
        (9, 4),
        [*LATE, add(2, "c", 9, 2), [3, "abort", "b"], [3, "abort", "x"], [5, "abort", "b"]],
        {},
    ),
    # the first chunk would fit, the prompt does not (vLLM pull request 21809)
    (ROOM, "", limits(2, 4), (4, 4), [add(0, "a", 7, 6), add(0, "b", 9, 2)], {}),
    (ROOM, "", limits(3, 4), (5, 4), [add(0, "a", 4, 9), add(1, "b", 14, 3), add(1, "c", 2, 2)], {}),
    (ROOM, "", limits(2, 6, watermark_blocks=2), (6, 4), [add(0, "a", 4, 5), add(1, "b", 11, 2)], {}),
    (PREEMPTS, "", limits(2, 4), (5, 4), [add(0, "a", 4, 13), add(1, "b", 12, 3)], {}),
    (PREEMPTS, "", limits(2, 3), (6, 2), [add(0, "a", 2, 9), add(0, "b", 7, 4)], {}),  # in the middle of its prompt
    (PREEMPTS, HIGHEST, limits(2, 3), (6, 2), [add(0, "b", 3, 9), add(1, "a", 3, 8, 1)], {"b": 6}),
    (PREEMPTS, "", limits(3, 5), (7, 2), [add(0, "a", 3, 9), add(0, "b", 4, 7), add(0, "c", 2, 7)], {"b": 7}),
    (REFUND, HIGHEST, limits(3, 3), (3, 8), [add(0, "a", 1, 9, 1), add(1, "b", 7, 5, 3), add(4, "c", 8, 2, 2)], {}),
)

# (max_num_seqs, budget), jobs: id, prompt, max_tokens, arrival, tokens of the answer
SERVED: tuple[tuple[tuple[int, int], list[list]], ...] = (
    ((2, 8), [["a", 4, 6, 0.0, 6], ["b", 18, 3, 1.5, 2]]),
    (
        (3, 8),
        [["a", 3, 9, 0.0, 8], ["b", 21, 2, 2.0, 2], ["c", 5, 4, 2.5, 1], ["d", 9, 3, 3.0, 3], ["e", 8, 1, 30.0, 1]],
    ),
)


def challenges(rng: Random) -> list[dict]:
    """Directed runs, smallest first, then served traces, random runs in too little memory, the trace."""
    directed = [server.challenge(row[0], row[2], *row[3:]) | {"key": row[1]} for row in DIRECTED]
    drawn = [_drawn(rng, key, n) for n in (12, 60) for key in ("", HIGHEST, FEWEST)]
    served = [clock.challenge(TIMES, limits(*most), jobs) for most, jobs in SERVED]
    return [*directed, *served, clock.drawn(rng, TIMES, limits(3, 8), 30), *drawn, _long_run()]


def _drawn(rng: Random, key: str, requests: int) -> dict:
    """A random run with a budget below most prompts, and less KV than the requests could use."""
    drawn = server.drawn(rng, LONG, requests)
    events = [[step // 2, *rest] + [rng.randint(0, 4)] * ("add" in rest[0]) for step, *rest in drawn["events"]]
    events.sort(key=lambda event: (event[0], "during" in event[1]))
    seqs = drawn["config"]["max_num_seqs"]
    config = limits(seqs, seqs + rng.randint(0, 4), watermark_blocks=rng.choice((0, 0, 1)))
    return drawn | {"key": key, "events": events, "config": config, "num_blocks": -(-28 // drawn["block_size"])}


def _long_run() -> dict:
    """Requests of unit 03's trace, which come faster than they can be served: the queue is thousands long."""
    asked = server.challenge(TRACE, limits(256, 16_384), (6_000, 16), [])
    return asked | {"key": "", "trace": "conv", "max_tokens": 8, "steps_per_second": 0.5, "limit": 2_000}


def _with_events(asked: dict) -> dict:
    """A run with its script; that of a trace is not written out."""
    if "trace" not in asked:
        return asked
    most, rate = asked["max_tokens"], asked["steps_per_second"]
    sizes = [(int(r.arrival * rate), r.prompt_tokens, min(r.output_tokens, most)) for r in _trace(asked["trace"])]
    return asked | {"events": [[step, "add", str(n), *size] for n, (step, *size) in enumerate(sizes)]}


@cache
def _trace(name: str) -> tuple[TraceRequest, ...]:
    return read_trace(name).requests


def drive(challenge: dict, scheduler_class) -> list[dict] | dict:
    """Run the script and write down every plan and who holds how many blocks; or serve, and write down the moments."""
    if "jobs" in challenge:
        return clock.drive(challenge, scheduler_class)
    key = [KEYS[challenge["key"]][0]] if challenge["key"] else []
    return server.drive(_with_events(challenge), lambda config, kv: scheduler_class(config, kv, *key))


class ChunkReferee(PolicyReferee):
    """The rules, with a little less of the budget in a step that had to preempt."""

    def plan(self, where: str, record: dict) -> None:
        self.grown = {id for id, count in record.get("kv", {}).items() if count > self.held.get(id, 0)}
        super().plan(where, record)

    def _preempt(self, where: str, preempted: list[str]) -> list[tuple[Live, int, int]]:
        victims = super()._preempt(where, preempted)
        self.num_victims = len(victims)
        return victims

    def check_counts(self, where: str) -> None:
        super().check_counts(where)
        missing = [self.live[id] for id in self.counts.keys() | self.running.keys()]
        cut = sorted(live.id for live in missing if live.missing > max(1, self.counts.get(live.id, 0)))
        if len(cut) > 1:
            raise Broken(
                f"{where}: the prompts of {cut[0]!r} and {cut[1]!r} are both unfinished; expected one at a time"
            )

    def unused(self, live: Live) -> int:
        """Tokens of the budget that a prompt may leave: if it took blocks itself, its chunk was cut before the victims
        gave their tokens back."""
        return self.num_victims if live.id in self.grown else 0


def judge(challenge: dict, transcript: Any, expected: None) -> list[Case]:
    """Follow the run with the referee, who has seen neither the reference's plans nor the scheduler's inside."""
    if "jobs" in challenge:
        return clock.judged(challenge, transcript, chunked=True)
    key = KEYS[challenge["key"]][1] if challenge["key"] else lambda live: 0
    rules = server.Rules(chunked=True, key=key)
    return server.judged(_with_events(challenge), rules, transcript, {"share": 1, "refusal": 3}, ChunkReferee)


def show(challenge: dict) -> str:
    """The run as Python; that of the trace starts from the file."""
    if "jobs" in challenge:
        return clock.show(challenge, made("ChunkedScheduler", ""))
    shown = server.show(challenge, made("ChunkedScheduler", challenge["key"]))
    if "trace" not in challenge:
        return shown
    most, rate = challenge["max_tokens"], challenge["steps_per_second"]
    event = f'(int(r.arrival * {rate}), "add", str(n), r.prompt_tokens, min(r.output_tokens, {most}))'
    listed = f"events = [{event} for n, r in enumerate(read_trace({challenge['trace']!r}).requests)]"
    before, _, after = shown.partition("events = [")
    return f"from servelab.traces import read_trace\n{before}{listed}\n{after.partition(']' + chr(10))[2]}"
