"""Check of `violations`: every broken state beside a sound one that differs from it in one thing."""

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.paged_kv._steps import UNCHANGED, shown
from servelab.plain import plain

ANSWERS = ("violations",)
CASES = (
    CaseSpec("leaked block", hint=2),
    CaseSpec("free and held", hint=2),
    CaseSpec("free and cached", hint=2),
    CaseSpec("cached and held", hint=2),
    CaseSpec("listed twice", hint=2),
    CaseSpec("wrong reference count", hint=3, weight=2),
    CaseSpec("twice in one table", hint=3),
    CaseSpec("id out of range", hint=1),
    CaseSpec(UNCHANGED, hint=1),
)
KEYS = ("num_blocks", "free", "cached", "refs", "tables")
PLACES = ("first", "second")


def challenges(rng: Random) -> list[dict]:
    """Two states each, one sound and one broken, in an order that only the reference's transcript tells."""
    made, orders = [], {spec.name: _orders(rng) for spec in CASES}
    for case, sound, broken in pairs(rng):
        states = [sound, broken] if orders[case].pop() else [broken, sound]
        made.append({"case": case, "states": states})
    return made


def _orders(rng: Random, most: int = 16) -> list[bool]:
    """As many random orders as a case may need, both of them among the first three."""
    last = rng.sample((True, True, False, False), 4)
    return [rng.random() < 0.5 for _ in range(most)] + last


def pairs(rng: Random) -> Iterator[tuple[str, dict, dict]]:
    """Case, sound state, broken state: small ones by hand, then random ones with one fault each."""
    yield from _by_hand()
    for fault in (
        _leak,
        _free_and_held,
        _free_and_cached,
        _cached_and_held,
        _listed_twice,
        _wrong_count,
        _twice,
        _range,
        _kept,
    ):
        yield from fault(rng)


def _state(num_blocks: int, free=(), cached=(), tables=None, refs=None) -> dict:
    """A snapshot. Reference counts follow from the tables where none are given; their keys are text, as JSON wants."""
    tables = {name: list(blocks) for name, blocks in (tables or {}).items()}
    holders: dict[str, int] = {}
    for blocks in tables.values():
        for block in dict.fromkeys(blocks):
            holders[str(block)] = holders.get(str(block), 0) + 1
    refs = holders if refs is None else {str(block): count for block, count in refs.items()}
    return {"num_blocks": num_blocks, "free": list(free), "cached": list(cached), "refs": refs, "tables": tables}


def _by_hand() -> list[tuple[str, dict, dict]]:
    shared = {"a": [0, 1], "b": [0, 2]}
    return [
        ("leaked block", _state(0), _state(1)),
        ("leaked block", _state(2, cached=[1, 0]), _state(2, cached=[1])),
        ("leaked block", _state(2, [1], tables={"a": [0]}), _state(2, tables={"a": [0]})),
        ("free and held", _state(1, tables={"a": [0]}), _state(1, [0], tables={"a": [0]})),
        ("free and held", _state(3, tables=shared), _state(3, [2], tables=shared)),
        ("free and cached", _state(1, cached=[0]), _state(1, [0], [0])),
        ("cached and held", _state(1, tables={"a": [0], "b": []}), _state(1, cached=[0], tables={"a": [0], "b": []})),
        ("listed twice", _state(2, [1, 0]), _state(2, [1, 0, 1])),
        ("listed twice", _state(2, [1], [0]), _state(2, [1], [0, 0])),
        ("wrong reference count", _state(3, tables=shared), _state(3, tables=shared, refs={0: 1, 1: 1, 2: 1})),
        ("wrong reference count", _state(3, tables=shared), _state(3, tables=shared, refs={0: 2, 1: 1, 2: 2})),
        ("wrong reference count", _state(1, [0], tables={"a": []}), _state(1, [0], refs={0: 1})),
        ("wrong reference count", _state(1, tables={"a": [0]}), _state(1, tables={"a": [0]}, refs={})),
        ("wrong reference count", _state(1, [0], refs={0: 0}), _state(1, [0], refs={0: -1})),
        ("wrong reference count", _state(2, tables={"a": [0, 1]}), _state(2, tables={"a": [0]}, refs={0: 1, 1: 1})),
        ("twice in one table", _state(2, tables={"a": [0, 1]}), _state(1, tables={"a": [0, 0]})),
        ("twice in one table", _state(2, tables={"a": [0, 1]}), _state(2, tables={"a": [0, 1, 0]}, refs={0: 2, 1: 1})),
        ("id out of range", _state(2, [0, 1]), _state(2, [0, 1, 2])),
        ("id out of range", _state(2, [0], [1]), _state(2, [0], [1, 7])),
        # nobody else has the last block, for which a list takes -1
        ("id out of range", _state(2, [0, 1]), _state(2, [0, -1])),
        ("id out of range", _state(2, [0, 1]), _state(2, [0, 1], refs={-1: 0})),
        ("id out of range", _state(2, [0, 1]), _state(2, [0, 1], refs={2: 0})),
        ("id out of range", _state(2, [0, 1], tables={"a": []}), _state(2, [0, 1], tables={"a": [-1]})),
        ("id out of range", _state(2, [0, 1], tables={"a": []}), _state(2, [0, 1], tables={"a": [2]})),
        (UNCHANGED, _state(3, [2, 0], tables={"a": [1]}), _state(3, [2], tables={"a": [1]})),
        (UNCHANGED, _state(4, [1], [3, 0], {"a": [2]}), _state(4, [1], [3, 0, 3], {"a": [2]})),
    ]


def _sound(rng: Random) -> dict:
    """A server at work: some blocks shared by two or three tables, some cached, some free."""
    num_blocks = rng.randint(9, 14)
    ids = rng.sample(range(num_blocks), num_blocks)
    prefix, own = ids[:2], ids[2:5]
    tables = {name: [*prefix, block] for name, block in zip("abc", own, strict=True)}
    tables["d"], cut = [ids[5]], rng.randint(7, num_blocks - 1)
    return _state(num_blocks, ids[cut:], ids[6:cut], tables)


def _leak(rng: Random):
    sound = _sound(rng)
    yield "leaked block", sound, {**sound, "free": sound["free"][1:]}
    yield "leaked block", sound, {**sound, "cached": sound["cached"][:-1]}
    tables = {name: blocks for name, blocks in sound["tables"].items() if name != "d"}
    refs = {block: n for block, n in sound["refs"].items() if block != str(sound["tables"]["d"][0])}
    yield "leaked block", sound, {**sound, "tables": tables, "refs": refs}


def _free_and_held(rng: Random):
    sound = _sound(rng)
    for name in ("a", "d"):
        yield "free and held", sound, {**sound, "free": [*sound["free"], sound["tables"][name][-1]]}


def _free_and_cached(rng: Random):
    sound = _sound(rng)
    yield "free and cached", sound, {**sound, "free": [*sound["free"], rng.choice(sound["cached"])]}
    yield "free and cached", sound, {**sound, "cached": [rng.choice(sound["free"]), *sound["cached"]]}


def _cached_and_held(rng: Random):
    sound = _sound(rng)
    for name in ("b", "d"):
        yield "cached and held", sound, {**sound, "cached": [sound["tables"][name][0], *sound["cached"]]}


def _listed_twice(rng: Random):
    sound = _sound(rng)
    for key in ("free", "cached"):
        yield "listed twice", sound, {**sound, key: [*sound[key], rng.choice(sound[key])]}


def _wrong_count(rng: Random):
    sound = _sound(rng)
    for block in (sound["tables"]["a"][0], sound["tables"]["c"][2]):
        for step in (-1, 1):
            refs = {**sound["refs"], str(block): sound["refs"][str(block)] + step}
            yield "wrong reference count", sound, {**sound, "refs": refs}
    without = {name: blocks for name, blocks in sound["tables"].items() if name != "b"}
    only = sound["tables"]["b"][2]
    kept = {block: count for block, count in sound["refs"].items() if block != str(only)}
    yield "wrong reference count", sound, {**sound, "tables": without, "free": [*sound["free"], only], "refs": kept}
    late = {**sound["refs"], str(sound["free"][0]): 1}
    yield "wrong reference count", {**sound, "refs": {**late, str(sound["free"][0]): 0}}, {**sound, "refs": late}


def _twice(rng: Random):
    sound = _sound(rng)
    table = sound["tables"]["c"]
    tables = {**sound["tables"], "c": [*table, table[0]]}
    for more in (0, 1):
        refs = {**sound["refs"], str(table[0]): sound["refs"][str(table[0])] + more}
        yield "twice in one table", sound, {**sound, "tables": tables, "refs": refs}


def _range(rng: Random):
    sound = _sound(rng)
    n = sound["num_blocks"]
    yield "id out of range", sound, {**sound, "free": [*sound["free"], n]}
    yield "id out of range", sound, {**sound, "cached": [-1, *sound["cached"]]}
    tables = {**sound["tables"], "d": [*sound["tables"]["d"], n + 3]}
    yield "id out of range", sound, {**sound, "tables": tables, "refs": {**sound["refs"], str(n + 3): 1}}


def _kept(rng: Random):
    sound = _sound(rng)
    for block in sound["tables"]["a"][1:]:
        yield UNCHANGED, sound, {**sound, "refs": {**sound["refs"], str(block): 9}}


def snapshot(state: dict) -> dict:
    """A state as the learner's function gets it: a copy of its own, with the blocks of ``refs`` as numbers."""
    copy = deepcopy(state)
    return {**copy, "refs": {int(block): count for block, count in copy["refs"].items()}}


def drive(challenge: dict, violations) -> list[dict]:
    """What the learner's function reports on each of the two states, and which keys of the snapshot it changed."""
    outcomes = []
    for state in challenge["states"]:
        given, before = snapshot(state), snapshot(state)
        found = plain(violations(given))
        outcomes.append({"found": found, "changed": [key for key in KEYS if given.get(key) != before[key]]})
    return outcomes


def judge(challenge: dict, transcript: list, expected: list) -> list[Case]:
    """Whether something is to be reported is determined, and the reference reports it; the wording is free."""
    problem = ""
    for which, state, outcome, wanted in zip(PLACES, challenge["states"], transcript, expected, strict=True):
        problem = problem or _problem(which, state, outcome["found"], wanted["found"])
        if challenge["case"] == UNCHANGED and not problem and outcome["changed"]:
            changed = " and ".join(str(key) for key in outcome["changed"])
            problem = f"the call changed {changed} of the {which} state: {_readable(state)}"
    return [Case(challenge["case"], not problem, problem)]


def _problem(which: str, state: dict, found: Any, wanted: list) -> str:
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        return f"return a list of str, also when it is empty; got {shown(found)} for the {which} state"
    if found and not wanted:
        return f"the {which} state is sound, and was reported as {found[0][:80]!r}: {_readable(state)}"
    if wanted and not found:
        return f"the {which} state is broken ({wanted[0]}), and nothing was reported: {_readable(state)}"
    return ""


def _readable(state: dict) -> str:
    return ", ".join(f"{key}={snapshot(state)[key]}" for key in KEYS)


def show(challenge: dict) -> str:
    """Both states, as Python to paste."""
    lines = []
    for which, state in zip(PLACES, challenge["states"], strict=True):
        given = snapshot(state)
        lines += [f"# the {which} state", f"violations({ {key: given[key] for key in KEYS} })"]
    return "\n".join(lines)
