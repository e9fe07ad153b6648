"""Check of `tree_all_reduce`: the sum everywhere, in few rounds; any algorithm that keeps to them passes."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import count_of, plain
from servelab.ranks import Link

ANSWERS = ("tree_all_reduce",)
SUMS, ROUNDS, LOAD = "every rank holds the sum", "few rounds", "no rank is overloaded"
CASES = (
    CaseSpec(ranks.RUNS, hint=1, alone=False),
    CaseSpec(ranks.OWN_MESSAGES, hint=1),
    CaseSpec(SUMS, hint=1, weight=2),
    CaseSpec(ranks.ANY, hint=3, weight=3),
    CaseSpec(ranks.ALONE, hint=3, alone=False),
    CaseSpec(ROUNDS, hint=1, weight=4),
    CaseSpec(LOAD, hint=1, weight=2),
    CaseSpec(ranks.GROUP, hint=1, weight=3),
    CaseSpec(ranks.SHAPES, hint=1),
)


def challenges(rng: Random) -> list[dict]:
    """Powers of two first; then all other numbers of ranks up to 8, groups, and tensors that are not flat.

    No p divides its size.
    """
    k, numbers = rng.randrange(9), (3, 5, 6, 7, rng.randint(13, 15))
    sizes = {p: rng.choice(ranks.uneven(p, range(2, 6))) for p in (2, 4, 8, *numbers)}
    powers = [ranks.challenge(SUMS, p, sizes[p], k) for p in (2, 4, 8)]
    others = [ranks.challenge(ranks.ANY, p, sizes[p], k) for p in numbers]
    groups = [(4, [[1, 2, 3]]), (6, [[0, 2, 3, 5], [1, 4]])]
    return [
        powers[0],
        ranks.challenge(ranks.ALONE, 1, 3, k),
        *powers[1:],
        *others,
        *(ranks.challenge(ranks.GROUP, world, 3, k, groups=made) for world, made in groups),
        ranks.challenge(ranks.SHAPES, 2, 1, k, shape=[]),
        ranks.challenge(ranks.SHAPES, 4, 6, k, shape=[2, 3], dtype="int64"),
    ]


def _body(challenge, group, rank, tree_all_reduce):
    mine = ranks.tensor(challenge, rank)
    tree_all_reduce(mine[...], *ranks.given(group))
    return plain({"tensor": mine})


def drive(challenge: dict, tree_all_reduce) -> dict:
    """One run on simulated ranks, on links that carry one whole tensor a second: seconds are rounds."""
    return ranks.run(challenge, _body, tree_all_reduce, link=Link(bandwidth=8.0 * challenge["n"]))


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined; rounds and load only bounded, so that recursive doubling passes as a tree does."""
    levels = (max(map(len, ranks.groups_of(challenge))) - 1).bit_length()

    def rules() -> list[Case]:
        values, own = _sums(challenge["case"], transcript, expected), _own_messages(challenge, transcript)
        if not own.passed:
            return [values, own]
        fast = _rounds(transcript, levels)
        return [ranks.counted(values, fast, 1), own, fast, _load(challenge, transcript, levels)]

    return ranks.judged(challenge, transcript, rules, group=1)


def _own_messages(challenge: dict, transcript: dict) -> Case:
    """Whether no ready collective was used, and all together sent as much as it takes to bring a sum together."""
    own = ranks.own_messages(challenge, transcript, lambda p: 0)
    for group in ranks.groups_of(challenge):
        sent, least = sum(ranks.total(transcript["sent"][rank]) for rank in group), (len(group) - 1) * challenge["n"]
        if own.passed and len(group) > 2 and sent < least:
            message = f"all ranks together sent {count_of(sent, 'element')}, and a sum takes {least} at least"
            return Case(ranks.OWN_MESSAGES, False, message if sent else "no rank sent anything")
    return own


def _sums(case: str, transcript: dict, expected: dict) -> Case:
    """Whether every rank holds the sum; if rank 0 does and another does not, the way down is at fault."""
    found = ranks.same_values(case, transcript, expected)
    got, want = ({"values": each["values"][:1]} for each in (transcript, expected))
    at_root = ranks.same_values(case, got, want)
    return Case(case, found.passed, found.message, 2 if case == SUMS and at_root.passed else None)


def _rounds(transcript: dict, levels: int) -> Case:
    """Whether the time allows for no more rounds, nobody sends oftener, and there are messages enough for a sum.

    A rank sends one message a round at most: many small ones, or several at once, take little time on these links. And
    in every all-reduce over 3 to 16 ranks some rank sends and receives as many messages together as there are levels.
    """
    found = ranks.rounds(ROUNDS, transcript, 2 * levels, f"{levels} up and {levels} down, at most")
    if not found.passed:
        return found
    for rank, messages in enumerate(transcript["sent"]):
        if len(messages) > 2 * levels:
            message = f"rank {rank} sent {len(messages)} messages; expected at most {2 * levels}, one a round"
            return Case(ROUNDS, False, message)
    for rank, starts in enumerate(transcript["starts"]):
        if len(set(starts)) < len(starts):
            return Case(ROUNDS, False, f"rank {rank} started two sends at the same time; a round has one for each rank")
    busiest = max(len(sent) + len(got) for sent, got in zip(transcript["sent"], transcript["received"], strict=True))
    if busiest < levels and levels > 1:
        message = f"no rank sent and received more than {count_of(busiest, 'message')}: no sum comes of that"
        return Case(ROUNDS, False, message)
    return found


def _load(challenge: dict, transcript: dict, levels: int) -> Case:
    """Nobody sends or receives more than a tensor a level: links that work side by side hide that from the clock."""
    most = levels * challenge["n"]
    for kind in ("sent", "received"):
        for rank, messages in enumerate(transcript[kind]):
            got = ranks.total(messages)
            if got > most:
                return Case(LOAD, False, f"rank {rank} {kind} {count_of(got, 'element')}, expected at most {most}")
    return Case(LOAD, True)


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    lines = [f"tensor = {ranks.shown_tensor(challenge)}", "tree_all_reduce(tensor[...]{group})", "return tensor"]
    return ranks.show(challenge, *lines).replace("alpha=1.0", f"bandwidth={8.0 * challenge['n']}")
