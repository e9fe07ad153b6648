"""Check of `CachedKV` and `CachedEngine`: the same tokens as without a cache, and nothing computed that was found."""

from collections.abc import Mapping
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.capstone import _script as script
from servelab.exercises.capstone._script import add, answer, challenge, prompt, step

ANSWERS = ("CachedKV", "CachedEngine")
PLAIN, FOUND, LAST = "strangers are served as before", "found tokens are not computed", "the last token is computed"
LEFT = "a finished request's blocks are found"
FINISHED, PARTS = "only what was computed is found", "chunks of found tokens"
TURNS, PREEMPTED = "answers are found, too", "a preempted request finds its blocks"
SHARED, ROOM, AGAIN = "what is shared needs no room", "no room changes nothing", "an id comes again"
DRAWN = "a random run"
CASES = (
    CaseSpec(PLAIN, hint=1, weight=2),
    CaseSpec(FOUND, hint=1, weight=3),
    CaseSpec(LEFT, hint=3),
    CaseSpec(LAST, hint=1),
    CaseSpec(FINISHED, hint=3, weight=2),
    CaseSpec(PARTS, hint=2, weight=2),
    CaseSpec(TURNS, hint=3),
    CaseSpec(PREEMPTED, hint=3, weight=2),
    CaseSpec(SHARED, hint=2, weight=2),
    CaseSpec(ROOM, hint=2, weight=2),
    CaseSpec(AGAIN, hint=3),
    CaseSpec(DRAWN, hint=3, weight=2),
)
JUDGED = ("tokens", "events", "unfinished", "given", "passes", "computed", "rows", "blocked", "left")


def challenges(rng: Random) -> list[dict]:
    """Directed runs with blocks of 4, then random ones."""
    runs = [_plain(rng), _found(rng), _left(rng), _last(rng), *_finished(rng), *_parts(rng), *_turns(rng)]
    runs += [*_preempted(rng), _shared(rng), *_room(rng), _again(rng)]
    begin = prompt(rng, 9)
    sizes = (2, 0.0, 0.0), (3, 0.15, 0.0), (4, 0.1, 0.1)  # of a block; chances of preemption and abort
    return runs + [script.drawn(rng, DRAWN, 8, size, lost, gone, begin) for size, lost, gone in sizes]


def _plain(rng: Random) -> dict:
    a, b = add("a", [1, *prompt(rng, 4)], 2), add("b", [2, *prompt(rng, 4)], 2)
    return challenge(PLAIN, [step({"a": 5}, a), step({"b": 3, "a": 1}, b), step({"b": 2}), step({"b": 1}), step({})])


def _found(rng: Random) -> dict:
    """While the first still runs, and after it has left."""
    common = prompt(rng, 9)
    a, b, c = (add(id, [*common, *prompt(rng, 2)], 2) for id in "abc")
    steps = [step({"a": 11}, a), step({"b": 11, "a": 1}, b), step({"b": 1}), step({"c": 11}, c), step({"c": 1})]
    return challenge(FOUND, [*steps, step({})])


def _left(rng: Random) -> dict:
    """The first is finished by the step that computes its blocks, and gives them back as the scheduler hears of it."""
    common = prompt(rng, 9)
    a, b = add("a", common, 1), add("b", [*common, *prompt(rng, 2)], 2)
    return challenge(LEFT, [step({"a": 9}, a), step({"b": 11}, b), step({"b": 1}), step({})])


def _last(rng: Random) -> dict:
    """The same prompt again, while the first still runs."""
    same = prompt(rng, 8)
    steps = [step({"a": 8}, add("a", same, 2)), step({"b": 8}, add("b", same, 2)), step({"a": 1, "b": 1}), step({})]
    return challenge(LAST, steps)


def _finished(rng: Random) -> list[dict]:
    """The first prompt is half computed when the second comes; a block is full but for the token sampled last.

    Then two equal prompts in one step, of which neither can find the other; and one that has room for all of its prompt
    and half of it computed.
    """
    same, other = prompt(rng, 14), prompt(rng, 6)
    half = [step({"a": 6}, add("a", same, 1)), step({"b": 14}, add("b", same, 5)), *[step({"b": 1})] * 4]
    half += [step({"a": 8}), step({})]
    longer = [*other, *answer(other, 2), *prompt(rng, 3)]
    last = [step({"a": 6}, add("a", other, 3)), step({"a": 1}), step({"b": 11}, add("b", longer, 3))]
    last += [step({"b": 1}), step({"a": 1, "b": 1})]
    twins = [step({"a": 10, "b": 10}, add("a", same[:10], 1), add("b", same[:10], 1)), step({})]
    whole = [step({"a": 6}, add("a", same, 1)), step({"b": 14}, add("b", same, 2)), step({"b": 1, "a": 8}), step({})]
    grown = [step({"a": 3}, add("a", same, 1)), step({"a": 3}), *whole[1:]]
    runs = [challenge(FINISHED, steps) for steps in (twins, half, [*last, step({})])]
    return runs + [challenge(FINISHED, steps, whole_prompts=True) for steps in (whole, grown)]


def _parts(rng: Random) -> list[dict]:
    """Chunks that end before, at and behind the end of what is found; and one beside a request that is computed."""
    same = prompt(rng, 14)
    first = step({"a": 14}, add("a", same, 1))
    small = [first, step({"b": 5}, add("b", same, 2)), step({"b": 7}), step({"b": 1}), step({"b": 1}), step({"b": 1})]
    beside = [first, step({"b": 7, "c": 3}, add("b", same, 1), add("c", prompt(rng, 3), 2)), step({"c": 1, "b": 7})]
    return [challenge(PARTS, [*steps, step({})]) for steps in (small, beside)]


def _turns(rng: Random) -> list[dict]:
    """The second turn of a chat begins with the first: its prompt and its answer, whose last token was never computed.

    Once it is the first of a block, once the last.
    """
    runs = []
    for length in (7, 6):
        first = prompt(rng, 6)
        second = [*first, *answer(first, length), *prompt(rng, 2)]
        steps = [step({"a": 6}, add("a", first, length)), *[step({"a": 1})] * (length - 1)]
        steps += [step({"b": len(second)}, add("b", second, 2)), step({"b": 1}), step({})]
        runs.append(challenge(TURNS, steps))
    return runs


def _preempted(rng: Random) -> list[dict]:
    """In an answer; and in a prompt."""
    first = [step({"a": 6}, add("a", prompt(rng, 6), 8)), *[step({"a": 1})] * 4, step({}, preempted=["a"])]
    first += [step({"a": 11}), step({"a": 1}), step({"a": 1}), step({})]
    second = [step({"a": 9}, add("a", prompt(rng, 12), 2)), step({}, preempted=["a"]), step({"a": 10})]
    second += [step({"a": 2}), step({"a": 1}), step({})]
    return [challenge(PREEMPTED, steps) for steps in (first, second)]


def _shared(rng: Random) -> dict:
    """Four blocks, of which the first request holds three. The second shares two of them and needs one of its own."""
    common = prompt(rng, 9)
    a, b = add("a", common, 3), add("b", [*common, *prompt(rng, 2)], 1)
    steps = [step({"a": 9}, a), step({"a": 1, "b": 11}, b), step({"a": 1}), step({})]
    return challenge(SHARED, steps) | {"num_blocks": 4}


def _room(rng: Random) -> list[dict]:
    """Five blocks. A request whose beginning is found waits for room; while it waits, all else can still be taken.

    Then one that has blocks waits for its next, in its answer and in its prompt; it keeps those that it has. At last
    one lacks two where one is free.
    """
    common = prompt(rng, 9)
    a, b, c = add("a", [*common, *prompt(rng, 2)], 2), add("b", prompt(rng, 8), 1), add("c", [*common, 3, 4, 5, 6], 2)
    steps = [step({"a": 11}, a), step({"b": 5, "a": 1}, b), step({"c": 13}, c), step({"b": 3}), step({"c": 13})]
    runs = [[*steps, step({"c": 1}), step({})]]
    a, b = add("a", prompt(rng, 8), 3), add("b", prompt(rng, 11), 2)
    steps = [step({"a": 8, "b": 11}, a, b), step({"a": 1}), step({"b": 1, "a": 1}), step({"a": 1}), step({"a": 1})]
    runs.append([*steps, step({})])
    a, b = add("a", [*common, *prompt(rng, 4)], 1), add("b", prompt(rng, 5), 2)
    steps = [step({"c": 9}, add("c", [*common, 1], 1)), step({"c": 1}), step({"a": 9, "b": 5}, a, b), step({"a": 4})]
    runs.append([*steps, step({"b": 1, "a": 4}), step({"a": 4}), step({})])
    a, b = add("a", prompt(rng, 9), 3), add("b", prompt(rng, 16), 1)
    steps = [step({"a": 9}, a), step({"b": 4, "a": 1}, b), step({"b": 8, "a": 1}), step({"b": 8}), step({"b": 4})]
    runs.append([*steps, step({})])
    return [challenge(ROOM, steps) | {"num_blocks": 5} for steps in runs]


def _again(rng: Random) -> dict:
    """The id of an aborted request, whose prompt was found, and of a finished one."""
    same, other = prompt(rng, 10), prompt(rng, 10)
    steps = [step({"a": 10}, add("a", same, 1)), step({"a": 6}, add("a", same, 3)), step({}, ["abort", "a"])]
    steps += [step({"a": 10}, add("a", other, 2)), step({"a": 1}), step({"a": 9}, add("a", [*other[:6], 1, 2, 3], 1))]
    return challenge(AGAIN, [*steps, step({})])


def drive(asked: dict, CachedKV, CachedEngine) -> dict:
    """Run the engine by the script, on unit 03's pool, as `servelab.parts` finds it."""
    from servelab.parts import paged_kv

    def make_kv():
        return CachedKV(paged_kv.PrefixCache(asked["num_blocks"], asked["block_size"]))

    return script.drive(asked, make_kv, CachedEngine, paged_kv, _remark)


def _remark(kv: Any, ids: list[str]) -> str:
    """Whether the memory knows the tokens of these requests."""
    known = getattr(kv, "tokens", None)
    strange = [id for id in ids if not isinstance(known, Mapping) or id not in known]
    return f"; the tokens of {strange[0]!r} are not in the memory's attribute tokens" if strange else ""


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every token and every pass is determined; blocks are too, unless equal ones lie twice in the pool."""
    (got,), (want,) = transcript["runs"], expected["runs"]
    kinds = (*JUDGED, "returned" if asked["case"] == DRAWN else "used")
    return [script.case(asked["case"], script.compare(asked, got, want), kinds)]


def show(asked: dict) -> str:
    """The run as Python."""
    return script.shown(asked, "CachedKV, CachedEngine", "cached_engine")


def play(CachedKV, CachedEngine, steps: list[dict], block_size: int, eos: int, **more) -> None:
    """Run an engine by a script and print what each step gave.

    ``more`` may be ``num_blocks``, and ``whole_prompts=True``: requests get room for all of their prompts at once.
    """
    asked = challenge(PLAIN, steps, block_size, eos) | more
    script.print_runs(asked, drive(asked, CachedKV, CachedEngine))
