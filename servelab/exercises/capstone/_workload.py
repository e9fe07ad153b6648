"""The two workloads as a case of the engine's check: whole runs under a real scheduler, judged by what they took.

The scheduler is unit 04's, as `servelab.parts` finds it. The model is one layer of nothing but attention, over pages of
its own kind, so that 576 steps take a fraction of a second.
"""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from servelab.exercise import Case
from servelab.exercises.capstone import _script as script
from servelab.exercises.capstone._model import SMALL
from servelab.plain import count_of, plain, text
from servelab.serving import Request, SchedulerConfig, StepPlan
from servelab.stepping import RecordedKV, attempt

BYTES = {"vocab_size": 256, "hidden_size": 4, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "max_model_len": 512}
BLOCKS, BLOCK_SIZE = 128, 16
BUDGET = 4096  # tokens of a step: more than all prompts have
MOST = 1000  # steps; one request after another takes more
COUNTS = {"decode": "decode steps", "steps": "calls of step()", "passes": "forward passes"}


class LittlePages:
    """Pages of one layer with one head, for a model whose keys are its values.

    Contexts are padded to the longest. The padding of a block table, -1, is the last block here; no token sees it.
    """

    def __init__(self) -> None:
        import torch

        self.rows = torch.zeros(BLOCKS * BLOCK_SIZE, BYTES["hidden_size"], dtype=torch.float64)
        self.places = torch.arange(BLOCK_SIZE)

    def bind(self, batch: Any) -> "LittlePages":
        self.batch = batch
        return self

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        import torch

        batch = self.batch
        self.rows[batch.slot_mapping] = k.flatten(1)
        slots = (batch.block_tables[:, :, None] * BLOCK_SIZE + self.places).flatten(1)
        contexts = self.rows[slots].repeat_interleave(torch.tensor(batch.query_lens), 0)
        scores = contexts @ q.transpose(1, 2) * q.shape[-1] ** -0.5
        ahead = torch.arange(slots.shape[1]) > batch.positions[:, None]
        weights = scores.squeeze(2).masked_fill(ahead, -torch.inf).softmax(1)
        return weights[:, None] @ contexts


class Watched:
    """A scheduler that counts its plans, and those among them that decode: whose request has been in one before."""

    def __init__(self, scheduler):
        self.scheduler, self.plans, self.decode = scheduler, 0, 0
        self._begun: set[str] = set()

    def __getattr__(self, name: str):
        return getattr(self.scheduler, name)

    def schedule(self) -> StepPlan:
        planned = self.scheduler.schedule()
        self.plans += bool(planned.scheduled)
        self.decode += not self._begun.isdisjoint(planned.scheduled)
        self._begun |= planned.scheduled.keys()
        return planned


def model(seed: int):
    """A model in float64 whose forward pass is one attention over what a token is and where it stands."""
    from servelab.llm import LLM, LLMConfig

    config = LLMConfig(**(SMALL | BYTES), eos_token_id=-1)
    weights = dict(_weights(seed))
    made: Any = LLM(config, weights)

    def forward(tokens, positions, kv):
        x = weights["embedding"][tokens] + weights["positions"][positions]
        return kv.attend(0, *[x.unsqueeze(1)] * 3).flatten(1)

    made.forward, made.logits = forward, lambda hidden: hidden @ weights["head"]
    return made


@cache
def _weights(seed: int) -> dict:
    import torch

    rng, dim, vocabulary = Random(seed), BYTES["hidden_size"], BYTES["vocab_size"]
    shapes = {"embedding": (vocabulary, dim), "positions": (BYTES["max_model_len"], dim), "head": (dim, vocabulary)}
    drawn = {name: [[rng.gauss(0, 1) for _ in range(n)] for _ in range(m)] for name, (m, n) in shapes.items()}
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in (drawn | {"norm": [1.0] * dim}).items()}


def requests(name: str) -> list[tuple[Request, list[int]]]:
    """The requests of a workload, a byte a token."""
    from servelab.llm.engine import workload

    return workload(name).requests(lambda said: list(said.encode()))


def drive(asked: dict, Engine: Callable) -> dict:
    """Serve a workload to its end, as far as the engine gets in so many steps."""
    from servelab.llm.engine import workload
    from servelab.parts import continuous_batching

    calls: list = []
    kv, served = RecordedKV(BLOCKS, BLOCK_SIZE), script.counting(model(asked["seed"]), calls)
    config = SchedulerConfig(workload(asked["workload"]).slots, BUDGET, eos_token_id=-1)
    scheduler = Watched(continuous_batching.Scheduler(config, kv))
    engine = Engine(served, scheduler, kv, LittlePages())
    record: dict[str, Any] = {"steps": 0, "answers": {}}
    record |= _serve(engine, requests(asked["workload"]), record)
    passes = sum(name == "forward" for name, _ in calls)
    record |= {"decode": scheduler.decode, "plans": scheduler.plans, "passes": passes}
    return record | {"unfinished": plain(engine.num_unfinished), "used": kv.num_blocks - kv.num_free}


def _serve(engine, todo: list[tuple[Request, list[int]]], record: dict) -> dict:
    """Add all requests and make steps; what went wrong, if something did."""
    for request, prompt in todo:
        outcome = attempt(engine.add, request, prompt)
        if "raised" in outcome:
            return {"raised": f"add({request.id!r}) raised {outcome['message']}"}
    while engine.num_unfinished and record["steps"] < MOST:
        outcome = attempt(engine.step)
        if "raised" in outcome:
            return {"raised": f"step {record['steps']}: step() raised {outcome['message']}"}
        record["steps"] += 1
        new = script.new_tokens(outcome["returned"])
        if isinstance(new, dict):
            return {"raised": f"step {record['steps'] - 1}: step() returned an object of type {new['instead']}"}
        for id, token, _ in new:
            record["answers"].setdefault(text(id), []).append(token)
    return {}


def judge(asked: dict, got: dict, want: dict) -> Case:
    """Steps, tokens and blocks of a workload are determined."""
    problem, hint = _problem(got, want)
    return Case(asked["case"], not problem, f"{asked['workload']}: {problem}" if problem else "", hint)


def _problem(got: dict, want: dict) -> tuple[str, int | None]:
    """What is wrong, with the hint that helps."""
    if "raised" in got:
        return got["raised"], None
    if got["unfinished"]:
        left = count_of(text(got["unfinished"]), "request")
        return f"unfinished after {got['steps']} calls of step(): {left}", None
    for count, name in COUNTS.items():
        if got[count] != want[count]:
            idle = got["steps"] - got["plans"] if count == "steps" else 0
            note = f"; in {idle} of them nothing was scheduled" if idle > 0 else ""
            return f"expected {want[count]} {name}, got {got[count]}{note}", 1 if count == "passes" else None
    for id, right in want["answers"].items():
        mine = got["answers"].get(id, [])
        if mine != right:
            at = next((n for n, (one, other) in enumerate(zip(mine, right, strict=False)) if one != other), None)
            if at is None:
                return f"the answer of {id} should have {count_of(len(right), 'token')}, not {len(mine)}", 2
            return f"{id}, token {at} of the answer: expected {right[at]}, got {script.token_text(mine[at])}", 2
    if got["answers"].keys() != want["answers"].keys():
        return f"a token for {text(next(iter(got['answers'].keys() - want['answers'].keys())))}, who is unknown", None
    return (f"still in use at the end: {count_of(got['used'], 'block')}", None) if got["used"] else ("", None)


def play(Engine, workload: str, seed: int) -> None:
    """Serve a workload as the check does, print what it took, and compare with the plain loop."""
    from servelab.llm import thread
    from servelab.llm.generate import greedy

    ran, small = drive({"workload": workload, "seed": seed}, Engine), model(seed)
    if "raised" in ran:
        print(ran["raised"])
    counts = ", ".join(f"{ran[count]} {name}" for count, name in COUNTS.items())
    left = count_of(ran["used"], "block")
    print(f"{workload}: {counts}; at the end {ran['unfinished']} unfinished, {left} in use")
    todo = requests(workload)
    want = {request.id: list(greedy(small, prompt, request.max_tokens)) for request, prompt in todo}
    thread.report(workload, ran["answers"], want)
