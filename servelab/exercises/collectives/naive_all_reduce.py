"""Check of `naive_all_reduce`: values, and that all goes through the first rank of the group, once each way."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import plain

ANSWERS = ("naive_all_reduce",)
SUMS, ROOT = "every rank holds the sum", "all goes through the first rank"
CASES = (
    CaseSpec(ranks.RUNS, hint=1, alone=False),
    CaseSpec(ranks.OWN_MESSAGES, hint=1, alone=False),
    CaseSpec(SUMS, hint=1, weight=3),
    CaseSpec(ranks.ANY, hint=2),
    CaseSpec(ranks.ALONE, hint=2, alone=False),
    CaseSpec(ROOT, hint=2, weight=2),
    CaseSpec(ranks.GROUP, hint=3, weight=2),
    CaseSpec(ranks.SHAPES, hint=2),
)


def challenges(rng: Random) -> list[dict]:
    """Two ranks first; then one, odd numbers, groups, and tensors that are not flat."""
    k = rng.randrange(9)
    return [
        ranks.challenge(SUMS, 2, 3, k),
        ranks.challenge(ranks.ALONE, 1, 3, k),
        ranks.challenge(ranks.ANY, 3, 4, k),
        ranks.challenge(SUMS, 4, rng.randint(5, 9), k),
        ranks.challenge(ranks.ANY, 5, rng.randint(1, 4), k),
        ranks.challenge(ranks.GROUP, 4, 3, k, groups=[[1, 2, 3]]),
        ranks.challenge(ranks.GROUP, 5, 3, k, groups=[[0, 2, 4], [1, 3]]),
        ranks.challenge(ranks.SHAPES, 2, 1, k, shape=[]),
        ranks.challenge(ranks.SHAPES, 3, 6, k, shape=[2, 3]),
    ]


def _body(challenge, group, rank, naive_all_reduce):
    mine = ranks.tensor(challenge, rank)
    naive_all_reduce(mine, *ranks.given(group))
    return plain({"tensor": mine})


def drive(challenge: dict, naive_all_reduce) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, naive_all_reduce)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined, and so is who sends how much to whom."""

    def rules() -> list[Case]:
        values, own = (
            ranks.same_values(challenge["case"], transcript, expected),
            ranks.own_messages(challenge, transcript),
        )
        return [values, own, _through_root(challenge, transcript)] if own.passed else [values, own]

    return ranks.judged(challenge, transcript, rules, buffer=2)


def _through_root(challenge: dict, transcript: dict) -> Case:
    for group in ranks.groups_of(challenge):
        for rank in group:
            others = [other for other in group if other != rank] if rank == group[0] else [group[0]]
            want = [[other, challenge["n"]] for other in others]
            for kind in ("sent", "received"):
                got = sorted(transcript[kind][rank])
                if got != want:
                    message = f"rank {rank}: expected {_shown(want)} {kind}, got {_shown(got)}"
                    return Case(ROOT, False, message)
    return Case(ROOT, True)


def _shown(messages: list) -> str:
    parts = [f"{ranks.count(elements, 'element')} (rank {peer})" for peer, elements in messages[:8]]
    return ", ".join(parts) or "nothing"


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    lines = [f"tensor = {ranks.shown_tensor(challenge)}", "naive_all_reduce(tensor{group})", "return tensor"]
    return ranks.show(challenge, *lines)
