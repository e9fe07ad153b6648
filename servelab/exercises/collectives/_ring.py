"""What the checks of the three ring exercises share: the runs, and what a ring sends to whom and how fast."""

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from servelab.exercise import Case, CaseSpec
from servelab.exercises.collectives import _ranks as ranks
from servelab.plain import count_of, decode_array, is_array, type_name

MOST, ELEMENTS = "sends no more than it must", "sends exactly what it must"
RING, AT_ONCE = "talks to its neighbours only", "all links work at once"
ADDS = "adds what arrives"
STRIDED = "no strided tensor comes back unchanged"
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)
BASIC = (CaseSpec(ranks.RUNS, hint=1, alone=False), CaseSpec(ranks.OWN_MESSAGES, hint=1))
GENERAL = (
    CaseSpec(RING, hint=1, weight=3),
    CaseSpec(ranks.ANY, hint=2, weight=2),
    CaseSpec(ranks.ALONE, hint=2, alone=False),
    CaseSpec(ranks.UNEVEN, hint=3, weight=2),
    CaseSpec(MOST, hint=2, weight=4),  # earned by a near miss, but not by another algorithm
    CaseSpec(ELEMENTS, hint=2),
    CaseSpec(AT_ONCE, hint=1),
    CaseSpec(ranks.GROUP, hint=3, weight=3),
    CaseSpec(ranks.SHAPES, hint=3),
    CaseSpec(STRIDED, hint=3, alone=False),
)
LIGHTER = {MOST: 1, RING: 2}  # where sums are made: passing round what is never added up is no near miss
ADDING = (
    CaseSpec(ADDS, hint=1, weight=6),
    *(replace(spec, weight=LIGHTER.get(spec.name, spec.weight)) for spec in GENERAL),
)


def challenges(rng: Random, basic: str) -> list[dict]:
    """Two ranks first; sizes that p divides, then those that it does not, fewer elements than ranks, none; groups.

    Then tensors of other shapes, the last one of whole numbers, and one that is no contiguous piece of memory. Every p
    up to 8 meets a size that it does not divide. From six ranks on the rest is 3 to p - 3, with five 2 or 3: nobody
    else's chunks, those of n / p elements rounded up or those with the rest in the last, might be right ones.
    """
    k = rng.randrange(9)
    rests = {5: rng.randint(2, 3), **{p: rng.randint(3, p - 3) for p in (6, 7, 8)}}
    shapes = [(3, [2, 5]), (2, [])]
    return [
        ranks.challenge(basic, 2, 4, k),
        ranks.challenge(ranks.ALONE, 1, 3, k),
        ranks.challenge(ranks.ALONE, 1, 6, k, shape=[2, 3]),
        ranks.challenge(ranks.ANY, 3, 6, k),
        ranks.challenge(basic, 4, 16, k),  # chunks of more elements than there are hops
        ranks.challenge(ranks.UNEVEN, 2, 3, k),
        ranks.challenge(ranks.UNEVEN, 3, 7, k),
        ranks.challenge(ranks.UNEVEN, 4, 2, k),
        ranks.challenge(ranks.UNEVEN, 3, 0, k),
        ranks.challenge(ranks.ANY, 6, 6 * rng.randint(1, 3), k),
        *(ranks.challenge(ranks.UNEVEN, p, p * rng.randint(2, 4) + rest, k) for p, rest in rests.items()),
        ranks.challenge(ranks.GROUP, 4, 6, k, groups=[[1, 2, 3]]),
        ranks.challenge(ranks.GROUP, 5, 6, k, groups=[[0, 2, 4], [1, 3]]),
        *(ranks.challenge(ranks.SHAPES, world, math.prod(shape), k, shape=shape) for world, shape in shapes),
        ranks.challenge(ranks.SHAPES, 4, 14, k, shape=[2, 1, 7], dtype="int64"),
        ranks.challenge(STRIDED, 2, 6, k, shape=[2, 3]),
    ]


def attempt(challenge: dict, group: Any, rank: int, function: Callable) -> tuple[Any, Any, str]:
    """Call a ring on a rank's tensor: the tensor, what was returned, and the type of the error that refused a strided
    tensor, empty if none did."""
    mine, returned, refused = ranks.tensor(challenge, rank), None, ""
    strided = challenge["case"] == STRIDED
    mine = mine.t().contiguous().t() if strided else mine
    try:
        returned = function(mine[...], *ranks.given(group))  # a view: other memory in its place is not in place
    except NotImplementedError:
        raise
    except REFUSALS as error:
        if not strided:
            raise
        refused = type_name(error)
    return mine, returned, refused


def strided(transcript: dict, name: str, want: Callable[[int], list[float]]) -> Case:
    """Whether a strided tensor was refused on every rank, as torch.distributed does, or else ``name`` is right there.

    ``want(r)`` are its elements on rank r.
    """
    if "failed" in transcript:
        return Case(STRIDED, False, ranks.broken_off(transcript))
    if all("refused" in value for value in transcript["values"]):
        return Case(STRIDED, True)
    for rank, value in enumerate(transcript["values"]):
        got = decode_array(value[name]).reshape(-1).tolist() if name in value else None
        if got != want(rank):
            message = f"rank {rank}: not all ranks refused the tensor, and it does not hold what it should"
            return Case(STRIDED, False, f"{message}; did a copy get it?")
    return Case(STRIDED, True)


def shown_strided(challenge: dict) -> str:
    """What makes the tensor of a challenge strided, as Python for the learner; empty if it is not."""
    return ".t().contiguous().t()" if challenge["case"] == STRIDED else ""


def cuts(challenge: dict) -> list[slice]:
    """Where the chunks of a run in one group lie in the flat tensor."""
    sizes = ranks.chunk_sizes(challenge["n"], challenge["world"])
    return [slice(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]


def judge(challenge: dict, transcript: dict, values: Case, rounds: int, hint: int, adds: bool = False) -> list[Case]:
    """The values and the traffic of a ring that goes round ``rounds`` times, less one hop each.

    ``hint`` is about what is sent. A run about any number of elements leaves it to the others whether there is a ring,
    since many a near miss breaks off there. Where neighbours are passed over, the hint about them is the one to open,
    and nothing is earned by sending little. ``adds`` says that something must have been added; only a ring that sends
    no more than it must is judged by that.
    """
    largest = max(map(len, ranks.groups_of(challenge)))
    hops = rounds * (largest - 1)
    own = ranks.own_messages(challenge, transcript, lambda p: challenge["n"] // p)
    if not own.passed:
        return [values, own]
    most, elements = (_elements(case, challenge, transcript, rounds) for case in (MOST, ELEMENTS))
    beside = ranks.neighbours(RING, challenge, transcript, both_ways=rounds > 1)
    why = f"{count_of(hops, 'hop')}; in each, every rank sends and receives"
    fast = ranks.rounds(AT_ONCE, transcript, hops, why)
    beside = _busy(RING, challenge, transcript, lambda p: 1) if beside.passed else beside
    fast = _busy(AT_ONCE, challenge, transcript, lambda p: p - 1) if fast.passed else fast
    rule = elements if beside.passed else replace(beside, hint=1)
    elements = elements if beside.passed else replace(elements, hint=1)
    values = ranks.counted(values, rule, hint)
    if challenge["case"] == ranks.UNEVEN:
        return [values, elements, fast]
    ring = [] if largest == 2 else [beside]  # of two ranks each is both neighbours of the other
    little = [most] if beside.passed or not ring else []
    few = all(ranks.total(sent) <= rounds * challenge["n"] for sent in transcript["sent"])  # a hop too many is no more
    added = [_added(challenge, transcript)] if adds and little and few else []
    return [values, own, *added, *ring, *little, elements, fast]


def _added(challenge: dict, transcript: dict) -> Case:
    """Whether every rank has added something: which chunks hold what is judged by the values.

    It may have done so in a tensor of its own that it returned. Two ranks that leave out a hop send nothing at all.
    """
    if challenge["groups"] or challenge["world"] < 3 or challenge["n"] < challenge["world"]:
        return Case(ADDS, True)
    for rank, value in enumerate(transcript["values"]):
        if not any(_sum_in(value[name], rank, challenge) for name in ("tensor", "returned")):
            return Case(ADDS, False, f"every element on rank {rank} is the share of one rank alone")
    return Case(ADDS, True)


def _sum_in(array: Any, rank: int, challenge: dict) -> bool:
    """Whether an element of a whole tensor, or of a rank's own chunk, is not the share of one rank alone."""
    held = decode_array(array).reshape(-1).tolist() if is_array(array) else []
    start = 0 if len(held) == challenge["n"] else cuts(challenge)[rank].start
    shares = range(challenge["world"])
    return any(all(one != ranks.element(challenge, s, start + i) for s in shares) for i, one in enumerate(held))


def _busy(case: str, challenge: dict, transcript: dict, least: Callable[[int], int]) -> Case:
    """Whether one way round, each link of a ring of p carried ``least(p)`` messages, if no chunk is empty."""
    for group in ranks.groups_of(challenge):
        p = len(group)
        if p == 1 or challenge["n"] < p:
            continue
        ways = {way: [_carried(group, index, way, transcript) for index in range(p)] for way in (1, -1)}
        way = max(ways, key=lambda way: min(ways[way]))
        carried = min(ways[way])
        if carried < least(p):
            index = ways[way].index(carried)
            link = f"rank {group[index]} sent {count_of(carried, 'message')} to rank {group[(index + way) % p]}"
            return Case(case, False, f"{link}, the next one on the ring; expected at least {least(p)}")
    return Case(case, True)


def _carried(group: list[int], index: int, way: int, transcript: dict) -> int:
    """The messages of a rank to the one that is ``way`` places on."""
    return sum(peer == group[(index + way) % len(group)] for peer, _ in transcript["sent"][group[index]])


def _elements(case: str, challenge: dict, transcript: dict, rounds: int) -> Case:
    """What each rank sends, and all together: each time round everything but one chunk.

    Which chunk that is decides what the ranks hold in the end, and is judged by the values. `MOST` asks only that it is
    no more. Ranks that send as many messages as there are hops send one chunk in each.
    """
    n = challenge["n"]
    for group in ranks.groups_of(challenge):
        p = len(group)
        sizes = ranks.chunk_sizes(n, p)
        least, most = (rounds * (n - size) for size in (max(sizes), min(sizes)))
        least, all_least = (0, 0) if case == MOST else (least, rounds * (p - 1) * n)
        sent = [ranks.total(transcript["sent"][rank]) for rank in group]
        for rank, elements in zip(group, sent, strict=True):
            if not least <= elements <= most:
                want = str(least) if least == most else f"{least} to {most}" if least else f"at most {most}"
                return Case(case, False, f"rank {rank} sent {count_of(elements, 'element')}, expected {want}")
            found = _no_chunk(transcript["sent"][rank], sizes) if case == ELEMENTS else ""
            if found and len(transcript["sent"][rank]) == rounds * (p - 1):
                return Case(case, False, f"rank {rank} sent {found}")
        if not all_least <= sum(sent) <= rounds * (p - 1) * n:
            message = f"the ranks {group} sent {count_of(sum(sent), 'element')} in all, expected {rounds * (p - 1) * n}"
            return Case(case, False, message)
    return Case(case, True)


def _no_chunk(messages: list, sizes: list[int]) -> str:
    """The first message that has the size of no chunk, in words; empty if there is none."""
    found = next((elements for _, elements in messages if elements not in sizes), None)
    if found is None:
        return ""
    want = " or ".join(map(str, sorted(set(sizes))))
    return f"a message of {count_of(found, 'element')}; a chunk of {sum(sizes)} over {len(sizes)} ranks has {want}"
