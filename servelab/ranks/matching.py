"""Which calls of different ranks belong together, whether they fit, and whether anybody can still go on.

Everything here is a function of what the ranks have posted (`servelab.ranks.flight`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from servelab.ranks import shipping
from servelab.ranks.flight import Post, Snapshot


def mismatch(posts: Iterable[Post]) -> str:
    """The first calls that belong together and do not fit, in words; empty if all that is known fits."""
    together: dict[tuple, list[Post]] = defaultdict(list)
    for post in posts:
        if post.number:
            together[(post.channel, post.number)].append(post)
    for (_, number), calls in sorted(together.items(), key=lambda item: item[0][1]):
        found = _collectives(calls, number) if calls[0].kind == "collective" else _message(calls)
        if found:
            return found
    return ""


def left_out(posts: Iterable[Post]) -> str:
    """The first collective that only some ranks of its group called, after all have ended; empty if there is none.

    The others need not notice: a broadcast's root or a `new_group` goes on without them.
    """
    together: dict[tuple, list[Post]] = defaultdict(list)
    for post in posts:
        if post.kind == "collective":
            together[(post.number, post.channel)].append(post)
    for _, calls in sorted(together.items()):
        missing = sorted(set(calls[0].ranks) - {post.rank for post in calls})
        if missing:
            head = f"{ranks_of(missing)} ended without calling a collective that other ranks of the group called"
            return "\n".join([head, *_sides([calls])])
    return ""


def _message(calls: list[Post]) -> str:
    """What is wrong between a send and the receive that it meets."""
    kinds = {post.kind: post for post in calls}
    if len(kinds) < 2 or (kinds["send"].elements, kinds["send"].dtype) == (kinds["recv"].elements, kinds["recv"].dtype):
        return ""
    send, recv = kinds["send"], kinds["recv"]
    head = (
        f"rank {send.rank} sends {send.elements} x {send.dtype} ({send.nbytes} bytes), but rank {recv.rank} "
        f"receives into {recv.elements} x {recv.dtype} ({recv.nbytes} bytes)"
    )
    return "\n".join([head, *_sides([[send], [recv]])])


def _collectives(calls: list[Post], number: int) -> str:
    """What is wrong between the ranks of a group that should be in the same collective."""
    calls = sorted(calls, key=lambda post: post.rank)
    sides: dict[tuple, list[Post]] = defaultdict(list)
    for post in calls:
        sides[_must_agree(post)].append(post)
    group = f"group {list(calls[0].ranks)}"
    if len({post.name for post in calls}) > 1:
        head = f"the ranks of {group} are in different collectives (the {_th(number)} of the group)"
    elif len(sides) > 1:
        head = f"the ranks of {group} disagree in {calls[0].name} (collective {number} of the group)"
    else:
        return _uneven_splits(calls)
    return "\n".join([head, *_sides(sides.values())])


def _must_agree(post: Post) -> tuple:
    size = (post.elements,) if post.splits is None and post.name != "barrier" else ()
    return (post.name, post.dtype, post.detail, *size)


def _uneven_splits(calls: list[Post]) -> str:
    """What one rank sends to another in an all_to_all must be what the other expects."""
    for sender in calls:
        for receiver in calls:
            if sender.splits is None or receiver.splits is None:
                return ""
            to, here = sender.ranks.index(receiver.rank), receiver.ranks.index(sender.rank)
            sent, expected = sender.splits[0][to], receiver.splits[1][here]
            if sent != expected:
                head = (
                    f"in {sender.name}, rank {sender.rank} sends {sent} elements to rank {receiver.rank}, "
                    f"which expects {expected}"
                )
                return "\n".join([head, *_sides([[sender], [receiver]])])
    return ""


def _sides(sides: Iterable[Sequence[Post]]) -> list[str]:
    lines = []
    for posts in sides:
        lines.append(f"  {ranks_of(post.rank for post in posts)}: {posts[0]}")
        lines.append(shipping.show([shipping.frame(*posts[0].where)], "    "))
    return lines


class Board:
    """What all ranks have posted and what each is in: who can go on, and who waits for whom.

    Parameters
    ----------
    snapshots : mapping of int to Snapshot
        Of every rank, the dead ones too.
    """

    def __init__(self, snapshots: Mapping[int, Snapshot]):
        self.snapshots = snapshots
        self.posts = [post for snapshot in snapshots.values() for post in snapshot.posts]
        self.counts: dict[tuple, int] = defaultdict(int)
        for post in self.posts:
            key = (post.rank, post.kind, post.channel)
            self.counts[key] = max(self.counts[key], post.number)

    def stuck(self, unfinished: Iterable[int]) -> bool:
        """Whether each of these ranks is blocked in a call whose partner has not been posted."""
        current = [self.snapshots[rank].current for rank in unfinished]
        return all(post is not None and not self.can_end(post) for post in current)

    def can_end(self, post: Post) -> bool:
        """Whether every rank that a call needs has posted its side: then it is slow at most, not stuck."""
        return not self.missing(post)

    def missing(self, post: Post) -> list[int]:
        """The ranks that have not posted their side of a call."""
        if post.kind == "collective":
            return [rank for rank in post.ranks if self._count(rank, "collective", post.channel) < post.number]
        if post.peer is None:
            return [] if self._any_sender(post) else [rank for rank in post.ranks if rank != post.rank]
        other = "recv" if post.kind == "send" else "send"
        posted = self._count(post.peer, other, post.channel) >= post.number
        return [] if posted or (other == "recv" and self._takes_any(post)) else [post.peer]

    def unmatched(self) -> list[str]:
        """Channels on which more was sent than received, or the other way round."""
        channels = {post.channel for post in self.posts if post.kind != "collective"}
        lines = []
        for channel in sorted((c for c in channels if None not in c), key=str):
            _, source, target, tag = channel
            sends, recvs = self._count(source, "send", channel), self._count(target, "recv", channel)
            if sends != recvs:
                lines.append(
                    f"  messages {source} -> {target}, tag {tag}: {sends} sent, {recvs} received or waited for"
                )
        return lines

    def _count(self, rank: int, kind: str, channel: tuple) -> int:
        return self.counts.get((rank, kind, channel), 0)

    def _any_sender(self, post: Post) -> bool:
        """Whether a message is under way for a receive from any source."""
        channels = [(post.group, rank, post.rank, post.tag) for rank in post.ranks]
        return any(self._count(c[1], "send", c) > self._count(c[2], "recv", c) for c in channels)

    def _takes_any(self, post: Post) -> bool:
        """Whether the other side is waiting for a message from anybody."""
        assert post.peer is not None
        current = self.snapshots[post.peer].current
        return current is not None and current.kind == "recv" and (current.peer, current.tag) == (None, post.tag)


def ranks_of(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0, 1 and 2``."""
    *others, last = sorted(ranks)
    return f"ranks {', '.join(map(str, others))} and {last}" if others else f"rank {last}"


def _th(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
