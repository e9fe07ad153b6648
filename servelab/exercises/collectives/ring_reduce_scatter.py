"""Check of `ring_reduce_scatter`: rank r ends up with the sum of chunk r, having sent every other chunk once."""

from dataclasses import replace
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.exercises.collectives import _ring as ring
from servelab.plain import decode_array, plain

ANSWERS = ("ring_reduce_scatter",)
SUMS, RETURNS = "rank r holds the sum of chunk r", "returns a view of its chunk"
HINTS = {ranks.ALONE: 3, ring.MOST: 1, ring.ELEMENTS: 1}
CASES = (
    *ring.BASIC,
    CaseSpec(SUMS, hint=2, weight=2),
    CaseSpec(RETURNS, hint=3),
    *(replace(spec, hint=HINTS.get(spec.name, spec.hint)) for spec in ring.ADDING),
)
WRITTEN = -1.0  # into what was returned, to see whether it is a view


def challenges(rng: Random) -> list[dict]:
    """The runs of all rings."""
    return ring.challenges(rng, SUMS)


def _body(challenge, group, rank, ring_reduce_scatter):
    import torch.distributed as dist

    mine, returned, refused = ring.attempt(challenge, group, rank, ring_reduce_scatter)
    if refused:
        return {"refused": refused}
    flat = mine.reshape(-1)
    own = flat.tensor_split(dist.get_world_size(group))[rank]
    found = plain({"own chunk": own, "returned": returned, "tensor": flat})
    return {**found, "written": _written(returned) and plain(own)}


def _written(returned: Any) -> bool:
    """Write to what was returned; whether that could be done."""
    try:
        returned.fill_(WRITTEN)
    except Exception:  # whatever it is, no tensor
        return False
    return True


def drive(challenge: dict, ring_reduce_scatter) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, ring_reduce_scatter)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Own chunk and traffic are determined; the direction of the ring is not, nor what else the tensor holds.

    A strided tensor may be refused or reduced, and then what is returned cannot be a view.
    """
    if challenge["case"] == ring.STRIDED:
        sums, cuts = ranks.sums(challenge), ring.cuts(challenge)
        return [ring.strided(transcript, "own chunk", lambda rank: sums[cuts[rank]])]
    returns = RETURNS if challenge["case"] == SUMS else challenge["case"]

    def rules() -> list[Case]:
        values = _sums(challenge, transcript, expected)
        return [
            *ring.judge(challenge, transcript, values, 1, hint=1, adds=True),
            ranks.same_values(returns, transcript, expected, "returned"),
            _view(returns, transcript, expected),
        ]

    return ranks.judged(challenge, transcript, rules, buffer=3)


def _sums(challenge: dict, transcript: dict, expected: dict) -> Case:
    """Whether the own chunks are right; if not, with what they hold instead and the hint about that."""
    case = ranks.same_values(challenge["case"], transcript, expected, "own chunk")
    if case.passed or challenge["case"] not in (SUMS, ranks.ANY):
        return case
    for rank, value in enumerate(transcript["values"]):
        told, hint = _instead(challenge, rank, decode_array(value["tensor"]).tolist())
        if told:
            return Case(case.name, False, f"{case.message}; {told}", hint)
    return case


def _instead(challenge: dict, rank: int, flat: list[float]) -> tuple[str, int]:
    """The complete sum of another chunk, or the share of one rank alone, in words, and the hint about that."""
    sums, cuts = ranks.sums(challenge), ring.cuts(challenge)
    own = range(challenge["n"])[cuts[rank]]
    if flat[cuts[rank]] == sums[cuts[rank]]:
        return "", 0
    for other, cut in enumerate(cuts):
        if flat[cut] == sums[cut] and sums[cut]:
            return f"rank {rank} holds the complete sum of chunk {other} instead", 2
    for other in range(challenge["world"]):
        if all(flat[index] == ranks.element(challenge, other, index) for index in own):
            return f"chunk {rank} of rank {rank} is the share of rank {other} alone: was anything added to it?", 1
    return "", 0


def _view(case: str, transcript: dict, expected: dict) -> Case:
    """Whether writing to what was returned changed the tensor."""
    for rank, (got, want) in enumerate(zip(transcript["values"], expected["values"], strict=True)):
        if want is not None and got["written"] != want["written"]:
            return Case(case, False, f"rank {rank} returned a copy: writing to it leaves the tensor as it is")
    return Case(case, True)


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    tensor = ranks.shown_tensor(challenge) + ring.shown_strided(challenge)
    lines = [f"tensor = {tensor}", "returned = ring_reduce_scatter(tensor[...]{group})"]
    return ranks.show(challenge, *lines, "return returned, tensor.reshape(-1).tensor_split(p)[rank]")
