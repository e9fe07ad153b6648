"""Judged reflection questions: a dictionary of answers, one case for each question."""

import re

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain, type_name

GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?%?")  # as texts print a large number: 15,840
RELATIVE = 0.005  # a share or an average may be rounded to three digits; a count may not


def _read(text: str) -> str | float:
    """An answer given as text: a letter, perhaps in brackets, or a number, perhaps in per cent."""
    text = text.strip().strip("().").strip().lower()
    text = text.replace(",", "") if GROUPED.fullmatch(text) else text
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return text


class Quiz:
    """The functions of an exercise whose answer is ``{question: number or letter}``.

    The reference's own dictionary says what is right; ``nudges`` say, for each question, what to think about when an
    answer is wrong, without giving it away.
    """

    def __init__(self, nudges: dict[str, str]):
        self.nudges = nudges
        self.cases = tuple(CaseSpec(name, hint=1) for name in nudges)

    def challenges(self, rng) -> list[str]:
        return list(self.nudges)

    def drive(self, question: str, answers) -> object:
        if isinstance(answers, dict) and not any(answers.get(key) is not None for key in self.nudges):
            raise NotImplementedError("no answer given yet")
        if not isinstance(answers, dict):
            return {"instead of a dictionary": type_name(answers)}
        return plain(answers.get(question))

    def judge(self, question: str, given, expected) -> list[Case]:
        meant, expected = (_read(answer) if isinstance(answer, str) else answer for answer in (given, expected))
        if close(meant, expected, rtol=RELATIVE if isinstance(expected, float) else 0):
            return [Case(question, True)]
        got = "no answer" if given is None else f"{given!r} is not it"
        if isinstance(meant, str) and not isinstance(expected, str):
            got = f"expected a number, got {given!r}"
        if isinstance(given, dict) and "instead of a dictionary" in given:
            got = f"expected the dictionary of answers, got an object of type {given['instead of a dictionary']}"
        elif isinstance(given, dict):
            got = f"expected a number or text, got an object of type {given.get('unexpected type', 'dict')}"
        return [Case(question, False, f"{got}. {self.nudges[question]}")]

    def show(self, question: str) -> str:
        return f"answers[{question!r}]"
