"""Keys, and the order that they give: who is admitted first, who is preempted first, and what stays as it was.

The keys are judged on sequences, by the order that they give; any numbers will do. The scheduler is judged by a referee
that knows the key. Most of its runs have a key of the check's own, so that a wrong key does not hide a right scheduler.
"""

from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.continuous_batching import _server as server
from servelab.exercises.continuous_batching._policies import FEWEST, FURTHEST, HIGHEST, KEYS, PolicyReferee, add, made
from servelab.exercises.continuous_batching._server import limits
from servelab.plain import plain
from servelab.serving import Request, Sequence
from servelab.stepping import Live

ANSWERS = ("PolicyScheduler", "by_priority", "shortest_remaining", "aged")
COMPARED = False
URGENT, SHORTEST, AGED = "urgent requests first", "the fewest tokens to come first", "each second of waiting counts"
ADMITS, TIES, HEAD = "the smallest key is admitted first", "equal keys in order of arrival", "nobody overtakes the head"
PREEMPTS, NOW, BACK = "the largest key is preempted first", "keys as they are now", "a victim waits by its key"
GOES_ON, ABORTS = "the others go on beside a victim", "forgets what is aborted"
BOUNDED, LONG = "ageing bounds the wait", "long runs"
CASES = (
    CaseSpec(URGENT, hint=1, weight=2),
    CaseSpec(SHORTEST, hint=1, weight=2),
    CaseSpec(AGED, hint=1, weight=2),
    CaseSpec(ADMITS, hint=2, weight=3),
    CaseSpec(TIES, hint=2, weight=2),
    CaseSpec(HEAD, hint=2, weight=2),
    CaseSpec(PREEMPTS, hint=3, weight=3),
    CaseSpec(NOW, hint=3, weight=2),
    CaseSpec(BACK, hint=2, weight=2),
    CaseSpec(GOES_ON, hint=3, weight=2),
    CaseSpec(ABORTS, hint=2),
    CaseSpec(BOUNDED, hint=1, weight=2),
    CaseSpec(LONG, hint=3, weight=3),
)

RANDOM = ("", HIGHEST, FEWEST, FURTHEST, "shortest_remaining", "aged(0.5)")  # the keys of the random runs


def _each(ids: str, *priorities: int, step: int = 0, size: tuple[int, int] = (2, 3)) -> list[list]:
    """Requests of one size that come together."""
    return [add(step, id, *size, priority) for id, priority in zip(ids, priorities, strict=True)]


def _prompts(ids: str, *prompts: int) -> list[list]:
    return [add(0, id, prompt, 3) for id, prompt in zip(ids, prompts, strict=True)]


PAIR = [add(0, "a", 4, 7, 1), add(1, "b", 4, 6, 2)]  # too much for 4 blocks of 4
STREAM = [add(step, f"u{step}", 2, 2) for step in range(2, 40, 2)]  # as much as one slot can serve

# case, key, (max_num_seqs, budget), (blocks, block size), events
DIRECTED: tuple[tuple[str, str, tuple[int, int], tuple[int, int], list[list]], ...] = (
    (ADMITS, HIGHEST, (1, 16), (4, 4), _each("ab", 0, 1)),
    (ADMITS, HIGHEST, (1, 16), (4, 4), _each("abcde", 2, 4, 1, 5, 3)),
    (ADMITS, FEWEST, (2, 16), (9, 4), _prompts("abcde", 5, 2, 4, 1, 3)),
    (
        ADMITS,
        HIGHEST,
        (1, 16),
        (4, 4),
        [add(0, "a", 2, 6, 9), *(add(n, "xbcd"[n], 2, 2, 2 * n % 5) for n in (1, 2, 3))],
    ),
    (ADMITS, "", (1, 16), (4, 4), _each("cab", 3, 1, 2)),
    (TIES, HIGHEST, (1, 16), (4, 4), _each("cadb", 1, 1, 1, 1)),
    (TIES, HIGHEST, (1, 16), (4, 4), _each("hcgbfa", 0, 1, 0, 1, 0, 1)),
    (TIES, HIGHEST, (3, 16), (4, 3), _each("cab", 1, 1, 1, size=(3, 6))),  # of equals the last is the victim
    (TIES, HIGHEST, (2, 16), (4, 4), [add(0, "b", 7, 6, 1), add(0, "c", 6, 5, 1), add(0, "a", 1, 2, 1)]),
    # in step 2 both have 5 tokens: b was admitted first, but added last
    (TIES, FEWEST, (2, 5), (5, 2), [add(0, "a", 4, 2), add(0, "b", 3, 3)]),
    # b comes first by its key, not by its arrival
    (HEAD, HIGHEST, (3, 16), (4, 4), [add(0, "a", 8, 5, 1), add(1, "c", 2, 2, 2), add(1, "b", 9, 2, 3)]),
    (HEAD, HIGHEST, (3, 12), (9, 4), [add(0, "a", 7, 3, 9), add(0, "b", 6, 2, 8), add(0, "c", 2, 2, 7)]),
    (PREEMPTS, HIGHEST, (2, 16), (4, 4), PAIR),  # the first that came
    (PREEMPTS, HIGHEST, (2, 16), (4, 4), [add(0, "a", 4, 7, 2), add(1, "b", 4, 6, 1)]),
    # the victim has its token in the plan already when the other finds no block
    (PREEMPTS, HIGHEST, (2, 16), (3, 4), [add(0, "a", 5, 6, 1), add(1, "b", 3, 6, 2)]),
    (PREEMPTS, HIGHEST, (3, 24), (6, 3), _each("abc", 2, 1, 3, size=(4, 6))),
    (PREEMPTS, HIGHEST, (4, 16), (8, 1), [add(0, id, n, 5, n) for id, n in (("c", 1), ("b", 2), ("a", 3), ("d", 1))]),
    (NOW, FEWEST, (2, 16), (5, 2), [add(0, "a", 2, 7), add(3, "b", 4, 3)]),
    (NOW, FEWEST, (3, 16), (8, 2), [add(0, "a", 3, 8), add(2, "b", 4, 7), add(4, "c", 2, 6)]),
    (BACK, HIGHEST, (2, 16), (4, 4), [add(0, "a", 7, 6, 9), add(0, "b", 6, 5, 1), add(1, "c", 2, 3, 5)]),
    (BACK, HIGHEST, (2, 16), (4, 4), [add(0, "a", 7, 6, 9), add(0, "b", 6, 5, 5), add(1, "c", 2, 3, 1)]),
    (BACK, FEWEST, (2, 16), (6, 2), [add(0, "a", 2, 9), add(0, "b", 4, 6), add(1, "c", 6, 2)]),
    # vLLM issue 49097: the victim stands before the one that needs its block; who comes next must not be skipped
    (GOES_ON, HIGHEST, (3, 24), (5, 4), [add(0, "a", 5, 6, 5), add(1, "b", 4, 6, 7), add(1, "c", 5, 6, 6)]),
    (GOES_ON, HIGHEST, (4, 24), (6, 2), [add(n, id, 1, 7, 5 + n) for n, id in enumerate("abcd")]),
    # vLLM pull request 26765: the one that needs a block is the victim itself; those behind it still run
    (GOES_ON, HIGHEST, (3, 24), (5, 3), [add(0, "a", 3, 6, 5), add(1, "b", 4, 6, 1), add(2, "c", 2, 6, 9)]),
    (ABORTS, HIGHEST, (1, 16), (4, 4), [*_each("abcd", 9, 1, 2, 3), [1, "abort", "d"], [1, "abort", "b"]]),
    (ABORTS, HIGHEST, (1, 16), (4, 4), [*_each("abcd", 9, 1, 2, 3), [1, "abort", "d"], add(1, "d", 3, 2, 0)]),
    (ABORTS, HIGHEST, (1, 16), (4, 4), [*_each("abcd", 9, 1, 2, 3), [1, "abort", "b"], add(1, "b", 3, 2, 5)]),
    # an id that comes again is the last of its equals
    (
        ABORTS,
        HIGHEST,
        (1, 16),
        (4, 4),
        [add(0, "a", 2, 2), add(3, "b", 2, 4), add(3, "a", 2, 2), *_each("cd", 0, 0, step=3)],
    ),
    (ABORTS, HIGHEST, (2, 16), (4, 4), [*PAIR, [6, "abort", "a"], add(6, "a", 2, 2, 3), add(6, "c", 2, 2, 2)]),
    # the runner leaves: there is room for the head at once
    (ABORTS, HIGHEST, (2, 16), (4, 4), [add(0, "a", 7, 6, 9), add(0, "b", 6, 5, 1), [4, "abort", "a"]]),
    (BOUNDED, "aged(0.5)", (1, 16), (4, 4), [add(0, "a", 2, 2), add(1, "z", 2, 2, 3), *STREAM]),
    (BOUNDED, "aged(0.25)", (1, 16), (4, 4), [add(0, "y", 2, 2, 4), add(0, "a", 2, 2), add(1, "z", 2, 2, 2), *STREAM]),
)

# prompt_tokens, max_tokens, arrival, priority, tokens generated, tokens computed
Row = tuple[int, int, float, int, int, int]
SEQUENCES: tuple[tuple[str, str, list[Row]], ...] = (
    (URGENT, "by_priority", [(4, 8, 0, 2, 0, 0), (4, 8, 0, 1, 0, 0)]),
    (URGENT, "by_priority", [(1, 9, 0, 0, 0, 0), (5, 3, 7, -2, 2, 5), (9, 1, 2, 5, 0, 0), (2, 4, 1, 0, 3, 4)]),
    (SHORTEST, "shortest_remaining", [(4, 8, 0, 1, 0, 0), (4, 9, 0, 1, 0, 0)]),
    (SHORTEST, "shortest_remaining", [(4, 8, 0, 1, 5, 8), (4, 5, 0, 1, 0, 0), (2, 4, 0, 1, 0, 0), (9, 3, 0, 1, 0, 0)]),
    (
        SHORTEST,
        "shortest_remaining",
        [(2, 9, 5, 0, 4, 0), (7, 5, 1, 3, 0, 7), (1, 50, 0, 1, 44, 44), (3, 8, 2, 2, 1, 0)],
    ),
    (AGED, "aged(1)", [(4, 8, 0, 1, 0, 0), (4, 8, 2, 1, 0, 0)]),
    (
        AGED,
        "aged(0.5)",
        [(4, 8, 0, 3, 0, 0), (4, 8, 2, 1, 0, 0), (4, 8, 4, 1, 3, 6), (1, 2, 6, 0, 0, 0), (9, 9, 7, 0, 0, 0)],
    ),
    (AGED, "aged(2)", [(4, 8, 0, 3, 0, 0), (4, 8, 1, 2, 0, 0), (4, 8, 1, 1, 0, 0), (4, 8, 1.75, 0, 0, 0)]),
    (AGED, "aged(0)", [(4, 8, 9, 1, 0, 0), (4, 8, 0, 1, 0, 0), (4, 8, 5, 0, 0, 0)]),
    # a second counts as much after an hour as at first
    (AGED, "aged(0.25)", [(4, 8, 0, 25, 0, 0), (4, 8, 99, 0, 0, 0), (4, 8, 101, 0, 0, 0)]),
    (AGED, "aged(0.25)", [(4, 8, 3590, 2, 0, 0), (4, 8, 3597, 0, 0, 0), (4, 8, 3599, 0, 0, 0), (4, 8, 3602, -1, 0, 0)]),
)


def challenges(rng: Random) -> list[dict]:
    """Keys on sequences, directed runs, smallest first, then random runs in too little memory."""
    keys = [{"case": case, "key": key, "sequences": [list(row) for row in rows]} for case, key, rows in SEQUENCES]
    directed = [server.challenge(row[0], limits(*row[2]), *row[3:]) | {"key": row[1]} for row in DIRECTED]
    return [*keys, *directed, *(_drawn(rng, key, n) for n in (12, 60) for key in RANDOM)]


def _drawn(rng: Random, key: str, requests: int) -> dict:
    """A random run of requests of random priorities, which come fast enough for a queue and for victims."""
    drawn = server.drawn(rng, LONG, requests)
    events = [[step // 3, *rest] + [rng.randint(0, 4)] * ("add" in rest[0]) for step, *rest in drawn["events"]]
    events.sort(key=lambda event: (event[0], "during" in event[1]))
    return drawn | {"key": key, "events": events, "num_blocks": -(-28 // drawn["block_size"])}


def _rate(key: str) -> float:
    return float(key.removeprefix("aged(").removesuffix(")"))


def drive(challenge: dict, scheduler_class, by_priority, shortest_remaining, aged) -> list:
    """The numbers that a key gives to sequences, or the record of a run."""
    name = challenge["key"]
    key: Callable[[Sequence], float]
    if name in KEYS:
        key = KEYS[name][0]
    elif name.startswith("aged"):
        key = aged(_rate(name))
    else:
        key = shortest_remaining if name == "shortest_remaining" else by_priority
    if "sequences" in challenge:
        return [plain(key(seq)) for seq in _sequences(challenge)]
    given = [key] if name else []
    return server.drive(challenge, lambda config, kv: scheduler_class(config, kv, *given))


def _sequences(challenge: dict) -> list[Sequence]:
    rows = enumerate(challenge["sequences"])
    return [Sequence(Request(_name(n), *row[:4]), list(range(row[4])), row[5]) for n, row in rows]


def _name(number: int) -> str:
    return "abcdefgh"[number]


def _known_key(name: str) -> Callable[[Live], float]:
    """What the referee knows of a key."""
    if name in KEYS:
        return KEYS[name][1]
    if name.startswith("aged"):
        return lambda live: live.priority + _rate(name) * live.arrival
    return {
        "": lambda live: 0,
        "by_priority": lambda live: live.priority,
        "shortest_remaining": lambda live: live.max_tokens - (live.known - live.prompt),
    }[name]


def judge(challenge: dict, transcript: list, expected: None) -> list[Case]:
    """Numbers in the right order, or a run that the referee has followed to its end."""
    key = _known_key(challenge["key"])
    if "sequences" in challenge:
        problem = _disorder(challenge, key, transcript)
        return [Case(challenge["case"], not problem, problem)]
    return server.judged(challenge, server.Rules(key=key), transcript, {"order": 2}, PolicyReferee)


def _disorder(challenge: dict, key: Callable[[Live], float], got: list[Any]) -> str:
    """The first two sequences that a key puts in the wrong order; empty if there are none."""
    name, due = challenge["key"], [key(live) for live in _lives(challenge)]
    for number in got:
        if type(number) not in (int, float):
            shown = number.get("unexpected type", "dict") if isinstance(number, dict) else number
            return f"{name}: expected a number for each sequence, got {str(shown)[:60]}"
    for i, j in combinations(range(len(due)), 2):
        if _sign(due[i] - due[j]) != _sign(got[i] - got[j]):
            should = {-1: "a smaller key than", 0: "the same key as", 1: "a larger key than"}[_sign(due[i] - due[j])]
            return f"{name}: expected {_name(i)} to have {should} {_name(j)}, got {got[i]} and {got[j]}"
    return ""


def _lives(challenge: dict) -> list[Live]:
    lives = []
    for number, (prompt, max_tokens, arrival, priority, generated, _) in enumerate(challenge["sequences"]):
        live = Live(arrival, number, [_name(number), prompt, max_tokens, priority], None)
        live.known += generated
        lives.append(live)
    return lives


def _sign(difference: float) -> int:
    return (difference > 1e-9) - (difference < -1e-9)


def show(challenge: dict) -> str:
    """The keys of some sequences, or the run, as Python."""
    name = challenge["key"]
    if "sequences" not in challenge:
        return server.show(challenge, made("PolicyScheduler", name))
    lines = ["from servelab.serving import Request, Sequence", f"key = {name}"]
    for seq in _sequences(challenge):
        r = seq.request
        request = f"Request({r.id!r}, {r.prompt_tokens}, {r.max_tokens}, arrival={r.arrival}, priority={r.priority})"
        lines.append(f"{r.id} = key(Sequence({request}, outputs={seq.outputs}, num_computed={seq.num_computed}))")
    return "\n".join(lines)
