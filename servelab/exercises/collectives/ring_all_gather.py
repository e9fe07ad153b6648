"""Check of `ring_all_gather`: rank r's chunk r arrives everywhere, each chunk having passed each rank once."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.exercises.collectives import _ring as ring
from servelab.plain import decode_array, plain

ANSWERS = ("ring_all_gather",)
GATHERS = "every rank holds all chunks"
CASES = (*ring.BASIC, CaseSpec(GATHERS, hint=2, weight=2), *ring.GENERAL)


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
        values = _gathered(challenge, transcript, expected)
        return ring.judge(challenge, transcript, values, 1, hint=2)

    return ranks.judged(challenge, transcript, rules, buffer=3)


def _gathered(challenge: dict, transcript: dict, expected: dict) -> Case:
    """Whether every rank holds all chunks; if one does not, with the chunk that is not there."""
    case = ranks.same_values(challenge["case"], transcript, expected, shares=False)
    if case.passed or challenge["groups"]:
        return case
    p = challenge["world"]
    for rank, (got, want) in enumerate(zip(transcript["values"], expected["values"], strict=True)):
        held, wanted = (decode_array(each["tensor"]).reshape(-1).tolist() for each in (got, want))
        before = [ranks.element(challenge, rank, index) for index in range(challenge["n"])]
        for chunk, cut in enumerate(ring.cuts(challenge)):
            if held[cut] != wanted[cut]:
                told, hint = _instead(held[cut], wanted[cut], before[cut])
                if hint and ranks.total(transcript["received"][rank]) < challenge["n"] * (p - 1) // p:
                    told, hint = "; it is what it was before: not all chunks have arrived", 2
                told = f"chunk {chunk} on rank {rank} is not that of rank {chunk}{told}"
                told = f"rank {rank} has lost its own chunk" if chunk == rank else told
                return Case(case.name, False, f"{case.message}; {told}", hint)
    return case


def _instead(held: list[float], wanted: list[float], before: list[float]) -> tuple[str, int | None]:
    """What a chunk holds that is not what it should be, in words, and the hint about that."""
    if held == before:
        return "; it is what it was before: did it arrive in a buffer?", 1
    if held == [a + b for a, b in zip(wanted, before, strict=True)]:
        return ", but that and what it was before, added up", 1
    return "", None


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    tensor = ranks.shown_tensor(challenge) + ring.shown_strided(challenge)
    return ranks.show(challenge, f"tensor = {tensor}", "ring_all_gather(tensor[...]{group})", "return tensor")
