"""Check of `ring_all_gather`: rank r's chunk r arrives everywhere, each chunk having passed each rank once."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.exercises.collectives import _ring as ring
from servelab.plain import decode_array, plain

ANSWERS = ("ring_all_gather",)
GATHERS = "every rank holds all chunks"
CASES = (*ring.BASIC, CaseSpec(GATHERS, hint=2, weight=3), *ring.GENERAL)


def challenges(rng: Random) -> list[dict]:
    """The runs of all rings; each rank's chunk is its own, and what else its tensor holds is to be overwritten."""
    return ring.challenges(rng, GATHERS)


def _body(challenge, group, rank, ring_all_gather):
    mine, _, refused = ring.attempt(challenge, group, rank, ring_all_gather)
    return {"refused": refused} if refused else plain({"tensor": mine})


def drive(challenge: dict, ring_all_gather) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, ring_all_gather)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined. A rank sends all chunks but its neighbour's, on whichever side that is.

    A strided tensor may be refused or gathered.
    """
    if challenge["case"] == ring.STRIDED:
        owners = [owner for owner, cut in enumerate(ring.cuts(challenge)) for _ in range(challenge["n"])[cut]]
        gathered = [ranks.element(challenge, owner, index) for index, owner in enumerate(owners)]
        return [ring.strided(transcript, "tensor", lambda _: gathered)]

    def rules() -> list[Case]:
        return [_gathered(challenge, transcript, expected), *ring.judge(challenge, transcript, 1, _allowed)]

    return ranks.judged(challenge, transcript, rules, buffer=3)


def _gathered(challenge: dict, transcript: dict, expected: dict) -> Case:
    """Whether every rank holds all chunks; if one does not, with the chunk that is not there."""
    case = ranks.same_values(challenge["case"], transcript, expected, shares=False)
    if case.passed or challenge["groups"]:
        return case
    for rank, (got, want) in enumerate(zip(transcript["values"], expected["values"], strict=True)):
        held, wanted = (decode_array(each["tensor"]).reshape(-1).tolist() for each in (got, want))
        missing = [index for index, cut in enumerate(ring.cuts(challenge)) if held[cut] != wanted[cut]]
        if missing:
            message = f"{case.message}; chunk {missing[0]} on rank {rank} is not that of rank {missing[0]}"
            return Case(case.name, False, message)
    return case


def _allowed(r: int, sizes: list[int]) -> set[int]:
    return {sum(sizes) - sizes[(r + way) % len(sizes)] for way in (-1, 1)}


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    tensor = ranks.shown_tensor(challenge) + ring.shown_strided(challenge)
    return ranks.show(challenge, f"tensor = {tensor}", "ring_all_gather(tensor{group})", "return tensor")
