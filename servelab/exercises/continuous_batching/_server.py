"""What the checks of this unit's schedulers share: a scripted run, and a referee over what was recorded of it.

The referee sees plans and how many blocks of the KV memory each request holds, nothing else. It follows the run with
its own book of the requests and stops at the first step that breaks a rule. Where a task leaves a choice, it goes on
with what the scheduler has chosen.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from servelab.exercise import Case
from servelab.plain import count_of
from servelab.serving import SchedulerConfig
from servelab.stepping import Live, RecordedKV, Run

MAX_SHOWN = 8  # ids in a message


class Broken(Exception):
    """The first rule that a run broke: at which step, what was expected, what came.

    ``topic`` says what it is about, where a hint may be about just that: the ``order`` of admission, the ``share`` of
    the budget that somebody got, or a ``refusal`` of one that can run.
    """

    def __init__(self, message: str, topic: str = ""):
        super().__init__(message)
        self.topic = topic


def challenge(case: str, config: dict, blocks: tuple[int, int], events: list, eos_after: dict | None = None) -> dict:
    """A run as plain data; ``blocks`` are the number of blocks and the tokens in each. Events: see `stepping`."""
    memory = {"num_blocks": blocks[0], "block_size": blocks[1]}
    return {"case": case, "config": config, **memory, "events": [list(e) for e in events], "eos_after": eos_after or {}}


def add(step: int, id: str, prompt_tokens: int, max_tokens: int) -> list:
    """The event of a request that comes before a plan."""
    return [step, "add", id, prompt_tokens, max_tokens]


def limits(max_num_seqs: int, budget: int, **more: int) -> dict:
    """A config as plain data."""
    return {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget} | more


def drive(asked: dict, make: Callable[[SchedulerConfig, RecordedKV], Any]) -> list[dict]:
    """Run a scheduler, made by ``make(config, kv)``, by the challenge's script."""
    config = SchedulerConfig(**asked["config"])
    kv = RecordedKV(asked["num_blocks"], asked["block_size"])
    return Run(make(config, kv), kv, asked["events"], config, asked["eos_after"], asked.get("limit")).go()


@dataclass(frozen=True)
class Rules:
    """What the schedulers of this unit differ in.

    Parameters
    ----------
    whole_answer : bool
        KV is reserved for the whole answer at admission, and nobody is preempted.
    chunked : bool
        A prompt may be cut into chunks.
    recompute : bool
        Lost tokens are computed again in one step, so they must fit into one.
    key : callable
        The policy: the smallest key is admitted first, the largest preempted first; equal keys as they came.
    """

    whole_answer: bool = False
    chunked: bool = False
    recompute: bool = True
    key: Callable[[Live], float] = lambda live: 0

    def largest_step(self, live: Live) -> int:
        """Tokens of the request that must fit into one step."""
        return 1 if self.chunked else live.most if self.recompute else live.prompt

    def rank(self, live: Live) -> tuple:
        return self.key(live), live.arrival, live.order

    def room(self, live: Live) -> int:
        """Tokens for which there must be room when a request is admitted."""
        return live.most if self.whole_answer else live.known


class Referee:
    """The rules of an iteration-level scheduler, over the record of a run."""

    def __init__(self, asked: dict, rules: Rules):
        self.asked, self.rules, self.config = asked, rules, SchedulerConfig(**asked["config"])
        self.live: dict[str, Live] = {}
        self.running: dict[str, Live] = {}
        self.queue: list[tuple] = []  # (rank, request), the head first; who has left stays until then
        self.held: dict[str, int] = {}  # blocks
        self.used = self.added = 0
        self.gone: dict[str, str] = {}  # what became of the last request of an id
        self.lost: set[str] = set()  # who was preempted and waits
        self.counts: dict[str, int] = {}  # the plan

    def follow(self, transcript: list) -> None:
        """Follow a run. Raises `Broken` at the first step that breaks a rule."""
        events: dict[int, list] = {}
        for event in self.asked["events"]:
            events.setdefault(event[0], []).append(event)
        for number, record in enumerate(transcript):
            self._step(number, record, events.pop(number, []))
        if events or self.live:
            left = f"{_named(self.live)} not finished" if self.live else "the script is not done"
            raise Broken(f"after step {len(transcript) - 1} the run was broken off: {left}")

    def _step(self, number: int, record: dict, events: list) -> None:
        where = f"step {number}"
        self._events(f"{where}, before the plan", record.get("before"), [e for e in events if "during" not in e[1]])
        self.plan(f"{where}, schedule()", record["plan"])
        ended = self._compute()
        self._events(f"{where}, after the plan", record.get("during"), [e for e in events if "during" in e[1]])
        self._finish(f"{where}, finish_step()", record.get("finish"), ended)

    # what the script does

    def _events(self, where: str, record: dict | None, events: list) -> None:
        outcomes = record["outcomes"] if record else []
        if len(outcomes) != len(events):
            raise Broken(f"{where}: the run was broken off")
        for event, outcome in zip(events, outcomes, strict=True):
            (self._abort if event[1].startswith("abort") else self._add)(where, event, outcome)
        self._take(record or {})
        for event in events:
            if event[1].startswith("abort") and self.held.get(event[2]):
                held = self._blocks(event[2])
                raise Broken(f"{where}, abort({event[2]!r}): its KV must be free at once; it holds {held}")

    def _add(self, where: str, event: list, outcome: dict | None) -> None:
        live = Live(event[0], self.added, event[2:], self.asked["eos_after"].get(event[2]))
        where, refusal = f"{where}, add({_request(live)})", self._refusal(live)
        if outcome is None and refusal:
            raise Broken(f"{where}: expected ValueError, because {refusal}; nothing was raised")
        if outcome and (not refusal or outcome["raised"] != "ValueError"):
            earlier = f", and the earlier one of this id is {self.gone[live.id]}" if live.id in self.gone else ""
            due = f"ValueError, because {refusal}" if refusal else f"no error: it can run{earlier}"
            about = "refusal" if outcome["raised"] == "ValueError" and not refusal and not earlier else ""
            raise Broken(f"{where}: expected {due}; it raised {outcome['message']}", about)
        if not refusal:
            self.live[live.id], self.added = live, self.added + 1
            self._enqueue(live)

    def _refusal(self, live: Live) -> str:
        """Why a request has to be refused, or nothing."""
        if live.id in self.live:
            return "the one with this id is not finished"
        if self.blocks_for(live.most) > self.asked["num_blocks"]:
            need = count_of(self.blocks_for(live.most), "block")
            return f"its {live.most} tokens need {need}, and there are {self.asked['num_blocks']}"
        step, budget = self.rules.largest_step(live), self.config.max_num_batched_tokens
        return f"{step} tokens may have to be computed in one step, and the budget is {budget}" if step > budget else ""

    def _abort(self, where: str, event: list, outcome: dict | None) -> None:
        if outcome:
            raise Broken(f"{where}, abort({event[2]!r}): expected no error; it raised {outcome['message']}")
        if self.live.pop(event[2], None):
            self.gone[event[2]] = "aborted"
        self.running.pop(event[2], None)

    # the plan

    def plan(self, where: str, record: dict) -> None:
        """Follow a plan: well-formed, within the limits, in order, and with nobody left out who could run."""
        self._read(where, record)
        victims = self._preempt(where, record.get("preempted", []))
        before = dict(self.running)
        self.check_counts(where)
        self._check_running(where)
        admitted = [self.live[id] for id in self.counts if id not in self.running]
        self._admit(where, admitted)
        self._take(record)
        self._check_kv(where)
        self._check_watermark(where, admitted)
        if victims:
            self._check_preemption(where, victims[-1], before)
        elif head := self._head():
            self._check_head(where, head)

    def _read(self, where: str, record: dict) -> None:
        if "raised" in record:
            raise Broken(f"{where}: expected a StepPlan; it raised {record['message']}")
        if "instead" in record:
            raise Broken(f"{where}: expected a StepPlan, got {str(record['instead'])[:40]}")
        for id in record.get("dropped", []):
            del self.counts[id]
        self.counts |= record.get("scheduled", {})
        preempted = record.get("preempted", [])
        if not isinstance(preempted, list):
            raise Broken(f"{where}: preempted must be a list of ids")
        for id in [*preempted, *self.counts]:
            if id not in self.live:
                raise Broken(f"{where}: the plan names request {str(id)[:40]!r}, which is not there (any more)")

    def _preempt(self, where: str, preempted: list[str]) -> list[tuple[Live, int, int]]:
        """Take the preempted out of the running; each with the blocks and tokens it loses, the largest rank first."""
        for number, id in enumerate(preempted):
            if id not in self.running or id in preempted[:number]:
                raise Broken(f"{where}: request {id!r} was preempted, but does not run")
        due = sorted(self.running.values(), key=self.rules.rank, reverse=True)[: len(preempted)] if preempted else []
        wrong = [live.id for live in due if live.id not in preempted]
        if preempted and self.rules.whole_answer:
            raise Broken(f"{where}: expected nobody to be preempted, got {_named(preempted)}")
        if wrong:
            due_ids = _named(live.id for live in due)
            raise Broken(f"{where}: expected {due_ids} to be preempted, got {_named(preempted)}")
        victims = [(live, self.held.get(live.id, 0), live.computed) for live in due]
        for live in due:
            del self.running[live.id]
            live.computed = 0
            self.lost.add(live.id)
            self._enqueue(live)
        return victims

    def check_counts(self, where: str) -> None:
        """Each request's tokens: all that are missing, or a chunk of them."""
        for id, n in self.counts.items():
            live = self.live[id]
            if type(n) is not int or not 1 <= n <= live.missing or (n < live.missing and not self.rules.chunked):
                most = "1 to " if self.rules.chunked and live.missing > 1 else ""
                message = f"{where}: expected {most}{_tokens(live)} of request {id!r}, got {str(n)[:40]}"
                raise Broken(message, "" if self.rules.chunked else "share")

    def _check_running(self, where: str) -> None:
        """Everybody who runs takes part, but for a prompt whose next chunk finds the budget used up."""
        total, budget = sum(self.counts.values()), self.config.max_num_batched_tokens
        if total > budget:
            raise Broken(f"{where}: {count_of(total, 'token')} scheduled, the budget is {budget}")
        for id, live in self.running.items():
            n, left = self.counts.get(id, 0), budget - total
            if n < live.missing and (left > self.unused(live) or live.missing == 1):
                got = f"only {n} planned, with {left} of the budget left" if n else "it was left out"
                raise Broken(f"{where}: request {id!r} runs and misses {_tokens(live)}, but {got}", "share")
        cut = [id for id, live in self.running.items() if self.counts.get(id, 0) < live.missing]
        new = [id for id in self.counts if id not in self.running]
        if cut and new:
            raise Broken(f"{where}: request {new[0]!r} was admitted, though the prompt of {cut[0]!r} is not finished")

    def unused(self, live: Live) -> int:
        """Tokens of the budget that may be left though a running request could use them."""
        return 0

    def _admit(self, where: str, admitted: list[Live]) -> None:
        """Let them run; they must be those who have waited in front."""
        for _ in admitted:
            head = self._head()
            if head is None or head.id not in self.counts:
                over, turn = next(new.id for new in admitted if new.id not in self.running), head.id if head else ""
                was = " (it was preempted)" if turn in self.lost else ""
                raise Broken(f"{where}: request {over!r} was admitted before {turn!r}{was}, whose turn it is", "order")
            heapq.heappop(self.queue)
            self.running[head.id] = head
            self.lost.discard(head.id)
        if len(self.running) > self.config.max_num_seqs:
            raise Broken(f"{where}: {_run(len(self.running))}, max_num_seqs is {self.config.max_num_seqs}")

    def _check_kv(self, where: str) -> None:
        for id in self.held.keys() - self.running.keys():
            raise Broken(f"{where}: request {id!r} does not run, but holds {self._blocks(id)}")
        for id, live in self.running.items():
            held = self.held.get(id, 0)
            least = live.most if self.rules.whole_answer else live.computed + self.counts.get(id, 0)
            if held < self.blocks_for(least):
                raise Broken(f"{where}: request {id!r} needs room for {least} tokens, but holds {self._blocks(id)}")
            if held > self.blocks_for(self.rules.room(live)):
                room = self.rules.room(live)
                raise Broken(
                    f"{where}: request {id!r} holds {self._blocks(id)}, more than {count_of(room, 'token')} fill"
                )

    def _check_watermark(self, where: str, admitted: list[Live]) -> None:
        """Who is admitted while others run leaves the watermark free, and room for the rest of a prompt cut off."""
        if not admitted or len(self.running) == 1:
            return
        last = max(admitted, key=self.rules.rank)
        due = self.config.watermark_blocks + self._lacking(last)
        if self.free < due:
            parts = [f"the watermark of {count_of(self.config.watermark_blocks, 'block')}"] * (
                due > self._lacking(last)
            )
            parts += [f"{count_of(self._lacking(last), 'block')} for the rest of it"] * bool(self._lacking(last))
            raise Broken(
                f"{where}: after {last.id!r} was admitted, {' and '.join(parts)} must be free, not {self.free}"
            )

    def _check_preemption(self, where: str, victim: tuple[Live, int, int], before: dict[str, Live]) -> None:
        """The last victim had to go: with its blocks and its next tokens the others would not have had room."""
        live, held, computed = victim
        budget = self.config.max_num_batched_tokens - sum(self.counts.get(id, 0) for id in before)
        own = max(held, self.blocks_for(computed + min(live.known - computed, max(1, budget))))
        others = sum(self.held.get(id, 0) for id in before)
        if others + own <= self.asked["num_blocks"]:
            raise Broken(f"{where}: request {live.id!r} was preempted, but there are enough blocks for all who run")

    def _check_head(self, where: str, head: Live) -> None:
        """Nobody waits who could run."""
        left = self.config.max_num_batched_tokens - sum(self.counts.values())
        fits = left >= (1 if self.rules.chunked else head.missing)
        watermark = self.config.watermark_blocks if self.running else 0
        need = self.blocks_for(self.rules.room(head))
        if len(self.running) < self.config.max_num_seqs and fits and need + watermark <= self.free:
            kept = f" and a watermark of {watermark} must stay free" if watermark else ""
            raise Broken(
                f"{where}: request {head.id!r} waits, though it could run: {_run(len(self.running))};"
                f" of the budget {_left(left, 'token')} left; it needs {count_of(need, 'block')}{kept}, and"
                f" {self.free} {_are(self.free)} free",
                "share" if self.rules.chunked and left < head.missing else "",
            )

    # the step itself

    def _compute(self) -> list[Live]:
        """Run the plan; returns who has the last token now."""
        sampled = [live for live in (self.live[id] for id in self.counts) if live.compute(self.counts[live.id])]
        return [live for live in sampled if live.ended]

    def _finish(self, where: str, record: dict | None, ended: list[Live]) -> None:
        if not self.counts:
            return
        if record is None:
            raise Broken(f"{where}: the run was broken off")
        if "raised" in record:
            raise Broken(f"{where}: expected no error; it raised {record['message']}")
        due = sorted(live.id for live in ended if self.live.get(live.id) is live)
        got = record["returned"]
        if not isinstance(got, list) or not all(type(id) is str for id in got) or sorted(got) != due:
            raise Broken(f"{where}: expected {due} to be finished, got {str(got)[:200]}")
        for id in due:
            del self.live[id], self.running[id]
            self.gone[id] = "finished"
        self._take(record)

    # helpers

    @property
    def free(self) -> int:
        return self.asked["num_blocks"] - self.used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.asked["block_size"])

    def _lacking(self, live: Live) -> int:
        """Blocks that an admitted request has not taken yet, out of those that had to be free for it."""
        return max(0, self.blocks_for(self.rules.room(live)) - self.held.get(live.id, 0))

    def _take(self, record: dict) -> None:
        """Take over what was recorded of the KV memory."""
        for id, count in record.get("kv", {}).items():
            self.used += count - self.held.pop(id, 0)
            if count:
                self.held[id] = count

    def _enqueue(self, live: Live) -> None:
        heapq.heappush(self.queue, (self.rules.rank(live), live))

    def _head(self) -> Live | None:
        while self.queue and (self.live.get(self.queue[0][-1].id) is not self.queue[0][-1]):
            heapq.heappop(self.queue)
        return self.queue[0][-1] if self.queue else None

    def _blocks(self, id: str) -> str:
        return count_of(self.held.get(id, 0), "block")


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _left(number: int, noun: str) -> str:
    return f"{count_of(number, noun)} {_are(number)}"


def _run(number: int) -> str:
    return f"{count_of(number, 'request')} {'runs' if number == 1 else 'run'}"


def _tokens(live: Live) -> str:
    """The tokens that a request misses, in words."""
    prompt, answer = max(0, live.prompt - live.computed), live.known - max(live.prompt, live.computed)
    parts = [f"{prompt} of the prompt"] * bool(prompt) + [f"{answer} of the answer"] * bool(answer)
    return f"{count_of(live.missing, 'token')} ({' and '.join(parts)})"


def _request(live: Live) -> str:
    priority = f", priority={live.priority}" if live.priority else ""
    return f"Request({live.id!r}, {live.prompt}, {live.max_tokens}{priority})"


def _named(ids: Iterable) -> str:
    """Requests as a learner should read them."""
    named = [repr(str(id)[:40]) for id in ids]
    return ", ".join(named[:MAX_SHOWN] + ["..."] * (len(named) > MAX_SHOWN)) or "nobody"


def judged(
    asked: dict, rules: Rules, transcript: list, hints: dict[str, int], referee: type[Referee] = Referee
) -> list[Case]:
    """The challenge's one case, after following the run by the rules; ``hints`` are those about a topic."""
    try:
        referee(asked, rules).follow(transcript)
    except Broken as broken:
        return [Case(asked["case"], False, str(broken), hints.get(broken.topic))]
    return [Case(asked["case"], True)]


def show(asked: dict, made: str) -> str:
    """The run as Python; ``made`` makes the scheduler out of ``config`` and ``kv``."""
    config = ", ".join(f"{name}={value}" for name, value in asked["config"].items())
    eos = f", eos_after={asked['eos_after']}" if asked["eos_after"] else ""
    priority = ", priority" * any(len(event) > 5 for event in asked["events"])
    return "\n".join(
        [
            "from servelab.stepping import RecordedKV, play",
            f"config = SchedulerConfig({config})",
            f"kv = RecordedKV(num_blocks={asked['num_blocks']}, block_size={asked['block_size']})",
            f"events = [  # step, what, id, prompt_tokens, max_tokens{priority}",
            *(f"    {tuple(event)}," for event in asked["events"]),
            "]",
            f"play({made}, kv, events, config{eos})",
        ]
    )


def queue(case: str) -> dict:
    """24 requests alike at two seats: whatever is lost with each of them adds up to a standstill."""
    return challenge(case, limits(2, 9), (4, 4), [add(0, f"r{n}", 2, 2) for n in range(24)], {})


def drawn(rng: Random, case: str, requests: int, watermark: int = 0) -> dict:
    """A random run with aborts, ids that come again, and less KV than the requests could use."""
    seqs, block_size = rng.randint(3, 8), rng.choice((1, 2, 4))
    events: list[list] = []
    step, names = 0, [f"r{n}" for n in range(requests * 3 // 4)]
    rng.shuffle(names)
    for _ in range(requests):
        step += 20 if rng.random() < 0.04 else rng.choice((0, 0, 0, 1, 1, 2))
        prompt, most = rng.randint(1, rng.choice((4, 14))), rng.randint(*rng.choice(((1, 6), (6, 15), (6, 15))))
        events.append([step, rng.choice(("add", "add", "add during")), rng.choice(names), prompt, most])
        if rng.random() < 0.2:
            events.append([step + rng.randint(0, 3), rng.choice(("abort", "abort during")), rng.choice(names)])
    events.sort(key=lambda event: (event[0], "during" in event[1]))
    config = limits(seqs, rng.randint(16, 29), **({"watermark_blocks": watermark} if watermark else {}))
    eos = {id: rng.randint(1, 9) for id in rng.sample(names, len(names) // 2)}
    return challenge(case, config, (-(-rng.randint(24, 34) // block_size), block_size), events, eos)
