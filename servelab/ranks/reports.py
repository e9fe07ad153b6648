"""What the simulated engine says when a run ends badly: the cause first, then where every other rank is."""

import traceback
from collections.abc import Iterable, Mapping, Sequence

from servelab.ranks import shipping
from servelab.ranks.flight import Post, Snapshot
from servelab.ranks.matching import Board, ranks_of

Stack = Iterable[traceback.FrameSummary]


def deadlock(snapshots: Mapping[int, Snapshot]) -> str:
    """Who waits for what, from whom."""
    board = Board(snapshots)
    lines = ["deadlock: no unfinished rank can go on"]
    for rank in sorted(snapshots):
        lines += standing(board, rank, {})
    return "\n".join([*lines, *board.unmatched(), *_groups_waited_in(board)])


def standing(board: Board, rank: int, stacks: Mapping[int, Stack]) -> list[str]:
    """What a rank is in, and where; ``stacks`` are those of ranks that do not wait."""
    snapshot = board.snapshots[rank]
    post = snapshot.current
    if post is None:
        own = shipping.frames(stacks.get(rank, ()))[-1:]
        return [f"  rank {rank}: {snapshot.state}", *([shipping.show(own, "    ")] if own else [])]
    missing = board.missing(post)
    whom = f", waits for {ranks_of(missing)}" if missing else ""
    number = f", collective {post.number} of group {list(post.ranks)}" if post.kind == "collective" else ""
    return [f"  rank {rank}: in {post}{number}{whom}", _place(post.where)]


def raised(rank: int, error: BaseException, snapshots: Mapping[int, Snapshot], stacks: Mapping[int, Stack]) -> str:
    """An error on one rank, its traceback, and the other ranks."""
    board = Board(snapshots)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    others = [line for other in sorted(snapshots) if other != rank for line in standing(board, other, stacks)]
    lines = [f"rank {rank} raised {text}", shipping.show(shipping.frames(error.__traceback__))]
    return "\n".join([*lines, *(["meanwhile"] if others else []), *others])


def stopped(reason: str, snapshots: Mapping[int, Snapshot], stacks: Mapping[int, Stack]) -> str:
    """Why a run was stopped from outside, and where every rank was; ``stacks`` of those that compute."""
    board = Board(snapshots)
    lines = [line for rank in sorted(snapshots) for line in standing(board, rank, stacks)]
    return "\n".join([reason, *lines])


def buffer_changed(post: Post, where: tuple[str, int, str]) -> str:
    """A buffer that changed between a call and its ``wait()``."""
    return "\n".join(
        [
            f"rank {post.rank} changed the buffer of {post} before wait(): what arrives is then anybody's guess",
            "  called at",
            _place(post.where),
            "  waited for at",
            _place(where),
        ]
    )


def unwaited(rank: int, posts: Sequence[Post]) -> str:
    """Calls that nobody waited for."""
    lines = [f"rank {rank} returned without waiting for what it had started; gloo may drop such a message"]
    for post in posts:
        lines += [f"  {post}: nobody called wait()", _place(post.where)]
    return "\n".join(lines)


def _groups_waited_in(board: Board) -> list[str]:
    """Other groups of the same ranks in which a rank waits, too: a group is made by one `new_group` on all ranks."""
    waiting = [s.current for s in board.snapshots.values() if s.current and s.current.kind == "collective"]
    names = {post.ranks: {other.group for other in waiting if other.ranks == post.ranks} for post in waiting}
    return [
        f"  ranks {list(ranks)} wait in {len(groups)} different groups: every rank must call new_group for the same "
        "groups in the same order, the ranks outside too"
        for ranks, groups in names.items()
        if len(groups) > 1
    ]


def _place(where: tuple[str, int, str]) -> str:
    return shipping.show([shipping.frame(*where)], "    ")
