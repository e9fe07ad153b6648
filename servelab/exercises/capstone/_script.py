"""What the checks of engines share: a scheduler that plays a script, a model that counts, and what a run is judged by.

The script says for each step what comes before it (requests added and aborted), who is preempted, and how many tokens
of whom are computed. So plans are known in advance, and they are more mixed than any one policy makes them. The model
is small and random; the answers are the tokens that it gives.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from servelab.exercise import Case
from servelab.exercises.capstone import _model
from servelab.kv import OutOfBlocks
from servelab.plain import count_of, is_array, plain, text, type_name
from servelab.serving import PagedKV, Request, SchedulerConfig, StepPlan
from servelab.stepping import RecordedKV, attempt

AMPLE = 64  # blocks: no script runs out of them by accident
SEED = 7  # of the model's weights
SEEN = ("passes", "computed", "rows", "used", "blocked", "left")
KINDS = ("tokens", "events", "unfinished", "given", "idle", "returned", *SEEN)
REFUSED = "refused"  # a request with this in its id is one that the scheduler refuses


class ScriptedScheduler:
    """A scheduler without a policy: its plans are given. It ends answers and gives back KV as unit 04's do.

    ``at`` is the number of the next plan. An engine that did not ask for one has missed it. With ``whole_prompts`` a
    request gets room for all of its prompt at once, however short its chunks are.
    """

    def __init__(self, config: SchedulerConfig, kv: PagedKV, plans: Sequence[dict], whole_prompts: bool = False):
        self.config, self.kv, self._plans, self.at = config, kv, plans, 0
        self.whole_prompts, self._prompts = whole_prompts, dict[str, int]()
        self._live: dict[str, list[int]] = {}  # tokens computed, tokens of the answer that may still come
        self.given: list[Any] = []  # what `finish_step` was given since the last look
        self.asked = 0  # calls of `schedule` since the last look
        self.blocked: list[str] = []  # who found no room

    def add(self, request: Request) -> None:
        if request.id in self._live or REFUSED in request.id:
            raise ValueError(f"the scheduler refuses {request.id}")
        self._live[request.id] = [0, request.max_tokens]
        self._prompts[request.id] = request.prompt_tokens if self.whole_prompts else 0

    def abort(self, id: str) -> None:
        if self._live.pop(id, None):
            self.kv.release(id)

    def schedule(self) -> StepPlan:
        asked = self._plans[self.at] if self.at < len(self._plans) else {}
        self.asked, self.at, plan = self.asked + 1, self.at + 1, StepPlan()
        for id in asked.get("preempted", []):
            if id in self._live:
                self.kv.release(id)
                self._live[id][0] = 0
                plan.preempted.append(id)
        for id, n in asked.get("scheduled", []):
            if id in self._live:
                try:
                    self.kv.reserve(id, max(self._prompts[id], self._live[id][0] + n))
                    plan.scheduled[id] = n
                except OutOfBlocks:
                    self.blocked.append(id)
        return plan

    def finish_step(self, plan: StepPlan, outputs: dict[str, int]) -> list[str]:
        self.given.append(plain(dict(outputs)))
        for id in self._live.keys() & plan.scheduled.keys():
            self._live[id][0] += plan.scheduled[id]
            self._live[id][1] -= id in outputs
        eos = self.config.eos_token_id
        ended = [id for id in outputs if id in self._live and (outputs[id] == eos or not self._live[id][1])]
        for id in ended:
            self.abort(id)
        return ended


def counting(model, calls: list):
    """The model, made to write down each forward pass and how many rows of logits are computed."""
    forward, logits = model.forward, model.logits

    def counted_forward(tokens, positions, kv):
        calls.append(["forward", len(tokens)])
        return forward(tokens, positions, kv)

    def counted_logits(hidden):
        calls.append(["logits", hidden.numel() // hidden.shape[-1]])
        return logits(hidden)

    model.forward, model.logits = counted_forward, counted_logits
    return model


# -- making challenges


def add(id: str, prompt: Sequence[int], max_tokens: int) -> list:
    """The event of a request."""
    return ["add", id, list(prompt), max_tokens]


def step(scheduled: dict[str, int], *events: list, preempted: Sequence[str] = ()) -> dict:
    """One step of a script."""
    return {"events": list(events), "scheduled": [[id, n] for id, n in scheduled.items()], "preempted": list(preempted)}


def challenge(case: str, steps: list[dict], block_size: int = 4, eos: int = -1, **more: Any) -> dict:
    """A run as plain data."""
    return {"case": case, "steps": steps, "block_size": block_size, "num_blocks": AMPLE, "eos": eos} | more


def prompt(rng: Random, length: int) -> list[int]:
    """Token ids; 0 is never among them."""
    return [rng.randrange(1, _model.SMALL["vocab_size"]) for _ in range(length)]


def answer(tokens: Sequence[int], max_tokens: int) -> list[int]:
    """What the model says, without an end."""
    from servelab.llm.generate import greedy

    return list(greedy(_model.model(SEED, eos_token_id=-1), tokens, max_tokens))


class _Live:
    """What the drawing of a script knows of a request."""

    def __init__(self, tokens: list[int], max_tokens: int, eos: int):
        said = answer(tokens, max_tokens)
        self.known, self.computed = len(tokens), 0
        self.last = self.known + (said.index(eos) + 1 if eos in said else max_tokens)


def drawn(
    rng: Random,
    case: str,
    requests: int,
    block_size: int,
    preempt: float = 0,
    abort: float = 0,
    begin: Sequence[int] = (),
) -> dict:
    """A random run: chunks of all sizes, requests that sit steps out, preemptions, aborts, and ids that come again.

    ``preempt`` is the chance of each request in each step, ``abort`` the chance of a step. About half of the prompts
    begin with ``begin``.
    """
    eos, steps, left = rng.randrange(_model.SMALL["vocab_size"]), [], requests
    live: dict[str, _Live] = {}
    while left or live:
        events = []
        while left and len(live) < 6 and rng.random() < 0.6:
            id = next(name for name in rng.sample("abcdefgh", 8) if name not in live)
            tokens = [*begin[: rng.choice((0, len(begin)))], *prompt(rng, rng.randint(1, 9))]
            most, left = rng.randint(1, 8), left - 1
            events.append(add(id, tokens, most))
            live[id] = _Live(tokens, most, eos)
        if live and rng.random() < abort:
            events.append(["abort", rng.choice(sorted(live))])
            del live[events[-1][1]]
        steps.append(_drawn_step(rng, live, events, preempt))
    return challenge(case, [*steps, step({})], block_size, eos)


def _drawn_step(rng: Random, live: dict[str, _Live], events: list, preempt: float) -> dict:
    """Draw a plan and take over what it does."""
    ids = rng.sample(sorted(live), len(live))
    lost = [id for id in ids if live[id].computed and rng.random() < preempt][:2]
    for id in lost:
        live[id].computed = 0
    plan = {}
    for id in ids:
        missing = live[id].known - live[id].computed
        if id not in lost and rng.random() < 0.8:
            plan[id] = missing if rng.random() < 0.5 else rng.randint(1, missing)
    for id, n in plan.items():
        live[id].computed += n
        live[id].known += live[id].computed == live[id].known
        if live[id].known == live[id].last:
            del live[id]
    return step(plan, *events, preempted=lost)


# -- running


def drive(
    asked: dict,
    make_kv: Callable[[], Any],
    make_engine: Callable,
    caches_unit,
    remark: Callable[[Any, list[str]], str] = lambda kv, ids: "",
) -> dict:
    """Run an engine by a script; with ``twin``, a second one beside it, step by step, on prompts of its own.

    With ``overwritten`` each prompt's list is written over as soon as it has been handed over.

    ``remark(kv, ids)`` is what there is to say of the KV memory when a step raises `KeyError`; ids are its plan's.
    """
    lists: dict[tuple, list] = {}  # one list object for equal prompts, to see whether it stays as it is
    twins = range(1 + asked.get("twin", 0))
    runs = [_Run(asked, twin, make_kv(), make_engine, caches_unit, lists, remark) for twin in twins]
    for number in range(len(asked["steps"])):
        going = [run.step(number) for run in runs]
        if not all(going):
            break
    kept = all(list(key) == prompt for key, prompt in lists.items())
    return {"runs": [run.records for run in runs], "prompts kept": kept}


class _Run:
    """One engine at work, and what is written down of it: a dictionary for each step."""

    def __init__(self, asked: dict, twin: int, kv, make_engine: Callable, unit, lists: dict, remark: Callable):
        from servelab.llm.kv import Pages

        self.asked, self.twin, self.kv, self.lists, self.remark = asked, twin, kv, lists, remark
        self.calls: list = []
        self.records: list[dict] = []
        model = counting(_model.model(SEED), self.calls)
        config = SchedulerConfig(8, 1024, eos_token_id=asked["eos"])
        self.scheduler = ScriptedScheduler(config, kv, asked["steps"], asked.get("whole_prompts", False))
        pages = Pages.of(model, asked["num_blocks"], asked["block_size"], unit)
        self.engine = make_engine(model, self.scheduler, kv, pages)

    def step(self, number: int) -> bool:
        """Do what the script says before a step, and the step. Whether the run can go on."""
        record: dict[str, Any] = {"events": [self._event(*event) for event in self.asked["steps"][number]["events"]]}
        self.records.append(record)
        self.scheduler.at = max(self.scheduler.at, number)
        outcome = attempt(self.engine.step)
        if "raised" in outcome:
            ids = [id for id, _ in self.asked["steps"][number]["scheduled"]]
            record["raised"] = outcome["message"] + (
                self.remark(self.kv, ids) if outcome["raised"] == "KeyError" else ""
            )
            return False
        record["new"] = new_tokens(outcome["returned"])
        record |= {"calls": self.calls[:], "plans": self.scheduler.asked, "given": self.scheduler.given[:]}
        record |= {"blocked": self.scheduler.blocked[:], **self._state()}
        self.scheduler.asked = 0
        for seen in (self.calls, self.scheduler.given, self.scheduler.blocked):
            seen.clear()
        return True

    def _event(self, what: str, id: str, *given) -> dict:
        if what == "abort":
            outcome = attempt(self.engine.abort, id)
        else:
            tokens = [1 + token % 29 for token in given[0]] if self.twin else given[0]
            over = self.asked.get("overwritten", 0)
            tokens = list(tokens) if over else self.lists.setdefault(tuple(tokens), tokens)
            length = given[2] if len(given) > 2 else len(tokens)
            outcome = attempt(self.engine.add, Request(id, length, given[1]), tokens)
            tokens[:] = [0] * len(tokens) if over else tokens
        raised = {"raised": outcome["raised"], "message": outcome["message"]} if "raised" in outcome else {}
        return raised | self._state()

    def _state(self) -> dict:
        return {"unfinished": plain(self.engine.num_unfinished), "used": self.kv.num_blocks - self.kv.num_free}


def new_tokens(returned: Any) -> Any:
    """New tokens as ``[id, token, finished]``, in the order of ids."""
    if not isinstance(returned, (list, tuple)):
        return {"instead": type_name(returned)}
    found = [[plain(getattr(new, name, None)) for name in ("id", "token", "finished")] for new in returned]
    return sorted(found, key=lambda new: text(new[0]))


# -- judging


def compare(asked: dict, got: list, want: list) -> dict[str, str]:
    """What is wrong in a run, by kind, each at its first step.

    A run that breaks off is wrong in every kind; the reason given is an event that went wrong before, if there is one.
    """
    found: dict[str, str] = {}
    there = 0  # requests that a step finds
    for number, right in enumerate(want):
        mine = got[number] if number < len(got) else {"events": right["events"], "raised": "nothing"}
        there = right["events"][-1]["unfinished"] if right["events"] else there
        for kind, problem in _problems(asked["steps"][number], mine, right, there):
            found.setdefault(kind, f"step {number}{problem}")
        if "raised" in mine:
            broken = f"step {number}: step() raised {mine['raised']}{_lost(asked['steps'][: number + 1])}"
            return found | {kind: found.get("events", broken) for kind in KINDS if kind not in found}
        there = right["unfinished"]
    left, due = got[-1]["used"], want[-1]["used"]
    message = f"{count_of(due, 'block')} should be in use at the end, not {left}"
    return found if left == due else found | {"left": message}


def _lost(steps: list[dict]) -> str:
    """Who was preempted last, and when."""
    lost = [(number, ", ".join(step["preempted"])) for number, step in enumerate(steps) if step["preempted"]]
    return "; preempted in step {}: {}".format(*lost[-1]) if lost else ""


def _problems(asked: dict, mine: dict, right: dict, there: int) -> Iterable[tuple[str, str]]:
    """The kinds of what is wrong at one step, each with a message; ``there`` is the number of requests it finds."""
    for event, now, due in zip(asked["events"], mine["events"], right["events"], strict=True):
        yield from _event_problems(event, now, due)
    if "raised" in mine:
        return
    plan = f", with {_planned(asked)} planned" if asked["scheduled"] else ", with nothing planned"
    if mine["new"] != right["new"]:
        ran = right["given"] or isinstance(mine["new"], list)  # or else it is only no list where nothing was to be done
        yield "tokens" if ran else "returned", f"{plan}: expected {_listed(right['new'])}, got {_listed(mine['new'])}"
    passes, rows = (_count(mine["calls"], name) for name in ("forward", "logits"))
    due, most = _count(right["calls"], "forward"), len(asked["scheduled"])
    if len(passes) != len(due) or mine["plans"] not in ((1,) if there else (0, 1)):
        expected = f"expected 1 plan and {count_of(len(due), 'forward pass')}"
        yield "passes", f"{plan}: {expected}, got {mine['plans']} and {len(passes)}"
    elif sum(passes) != sum(due):
        yield "computed", f"{plan}: expected {count_of(sum(due), 'token')} in the forward pass, got {sum(passes)}"
    if sum(rows) > most:
        yield "rows", f"{plan}: {count_of(sum(rows), 'row')} of logits were computed for {count_of(most, 'request')}"
    if mine["given"] != right["given"]:
        harmless = not right["given"] and not any(mine["given"])  # told of a step in which nothing was computed
        said = f"expected {_calls(right['given'])}; {_calls(mine['given'], 'was')}"
        yield "idle" if harmless else "given", f"{plan}: {said}"
    if mine["used"] != right["used"]:
        lacking = "".join(f" (reserve for {id} raised OutOfBlocks)" for id in mine["blocked"][:1])
        due = f"{count_of(right['used'], 'block')} should be in use afterwards"
        yield "used", f"{plan}{lacking}: {due}, not {mine['used']}"
    if mine["blocked"] != right["blocked"]:
        came, due = (f"reserve {_without_room(run['blocked'])}" for run in (mine, right))
        yield "blocked", f"{plan}: {came}; expected: {due}"
    if mine["unfinished"] != right["unfinished"]:
        yield "unfinished", f"{plan}: expected {right['unfinished']} unfinished afterwards, got {mine['unfinished']}"


def _event_problems(event: list, now: dict, due: dict) -> Iterable[tuple[str, str]]:
    named = f", before it: {event[0]} {event[1]!r}{_about(event, due)}"
    if now.get("raised") != due.get("raised"):
        came = f"it raised {now['message']}" if "raised" in now else "nothing was raised"
        yield "events", f"{named}: expected {due.get('raised', 'no error')}, {came}"
    elif now["used"] != due["used"]:
        yield "used", f"{named}: {count_of(due['used'], 'block')} should be in use afterwards, not {now['used']}"
    elif now["unfinished"] != due["unfinished"]:
        yield "unfinished", f"{named}: expected {due['unfinished']} unfinished afterwards, got {now['unfinished']}"


def _about(event: list, due: dict) -> str:
    """What there is to say of a request that is refused, or as long as the model allows; in brackets."""
    longest = _model.SMALL["max_model_len"]
    if event[0] != "add":
        return ""
    length, most = len(event[2]), event[3]
    if event[4:] and event[4] != length:
        return f" (a prompt of {length} tokens, the request says {event[4]})"
    if _at_limit(event):
        return f" ({length} + {most} tokens, the model's limit is {longest})"
    return " (the scheduler refuses it)" if "raised" in due else ""


def _calls(given: list, verb: str = "to be") -> str:
    """How `finish_step` was called, or should have been."""
    came = ", then ".join(map(_outputs, given))
    if came:
        return f"finish_step {verb} called with {came}"
    return "it was not called" if verb == "was" else "no call of finish_step"


def _without_room(blocked: list[str]) -> str:
    return f"raised OutOfBlocks for {', '.join(blocked)}" if blocked else "found room for all"


def _count(calls: list, name: str) -> list[int]:
    return [size for called, size in calls if called == name]


def _planned(asked: dict) -> str:
    return ", ".join(f"{n} of {id}" for id, n in asked["scheduled"])


def _listed(new: Any) -> str:
    """New tokens as a learner should read them."""
    if not isinstance(new, list):
        return f"an object of type {new.get('instead')}"
    parts = [f"{id}: {token_text(token)}{_ending(finished)}" for id, token, finished in new[:6]]
    return ", ".join(parts) or "no token"


def _ending(finished: Any) -> str:
    if isinstance(finished, bool):
        return " (finished)" if finished else ""
    return f" (finished: {text(finished, 40)})"


def _outputs(given: Any) -> str:
    """What `finish_step` was given, as a learner should read it."""
    if not isinstance(given, dict):
        return text(given, 80)
    return "{" + ", ".join(f"{id!r}: {token_text(token)}" for id, token in list(given.items())[:6]) + "}"


def token_text(token: Any) -> str:
    """A token, or what is there instead of one."""
    if is_array(token):
        return f"a tensor of shape {token['shape']}, not an int"
    return f"an object of type {token['unexpected type']}" if isinstance(token, dict) and token else repr(token)[:40]


def case(name: str, found: dict[str, str], kinds: Sequence[str]) -> Case:
    """The case; it fails on the first problem of one of these kinds."""
    problem = next((problem for kind, problem in found.items() if kind in kinds), "")
    return Case(name, not problem, problem)


def shown(asked: dict, made: str, play: str) -> str:
    """The run as Python."""
    lines = [f"    {entry!r}," for entry in asked["steps"]]
    adds = [event for entry in asked["steps"] for event in entry["events"] if event[0] == "add"]
    notes = [f"# the model's max_model_len is {_model.SMALL['max_model_len']}"] if any(map(_at_limit, adds)) else []
    notes += ["# a fifth part of an add: the request's prompt_tokens"] if any(event[4:] for event in adds) else []
    notes += ["# the scheduler reserves room for all of a prompt at once"] if asked.get("whole_prompts") else []
    notes += ["# the caller writes over each prompt's list after add"] if asked.get("overwritten") else []
    usual = ("steps", "case", "num_blocks") if asked["num_blocks"] == AMPLE else ("steps", "case")
    rest = {key: value for key, value in asked.items() if key not in usual}
    return "\n".join(
        [
            f"from servelab.exercises.capstone.{play} import play",
            "steps = [  # events before the step, tokens to compute of each request, who is preempted",
            *lines,
            "]",
            *notes,
            f"play({made}, steps, {', '.join(f'{key}={value!r}' for key, value in rest.items())})",
        ]
    )


def _at_limit(event: list) -> bool:
    return len(event[2]) + event[3] >= _model.SMALL["max_model_len"]


def recorded_kv(asked: dict) -> RecordedKV:
    """A KV memory of the check's own."""
    return RecordedKV(asked["num_blocks"], asked["block_size"])


def print_runs(asked: dict, transcript: dict) -> None:
    """A line for each step: what was planned, what came, blocks in use, requests unfinished."""
    for number, records in enumerate(transcript["runs"]):
        if len(transcript["runs"]) > 1:
            print(f"engine {number}:")
        for at, (plan, record) in enumerate(zip(asked["steps"], records, strict=False)):
            for event, outcome in zip(plan["events"], record["events"], strict=True):
                print(f"  {event[0]} {event[1]}: {outcome.get('message', 'ok')}")
            if "raised" in record:
                print(f"step {at}: step() raised {record['raised']}")
                continue
            for id in record["blocked"]:
                print(f"  reserve {id}: OutOfBlocks")
            passes, came = _count(record["calls"], "forward"), _listed(record["new"])
            left = f"{count_of(record['used'], 'block')} in use, {record['unfinished']} unfinished"
            lost = f", {' and '.join(plan['preempted'])} preempted" if plan["preempted"] else ""
            print(f"step {at}: {_planned(plan) or 'nothing'} planned{lost} -> {came}; passes {passes}; {left}")
