"""Check of `all_to_all`: part j of rank i's inputs becomes part i of rank j's outputs, in one message or none."""

from dataclasses import replace
from random import Random

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import count_of, plain

ANSWERS = ("all_to_all",)
PARTS, KEEPS, ONCE = "part j of rank i becomes part i of rank j", "leaves its inputs alone", "sends each part once"
CASES = (
    CaseSpec(ranks.RUNS, hint=2, alone=False),
    CaseSpec(ranks.OWN_MESSAGES, hint=1),
    CaseSpec(PARTS, hint=1, weight=3),
    CaseSpec(ranks.ANY, hint=2, weight=2),
    CaseSpec(ranks.ALONE, hint=1),
    CaseSpec(ranks.UNEVEN, hint=1, weight=2),
    CaseSpec(KEEPS, hint=1, alone=False),
    CaseSpec(ONCE, hint=1, weight=2),
    CaseSpec(ranks.DTYPE, hint=1),
    CaseSpec(ranks.GROUP, hint=3, weight=2),
)


def challenges(rng: Random) -> list[dict]:
    """Equal parts first, then unequal and empty ones, those for any number of ranks up to 8.

    ``splits[i][j]`` are the elements from rank i to rank j.
    """
    made = [
        _challenge(PARTS, [[2, 2], [2, 2]]),
        _challenge(ranks.ALONE, [[3]]),
        _challenge(PARTS, [[1] * 4] * 4),
        _challenge(ranks.ANY, [[2] * 3] * 3),
        _challenge(ranks.ANY, [[1] * 6] * 6),
        _challenge(ranks.UNEVEN, [[1, 3], [2, 0]]),
        _challenge(ranks.UNEVEN, [[0, 0, 0], [4, 0, 1], [0, 2, 3]]),
    ]
    drawn = [[[rng.choice((0, 1, 2, 5)) for _ in range(p)] for _ in range(p)] for p in (4, 5, 6, 7, 8)]
    whole = {**_challenge(ranks.DTYPE, [[1] * 3] * 3), "dtype": "int64"}
    groups = [_challenge(ranks.GROUP, [[2] * 3] * 3, 4, [[1, 2, 3]])]
    groups.append(_challenge(ranks.GROUP, [[1, 2, 3], [2, 0, 1], [1, 1, 4]], 5, [[0, 2, 4], [1, 3]]))
    return [*made, *(_challenge(ranks.UNEVEN, splits) for splits in drawn), whole, *groups]


def _challenge(case: str, splits: list, world: int | None = None, groups: list | None = None) -> dict:
    return ranks.challenge(case, world or len(splits), 0, splits=splits, groups=groups)


def _body(challenge, group, rank, all_to_all):
    import torch
    import torch.distributed as dist

    splits, p = challenge["splits"], dist.get_world_size(group)
    dtype = getattr(torch, challenge.get("dtype", "float32"))
    inputs = [torch.full((splits[rank][j],), 10 * rank + j, dtype=dtype) for j in range(p)]
    outputs = [torch.full((splits[i][rank],), -1, dtype=dtype) for i in range(p)]
    all_to_all([part[...] for part in outputs], [part[...] for part in inputs], *ranks.given(group))
    held = [("output", index, part) for index, part in enumerate(outputs)]
    held += [("input", index, part) for index, part in enumerate(inputs)]
    return plain({f"{name} {index}": part for name, index, part in held})


def drive(challenge: dict, all_to_all) -> dict:
    """One run on simulated ranks."""
    return ranks.run(challenge, _body, all_to_all)


def judge(challenge: dict, transcript: dict, expected: dict) -> list[Case]:
    """Values and messages are determined; their order is not, and an empty part may be sent or not."""

    def rules() -> list[Case]:
        smallest = min(min(row) for row in challenge["splits"])
        own = ranks.own_messages(challenge, transcript, lambda p: smallest)
        return [
            ranks.same_values(challenge["case"], transcript, expected, "output", shares=False),
            *([] if challenge["case"] == ranks.UNEVEN else [own]),
            ranks.same_values(KEEPS, transcript, expected, "input", shares=False),
            *([_once(challenge, transcript)] if own.passed else []),
        ]

    cases = ranks.judged(challenge, transcript, rules, ranks.DTYPE)
    if challenge["case"] == ranks.ALONE and "failed" in transcript:  # an error, too, has its hint: an empty batch
        return [replace(case, hint=1) for case in cases]
    return cases


def _once(challenge: dict, transcript: dict) -> Case:
    """Whether nobody sent anything but whole parts, each to its rank and once; one never sent shows in the values."""
    for group in ranks.groups_of(challenge):
        for index, rank in enumerate(group):
            row = challenge["splits"][index]
            want = [[peer, row[j]] for j, peer in enumerate(group) if row[j] and j != index]
            got, left = sorted(transcript["sent"][rank]), list(want)
            for message in got:
                if message not in left:
                    return Case(ONCE, False, f"rank {rank} sent {_shown(got)}, expected {_shown(want)}")
                left.remove(message)
    return Case(ONCE, True)


def _shown(messages: list) -> str:
    parts = [f"{count_of(elements, 'element')} to rank {peer}" for peer, elements in messages[:12]]
    return ", ".join(parts) or "nothing"


def show(challenge: dict) -> str:
    """A run, as Python to paste."""
    return ranks.show(
        challenge,
        f"splits = {challenge['splits']}",
        f"dtype = torch.{challenge.get('dtype', 'float32')}",
        "inputs = [torch.full((splits[rank][j],), 10 * rank + j, dtype=dtype) for j in range(p)]",
        "outputs = [torch.full((splits[i][rank],), -1, dtype=dtype) for i in range(p)]",
        "all_to_all([part[...] for part in outputs], inputs{group})",
        "return outputs",
    )
