"""What this unit's drivers and judges share: the outcome of one call, and the first rule that a run broke.

Every challenge here tests one case, named in it. A judge follows the run with a model of the rules, in which any choice
of ids is right, and stops at the first step that breaks one: what comes after has no meaning.
"""

from collections.abc import Callable
from typing import Any

from servelab.exercise import Case
from servelab.kv import OutOfBlocks
from servelab.plain import close, plain


class Broken(Exception):
    """The first rule that a run broke: at which step, what was expected, what came."""


def attempt(call: Callable, *arguments) -> dict:
    """Call the learner's code: ``{"returned": value}`` or ``{"raised": name}``. An unwritten stub is let through."""
    try:
        return {"returned": plain(call(*arguments))}
    except NotImplementedError:
        raise
    except Exception as error:  # whatever else the learner's code raises is an outcome to judge
        kinds = [kind.__name__ for kind in (OutOfBlocks, ValueError) if isinstance(error, kind)]
        return {"raised": (kinds or [type(error).__name__])[0]}


def value(call: Callable, *arguments) -> Any:
    """What a call that only looks returned, or the name of what it raised."""
    outcome = attempt(call, *arguments)
    return outcome["returned"] if "returned" in outcome else f"raised {outcome['raised']}"


def pool_state(pool, num_blocks: int) -> dict:
    """What a pool says about itself through its documented methods."""
    counts = [value(pool.ref_count, block) for block in range(num_blocks)]
    return {"num_free": value(lambda: pool.num_free), "ref_counts": counts}


def text(outcome: dict) -> str:
    """An outcome as a learner should read it."""
    if "raised" in outcome:
        return str(outcome["raised"])
    returned = outcome["returned"]
    return "nothing" if returned is None else str(returned)[:200]


def require(where: str, expected: Any, got: Any) -> None:
    """Stop the run unless a plain value is the expected one."""
    if not close(got, expected):
        raise Broken(f"{where}: expected {expected}, got {str(got)[:200]}")


def require_done(where: str, outcome: dict) -> None:
    """Stop the run if a call that had to succeed raised."""
    if "raised" in outcome:
        raise Broken(f"{where}: expected no error, got {outcome['raised']}")


def require_returned(where: str, expected: Any, outcome: dict) -> None:
    """Stop the run unless the call returned the expected value."""
    if "raised" in outcome or not close(outcome["returned"], expected):
        raise Broken(f"{where}: expected {expected}, got {text(outcome)}")


def require_raised(where: str, error: str, outcome: dict) -> None:
    """Stop the run unless the call raised ``error``."""
    if outcome.get("raised") != error:
        raise Broken(f"{where}: expected {error}, got {text(outcome)}")


def require_state(where: str, holders: list[int], state: dict) -> None:
    """Stop the run unless a pool counts its holders and its free blocks as the model does."""
    require(f"{where}: ref_count of blocks 0 to {len(holders) - 1}", holders, state["ref_counts"])
    require(f"{where}: num_free", holders.count(0), state["num_free"])


def are_ids(blocks: Any) -> bool:
    """Whether a plain value is a list of different block ids."""
    return isinstance(blocks, list) and all(type(b) is int for b in blocks) and len(set(blocks)) == len(blocks)


def entry(transcript: Any, step: int) -> dict:
    """What was recorded at a step; a run that is too short is broken."""
    if not isinstance(transcript, list) or step >= len(transcript):
        raise Broken(f"the run ended before step {step}")
    return transcript[step]


def judged(challenge: dict, rules: Callable[[Any], None], transcript: Any) -> list[Case]:
    """The challenge's one case, after following the transcript by the rules."""
    try:
        rules(transcript)
    except Broken as broken:
        return [Case(challenge["case"], False, str(broken))]
    return [Case(challenge["case"], True)]
