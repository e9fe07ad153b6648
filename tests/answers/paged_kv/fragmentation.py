"""Answers to the fragmentation exercise."""

from bisect import bisect
from fractions import Fraction
from itertools import pairwise
from math import ceil
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np

from servelab.answers import right, wrong

KINDS = ("used", "reserved", "internal", "external", "free")


def rebuilt(reference: ModuleType, **parts):
    """The reference's `fragmentation` with some of the functions that it calls replaced."""
    names = dict(vars(reference))
    for name in ("slots_needed", "first_fit", "grow", "count", "place", "arrivals", "fragmentation"):
        given = getattr(reference, name)
        names[name] = FunctionType(given.__code__, names, name, given.__defaults__)
    names.update(parts)
    return names["fragmentation"]


def _needs(reference, **by_policy):
    """`slots_needed` with another rule for some policies."""

    def slots_needed(request, policy, max_len):
        rule = by_policy.get(policy)
        return rule(request, max_len) if rule else reference.slots_needed(request, policy, max_len)

    return slots_needed


@wrong("the largest reservation is the request's final length", case="reserves the longest length")
def no_reservation(reference):
    return rebuilt(reference, slots_needed=_needs(reference, max=lambda r, n: r.final))


@wrong("power of two of the whole length", case="reserves a power of two")
def power_of_all(reference):
    return rebuilt(reference, slots_needed=_needs(reference, pow2=lambda r, n: min(n, 2 ** (r.final - 1).bit_length())))


@wrong("a power of two is doubled again", case="reserves a power of two")
def next_power(reference):
    return rebuilt(
        reference, slots_needed=_needs(reference, pow2=lambda r, n: min(n, r.prompt + 2 ** r.output.bit_length()))
    )


@wrong("power of two past the longest length", case="reserves a power of two")
def uncapped_power(reference):
    return rebuilt(
        reference, slots_needed=_needs(reference, pow2=lambda r, n: r.prompt + 2 ** (r.output - 1).bit_length())
    )


@wrong("the oracle rounds up to blocks", case="reserves the final length")
def oracle_in_blocks(reference):
    return rebuilt(reference, slots_needed=_needs(reference, oracle=lambda r, n: ceil(r.final / 16) * 16))


@wrong("paged takes all blocks of the final length at once", case="takes a block at a time")
def paged_oracle(reference):
    return rebuilt(reference, slots_needed=_needs(reference, paged=lambda r, n: ceil(r.final / 16) * 16))


@wrong("paged forgets the coming token", case="takes a block at a time")
def one_token_late(reference):
    return rebuilt(reference, slots_needed=_needs(reference, paged=lambda r, n: ceil(r.held / 16) * 16))


@wrong("paged takes a block more at a full block", case="takes a block at a time")
def one_block_early(reference):
    return rebuilt(reference, slots_needed=_needs(reference, paged=lambda r, n: ((r.held + 1) // 16 + 1) * 16))


def _gaps(running, capacity):
    """Free regions as (start, size), lowest first."""
    start, gaps = 0, []
    for other in sorted(running, key=lambda request: request.start):
        gaps.append((start, other.start - start))
        start = other.start + other.size
    return [*gaps, (start, capacity - start)]


@wrong("best fit", case="first fit, lowest slot")
def best_fit(reference):
    def first_fit(running, size, capacity):
        fitting = [(room, start) for start, room in _gaps(running, capacity) if room >= size]
        return min(fitting)[1] if fitting else None

    return rebuilt(reference, first_fit=first_fit)


@wrong("highest slot that fits", case="first fit, lowest slot")
def last_fit(reference):
    def first_fit(running, size, capacity):
        fitting = [start for start, room in _gaps(running, capacity) if room >= size]
        return fitting[-1] if fitting else None

    return rebuilt(reference, first_fit=first_fit)


@wrong("total room instead of one gap", case="first fit, lowest slot")
def compacting(reference):
    def first_fit(running, size, capacity):
        return 0 if size <= capacity - sum(other.size for other in running) else None

    return rebuilt(reference, first_fit=first_fit)


@wrong("the gap behind the last region is forgotten", case="first fit, lowest slot")
def no_gap_behind(reference):
    def first_fit(running, size, capacity):
        gaps = _gaps(running, capacity)
        return next((start for start, room in gaps[: -1 if running else None] if room >= size), None)

    return rebuilt(reference, first_fit=first_fit)


@wrong("regions walked over in the order of admission", case="first fit, lowest slot")
def unsorted_regions(reference):
    def first_fit(running, size, capacity):
        start = 0
        for other in running:
            if other.start - start >= size:
                return start
            start = other.start + other.size
        return start if start + size <= capacity else None

    return rebuilt(reference, first_fit=first_fit)


@wrong("gaps are never used again", case="first fit, lowest slot")
def bump_pointer(reference):
    def first_fit(running, size, capacity):
        start = max((other.start + other.size for other in running), default=0)
        return start if start + size <= capacity else None

    return rebuilt(reference, first_fit=first_fit)


@wrong("a gap of exactly the size is refused", case="first fit, lowest slot")
def too_careful(reference):
    def first_fit(running, size, capacity):
        return next((start for start, room in _gaps(running, capacity) if room > size), None)

    return rebuilt(reference, first_fit=first_fit)


def _counting(reference, change):
    def count(running, capacity, waiting):
        slots = {"external": 0, "free": 0, **reference.count(running, capacity, waiting)}
        change(slots, running, capacity)
        return slots

    return rebuilt(reference, count=count)


@wrong("external counted when nothing waits", case="external only while a request waits")
def always_external(reference):
    def change(slots, running, capacity):
        slots["external"], slots["free"] = slots["external"] + slots["free"], 0

    return _counting(reference, change)


@wrong(
    "free slots of whole blocks are never external",
    case="external only while a request waits",
)
def paged_has_no_external(reference):
    def change(slots, running, capacity):
        if all(other.size % 16 == 0 for other in running):
            slots["external"], slots["free"] = 0, slots["external"] + slots["free"]

    return _counting(reference, change)


@wrong("slots taken counted as used", case="each slot counted as what it is")
def utilisation_is_allocation(reference):
    def change(slots, running, capacity):
        slots["used"] += slots["reserved"] + slots["internal"]
        slots["reserved"] = slots["internal"] = 0

    return _counting(reference, change)


@wrong("utilisation mistaken for waste", case="each slot counted as what it is")
def inverted(reference):
    def fragmentation(trace, policy, capacity, max_len=2048):
        found = reference.fragmentation(trace, policy, capacity, max_len)
        return SimpleNamespace(**{**vars(found), "used": 1 - found.used})

    return fragmentation


@wrong("reserved slots counted as internal", case="each slot counted as what it is")
def all_internal(reference):
    def change(slots, running, capacity):
        slots["internal"] += slots["reserved"]
        slots["reserved"] = 0

    return _counting(reference, change)


@wrong("reserved up to the final length past the slots taken", case="each slot counted as what it is")
def reserves_the_future(reference):
    def change(slots, running, capacity):
        slots["reserved"] = sum(r.final - r.held for r in running)

    return _counting(reference, change)


@wrong("idle iterations skipped", case="counts only the iterations and slots there are")
def no_idle_time(reference):
    def fragmentation(trace, policy, capacity, max_len=2048):
        busy = 0

        def count(running, *rest):
            nonlocal busy
            busy += bool(running)
            return reference.count(running, *rest) if running else {}

        found = rebuilt(reference, count=count)(trace, policy, capacity, max_len)
        total = sum(getattr(found, kind) for kind in KINDS)
        shares = {kind: getattr(found, kind) / total for kind in KINDS}
        return SimpleNamespace(**shares, preemptions=found.preemptions)

    return fragmentation


@wrong("shares of the slots taken", case="counts only the iterations and slots there are")
def share_of_taken(reference):
    def fragmentation(trace, policy, capacity, max_len=2048):
        found = reference.fragmentation(trace, policy, capacity, max_len)
        taken = found.used + found.reserved + found.internal
        shares = {kind: getattr(found, kind) / taken for kind in KINDS}
        return SimpleNamespace(**shares, preemptions=found.preemptions)

    return fragmentation


def _growing(reference, evict, forget=False):
    """`grow` that lets another request give way: ``evict(running)`` removes and returns it."""

    def grow(running, queue, policy, capacity, max_len):
        index = 0
        while index < len(running):
            request = running[index]
            size = reference.slots_needed(request, policy, max_len)
            if size - request.size <= capacity - sum(other.size for other in running):
                request.size, request.held = size, request.held + 1
                index += 1
                continue
            evict(running, queue, request)

    return rebuilt(reference, grow=grow)


@wrong("the oldest gives way", case="the last admitted gives its blocks back")
def oldest_gives_way(reference):
    def evict(running, queue, request):
        victim = next((other for other in running if other is not request), request)
        running.remove(victim)
        queue.appendleft(victim)

    return _growing(reference, evict)


@wrong("a preempted request goes to the end of the queue", case="the last admitted gives its blocks back")
def back_of_the_queue(reference):
    def evict(running, queue, request):
        victim = running.pop()
        queue.append(victim)

    return _growing(reference, evict)


@wrong("a preempted request loses its tokens", case="the last admitted gives its blocks back")
def tokens_lost(reference):
    def evict(running, queue, request):
        victim = running.pop()
        victim.held = victim.prompt
        queue.appendleft(victim)

    return _growing(reference, evict)


@wrong("the same request grows again and again", case="takes a block at a time")
def stuck_index(reference):
    def grow(running, queue, policy, capacity, max_len):
        while running:
            running[0].advance(reference.slots_needed(running[0], policy, max_len))

    return rebuilt(reference, grow=grow)


@wrong("a dictionary instead of Shares", case="reserves the longest length")
def dictionary(reference):
    return lambda *arguments: vars(reference.fragmentation(*arguments))


@wrong("a request without a block gives way itself", case="the last admitted gives its blocks back")
def asks_and_leaves(reference):
    def evict(running, queue, request):
        running.remove(request)
        queue.appendleft(request)

    return _growing(reference, evict)


@wrong("gives blocks back although one more would do", case="the last admitted gives its blocks back")
def needless(reference):
    def grow(running, queue, policy, capacity, max_len):
        index = 0
        while index < len(running):
            request = running[index]
            size = reference.slots_needed(request, policy, max_len)
            if size - request.size >= capacity - sum(other.size for other in running) and len(running) > 1:
                queue.appendleft(running.pop())
            else:
                request.size, request.held = size, request.held + 1
                index += 1

    return rebuilt(reference, grow=grow)


@wrong("stalls until a block is free", case="the last admitted gives its blocks back")
def stalls(reference):
    def grow(running, queue, policy, capacity, max_len):
        moved = False
        for request in running:
            size = reference.slots_needed(request, policy, max_len)
            if size - request.size <= capacity - sum(other.size for other in running):
                request.size, request.held, moved = size, request.held + 1, True
        if running and not moved:
            raise RuntimeError("deadlock: every request waits for a block")

    return rebuilt(reference, grow=grow)


@wrong("the pool overflows", case="the last admitted gives its blocks back")
def unlimited(reference):
    def grow(running, queue, policy, capacity, max_len):
        for request in running:
            request.size, request.held = reference.slots_needed(request, policy, max_len), request.held + 1

    return rebuilt(reference, grow=grow)


@wrong("the head is overtaken", case="external only while a request waits")
def overtaking(reference):
    def fragmentation(trace, policy, capacity, max_len=2048):
        queue, running, slots, now = list(reference.arrivals(trace, max_len)), [], dict.fromkeys(KINDS, 0), 0
        preempted = 0
        while queue or running:
            waiting_line = _Line(queue)
            reference.grow(running, waiting_line, policy, capacity, max_len)
            preempted += len(waiting_line.items) - len(queue)
            queue[:] = waiting_line.items
            for request in list(queue):
                arrived = request.arrival * 16 <= now
                if arrived and reference.place(request, running, policy, capacity, max_len):
                    running.append(request)
                    queue.remove(request)
            waiting = any(request.arrival * 16 <= now for request in queue)
            for kind, n in reference.count(running, capacity, waiting).items():
                slots[kind] += n
            running = [request for request in running if request.held < request.final]
            now += 1
        return SimpleNamespace(**{kind: slots[kind] / (now * capacity) for kind in KINDS}, preemptions=preempted)

    return fragmentation


class _Line:
    def __init__(self, items):
        self.items = list(items)

    def appendleft(self, item):
        self.items.insert(0, item)


@right("exact fractions, one slot map of integers")
def slot_map(reference):
    """Every slot is an array element that names its owner; shares are fractions until the end."""

    def fragmentation(trace, policy, capacity, max_len=2048):
        owner = np.full(capacity, -1)
        want = [(r.arrival, r.prompt_tokens, r.prompt_tokens + r.output_tokens) for r in trace]
        held = [prompt for _, prompt, _ in want]
        queue, running, total, now, preempted = list(range(len(want))), [], [Fraction(0)] * 5, 0, np.int64(0)

        def size_of(i):
            prompt, final = want[i][1:]
            if policy == "max":
                return max_len
            if policy == "oracle":
                return final
            if policy == "pow2":
                room = 1
                while room < final - prompt:
                    room *= 2
                return min(prompt + room, max_len)
            return ceil((held[i] + 1) / 16) * 16

        def take(i):
            need = size_of(i) - int((owner == i).sum())
            empty = np.flatnonzero(owner == -1)
            if policy == "paged":
                if len(empty) < need:
                    return False
                owner[empty[:need]] = i
                return True
            for start in range(capacity - need + 1):
                if (owner[start : start + need] == -1).all():
                    owner[start : start + need] = i
                    return True
            return False

        while queue or running:
            for i in list(running):
                while i in running and policy == "paged" and not take(i):
                    victim = running.pop()
                    owner[owner == victim] = -1
                    queue.insert(0, victim)
                    preempted += 1
                if i in running:
                    held[i] += 1
            while queue and want[queue[0]][0] <= now / 16 and take(queue[0]):
                held[queue[0]] += 1
                running.append(queue.pop(0))
            blocked = bool(queue) and want[queue[0]][0] <= now / 16
            sizes = {i: int((owner == i).sum()) for i in running}
            used = sum(held[i] for i in running)
            kept = sum(max(0, min(sizes[i], want[i][2]) - held[i]) for i in running)
            empty = int((owner == -1).sum())
            parts = (used, kept, sum(sizes.values()) - used - kept, empty * blocked, empty * (not blocked))
            total = [a + Fraction(b, capacity) for a, b in zip(total, parts, strict=True)]
            for i in [i for i in running if held[i] == want[i][2]]:
                owner[owner == i] = -1
                running.remove(i)
            now += 1
        return reference.Shares(*(np.float64(part / now) for part in total), preempted)

    return fragmentation


@right("a sorted list of regions, and free blocks as a number")
def sorted_regions(reference):
    """Keeps the regions sorted by address as requests come and go."""

    def first_fit(running, size, capacity):
        ends = [(0, 0)]
        for other in running:
            ends.insert(bisect(ends, (other.start, other.start + other.size)), (other.start, other.start + other.size))
        ends.append((capacity, capacity))
        return next((a[1] for a, b in pairwise(ends) if b[0] - a[1] >= size), None)

    def count(running, capacity, waiting):
        kinds = dict.fromkeys(KINDS, 0)
        for request in running:
            final = request.prompt + request.output
            for slot in range(request.size):
                kinds["used" if slot < request.held else "reserved" if slot < final else "internal"] += 1
        kinds["external" if waiting else "free"] = capacity - sum(kinds.values())
        return kinds

    return rebuilt(reference, first_fit=first_fit, count=count)


@right("a walk over a copy of the running requests, and no history")
def copied_walk(reference):
    def grow(running, queue, policy, capacity, max_len):
        for request in list(running):
            while request in running:
                more = reference.slots_needed(request, policy, max_len) - request.size
                if more <= capacity - sum(other.size for other in running):
                    request.advance(request.size + more)
                    break
                queue.appendleft(running.pop())

    def fragmentation(*arguments):
        found = rebuilt(reference, grow=grow)(*arguments)
        return SimpleNamespace(**{name: getattr(found, name) for name in (*KINDS, "preemptions")})

    return fragmentation
