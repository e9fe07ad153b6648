"""Check of `ring_all_reduce`: the sum everywhere, in place, for any shape, with 2 (p - 1) n elements sent in all."""

from dataclasses import replace
from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.exercises.collectives import _ring as ring
from servelab.plain import plain

ANSWERS = ("ring_all_reduce",)
SUMS = "every rank holds the sum"
CUT = (ranks.ALONE, ranks.UNEVEN, ring.ELEMENTS, ranks.SHAPES, ring.STRIDED)  # how the tensor is cut up
CASES = (
    *ring.BASIC,
    CaseSpec(SUMS, hint=1, weight=2),
    *(replace(spec, hint=2 if spec.name in CUT else 1) for spec in ring.ADDING),
)


def challenges(rng: Random) -> list[dict]:
    """The runs of all rings."""
    return ring.challenges(rng, SUMS)


def _body(challenge, group, rank, ring_all_reduce):
    mine, returned, refused = ring.attempt(challenge, group, rank, ring_all_reduce)
    return {"refused": refused} if refused else plain({"tensor": mine, "returned": returned})


def drive(challenge: dict, ring_all_reduce) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, ring_all_reduce)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values and traffic are determined, and chunks may be cut in any way that differs by one element at most.

    A strided tensor may be refused, as torch.distributed does, or reduced.
    """
    if challenge["case"] == ring.STRIDED:
        return [ring.strided(transcript, "tensor", lambda _: ranks.sums(challenge))]

    def rules() -> list[Case]:
        values = ranks.same_values(challenge["case"], transcript, expected)
        return ring.judge(challenge, transcript, values, 2, hint=1, adds=True)

    return ranks.judged(challenge, transcript, rules)


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    tensor = ranks.shown_tensor(challenge) + ring.shown_strided(challenge)
    return ranks.show(challenge, f"tensor = {tensor}", "ring_all_reduce(tensor[...]{group})", "return tensor")
