"""A server without a clock: a script says what happens before and during which step, and every outcome is written down.

A step is: what the script says, ``schedule``, what the script says while the step runs, ``finish_step``. A plan that
schedules nothing is not run, so ``finish_step`` is not called for it.

A script is a list of events, in the order in which they happen:

- ``[step, "add", id, prompt_tokens, max_tokens]`` or ``[..., priority]``: before the plan, the step number as arrival;
- ``[step, "abort", id]``: before the plan;
- ``[step, "add during", ...]`` and ``[step, "abort during", id]``: after the plan, before ``finish_step``.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from servelab.exercise import describe_error
from servelab.kv import OutOfBlocks
from servelab.plain import count_of, plain, text, type_name
from servelab.serving import PagedKV, Request, SchedulerConfig

STALLED = 3  # plans in a row that schedule nothing although nothing is to come: the run ends


class EndlessLoop(RuntimeError):
    """One call of a scheduler's has asked the KV memory far more often than any way of doing its work needs."""


class _Ids:
    """A pool that hands out ids from a stack."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size, self._free = num_blocks, block_size, list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        return [self._free.pop() for _ in range(n)]

    def free(self, blocks: list[int]) -> None:
        self._free += blocks


class RecordedKV(PagedKV):
    """A KV memory of its own, which writes down who holds how many blocks, and ends a loop that asks it for ever."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(_Ids(num_blocks, block_size))
        self._changed: dict[str, int] = {}
        self._asked, self._most = 0, math.inf

    def allow(self, questions: float) -> None:
        """From now on answer so many questions at most; then `EndlessLoop` is raised."""
        self._asked, self._most = 0, questions

    def _count(self) -> None:
        self._asked += 1
        if self._asked > self._most:
            raise EndlessLoop(f"an endless loop? This call has asked the KV memory {self._most:,} times")

    @property
    def num_free(self) -> int:
        self._count()
        return super().num_free

    def blocks_for(self, num_tokens: int) -> int:
        self._count()
        return super().blocks_for(num_tokens)

    def blocks(self, id: str) -> list[int]:
        self._count()
        return super().blocks(id)

    def reserve(self, id: str, num_tokens: int) -> None:
        before = len(self._tables.get(id, ()))
        PagedKV.reserve(self, id, num_tokens)
        if (held := len(self._tables.get(id, ()))) != before:
            self._changed[id] = held

    def release(self, id: str) -> None:
        if self._tables.get(id):
            self._changed[id] = 0
        super().release(id)

    def changes(self) -> dict[str, int]:
        """The blocks held by each request that has taken or given back any since the last call."""
        changed, self._changed = self._changed, {}
        return {text(id): count for id, count in changed.items()}


class Live:
    """What the model of a run knows about a request that is not finished."""

    __slots__ = ("arrival", "computed", "id", "known", "last", "max_tokens", "order", "priority", "prompt", "stops")

    def __init__(self, step: int, order: int, add: list, eos_after: int | None):
        self.id, self.prompt, self.max_tokens = add[:3]
        self.priority = add[3] if len(add) > 3 else 0
        self.arrival, self.order = step, order
        self.known, self.computed = self.prompt, 0
        self.stops = eos_after is not None and eos_after <= self.max_tokens
        self.last = self.prompt + (eos_after if self.stops and eos_after else self.max_tokens)

    @property
    def missing(self) -> int:
        """Known tokens that are not computed."""
        return self.known - self.computed

    @property
    def most(self) -> int:
        """Tokens that are in the KV cache at most: the last token is never fed back."""
        return self.prompt + self.max_tokens - 1

    @property
    def ended(self) -> bool:
        return self.known == self.last

    def request(self) -> Request:
        return Request(self.id, self.prompt, self.max_tokens, float(self.arrival), self.priority)

    def compute(self, n: int) -> bool:
        """Compute so many tokens; whether the next one has been sampled."""
        self.computed += n
        if self.computed < self.known:
            return False
        self.known += 1
        return True

    def token(self, eos_token_id: int) -> int:
        """The token sampled last: 0, 1, 2, ... past the EOS token, which comes where the script says."""
        if self.stops and self.ended:
            return eos_token_id
        count = self.known - self.prompt - 1
        return count + (count >= eos_token_id)


class Run:
    """One run of a scheduler by a script; ``records`` is what happened, as plain data, a dictionary for each step.

    Parameters
    ----------
    scheduler : object
        With ``add``, ``abort``, ``schedule`` and ``finish_step``.
    kv : RecordedKV
        The one that the scheduler was given.
    events : list
        As above.
    config : SchedulerConfig
        The one that the scheduler was given.
    eos_after : dict
        For the requests that end with EOS: with which token of the answer.
    limit : int, optional
        The run is broken off after so many steps; by default long after any scheduler is done.
    """

    def __init__(self, scheduler, kv, events: list, config: SchedulerConfig, eos_after=None, limit: int | None = None):
        self.scheduler, self.kv, self.eos_after, self.eos = scheduler, kv, eos_after or {}, config.eos_token_id
        self.limit = limit or default_limit(events, config.max_num_batched_tokens)
        self.events: dict[int, list] = {}
        for event in events:
            self.events.setdefault(event[0], []).append(event)
        self.live: dict[str, Live] = {}
        self.added = self.idle = 0
        self.before: dict = {}  # the tokens of the last plan
        self.records: list[dict] = []

    def go(self) -> list[dict]:
        """Run until one plan after everything is finished, or until something makes no sense."""
        number, going = 0, True
        while going and number < self.limit:
            done = not (self.live or self.events)
            self.records.append({})
            going = self._step(number, self.records[-1]) and not done
            number += 1
        return self.records

    def _step(self, number: int, record: dict) -> bool:
        events = self.events.pop(number, [])
        self._events(record, "before", [e for e in events if "during" not in e[1]])
        outcome = self._call(self.scheduler.schedule)
        record["plan"] = self._plan(outcome)
        if "raised" in outcome or "instead" in record["plan"] or not self._sound(record["plan"]):
            return False
        counts = self.before
        sampled = [live for live in (self.live[id] for id in counts) if live.compute(counts[live.id])]
        outputs = {live.id: live.token(self.eos) for live in sampled}
        self._events(record, "during", [e for e in events if "during" in e[1]])
        self.idle = 0 if counts or self.events else self.idle + 1
        if not counts:
            return self.idle < STALLED
        outcome = self._call(self.scheduler.finish_step, outcome["returned"], outputs)
        record["finish"] = _with(_listed(outcome), kv=self.kv.changes())
        for live in sampled:
            if live.ended and self.live.get(live.id) is live:
                del self.live[live.id]
        return "raised" not in outcome

    def _call(self, call, *arguments) -> dict:
        """`attempt`, with a bound on the KV memory that even a look at everybody for each request stays below."""
        requests = len(self.live) + 1
        self.kv.allow(1000 + 20 * requests * (requests + self.kv.num_blocks))
        return attempt(call, *arguments)

    def _events(self, record: dict, when: str, events: list) -> None:
        outcomes = [self._event(*event) for event in events]
        if outcomes:
            record[when] = _with({"outcomes": outcomes}, kv=self.kv.changes())

    def _event(self, step: int, what: str, *given) -> dict | None:
        """Do it; None if it went well."""
        if what.startswith("abort"):
            outcome = self._call(self.scheduler.abort, given[0])
            self.live.pop(given[0], None)
        else:
            live = Live(step, self.added, list(given), self.eos_after.get(given[0]))
            outcome = self._call(self.scheduler.add, live.request())
            if "returned" in outcome:
                self.live[live.id], self.added = live, self.added + 1
        return None if "returned" in outcome else outcome

    def _plan(self, outcome: dict) -> dict:
        """A plan as what differs from the one before."""
        plan: Any = outcome.get("returned")
        if "raised" in outcome:
            return outcome
        if not isinstance(getattr(plan, "scheduled", None), Mapping) or not hasattr(plan, "preempted"):
            return {"instead": type_name(plan)}
        counts = {text(id): n if type(n) is int else plain(n) for id, n in plan.scheduled.items()}
        changed = {id: n for id, n in counts.items() if self.before.get(id) != n}
        dropped = [id for id in self.before if id not in counts]
        self.before = counts
        return _with({}, scheduled=changed, dropped=dropped, preempted=ids(plan.preempted), kv=self.kv.changes())

    def _sound(self, plan: dict) -> bool:
        """Whether the plan can be run; takes the KV of the preempted away."""
        preempted = plan.get("preempted", [])
        if not isinstance(preempted, list) or not all(type(id) is str and id in self.live for id in preempted):
            return False
        for id in preempted:
            self.live[id].computed = 0
        known = all(id in self.live and type(n) is int for id, n in self.before.items())
        return known and all(1 <= n <= self.live[id].missing for id, n in self.before.items())


def default_limit(events: list, budget: int) -> int:
    """Steps after which a run is broken off: several times what one request after the other would take."""
    adds = [event for event in events if "add" in event[1]]
    return 10 + max((e[0] for e in events), default=0) + 4 * sum(e[4] + -(-e[3] // budget) for e in adds)


def attempt(call, *arguments) -> dict:
    """Call the learner's code: ``{"returned": value}`` or ``{"raised": name, "message": text}``."""
    try:
        return {"returned": call(*arguments)}
    except NotImplementedError:  # a stub: let through
        raise
    except Exception as error:  # whatever else the learner's code raises is an outcome to judge
        kinds = [kind.__name__ for kind in (ValueError, OutOfBlocks) if isinstance(error, kind)]
        return {"raised": (kinds or [type_name(error)])[0], "message": describe_error(error)}


def ids(value: Any) -> Any:
    """A list of ids out of any collection of them."""
    return plain(list(value)) if isinstance(value, Iterable) and not isinstance(value, str) else plain(value)


def _listed(outcome: dict) -> dict:
    return {"returned": ids(outcome["returned"])} if "returned" in outcome else outcome


def _with(record: dict, **parts) -> dict:
    """The record with those parts that are not empty."""
    return record | {name: part for name, part in parts.items() if part or part is None}


def play(scheduler, kv: RecordedKV, events: list, config: SchedulerConfig, eos_after: dict | None = None) -> None:
    """Run a scheduler by a script and print a line for each step.

    Parameters
    ----------
    scheduler : object
        Made with ``config`` and ``kv``.
    events : list
        The script; see this module.
    eos_after : dict, optional
        For the requests that end with EOS: with which token of the answer.
    """
    plan: dict = {}
    held: dict = {}
    for number, record in enumerate(Run(scheduler, kv, events, config, eos_after).go()):
        print(f"step {number:>3}: {_described(record, plan, held)}")


def _described(record: dict, plan: dict, held: dict) -> str:
    """A step as text; ``plan`` and ``held`` are the plan and the blocks of the step before, and become this one's."""
    given = record["plan"]
    for id in given.get("dropped", ()):
        del plan[id]
    plan |= given.get("scheduled", {})
    for part in (record.get("before", {}), given):
        held |= part.get("kv", {})
    parts = [_refused(record[when]) for when in ("before", "during") if when in record]
    parts += [f"schedule raised {given['message']}"] if "raised" in given else [f"scheduled {plan}"]
    parts += [f"preempted {given['preempted']}"] if "preempted" in given else []
    used = sum(held.values())
    parts += [f"{count_of(used, 'block')} in use"]
    finish = record.get("finish", {})
    parts += [f"finished {finish['returned']}"] if finish.get("returned") else []
    parts += [f"finish_step raised {finish['message']}"] if "raised" in finish else []
    for part in (record.get("during", {}), finish):
        held |= part.get("kv", {})
    return "; ".join(part for part in parts if part)


def _refused(events: dict) -> str:
    return "; ".join(f"an event raised {outcome['message']}" for outcome in events["outcomes"] if outcome)
