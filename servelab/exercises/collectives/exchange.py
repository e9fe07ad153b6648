"""Check of `exchange`: a message each way at once, of any sizes, between any two ranks of a group or with itself."""

from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import plain

ANSWERS = ("exchange",)
ARRIVES, KEEPS, ITSELF = "receives what the other rank sent", "leaves outgoing alone", "a rank with itself"
AT_ONCE = "sends and receives at the same time"
CASES = (
    CaseSpec(ranks.RUNS, hint=1, weight=2, alone=False),
    CaseSpec(ranks.OWN_MESSAGES, hint=1),
    CaseSpec(ARRIVES, hint=2, weight=2),
    CaseSpec(KEEPS, hint=2, alone=False),
    CaseSpec(AT_ONCE, hint=1, weight=2),
    CaseSpec(ITSELF, hint=2),
    CaseSpec(ranks.DTYPE, hint=2),
    CaseSpec(ranks.GROUP, hint=3, weight=2),
)


def challenges(rng: Random) -> list[dict]:
    """Rank r sends r + n elements to the rank ``shift`` places on; no message is needed where that is itself.

    Any number of ranks up to 8; no two of them send equally much.
    """
    k = rng.randrange(9)
    made = [
        ranks.challenge(ARRIVES, 2, 3, k, shift=1),
        ranks.challenge(ARRIVES, 3, 2, k, shift=1),
        ranks.challenge(ARRIVES, 4, 1, k, shift=rng.randint(1, 3)),
        ranks.challenge(ARRIVES, 5, rng.randint(1, 5), k, shift=2),
        *(ranks.challenge(ARRIVES, p, rng.randint(1, 5), k, shift=rng.randint(1, p - 1)) for p in (6, 7, 8)),
        ranks.challenge(ITSELF, 1, 3, k, shift=0),
        ranks.challenge(ITSELF, 2, 2, k, shift=0),
        ranks.challenge(ranks.DTYPE, 3, 2, k, shift=1, dtype="int64"),
        ranks.challenge(ranks.GROUP, 4, 2, k, groups=[[1, 2, 3]], shift=1),
        ranks.challenge(ranks.GROUP, 5, 2, k, groups=[[0, 2, 4], [1, 3]], shift=1),
    ]
    return [{**each, "messages": each["shift"] > 0} for each in made]


def _body(challenge, group, rank, exchange):
    import torch
    import torch.distributed as dist

    p, n, shift = dist.get_world_size(group), challenge["n"], challenge["shift"]
    source, to = (rank - shift) % p, (rank + shift) % p
    outgoing = ranks.tensor(challenge, rank, n + rank)
    incoming = torch.full((n + source,), -1, dtype=outgoing.dtype)
    exchange(outgoing[...], to, incoming[...], source, *ranks.given(group))
    return plain({"incoming": incoming, "outgoing": outgoing})


def drive(challenge: dict, exchange) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, exchange)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values are determined; that both directions go at once shows in the time."""

    def rules() -> list[Case]:
        n = challenge["n"] if challenge["messages"] else 0
        own = ranks.own_messages(challenge, transcript, lambda p: n, fewest=2)
        alone = {**transcript, "barriers": 0}  # two ranks may exchange something while others do not
        fast = ranks.rounds(AT_ONCE, alone, 1, "in which all ranks send and receive")
        return [
            ranks.same_values(challenge["case"], transcript, expected, "incoming"),
            own,
            ranks.same_values(KEEPS, transcript, expected, "outgoing"),
            *([fast] if own.passed else []),
            *([] if challenge["shift"] else [_copied(transcript)]),
        ]

    return ranks.judged(challenge, transcript, rules, ITSELF, ranks.DTYPE, buffer=2)


def _copied(transcript: dict) -> Case:
    """Whether a rank has sent nothing to itself."""
    fine = not any(transcript["sent"])
    return Case(ITSELF, fine, "" if fine else "a rank sent itself a message; a copy is enough")


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    shift, n = challenge["shift"], challenge["n"]
    return ranks.show(
        challenge,
        f"to, source = (rank + {shift}) % p, (rank - {shift}) % p",
        f"outgoing = {ranks.shown_tensor(challenge, f'{n} + rank')}",
        f"incoming = torch.full(({n} + source,), -1, dtype=outgoing.dtype)",
        "exchange(outgoing[...], to, incoming[...], source{group})",
        "return incoming",
    )
