"""What simulated ranks send each other: who meets whom, when data moves, and what is delivered.

Messages are a rendezvous, as in gloo and NCCL: data moves once both sides have made their call. A link carries one
message after the other; a message of n bytes holds it for n / bandwidth seconds and arrives alpha later. The ready
collectives of a group follow each other, too; each starts when its last rank has called it and takes its ring's time
(`servelab.ranks.collectives`). Collectives and messages do not slow each other down.

Data is copied at the call and delivered by ``wait()``: a rank that reads a receive buffer earlier finds the old
contents, every time.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from servelab.ranks import reports
from servelab.ranks.calls import caller, same_bytes
from servelab.ranks.collectives import Collective, Contribution, Ring
from servelab.ranks.errors import BufferChangedError, MismatchError, UnwaitedError
from servelab.ranks.flight import Post
from servelab.ranks.matching import mismatch
from servelab.ranks.record import Event, Link
from servelab.ranks.scheduler import Rank, Scheduler

POLL = 1e-5  # virtual seconds that asking ``is_completed()`` takes, so that a loop of asking comes to an end


class Request:
    """A communication call of one rank.

    ``began`` and ``done`` are when its data starts to move and when the call is complete for this rank, once known.
    ``deliveries`` are pairs of a tensor of the rank's and what it receives. ``kept`` are pairs of a tensor that must
    not change before ``wait()`` and a copy of what it held.
    """

    def __init__(self, post: Post, posted: float, blocking: bool, sent: Sequence[torch.Tensor]):
        self.post, self.posted, self.blocking = post, posted, blocking
        self.kept = [(tensor, tensor.detach().clone()) for tensor in sent]
        self.deliveries: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.began = 0.0
        self.done: float | None = None
        self.settled = False

    def changed(self) -> bool:
        """Whether a buffer to be sent holds something else than when the call was made."""
        return any(not torch.equal(now, then) and not same_bytes(now, then) for now, then in self.kept)


class Exchange:
    """All communication of one run.

    Parameters
    ----------
    link : Link
        What every directed pair of ranks is joined by.
    links : mapping of (int, int) to Link
        Exceptions, by sender and receiver.
    """

    def __init__(self, link: Link, links: Mapping[tuple[int, int], Link]):
        self.scheduler: Scheduler
        self.events: list[Event] = []
        self.posts: list[Post] = []
        self._link, self._links = link, links
        self._counts: Counter = Counter()
        self._unmatched: dict[tuple, list[tuple[Request, torch.Tensor]]] = defaultdict(list)
        self._meetings: dict[tuple, dict[int, tuple[Request, Contribution]]] = defaultdict(dict)
        self._link_free: dict[tuple[int, int], float] = defaultdict(float)
        self._group_free: dict[tuple, float] = defaultdict(float)
        self._open: dict[int, dict[Request, None]] = defaultdict(dict)

    # -- what a rank calls

    def message(self, rank: Rank, post: Post, tensor: torch.Tensor, blocking: bool) -> Request:
        """Post one side of a message."""
        request = self._posted(rank, post, blocking, [tensor] if post.kind == "send" else [])
        self._open[rank.index][request] = None
        if not blocking:
            self._record(rank, request, rank.clock)
        self._match(request, tensor)
        return request

    def collective(self, rank: Rank, post: Post, part: Contribution, kind: Collective, blocking: bool) -> Request:
        """Join a collective."""
        request = self._posted(rank, post, blocking, part.inputs)
        self._open[rank.index][request] = None
        if not blocking:
            self._record(rank, request, rank.clock)
        part.inputs = [copy for _, copy in request.kept]
        meeting = self._meetings[post.channel, request.post.number]
        meeting[rank.index] = (request, part)
        self._demand_agreement([request.post for request, _ in meeting.values()])
        if len(meeting) == len(post.ranks):
            del self._meetings[post.channel, request.post.number]
            self._complete([meeting[member] for member in post.ranks], kind)
        return request

    def wait(self, rank: Rank, request: Request) -> None:
        """Return when the call is complete, with its data delivered."""
        self.scheduler.check(rank)
        if request.settled:
            return
        self._demand_unchanged(rank, request)
        start = rank.clock
        if request.done is None:
            self.scheduler.block(rank, request)
        assert request.done is not None
        self.scheduler.advance(rank, request.done)
        self._settle(rank, request)
        self._record(rank, request, request.posted if request.blocking else start, waited=not request.blocking)

    def completed(self, rank: Rank, request: Request) -> bool:
        """Whether the call is complete by now; then its data is delivered. Asking takes `POLL` virtual seconds."""
        if not request.settled and (request.done is None or request.done > rank.clock):
            self.scheduler.advance(rank, rank.clock + POLL)
        if not request.settled and request.done is not None and request.done <= rank.clock:
            self._demand_unchanged(rank, request)
            self._settle(rank, request)
        return request.settled

    @contextlib.contextmanager
    def span(self, rank: Rank, name: str, seconds: float) -> Iterator[None]:
        """A compute interval, which ends ``seconds`` of virtual time after the block's last communication."""
        start = rank.clock
        yield
        if not seconds >= 0:
            raise ValueError(f"span({name!r}, {seconds}): expected a number of seconds of at least 0")
        self.events.append(Event(rank.index, "compute", name, start, rank.clock + seconds))
        self.scheduler.advance(rank, rank.clock + seconds)

    def leave(self, rank: Rank) -> None:
        """The rank's function has returned: nothing may be left to wait for."""
        if self._open[rank.index]:
            posts = [request.post for request in self._open[rank.index]]
            self.scheduler.fail(rank, UnwaitedError(reports.unwaited(rank.index, posts)))

    # -- matching

    def _posted(self, rank: Rank, post: Post, blocking: bool, sent: Sequence[torch.Tensor]) -> Request:
        """Number a call and write it down."""
        self.scheduler.check(rank)
        if post.kind != "recv" or post.peer is not None:
            post = self._numbered(post)
        self.posts.append(post)
        return Request(post, rank.clock, blocking, sent)

    def _numbered(self, post: Post) -> Post:
        key = (post.rank, post.kind, post.channel)
        self._counts[key] += 1
        return post._replace(number=self._counts[key])

    def _match(self, request: Request, tensor: torch.Tensor) -> None:
        """Let a message move if its other side is there, or leave it for the other side to find."""
        post = request.post
        target = post.peer if post.kind == "send" else post.rank
        other = "recv" if post.kind == "send" else "send"
        there = self._unmatched[post.group, target, post.tag, other]
        for index, (candidate, its_tensor) in enumerate(there):
            if candidate.post.peer in (None, post.rank) and post.peer in (None, candidate.post.rank):
                del there[index]
                sides = [(request, tensor), (candidate, its_tensor)]
                self._move(*sorted(sides, key=lambda side: side[0].post.kind, reverse=True))
                return
        self._unmatched[post.group, target, post.tag, post.kind].append((request, tensor))

    def _move(self, sending: tuple[Request, torch.Tensor], receiving: tuple[Request, torch.Tensor]) -> None:
        """Send a message over its link, now that both sides are there."""
        (send, _), (receive, buffer) = sending, receiving
        if receive.post.peer is None:
            self._name_source(receive, send.post.rank)
        self._demand_agreement([send.post, receive.post])
        ends = (send.post.rank, receive.post.rank)
        link = Link() if ends[0] == ends[1] else self._links.get(ends, self._link)
        began = max(send.posted, receive.posted, self._link_free[ends])
        self._link_free[ends] = sent = began + send.post.nbytes / link.bandwidth
        receive.deliveries = [(buffer, send.kept[0][1])]
        for request, done in ((send, sent), (receive, sent + link.alpha)):
            request.began, request.done = began, done
            self.scheduler.wake(self.scheduler.ranks[request.post.rank], request)

    def _name_source(self, receive: Request, source: int) -> None:
        """A receive from any source counts on its sender's channel from now on."""
        position = self.posts.index(receive.post)
        receive.post = self.posts[position] = self._numbered(receive.post._replace(peer=source))

    def _complete(self, members: Sequence[tuple[Request, Contribution]], kind: Collective) -> None:
        """All ranks of a group are in the collective: compute it and set when it is done."""
        requests, parts = zip(*members, strict=True)
        post = requests[0].post
        ring = Ring(post.ranks, self._link, self._links)
        began = max(self._group_free[post.channel], *(request.posted for request in requests))
        self._group_free[post.channel] = done = began + kind.seconds(parts, ring)
        with torch.no_grad():
            results = kind.results(parts)
        for request, part, received in zip(requests, parts, results, strict=True):
            request.deliveries = list(zip(part.outputs, received, strict=True))
            request.began, request.done = began, done
            self.scheduler.wake(self.scheduler.ranks[request.post.rank], request)

    # -- completion

    def _demand_agreement(self, posts: Sequence[Post]) -> None:
        """Calls that meet must fit. The last one is new; the others are known to fit each other."""
        first, new = posts[0], posts[-1]
        if (
            first.splits
            or (first.elements, first.dtype, first.detail) != (new.elements, new.dtype, new.detail)
            or (new.kind == "collective" and new.name != first.name)
        ):
            problem = mismatch(posts)
            if problem:
                self.scheduler.fail(self.scheduler.ranks[new.rank], MismatchError(problem))

    def _demand_unchanged(self, rank: Rank, request: Request) -> None:
        if request.changed():
            self.scheduler.fail(rank, BufferChangedError(reports.buffer_changed(request.post, caller())))

    def _settle(self, rank: Rank, request: Request) -> None:
        for tensor, received in request.deliveries:
            same = received if received.shape == tensor.shape else received.view(tensor.shape)
            tensor.data.copy_(same)  # .data: autograd sees no change, as with gloo and NCCL
        request.settled = True
        request.deliveries, request.kept = [], []
        self._open[rank.index].pop(request, None)

    def _record(self, rank: Rank, request: Request, start: float, waited: bool = False) -> None:
        """Write down a call: as a moment if it does not block, else from its start to now; or the wait for it."""
        post = request.post
        kind, nbytes, elements = ("wait", 0, 0) if waited else (post.kind, post.nbytes, post.elements)
        ranks = post.ranks if post.kind == "collective" else ()
        began = None if request.done is None else min(max(start, request.began), rank.clock)
        self.events.append(
            Event(rank.index, kind, post.name, start, rank.clock, post.peer, nbytes, elements, post.tag, ranks, began)
        )
