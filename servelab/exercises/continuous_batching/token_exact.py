"""Check of `sampled_rows`, with the learner's schedulers and flat batch around it: the tokens are the plain loop's.

The parts serve the tiny model in float64, in the ways of this unit. The plain loop is the reference's: `expected` has
its tokens and their logits. A submission could know these, too, so the steps are followed beside: which rows gave a
token, and how many tokens went through the model for it.
"""

import traceback
from collections.abc import Callable, Mapping
from functools import cache
from operator import index
from random import Random
from types import SimpleNamespace
from typing import Any

from servelab.errors import CourseError
from servelab.exercise import Case, CaseSpec, describe_error
from servelab.exercises.continuous_batching._policies import FEWEST, KEYS, made
from servelab.plain import close, plain, type_name
from servelab.plain import text as shortened
from servelab.serving import SchedulerConfig, StepPlan
from servelab.stepping import RecordedKV

ANSWERS = ("sampled_rows", "flatten_batch", "Scheduler", "PagedScheduler", "ChunkedScheduler")
EARLIER = ANSWERS[1:]
ROWS, WHOLE, ENDS = "the last row of each complete request", "room for whole answers", "an answer that ends with EOS"
PAGED, PREEMPTED, CHUNKS = "blocks as tokens come", "preempted and computed again", "prompts in chunks"
BOTH, COUNTS = "chunks and preemption", "computes what is planned"
CASES = (
    CaseSpec(ROWS, hint=1, weight=3),
    CaseSpec(WHOLE, hint=3, weight=2),
    CaseSpec(ENDS, hint=3),
    CaseSpec(PAGED, hint=3, weight=2),
    CaseSpec(PREEMPTED, hint=3, weight=2),
    CaseSpec(CHUNKS, hint=3, weight=2),
    CaseSpec(BOTH, hint=3, weight=2),
    CaseSpec(COUNTS, hint=3, weight=2),
)
BLOCK = 4
NO_EOS = -1
AMPLE = 40  # blocks
LENGTHS = (5, 11, 8, 3)  # of the prompts a, b, c, d
DIGITS = 6  # of a logit are written down, so that every machine writes the same
TOLERANCE = 1e-3  # of a logit: a token may come out right over wrong keys and values
MAX_STEPS = 80  # several times what any of the runs takes
UNIT_03 = ("write_kv", "paged_attention")
QUESTIONS = 50_000  # that the KV memory answers in a run, hundreds of times what the reference asks

# requests as [known tokens, computed, scheduled], in the order of the plan
PLANS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((3, 0, 3),),  # a whole prompt
    ((4, 3, 1), (2, 0, 2)),  # a decode, and a prompt
    ((6, 2, 3), (4, 3, 1)),  # a chunk that ends before the prompt does, and a decode
    ((5, 4, 1), (9, 2, 1), (5, 3, 2), (7, 0, 7)),
)

# case, scheduler, key, (max_num_seqs, budget), blocks, requests: (which prompt, max_tokens)
RUNS: tuple[tuple[str, str, str, tuple[int, int], int, str, tuple[int, ...]], ...] = (
    (WHOLE, "Scheduler", "", (1, 32), AMPLE, "a", (3,)),
    (WHOLE, "Scheduler", "", (2, 32), AMPLE, "abd", (4, 6, 3)),  # d waits for a
    (PAGED, "PagedScheduler", "", (4, 32), AMPLE, "bdca", (5, 2, 4, 6)),
    (PREEMPTED, "PagedScheduler", "", (3, 32), 6, "adbc", (8, 5, 5, 3)),
    (CHUNKS, "ChunkedScheduler", "", (3, 6), AMPLE, "abc", (5, 3, 3)),
    (CHUNKS, "ChunkedScheduler", FEWEST, (3, 5), AMPLE, "bca", (2, 4, 6)),
    (BOTH, "ChunkedScheduler", "", (3, 5), 6, "abdc", (8, 5, 3, 4)),
)
LOSES = (PREEMPTED, BOTH)


def challenges(rng: Random) -> list[dict]:
    """Single steps; then the ways of serving, with pieces of the texts that the tiny model was made for as prompts."""
    from servelab.llm.engine import workload

    prompts = {}
    for id, length, text in zip("abcd", LENGTHS, rng.sample(workload("w32").texts, len(LENGTHS)), strict=True):
        start = rng.randrange(len(text) - length)
        prompts[id] = text[start : start + length]
    runs = [_run(*row, prompts) for row in RUNS]
    steps = [_step(rng, list(plan)) for plan in PLANS] + [_step(rng, _requests(rng, n)) for n in (5, 12)]
    return [*steps, *runs[:2], runs[1] | {"case": ENDS, "eos": _eos(prompts)}, *runs[2:]]


def _step(rng: Random, requests: list) -> dict:
    """One step; its requests arrived in another order, and one more is not in the plan."""
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", len(requests) + 1)
    plan = [[name, n] for name, (_, _, n) in zip(names, requests, strict=False)]
    known = [[name, *counts] for name, (*counts, _) in zip(names, [*requests, (6, 5, 0)], strict=True)]
    return {"case": ROWS, "plan": plan, "known": rng.sample(known, len(known))}


def _requests(rng: Random, number: int) -> list[tuple[int, int, int]]:
    """Decodes, whole prompts, chunks of any length, last chunks."""
    made = []
    for _ in range(number):
        known = rng.randint(2, 40)
        computed = rng.choice((0, known - 1, rng.randrange(known)))
        made.append((known, computed, rng.choice((1, known - computed, rng.randint(1, known - computed)))))
    return made


def _run(case: str, scheduler: str, key: str, limits: tuple, blocks: int, ids: str, most: tuple, prompts: dict) -> dict:
    requests = [[id, prompts[id], max_tokens] for id, max_tokens in zip(ids, most, strict=True)]
    config = dict(zip(("max_num_seqs", "max_num_batched_tokens"), limits, strict=True))
    memory = {"num_blocks": blocks, "block_size": BLOCK}
    return {
        "case": case,
        "scheduler": scheduler,
        "key": key,
        "config": config,
        **memory,
        "requests": requests,
        "eos": NO_EOS,
    }


def _eos(prompts: dict[str, str]) -> int:
    """A token with which b's answer ends before its time: the second of it."""
    return _plain_loop(prompts["b"], 2, NO_EOS)["tokens"][1]


# the run


def drive(asked: dict, sampled_rows, flatten_batch, *schedulers) -> dict:
    """Ask for the rows of one step, or serve the requests."""
    if asked["case"] == ROWS:
        arguments, before = inputs(asked), inputs(asked)
        rows = _plain_rows(sampled_rows(*arguments))
        return {"rows": rows, "kept": all(map(_same, arguments, before))}
    sampled_rows(StepPlan({"a": 1}), {"a": [1]}, {"a": 0})  # unwritten, it says so before any other part does
    return _serve(asked, sampled_rows, flatten_batch, dict(zip(EARLIER[1:], schedulers, strict=True)))


def inputs(asked: dict) -> tuple[StepPlan, dict[str, list[int]], dict[str, int]]:
    """The arguments of ``sampled_rows``."""
    tokens = {name: list(range(known)) for name, known, _ in asked["known"]}
    return StepPlan(dict(asked["plan"])), tokens, {name: computed for name, _, computed in asked["known"]}


def _same(now: Any, then: Any) -> bool:
    return now == then and list(getattr(now, "scheduled", now)) == list(getattr(then, "scheduled", then))


def _serve(asked: dict, sampled_rows, flatten_batch, schedulers: dict) -> dict:
    """Serve the requests; attention is unit 03's, as `servelab.parts` finds it."""
    transcript: dict = {"plain": {id: _plain_loop(*request, asked["eos"]) for id, *request in asked["requests"]}}
    steps: list = []
    try:
        server = _server(asked, schedulers[asked["scheduler"]], flatten_batch, sampled_rows)
        steps = server.steps
        for id, prompt, most in asked["requests"]:
            server.add(id, list(prompt.encode()), most)
        server.run(MAX_STEPS)
    except NotImplementedError:
        raise
    except (CourseError, Misuse) as error:  # of a part of unit 03 that nobody has written; of what was handed over
        transcript["raised"] = shortened(error)
    except Exception as error:  # an outcome to judge, with the steps before it
        transcript["raised"] = f"your code raised {describe_error(error)} (in {_part(error)})"
    return transcript | {"steps": [_recorded(step) for step in steps]}


class Misuse(Exception):
    """A part took or gave something that the next one cannot work with."""


def _part(error: Exception) -> str:
    """The part that an error comes from: what the server called, or one of unit 03's functions under the model."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [code.co_qualname.rpartition("<locals>.")[2] for code in codes if code.co_filename != __file__]
    for name in UNIT_03:
        if name in names:
            return f"unit 03's {name}, over the batch of flatten_batch"
    calls = [number for number, name in enumerate(names) if name.startswith("Server.")]
    called = names[calls[-1] + 1 :][:1] if calls else names[:1]
    if not called:
        return "the server, over the rows of sampled_rows"
    return "the model, over the batch of flatten_batch" if called[0].startswith(("LLM.", "Pages.")) else called[0]


def _watched_flat(flatten_batch: Callable) -> Callable:
    """The function; the plan is looked at before it runs, and all that it got afterwards."""

    def flat(plan, tokens, num_computed, kv):
        for id, n in plan.scheduled.items():
            end, room = num_computed.get(id, 0) + n, kv.block_size * len(kv.blocks(id))
            if end > room:
                raise Misuse(f"the plan takes request {id!r} to {end} tokens in the cache, and its blocks hold {room}")
        before = _books(plan, tokens, num_computed)
        batch = flatten_batch(plan, tokens, num_computed, kv)
        for name, now in _books(plan, tokens, num_computed).items():
            if now != before[name]:
                raise Misuse(f"flatten_batch changed {name}, which is the server's")
        return batch

    return flat


def _books(plan: Any, tokens: Mapping, num_computed: Mapping) -> dict:
    known = {id: list(each) for id, each in tokens.items()}
    return {"plan": list(plan.scheduled.items()), "tokens": known, "num_computed": dict(num_computed)}


def _watched_rows(sampled_rows: Callable) -> Callable:
    """The function; what it returns must be rows by id."""

    def rows(*arguments):
        found = sampled_rows(*arguments)
        if not isinstance(found, Mapping):
            raise Misuse(f"sampled_rows: expected a dictionary from id to row, got {type_name(found)}")
        return found

    return rows


def _watched_attention(paged_attention: Callable) -> Callable:
    """Unit 03's function; its output must be as wide and as exact as the queries."""

    def attention(q, *arguments):
        out = paged_attention(q, *arguments)
        got, want = ((getattr(t, "dtype", None), tuple(getattr(t, "shape", ()))) for t in (out, q))
        if got != want:
            shown = " of shape ".join(map(str, got)) if got[0] else type_name(out)
            due = " of shape ".join(map(str, want))
            raise Misuse(f"unit 03's paged_attention: for queries in {due} it returned {shown}, expected the same")
        return out

    return attention


def _server(asked: dict, scheduler_class, flatten_batch, sampled_rows) -> Any:
    """The parts around the model; the KV memory ends a loop that asks it for ever."""
    from servelab.llm.kv import Pages
    from servelab.llm.thread import Server
    from servelab.parts import paged_kv

    model, kv = _model(asked["eos"]), RecordedKV(asked["num_blocks"], asked["block_size"])
    kv.allow(QUESTIONS)
    key = [KEYS[asked["key"]][0]] if asked["key"] else []
    scheduler = scheduler_class(SchedulerConfig(**asked["config"], eos_token_id=asked["eos"]), kv, *key)
    unit = SimpleNamespace(write_kv=paged_kv.write_kv, paged_attention=_watched_attention(paged_kv.paged_attention))
    pages = Pages.of(model, kv.num_blocks, kv.block_size, unit)
    return Server(model, scheduler, _watched_flat(flatten_batch), _watched_rows(sampled_rows), kv, pages)


@cache
def _model(eos: int) -> Any:
    from dataclasses import replace

    from servelab.llm.thread import tiny_model

    model = tiny_model()
    model.config = replace(model.config, eos_token_id=eos)
    return model


@cache
def _plain_loop(text: str, max_tokens: int, eos: int) -> dict:
    """The answer of the plain loop, and the logit of each of its tokens."""
    from servelab.llm.thread import answer_logits, greedy

    model, prompt = _model(eos), list(text.encode())
    tokens = list(greedy(model, prompt, max_tokens))
    return {"tokens": tokens, "scores": [round(score, DIGITS) for score in answer_logits(model, prompt, tokens)]}


def _recorded(step) -> dict:
    """A step as plain data; what is scheduled as pairs, in the order of the plan."""
    return {
        "scheduled": plain(list(step.scheduled.items())),
        "preempted": plain(step.preempted),
        "computed": step.computed,
        "rows": _plain_rows(step.rows),
        "outputs": plain(step.outputs),
        "scores": {id: round(score, DIGITS) for id, score in plain(step.scores).items()},
    }


def _plain_rows(rows: Any) -> Any:
    """Whole numbers of any library as ``int``; of anything else its type."""
    return plain({id: _number(row) for id, row in rows.items()} if isinstance(rows, Mapping) else rows)


def _number(row: Any) -> Any:
    try:
        return index(row)
    except TypeError:
        return type_name(row)


# the verdict


class Wrong(Exception):
    """What is wrong in a step, and the case that it belongs to; ``hint`` is the one to open."""

    def __init__(self, case: str, message: str, hint: int | None = None):
        super().__init__(message)
        self.found = Case(case, False, message, hint)


def judge(asked: dict, transcript: dict, expected: dict) -> list[Case]:
    """The rows of a step; or of a run its tokens, and its steps up to the first that is wrong."""
    steps, case = transcript["steps"] if asked["case"] != ROWS else [], asked["case"]
    try:
        if case == ROWS:
            _one_step(asked, transcript)
            return [Case(ROWS, True)]
        problem = _tokens(transcript, expected["plain"])
        _follow(asked, steps, "raised" in transcript)
    except Wrong as error:
        return [error.found] if case == ROWS else _cases(case, problem, error.found, _broken_off(transcript))
    own = Case(case, not problem, problem)
    if _broken_off(transcript) or not any(step["rows"] for step in steps):
        return [own]
    problem = _steps(asked, steps, expected["steps"]) if own.passed else ""
    return [own, Case(COUNTS, not problem, problem)]


def _cases(case: str, problem: str, found: Case, broken_off: bool) -> list[Case]:
    """A run with a wrong step. That is why it broke off; wrong rows fail the run, wrong counts a case of their own."""
    if found.name == ROWS:
        return [Case(case, False, found.message, found.hint)]
    return [Case(case, not problem, found.message if broken_off else problem), found]


def _broken_off(transcript: dict) -> bool:
    """Whether the run ended before all requests did."""
    steps = transcript["steps"]
    return "raised" in transcript or not steps or not (steps[-1]["scheduled"] or steps[-1]["preempted"])


def _one_step(asked: dict, transcript: dict) -> None:
    known, computed = ({name: counts[place] for name, *counts in asked["known"]} for place in (0, 1))
    _, due = _planned("", dict(asked["plan"]), known, computed)
    _compare("", transcript["rows"], due)
    if transcript["kept"] is not True:
        raise Wrong(ROWS, "the arguments were changed; they are the caller's")


def _compare(where: str, got: Any, due: dict[str, int]) -> None:
    if got != due:
        others = isinstance(got, dict) and got.keys() != due.keys()
        raise Wrong(ROWS, f"{where}expected the rows {due}, got {str(got)[:200]}", 2 if others else 1)


def _tokens(transcript: dict, plain_loop: dict) -> str:
    """How the answers differ from the plain loop's; empty if they do not."""
    steps = transcript["steps"]
    if "raised" in transcript:
        where = f"step {len(steps) - 1}" if steps else "before the first step"
        return f"{where}: {transcript['raised']}"
    if _broken_off(transcript):
        return f"step {len(steps) - 1}: schedule() planned nothing, but not all requests are finished"
    said: dict[str, list] = {id: [] for id in plain_loop}
    for step in steps:
        for id, token in step["outputs"].items():
            said.setdefault(id, []).append((token, step["scores"][id]))
    for id, pairs in said.items():
        tokens, want = [token for token, _ in pairs], plain_loop.get(id, {"tokens": [], "scores": []})
        if tokens != want["tokens"]:
            return f"request {id!r}: expected the plain loop's {_shown(want['tokens'])}, got {_shown(tokens)}"
        for n, ((_, score), right) in enumerate(zip(pairs, want["scores"], strict=True)):
            if not close(score, right, atol=TOLERANCE):
                ways = f"its logit is {str(score)[:9]}, in the plain loop {right:.6f}"
                return f"request {id!r}, token {n} of the answer is right, but {ways}: its context was another"
    return ""


def _shown(tokens: list) -> str:
    """Tokens of the tiny model are bytes."""
    return repr(bytes(tokens)) if all(type(t) is int and 0 <= t < 256 for t in tokens) else repr(tokens)[:80]


def _follow(asked: dict, steps: list[dict], raised: bool) -> None:
    """Compare each step with what its plan asks for. Raises `Wrong` at the first that is something else."""
    known = {id: len(text) for id, text, _ in asked["requests"]}
    computed = dict.fromkeys(known, 0)
    for number, step in enumerate(steps):
        scheduled = dict(step["scheduled"])
        where = f"step {number}, scheduled {scheduled}"
        computed |= dict.fromkeys(step["preempted"], 0)
        end, due = _planned(where, scheduled, known, computed)
        broken_off = raised and step is steps[-1]
        if step["computed"] != end and not (broken_off and not step["computed"]):
            raise Wrong(COUNTS, f"{where}: {step['computed']} tokens went through the model, {end} are planned")
        if step["rows"] or not broken_off:
            _compare(f"{where}: ", step["rows"], due)


def _planned(where: str, scheduled: dict, known: dict[str, int], computed: dict[str, int]) -> tuple[int, dict]:
    """How many tokens a step computes and which rows give a token, by its plan; the books go on to after the step."""
    due, end = {}, 0
    for id, n in scheduled.items():
        missing = known.get(id, 0) - computed.get(id, 0)
        if type(n) is not int or not 1 <= n <= missing:
            raise Wrong(COUNTS, f"{where}: request {id!r} misses {missing} tokens")
        computed[id], end = computed[id] + n, end + n
        if computed[id] == known[id]:
            due[id], known[id] = end - 1, known[id] + 1
    return end, due


def _steps(asked: dict, steps: list[dict], expected: list[dict]) -> str:
    """What is wrong with the run as a whole: with blocks enough, the number of its steps is determined."""
    if asked["case"] not in LOSES:
        same = len(steps) == len(expected)
        return "" if same else f"{len(steps)} steps, expected {len(expected)}: a step left out somebody who could run"
    lost = any(step["preempted"] for step in steps)
    return "" if lost else f"{asked['num_blocks']} blocks do not hold all requests, but nobody was preempted"


def show(asked: dict) -> str:
    """The step or the run as Python; a run beside the plain loop."""
    if asked["case"] == ROWS:
        plan, tokens, num_computed = inputs(asked)
        lengths = {id: len(known) for id, known in tokens.items()}
        return (
            f"plan = StepPlan({plan.scheduled})\n"
            f"tokens = {{name: list(range(n)) for name, n in {lengths}.items()}}\n"
            f"sampled_rows(plan, tokens, num_computed={num_computed})"
        )
    requests = {id: tuple(request) for id, *request in asked["requests"]}
    scheduler, eos = made(asked["scheduler"], asked["key"]), asked["eos"]
    limits = "".join(f"{name}={value}, " for name, value in asked["config"].items())
    return (
        "from dataclasses import replace\n"
        "from servelab.llm import thread\n"
        "from servelab.llm.kv import Pages\n"
        "from servelab.stepping import RecordedKV\n\n"
        f"requests = {requests}  # prompt, max_tokens\n"
        f"config = SchedulerConfig({limits}eos_token_id={eos})\n"
        f"kv = RecordedKV(num_blocks={asked['num_blocks']}, block_size={asked['block_size']})\n"
        f"kv.allow({QUESTIONS:_})  # questions, against an endless loop\n"
        "model = thread.tiny_model()\n"
        f"model.config = replace(model.config, eos_token_id={eos})\n"
        "pages = Pages.of(model, kv.num_blocks, kv.block_size, paged_kv)\n"
        f"server = thread.Server(model, {scheduler}, flatten_batch, sampled_rows, kv, pages)\n"
        "for name, (prompt, most) in requests.items():\n"
        "    server.add(name, prompt.encode(), most)\n"
        f"server.run({MAX_STEPS})\n"
        "thread.compare(server, requests)"
    )
