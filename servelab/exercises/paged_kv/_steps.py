"""What this unit's drivers and judges share: the outcome of one call, and the first rule that a run broke.

A judge follows the run with a model of the rules, in which any choice of ids is right, and stops at the first step that
breaks one: what comes after has no meaning. A step is a line of the listing that the learner is shown, and a message
quotes that line.
"""

from collections.abc import Callable
from typing import Any

from servelab.exercise import Case, describe_error
from servelab.kv import OutOfBlocks
from servelab.plain import close, is_array, plain

USED = ("OutOfBlocks", "ValueError")  # the errors that the tasks ask for
UNCHANGED = "leaves its arguments unchanged"
MAX_SHOWN = 10  # items of a list; of a longer one a message shows where it differs first


class Broken(Exception):
    """The first rule that a run broke: at which step, what was expected, what came."""


def attempt(call: Callable, *arguments) -> dict:
    """Call the learner's code: ``{"returned": value}`` or ``{"raised": name, "message": text}``.

    Where a list that it was given is another one afterwards, ``"changed"`` says from what to what. An unwritten stub is
    let through.
    """
    lists = [argument for argument in arguments if isinstance(argument, list)]
    before = plain(lists)
    try:
        outcome = {"returned": plain(call(*arguments))}
    except NotImplementedError:
        raise
    except Exception as error:  # whatever else the learner's code raises is an outcome to judge
        kinds = [kind.__name__ for kind in (OutOfBlocks, ValueError) if isinstance(error, kind)]
        outcome = {"raised": (kinds or [type(error).__name__])[0], "message": describe_error(error)}
    changed = [pair for pair in zip(before, plain(lists), strict=True) if pair[0] != pair[1]]
    return outcome | ({"changed": list(changed[0])} if changed else {})


def value(call: Callable, *arguments) -> Any:
    """What a call that only looks returned, or the outcome of one that raised."""
    outcome = attempt(call, *arguments)
    return outcome.get("returned", outcome)


def pool_state(pool, num_blocks: int) -> dict:
    """What a pool says about itself through its documented methods."""
    counts = [value(pool.ref_count, block) for block in range(num_blocks)]
    return {"num_free": value(lambda: pool.num_free), "ref_counts": counts}


def shown(value: Any) -> str:
    """A plain value as a learner should read it."""
    if is_array(value):
        return f"an array or tensor of {value['dtype']} with shape {value['shape']}"
    if isinstance(value, dict):
        kind = str(value.get("unexpected type", "dict"))[:40]
        return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
    if isinstance(value, list):
        start = ", ".join(map(shown, value[:MAX_SHOWN]))
        return f"[{start}, ... ({len(value)} in all)]" if len(value) > MAX_SHOWN else f"[{start}]"
    return repr(value)[:100]


def shown_pairs(value: Any) -> str:
    """Like `shown`, for a list of pairs, because plain data keeps no tuples."""
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return f"[{', '.join(f'({shown(a)}, {shown(b)})' for a, b in value[:MAX_SHOWN])}]"
    return shown(value)


def advice(got: Any, wanted: str) -> str:
    """What to return instead of something that is neither a list nor a number, or holds such a thing."""
    strange = any(isinstance(item, dict) for item in ([got, *got] if isinstance(got, list) else [got]))
    if got == {"unexpected type": "method"}:
        return "; keep the @property above it"
    return f"; it must be {wanted}" if strange else ""


def instead(outcome: dict, wanted: str = "", show: Callable[[Any], str] = shown) -> str:
    """What came of a call in place of what was expected, ``wanted`` being its type: the end of a sentence."""
    if "raised" in outcome:
        message = str(outcome.get("message") or outcome["raised"])[:300].rstrip(": ")
        return f", but {'it' if outcome['raised'] in USED else 'your code'} raised {message}"
    returned = outcome["returned"]
    return ", but it returned None" if returned is None else f", got {show(returned)}{advice(returned, wanted)}"


def found(got: Any, wanted: str = "") -> str:
    """Like `instead`, for what `value` saw."""
    if isinstance(got, dict) and "raised" in got:
        return instead(got)
    return f", got {shown(got)}{advice(got, wanted)}"


def type_in_words(expected: Any) -> str:
    """The type of the ids, numbers or pairs that were expected."""
    if not isinstance(expected, list):
        return "an int"
    return "a list of int" if all(isinstance(item, int) for item in expected) and expected else "a list"


def require(where: str, expected: Any, got: Any) -> None:
    """Stop the run unless a plain value is the expected one. Of long lists the message names the first difference."""
    if close(got, expected):
        return
    if isinstance(expected, list) and isinstance(got, list) and max(len(expected), len(got)) > MAX_SHOWN:
        index = next((i for i, (e, g) in enumerate(zip(expected, got, strict=False)) if not close(g, e)), None)
        if index is None:
            raise Broken(f"{where}: expected {len(expected)} items, got {len(got)}")
        raise Broken(f"{where}: expected {shown(expected[index])} at index {index}, got {shown(got[index])}")
    raise Broken(f"{where}: expected {shown(expected)}{found(got, type_in_words(expected))}")


def require_done(where: str, outcome: dict) -> None:
    """Stop the run if a call that had to succeed raised."""
    if "raised" in outcome:
        raise Broken(f"{where}: expected no error{instead(outcome)}")


def require_returned(where: str, expected: Any, outcome: dict, show: Callable[[Any], str] = shown) -> None:
    """Stop the run unless the call returned the expected value."""
    returned = outcome.get("returned")
    if isinstance(returned, list) and len(returned) > MAX_SHOWN:
        require(where, expected, returned)
    if not close(returned, expected):
        raise Broken(f"{where}: expected {show(expected)}{instead(outcome, type_in_words(expected), show)}")


def require_raised(where: str, error: str, outcome: dict, show: Callable[[Any], str] = shown) -> None:
    """Stop the run unless the call raised ``error``."""
    if "returned" in outcome:
        returned = outcome["returned"]
        done = "nothing was raised" if returned is None else f"it returned {show(returned)}"
        raise Broken(f"{where}: expected {error}, but {done}")
    if outcome["raised"] != error:
        raise Broken(f"{where}: expected {error}{instead(outcome)}")


def require_ref_count(where: str, holders: list[int], block: int, outcome: dict) -> None:
    """The call tells how many hold the block, or refuses one that does not exist."""
    if 0 <= block < len(holders):
        require_returned(where, holders[block], outcome)
    else:
        require_raised(where, "ValueError", outcome)


def require_granted(where: str, n: int, free: list[int], outcome: dict) -> list[int]:
    """The ids that an ``allocate`` returned; stop the run unless they are ``n`` of the free ones."""
    got: Any = outcome.get("returned")
    if not (are_ids(got) and len(got) == n and set(got) <= set(free)):
        due = f"{n} of the free blocks {shown(free)}, each once" if n else "[]"
        raise Broken(f"{where}: expected {due}{instead(outcome, 'a list of int')}")
    return got


def require_state(where: str, holders: list[int], state: dict) -> None:
    """Stop the run unless a pool counts its holders and its free blocks as the model does."""
    for block, count in enumerate(holders):
        require(f"{where}: ref_count({block})", count, state["ref_counts"][block])
    require(f"{where}: num_free", holders.count(0), state["num_free"])


def require_unchanged(where: str, outcome: dict) -> None:
    """Stop the run if the learner's code changed a list that it was given."""
    if "changed" in outcome:
        before, after = map(shown_pairs, outcome["changed"])
        raise Broken(f"{where}: expected the caller's list {before} to be left alone, it became {after}")


def with_one_bad(good: list, bad: Any) -> list[list]:
    """The good names with a bad one first, in the middle and last: a loop from either end meets good ones before it."""
    middle = len(good) // 2
    return [[bad, *good], [*good[:middle], bad, *good[middle:]], [*good, bad]]


def are_ids(blocks: Any) -> bool:
    """Whether a plain value is a list of different block ids."""
    return isinstance(blocks, list) and all(type(b) is int for b in blocks) and len(set(blocks)) == len(blocks)


def entry(transcript: Any, step: int) -> dict:
    """What was recorded at a step; a run that is too short is broken."""
    if not isinstance(transcript, list) or step >= len(transcript):
        raise Broken(f"the run ended before step {step}")
    return transcript[step]


def step(number: int, line: str, blocks: list[int] | None = None) -> str:
    """How a message names a step: its number, its line of the listing, and the ids that the names in it stand for."""
    code = line.partition("  # ")[0]
    return f"step {number}, {code}" + ("" if blocks is None or str(blocks) in code else f" with blocks {blocks}")


def listing(given: list[str], lines: list[str]) -> str:
    """A run to paste: lines that are given, then one line a step with its number, by which messages name it.

    Some steps have to be refused, so `walk` runs it.
    """
    codes = [line.partition("  # ") for line in lines]
    numbered = [f"{c}  # step {n}{'; ' * bool(note)}{note}" for n, (c, _, note) in enumerate(codes, start=1)]
    lead = "from servelab.listing import walk  # runs line by line, and goes on behind an error"
    return "\n".join([lead, "", 'walk(globals(), """', *given, *numbered, '""")'])


def judged(challenge: dict, rules: Callable[[Any], None], transcript: Any) -> list[Case]:
    """The challenge's one case, after following the transcript by the rules."""
    try:
        rules(transcript)
    except Broken as broken:
        return [Case(challenge["case"], False, str(broken))]
    return [Case(challenge["case"], True)]
