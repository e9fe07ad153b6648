"""Check of `reflection`: numbers and choices whose answers the unit determines."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.plain import close, plain

ANSWERS = ("reflection",)
QUESTIONS = {
    "mean_waste_tokens": "mean waste of a sequence",
    "what_20_4_percent_is": "what 20.4 % is",
    "regions_that_fit": "regions that fit",
    "orca_without_paging": "batching without paging",
    "recomputed_block": "a fully cached prompt",
    "why_mask_values": "why V is masked too",
}
CASES = tuple(CaseSpec(case) for case in QUESTIONS.values())


def challenges(rng: Random) -> list[dict]:
    """One challenge: the questions stand in the notebook."""
    return [{"questions": list(QUESTIONS)}]


def drive(challenge: dict, reflection) -> dict:
    """The answers, as the learner's function returns them."""
    answers = plain(reflection())
    return {key: answers.get(key) if isinstance(answers, dict) else None for key in challenge["questions"]}


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Each answer on its own; a message never gives the answer away."""
    cases = []
    for key in challenge["questions"]:
        got = transcript[key].strip().lower() if isinstance(transcript[key], str) else transcript[key]
        passed = close(got, expected[key], atol=0.005)
        shown = "no answer" if got is None else f"your answer is {got!r}"
        cases.append(Case(QUESTIONS[key], passed, "" if passed else f"{key}: {shown}"))
    return cases


def show(challenge: dict) -> str:
    """The questions' names."""
    return "reflection() -> " + ", ".join(challenge["questions"])
