"""Check of `naive_all_reduce`: values, and that all goes to the first rank and comes back from it, once."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import count_of, plain

ANSWERS = ("naive_all_reduce",)
SUMS, TO, BACK = "every rank holds the sum", "all goes to the first rank", "the sum comes back from it"
CASES = (
    CaseSpec(ranks.RUNS, hint=1, alone=False),
    CaseSpec(ranks.OWN_MESSAGES, hint=1),
    CaseSpec(SUMS, hint=1, weight=2),
    CaseSpec(ranks.ANY, hint=2, weight=2),
    CaseSpec(ranks.ALONE, hint=2, alone=False),
    CaseSpec(TO, hint=1, weight=3),
    CaseSpec(BACK, hint=2, weight=2),
    CaseSpec(ranks.GROUP, hint=3, weight=2),
    CaseSpec(ranks.SHAPES, hint=2),
)


def challenges(rng: Random) -> list[dict]:
    """Two ranks first; then one, any other number up to 8 with a size that it does not divide, groups, other shapes."""
    k = rng.randrange(9)
    return [
        ranks.challenge(SUMS, 2, 3, k),
        ranks.challenge(ranks.ALONE, 1, 3, k),
        ranks.challenge(ranks.ANY, 3, 4, k),
        ranks.challenge(SUMS, 4, rng.choice(ranks.uneven(4, range(5, 10))), k),
        *(ranks.challenge(ranks.ANY, p, rng.choice(ranks.uneven(p, range(1, 10))), k) for p in (5, 6, 7, 8)),
        ranks.challenge(ranks.GROUP, 4, 3, k, groups=[[1, 2, 3]]),
        ranks.challenge(ranks.GROUP, 6, 3, k, groups=[[0, 2, 3, 5], [1, 4]]),
        ranks.challenge(ranks.SHAPES, 2, 1, k, shape=[]),
        ranks.challenge(ranks.SHAPES, 4, 6, k, shape=[2, 3], dtype="int64"),
    ]


def _body(challenge, group, rank, naive_all_reduce):
    mine = ranks.tensor(challenge, rank)
    naive_all_reduce(mine[...], *ranks.given(group))
    return plain({"tensor": mine})


def drive(challenge: dict, naive_all_reduce) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, naive_all_reduce)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined, and so is who sends how much to whom."""

    def rules() -> list[Case]:
        values, own = (
            ranks.same_values(challenge["case"], transcript, expected),
            ranks.own_messages(challenge, transcript, lambda p: challenge["n"]),
        )
        if not own.passed:
            return [values, own]
        to, back = (_through_root(name, challenge, transcript) for name in (TO, BACK))
        return [ranks.counted(values, back if to.passed else to, 2 if to.passed else 1), own, to, back]

    return ranks.judged(challenge, transcript, rules, buffer=2)


def _through_root(case: str, challenge: dict, transcript: dict) -> Case:
    """Whether one way every rank but the first sends, or receives, its n elements once, and the first one all."""
    for group in ranks.groups_of(challenge):
        for rank in group:
            first = rank == group[0]
            want = [[other, challenge["n"]] for other in (group[1:] if first else group[:1])]
            kind = "sent" if first == (case == BACK) else "received"
            got = sorted(transcript[kind][rank])
            if got != want:
                return Case(case, False, f"rank {rank}: expected {_shown(want)} {kind}, got {_shown(got)}")
    return Case(case, True)


def _shown(messages: list) -> str:
    parts = [f"{count_of(elements, 'element')} (rank {peer})" for peer, elements in messages[:8]]
    return ", ".join(parts) or "nothing"


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    lines = [f"tensor = {ranks.shown_tensor(challenge)}", "naive_all_reduce(tensor[...]{group})", "return tensor"]
    return ranks.show(challenge, *lines)
