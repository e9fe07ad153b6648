"""What this unit's drivers and judges share: a run on simulated ranks, its record, and what it must and may not be.

Every message takes one second of virtual time, whatever its size, so that seconds are rounds. Values tell where they
come from: rank r contributes one decimal digit, the r-th from the right, to every element.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from servelab.exercise import Case
from servelab.plain import MAX_TEXT, count_of, decode_array, is_array, plain, text, told_apart
from servelab.ranks import Link, RankError, RankInterruptError, RankTimeoutError, SimCluster

RUNS = "comes to an end on every rank"
ANY, ALONE, UNEVEN = "any number of ranks", "one rank alone", "any number of elements"
OWN_MESSAGES = "sends its own messages"
NO_DATA = ("barrier",)  # ready collectives that bring no values
GROUP, SHAPES, DTYPE = "stays in its group", "tensors of any shape and dtype", "any dtype"
VIEWED = "  # [...]: a view of all of it"  # in a listing
NO_GROUP = "is not registered"  # what torch says of a group that is None, where it wants one
SLIPS = (
    *("NameError", "UnboundLocalError", "AttributeError", "TypeError", "IndexError", "KeyError"),
    *("ImportError", "ModuleNotFoundError"),
)
LIMIT = 10  # seconds of real time for a run that takes milliseconds


def challenge(case: str, world: int, n: int, k: int = 0, **more: Any) -> dict:
    """One run: ``world`` ranks with ``n`` elements each, first digit ``k``; ``case`` is what its values are about.

    Elements are float64, unless ``more`` names another dtype.
    """
    return {"case": case, "world": world, "n": n, "k": k, "groups": None, "shape": [n], **more}


def uneven(p: int, sizes: Sequence[int]) -> list[int]:
    """Those of some sizes that p does not divide."""
    return [n for n in sizes if n % p]


def groups_of(challenge: dict) -> list[list[int]]:
    """The groups that work side by side, as global ranks."""
    return challenge["groups"] or [list(range(challenge["world"]))]


def tensor(challenge: dict, rank: int, n: int | None = None):
    """The tensor of a rank of its group, to begin with."""
    import torch

    digits = 1 + (torch.arange(challenge["n"] if n is None else n) + rank + challenge["k"]) % 9
    made = (10**rank * digits).to(getattr(torch, challenge.get("dtype", "float64")))
    return made.view(challenge["shape"]) if n is None else made


def element(challenge: dict, rank: int, index: int) -> float:
    """An element of the tensor of a rank of its group, counted through all dimensions."""
    return 10.0**rank * (1 + (index + rank + challenge["k"]) % 9)


def sums(challenge: dict) -> list[float]:
    """The sum of the tensors of all ranks."""
    shares = range(challenge["world"])
    return [sum(element(challenge, rank, index) for rank in shares) for index in range(challenge["n"])]


def shown_tensor(challenge: dict, n: str = "") -> str:
    """The same as Python for the learner."""
    digits = f"1 + (torch.arange({n or challenge['n']}) + rank + {challenge['k']}) % 9"
    shape = "" if n or challenge["shape"] == [challenge["n"]] else f".view({challenge['shape']})"
    made = f"(10**rank * ({digits}))"  # int64, to begin with
    return f"{made}{'' if challenge.get('dtype') == 'int64' else '.double()'}{shape}"


def show(challenge: dict, *lines: str) -> str:
    """A run as Python to paste: ``lines`` are the body, ``{group}`` in them is what passes the group on."""
    made = ["    rank, p, group = dist.get_rank(), dist.get_world_size(), None"]
    if challenge["groups"]:
        groups = ", ".join(str(tuple(ranks)) for ranks in challenge["groups"])
        made = [
            f"    groups = {{ranks: dist.new_group(ranks) for ranks in [{groups}]}}",
            "    group = next((groups[ranks] for ranks in groups if dist.get_rank() in ranks), None)",
            "    if group is None:",
            "        return None",
            "    p, rank = dist.get_world_size(group), dist.get_rank(group)",
        ]
    given = ", group" if challenge["groups"] else ""
    body = [f"    {line.replace('{group}', given)}" for line in lines]
    body = [f"{line}{VIEWED}" if "[...]" in line else line for line in body]
    call = f"SimCluster({challenge['world']}, link=Link(alpha=1.0)).run(one_rank)"
    return "\n".join(["def one_rank():", *made, *body, call])


def run(challenge: dict, body: Callable, *functions: Callable, link: Link | None = None) -> dict:
    """Call ``body(challenge, group, rank, *functions)`` on each simulated rank of a group; write down what came.

    ``rank`` is the rank in the group. Raises what an unwritten stub raises.
    """
    cluster = SimCluster(challenge["world"], link=link or Link(alpha=1.0), timeout=LIMIT)
    try:
        ran = cluster.run(_on_rank, body, challenge, *functions)
    except (RankInterruptError, RankTimeoutError):
        raise
    except RankError as error:
        return {"failed": type(error.cause or error).__name__, "message": _whole_lines(text(error, MAX_TEXT + 1))}
    sends = [_sends(ran, rank) for rank in range(ran.world_size)]
    sent = [[[event.peer, event.elements] for event in events] for events in sends]
    starts = [[event.start for event in events] for events in sends]
    ready = [[rank, event.name] for rank in range(ran.world_size) for event in ran.collectives(rank)]
    barriers = [_in_barriers(ran, rank) for rank in range(ran.world_size)]
    record = {"values": list(ran.values), "seconds": ran.seconds, "sent": sent, "starts": starts, "ready": ready}
    return plain({**record, "received": _received(sent), "barriers": max(barriers)})


def _whole_lines(report: str) -> str:
    """A report, cut behind a line if it is too long."""
    return report if len(report) <= MAX_TEXT else report[:MAX_TEXT].rpartition("\n")[0] + "\n  ..."


def _on_rank(body: Callable, challenge: dict, *functions: Callable) -> Any:
    import torch.distributed as dist

    if not challenge["groups"]:
        return body(challenge, None, dist.get_rank(), *functions)
    made = [dist.new_group(ranks) for ranks in challenge["groups"]]
    for group, ranks in zip(made, challenge["groups"], strict=True):
        if dist.get_rank() in ranks:
            return body(challenge, group, ranks.index(dist.get_rank()), *functions)
    return None


def given(group: Any) -> tuple:
    """The group as a learner's function is given it: not at all where it is the whole world."""
    return () if group is None else (group,)


def _sends(ran, rank: int) -> list:
    """The messages of a rank that have any elements."""
    return [event for event in ran.of_rank(rank) if event.kind == "send" and event.elements]


def _in_barriers(ran, rank: int) -> float:
    """The seconds that the messages of a rank's barriers take."""
    events = [event for event in ran.collectives(rank) if event.name in NO_DATA and event.began is not None]
    return float(sum(event.end - event.began for event in events))


def _received(sent: list[list[list[int]]]) -> list[list[list[int]]]:
    """The other rank and the elements of what each rank received: a receive may leave open from whom."""
    everybody = range(len(sent))
    return [[[rank, elements] for rank in everybody for peer, elements in sent[rank] if peer == to] for to in everybody]


def judged(
    challenge: dict,
    transcript: dict,
    rules: Callable[[], list[Case]],
    *special: str,
    buffer: int | None = None,
    group: int = 3,
) -> list[Case]:
    """The cases of one run: those of ``rules``, or that it broke off.

    A challenge about one rank, about groups or shapes, or about one of ``special`` has that case alone, which fails
    with whatever rule is broken first. Of the others a run that breaks off fails what the challenge is about, and so
    does one whose values a ready collective may have brought. ``buffer`` is the hint about what a buffer must be like,
    if there is one, and ``group`` the one about numbers in a group.
    """
    label, single = challenge["case"], challenge["case"] in (ALONE, GROUP, SHAPES, *special)
    if "failed" in transcript:
        name = label if single or label in (ANY, UNEVEN) else RUNS
        hint = group if NO_GROUP in transcript["message"] else None
        hint = buffer if transcript["failed"] == "MismatchError" else hint
        return [Case(name, False, broken_off(transcript), hint)]
    lent = any(name not in NO_DATA for _, name in transcript["ready"])
    cases = borrowed(label, challenge, transcript) if lent else rules()
    if single:
        broken = next((case for case in cases if not case.passed), None)
        return [Case(label, broken is None, broken.message if broken else "", broken.hint if broken else None)]
    return cases if label in (ANY, UNEVEN) else [Case(RUNS, True), *cases]


def broken_off(transcript: dict) -> str:
    """What a run says that did not come to an end."""
    began = "your code raised an error" if transcript["failed"] in SLIPS else "the ranks did not finish"
    return f"{began}. {transcript['message']}"


def borrowed(label: str, challenge: dict, transcript: dict) -> list[Case]:
    """The cases of a run in which a ready collective was used: nobody can say what else the values come from."""
    own = own_messages(challenge, transcript, lambda p: 0)
    return [own, Case(label, False, own.message, hint=1)]


def own_messages(challenge: dict, transcript: dict, least: Callable[[int], int], fewest: int = 3) -> Case:
    """Whether no ready collective was used, and every rank had to do with enough elements.

    ``least(p)`` is what each of p ranks must have sent or received to have done more than a token message. It is asked
    of groups of ``fewest`` ranks or more: one step too few in a small group is no message at all, and a near miss.
    """
    lent = [call for call in transcript["ready"] if call[1] not in NO_DATA]
    if lent:
        rank, name = lent[0]
        message = f"rank {rank} called {name}, a ready collective; write it with sends and receives"
        return Case(OWN_MESSAGES, False, message)
    for group in groups_of(challenge):
        needed = least(len(group)) if len(group) >= fewest else 0
        if needed and not any(transcript["sent"]):
            return Case(OWN_MESSAGES, False, "no rank sent anything")
        for rank in group:
            sent, received = (total(transcript[kind][rank]) for kind in ("sent", "received"))
            if max(sent, received) < needed:
                told = f"rank {rank} sent {sent or 'nothing'} and received {received or 'nothing'}"
                wanted = "" if sent == received == 0 else f"; expected {count_of(needed, 'element')} one way, at least"
                return Case(OWN_MESSAGES, False, told + wanted)
    return Case(OWN_MESSAGES, True)


def counted(values: Case, rule: Case, hint: int) -> Case:
    """The values of a run; for any number of ranks or elements they count only where what makes the algorithm holds.

    So another algorithm in its place earns little. ``hint`` is the one about the rule for any number of ranks.
    """
    if not values.passed or rule.passed or values.name not in (ANY, UNEVEN):
        return values
    return replace(values, passed=False, message=rule.message, hint=rule.hint or (hint if values.name == ANY else None))


def same_values(case: str, transcript: dict, expected: dict, name: str = "tensor", shares: bool = True) -> Case:
    """Whether on every rank ``name`` ended up with the reference's values; or all of ``name 0``, ``name 1``, ...

    ``shares`` says that each rank has a digit of its own in them.
    """
    for rank, (got, want) in enumerate(zip(transcript["values"], expected["values"], strict=True)):
        for key in [key for key in want or () if key == name or key.startswith(f"{name} ")]:
            problem = difference(got[key], want[key], shares)
            if problem:
                return Case(case, False, f"rank {rank}, {key}: {problem}")
    return Case(case, True)


def difference(got: Any, want: Any, shares: bool = True) -> str:
    """The first element in which an array is not what it should be, in words; empty if there is none."""
    wanted = decode_array(want)
    if not is_array(got):
        return f"expected a tensor, got {type_of(got)}"
    found = decode_array(got)
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"expected shape {list(wanted.shape)} of {wanted.dtype}, got {list(found.shape)} of {found.dtype}"
    for index, (one, other) in enumerate(zip(found.reshape(-1), wanted.reshape(-1), strict=True)):
        if one != other:
            return f"element {index}: {expected_got(float(other), float(one), digits=10)}" + (
                _who(one, other) if shares else ""
            )
    return ""


def expected_got(want: float, got: Any, unit: str = "", digits: int = 6) -> str:
    """A number that is not what it should be, in words."""
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"expected {want:.6g}{unit}, got {type_of(got)}"
    return "expected {}{unit}, got {}".format(*told_apart(want, got, digits), unit=unit)


def _who(got: float, want: float) -> str:
    """Which ranks' digits differ; a digit that two shares run into says nothing."""
    if not math.isfinite(got) or got < 0 or got != int(got):
        return ""
    pairs = list(zip(reversed(f"{int(got):010d}"), reversed(f"{int(want):010d}"), strict=False))
    lacking = [str(rank) for rank, (have, need) in enumerate(pairs) if have == "0" != need]
    named = (
        f"s of group ranks {', '.join(lacking)} are" if len(lacking) > 1 else f" of group rank {''.join(lacking)} is"
    )
    return f" (the share{named} missing)" if lacking else ""


def numbers(value: Any) -> Any:
    """What was returned, with arrays in place of lists and numbers undone: a pair may be an array, too."""
    if is_array(value):
        return decode_array(value).tolist()
    return [numbers(item) for item in value] if isinstance(value, list) else value


def type_of(value: Any) -> str:
    """What came instead of a tensor."""
    if is_array(value):
        return "an array"
    return str(value.get("unexpected type", "a dict"))[:60] if isinstance(value, dict) else repr(value)[:60]


def total(messages: Sequence[Sequence[int]]) -> int:
    """The elements of some messages."""
    return sum(elements for _, elements in messages)


def chunk_sizes(n: int, p: int) -> list[int]:
    """How many elements each of p chunks has, as `torch.tensor_split` cuts them."""
    return [n // p + (index < n % p) for index in range(p)]


def neighbours(case: str, challenge: dict, transcript: dict, both_ways: bool = False) -> Case:
    """Whether all ranks send to one neighbour on the ring and receive from the other, in the same direction.

    ``both_ways`` says that there are two passes, which need not have the same direction: each has one.
    """
    if both_ways:
        found = next(filter(None, (_no_two_passes(ranks, challenge, transcript) for ranks in groups_of(challenge))), "")
        return Case(case, not found, found)
    found = ""
    for way in (-1, 1):
        strangers = (_stranger(ranks, way, transcript) for ranks in groups_of(challenge))
        found = next(filter(None, strangers), "")
        if not found:
            return Case(case, True)
    return Case(case, False, found)


def _no_two_passes(ranks: Sequence[int], challenge: dict, transcript: dict) -> str:
    """What tells that a group does not pass its chunks round twice, each time one way, in words; empty if nothing does.

    Where chunks are empty, ranks that pass them over may turn at different messages, or not at all.
    """
    p, first = len(ranks), None
    for index, rank in enumerate(ranks):
        beside = (ranks[index - 1], ranks[(index + 1) % p])
        turns: list[int] = []  # whom the rank sent to, each time another than before
        for peer, _ in transcript["sent"][rank]:
            if peer not in beside:
                return f"rank {rank} sent to rank {peer}; its neighbours on the ring are {beside[0]} and {beside[1]}"
            turns += [beside.index(peer)] if turns[-1:] != [beside.index(peer)] else []
        first = turns if first is None else first
        if p > 2 and challenge["n"] >= p and (len(turns) > 2 or turns != first):
            wrong = "both ways round" if len(turns) > 2 else f"another way round than rank {ranks[0]}"
            return f"rank {rank} sent {wrong} in one half of the all-reduce"
    return ""


def _stranger(ranks: Sequence[int], way: int, transcript: dict) -> str:
    """The first message that does not go ``way`` places on along the ring, in words; empty if there is none."""
    for index, rank in enumerate(ranks):
        after, before = ranks[(index + way) % len(ranks)], ranks[(index - way) % len(ranks)]
        for peer, _ in transcript["sent"][rank]:
            if peer != after:
                return f"rank {rank} sent to rank {peer}; on a ring this way round the next rank is {after}"
        for peer, _ in transcript["received"][rank]:
            if peer != before:
                return f"rank {rank} received from rank {peer}; on a ring this way round the one before is {before}"
    return ""


def rounds(case: str, transcript: dict, most: int, why: str) -> Case:
    """Whether the run took at most so many rounds, of one message each way; barriers do not count.

    Nor do the moments that asking whether a message has arrived takes.
    """
    took = transcript["seconds"] - transcript["barriers"]
    fine = isinstance(took, (int, float)) and took <= most + 0.01
    return Case(
        case, fine, "" if fine else f"took the time of {took:g} messages, one after the other; expected {most} ({why})"
    )
