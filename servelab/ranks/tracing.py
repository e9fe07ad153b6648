"""torch.distributed as ranks see it: every call is written down before it is made, and timed.

`Tracer.install` puts wrappers in place of the functions of torch.distributed in a rank's process; a learner's function
arrives there afterwards, so ``from torch.distributed import send`` in its cell means the wrapper, too. A call that
torch makes itself inside another one is not counted. Not seen at all: what does not go through these functions, such
as DistributedDataParallel, DTensor and torch.distributed._functional_collectives (simulated ranks see the last two).
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from servelab.ranks import calls, shipping
from servelab.ranks.calls import Call
from servelab.ranks.errors import BufferChangedError, UnwaitedError
from servelab.ranks.flight import FlightRecorder, Post
from servelab.ranks.record import Event

MESSAGES = ("send", "recv", "isend", "irecv")
COLLECTIVES = {  # each function's payload parameter; the deprecated functions call the ones named here
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_single": "input_tensor",
    "gather": "tensor",
    "scatter": "tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_single": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
    "barrier": None,
}

active: "Tracer | None" = None  # this process's, while it runs a rank's function


def device() -> torch.device:
    """Where this rank computes: its own GPU under NCCL, the CPU under gloo."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextlib.contextmanager
def span(name: str, seconds: float = 0.0) -> Iterator[None]:
    """Mark a compute interval. ``seconds`` above 0 emulates a device that is busy so long, by sleeping."""
    start = perf_counter()
    yield
    if active and active.on_gpu:
        torch.cuda.synchronize()  # kernels run on after the call that started them
    if seconds:
        sleep(max(0.0, start + seconds - perf_counter()))
    if active:
        active.events.append(Event(active.rank, "compute", name, start, perf_counter()))


class TracedWork:
    """A `torch.distributed.Work` whose ``wait()`` is recorded and which knows what was to be sent."""

    def __init__(self, tracer: "Tracer", work: Any, made: list[Call]):
        self._tracer, self._work, self.calls = tracer, work, made
        tracer.pending[id(self)] = self

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        wait = functools.partial(self._work.wait, *args, **kwargs)
        if not self._seen_to():
            return wait()
        return self._tracer.wait(self.calls, wait, self._work)

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._seen_to()
        return completed

    def __getattr__(self, name: str) -> Any:
        self._seen_to()  # get_future() and the like: the learner knows another way to wait
        return getattr(self._work, name)

    def _seen_to(self) -> bool:
        """Take it off the list of what was never waited for; False if it was off already."""
        return self._tracer.pending.pop(id(self), None) is not None


class Tracer:
    """Everything that one rank communicates."""

    def __init__(self, rank: int, recorder: FlightRecorder | None = None, check_buffers: bool = True):
        self.rank, self.recorder, self.check_buffers = rank, recorder, check_buffers
        self.on_gpu = device().type == "cuda"
        self.events: list[Event] = []  # times of perf_counter
        self.posts: list[Post] = []
        self.pending: dict[int, TracedWork] = {}  # not waited for so far
        self._numbers: Counter = Counter()
        self._groups: dict[Any, tuple[str, tuple[int, ...]]] = {}
        self._inside = _Inside()
        self._originals: dict[str, Callable] = {}

    def install(self) -> None:
        """Put the wrappers into torch.distributed, for the rest of this process's life or until `uninstall`."""
        for name in (*MESSAGES, *COLLECTIVES, "batch_isend_irecv", "new_group"):
            self._originals[name] = getattr(distributed_c10d, name)
            _replace(name, self._wrap(name, self._originals[name]))

    def uninstall(self) -> None:
        for name, original in self._originals.items():
            _replace(name, original)

    def check_all_waited_for(self) -> None:
        """At the function's end: whatever is still under way may never arrive, and nobody would know."""
        posts = [call.post for work in self.pending.values() for call in work.calls]
        if posts:
            lines = [f"{post}\n{shipping.show([shipping.frame(*post.where)], '    ')}" for post in posts]
            raise UnwaitedError("the function ended without waiting for\n    " + "\n    ".join(lines))

    def untraced(self, call: Callable[[], Any]) -> Any:
        """Make a call of the harness's own, of which the record says nothing."""
        return self._make(call)

    def state(self, name: str, index: int = 0) -> None:
        if self.recorder:
            self.recorder.state(name, index)

    def wait(self, made: list[Call], wait: Callable[[], Any], work: Any) -> Any:
        """Wait for what was posted; names a send buffer that has changed since."""
        post = made[0].post
        for call in made:
            if call.changed():
                raise BufferChangedError(
                    f"the buffer of {call.post} was changed before wait(): what arrives is then anybody's guess"
                )
        start = perf_counter()
        result = self._make(wait, made[0].index)
        for call in made:
            call.tensor = call.copy = None
            self._arrived(call, work)
        self.events.append(Event(self.rank, "wait", post.name, start, perf_counter(), post.peer, tag=post.tag))
        return result

    def _wrap(self, name: str, original: Callable) -> Callable:
        names, defaults = calls.parameters(original)
        trace = self._messages if name in MESSAGES else self._batch if name == "batch_isend_irecv" else self._collective

        @functools.wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            if self._inside.depth or len(given) != len(names) or len(args) > len(names):
                return original(*args, **kwargs)  # if they do not fit, torch's own error says how
            return trace(name, functools.partial(original, *args, **kwargs), given)

        return traced

    # -- messages

    def _messages(self, name: str, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        group, tensor = given.get("group"), given["tensor"]
        if not torch.is_tensor(tensor) or group == dist.GroupMember.NON_GROUP_MEMBER:
            return call()
        made = self._posted_message(name, tensor, self._peer(given), group, given["tag"])
        if name.startswith("i"):
            work = self._make(call)
            self._message_event(made, perf_counter())
            return work if work is None else TracedWork(self, work, [made])
        start = perf_counter()
        result = self._make(call, made.index)
        self._message_event(made, start)
        self._arrived(made, source=result)
        return result

    def _posted_message(self, name: str, tensor: torch.Tensor, peer: int | None, group: Any, tag: int) -> Call:
        group_name, ranks = self._group(group)
        post = Post(
            rank=self.rank,
            kind="send" if "send" in name else "recv",
            name=name,
            group=group_name,
            ranks=ranks,
            number=0,
            peer=peer,
            tag=0 if self.on_gpu else tag,  # NCCL has no tags
            **calls.size(tensor),
            where=calls.caller(),
        )
        return self._post(post, tensor if self.check_buffers and name == "isend" else None)

    def _batch(self, name: str, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        operations = given["p2p_op_list"]
        if not all(isinstance(operation, dist.P2POp) for operation in operations):
            return call()
        made = []
        for op in operations:
            made.append(self._posted_message(op.op.__name__, op.tensor, op.peer, op.group, op.tag))
            self._message_event(made[-1], perf_counter())
        works = self._make(call)
        if len(works) == len(made):
            return [TracedWork(self, work, [one]) for work, one in zip(works, made, strict=True)]
        return [TracedWork(self, work, made) for work in works]  # NCCL: one handle for the whole batch

    def _message_event(self, call: Call, start: float) -> None:
        post, end = call.post, perf_counter()
        call.event = len(self.events)
        self.events.append(
            Event(self.rank, post.kind, post.name, start, end, post.peer, post.nbytes, post.elements, post.tag)
        )

    def _arrived(self, call: Call, work: Any = None, source: int | None = None) -> None:
        """A receive from any source counts on its sender's channel, now that the sender is known."""
        if call.post.kind != "recv" or call.post.peer is not None or call.event is None:
            return
        if source is None:
            source = call.post.ranks[work._source_rank()]
        self.events[call.event] = replace(self.events[call.event], peer=source)
        self.posts[call.position] = self._write(call.post._replace(peer=source))[0]

    def _peer(self, given: dict[str, Any]) -> int | None:
        """The other rank of a message, or the root of a collective; global."""
        for name in ("src", "dst"):
            if given.get(name) is not None:
                return given[name]
            inside = given.get(f"group_{name}")
            if inside is not None:
                ranks = self._group(given.get("group"))[1]
                return ranks[inside] if 0 <= inside < len(ranks) else inside
        return None

    # -- collectives

    def _collective(self, name: str, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        group = given.get("group")
        if group == dist.GroupMember.NON_GROUP_MEMBER or given.get("use_local_synchronization"):
            return call()
        post = self._collective_post(name, given, group)
        made, start = self._post(post), perf_counter()
        result = self._make(call, None if given.get("async_op") else made.index)
        if name == "new_group":
            return result
        self.events.append(
            Event(self.rank, "collective", name, start, perf_counter(), None, post.nbytes, post.elements, 0, post.ranks)
        )
        return TracedWork(self, result, [made]) if given.get("async_op") and result is not None else result

    def _collective_post(self, name: str, given: dict[str, Any], group: Any) -> Post:
        group_name, ranks = self._group(group)
        payload = given.get(COLLECTIVES.get(name) or "")
        details = [f"op={calls.reduction(given['op'])}"] if "op" in given else []
        root = self._peer(given)
        details += [f"root={root}"] if root is not None else []
        details += [f"ranks={given['ranks']}"] if name == "new_group" else []
        return Post(
            rank=self.rank,
            kind="collective",
            name=name,
            group=group_name,
            ranks=ranks,
            number=0,
            **calls.size(payload),
            detail=", ".join(details),
            splits=calls.splits(name, given, len(ranks)),
            where=calls.caller(),
        )

    # -- bookkeeping

    def _post(self, post: Post, sent: torch.Tensor | None = None) -> Call:
        post, index = self._write(post)
        self.posts.append(post)
        return Call(post, index, len(self.posts) - 1, sent)

    def _write(self, post: Post) -> tuple[Post, int]:
        """Number a call and write it down, before it is made."""
        if post.kind != "recv" or post.peer is not None:
            key = (post.kind, post.channel)
            self._numbers[key] += 1
            post = post._replace(number=self._numbers[key])
        return post, self.recorder.post(post) if self.recorder else 0

    def _group(self, group: Any) -> tuple[str, tuple[int, ...]]:
        """Name and global ranks; of the world for None."""
        if group not in self._groups:
            named: Any = group or dist.group.WORLD
            self._groups[group] = (named.group_name, tuple(dist.get_process_group_ranks(named)))
        return self._groups[group]

    def _make(self, call: Callable[[], Any], blocked_in: int | None = None) -> Any:
        """Make a call; what torch calls inside it is not recorded."""
        before, self._inside.depth = self._inside.depth, 1
        if blocked_in is not None:
            self.state("blocked", blocked_in)
        try:
            return call()
        finally:
            self._inside.depth = before
            if blocked_in is not None:
                self.state("running")


class _Inside(threading.local):
    depth = 0  # above 0 while this thread is in a recorded call


def _replace(name: str, function: Callable) -> None:
    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)
