"""What the checks of the ledger share: one call of a function, with model, hardware and link as plain data."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from servelab.errors import CourseError
from servelab.exercise import Case
from servelab.exercises.memory import _calls as memory
from servelab.plain import text
from servelab.ranks import Link


def call(case: str, function: str, link: Link | None = None, **arguments: Any) -> dict:
    """A challenge: the case that it tests, the function, and the arguments as plain data."""
    made = memory.call(case, function, **arguments)
    made["arguments"] |= {"link": asdict(link)} if link else {}
    return made


def drive(challenge: dict, **functions: Callable) -> dict:
    """Call the function once; what it returned or raised, or which exercise of an earlier unit it lacks."""
    function, link = functions[challenge["function"]], challenge["arguments"].pop("link", None)
    more = {"link": Link(**link)} if link else {}
    lacking: list[str] = []

    def call(**given: Any) -> Any:
        try:
            return function(**given, **more)
        except CourseError as error:
            lacking.append(text(f"{error.problem}\n{error.mend}"))
            raise

    made = memory.drive(challenge, **{challenge["function"]: call})
    return {"lacking": lacking[0]} if lacking else made


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Every value is determined. Without an earlier unit's exercise nothing can be judged, which is said as such."""
    if "lacking" in transcript:
        return [Case(challenge["case"], False, f"what this builds on is not written yet: {transcript['lacking']}")]
    got, want = transcript.get("returned"), expected["returned"]
    if challenge["function"] == "fastest_degree" and transcript["error"] is None and not memory.agree(got, want):
        return [Case(challenge["case"], False, f"expected {want}, got {str(got)[:80]}")]
    return memory.judge(challenge, transcript, expected)


def show(challenge: dict) -> str:
    """The call, as Python to paste."""
    arguments = dict(challenge["arguments"])
    link = arguments.pop("link", None)
    text = memory.show(challenge | {"arguments": arguments})
    return text if link is None else f"{text[:-1]}, link=Link({link['alpha']}, {link['bandwidth']}))"
