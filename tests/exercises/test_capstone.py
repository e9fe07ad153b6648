"""Unit 11: what a learner reads when an engine goes wrong."""

from dataclasses import replace
from random import Random

import pytest

torch = pytest.importorskip("torch")

from servelab import exercise  # noqa: E402
from servelab.exercises.capstone import _workload  # noqa: E402
from servelab.exercises.capstone import rank_model as ranks  # noqa: E402
from servelab.exercises.capstone._script import add, step  # noqa: E402
from servelab.exercises.capstone.engine import WORKLOADS, play  # noqa: E402
from servelab.kv import OutOfBlocks  # noqa: E402
from servelab.llm import LLM  # noqa: E402
from servelab.llm.kv import ContiguousKV  # noqa: E402
from servelab.mutants import read_cells  # noqa: E402
from servelab.paths import units  # noqa: E402
from servelab.reference import capstone as reference  # noqa: E402
from servelab.reference import paged_kv, tensor_parallel  # noqa: E402
from servelab.serving import PagedKV, StepPlan  # noqa: E402

(UNIT,) = (unit for unit in units() if unit.name == "capstone")


def judged(name, *answers):
    """The exercise, its public probes and the verdict."""
    subject = exercise.find(f"capstone.{name}")
    right = tuple(getattr(reference, answer) for answer in subject.answers)
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), right)
    recorded = [exercise.record(subject, probe.challenge, answers) for probe in probes]
    return subject, probes, exercise.judge(subject, probes, recorded)


def first_failure(name, *answers):
    """The first failed case, with the listing of its smallest failing input."""
    subject, probes, verdict = judged(name, *answers)
    case = verdict.first_failure
    return case.message, subject.show(probes[case.failed_on].challenge)


def failed(verdict):
    return [case.spec.name for case in verdict.cases if not case.passed]


def engine(**methods):
    return type("Engine", (reference.Engine,), methods)


def test_what_is_no_int_is_named():
    def _compute(self, plan):
        return {id: torch.tensor(token) for id, token in reference.Engine._compute(self, plan).items()}

    message, _ = first_failure("engine", engine(_compute=_compute))
    assert "got a: a tensor of shape [], not an int" in message and "base64" not in message


def test_a_step_that_raises_after_a_preemption_says_who_was_preempted():
    def step(self):
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: StepPlan(schedule().scheduled)
        try:
            return reference.Engine.step(self)
        finally:
            self.scheduler.schedule = schedule

    message, _ = first_failure("engine", engine(step=step))
    assert "; preempted in step 2: b" in message


def test_the_workloads_take_the_steps_that_the_unit_says(capsys):
    subject, probes, verdict = judged("engine", reference.Engine)
    asked = {probe.challenge["workload"]: probe for probe in probes if probe.cases == (WORKLOADS,)}
    assert verdict.passed and {name: probe.expected["decode"] for name, probe in asked.items()} == {
        "w16": 255,
        "w32": 319,
    }
    for probe in asked.values():
        exec(subject.show(probe.challenge), {"Engine": reference.Engine})
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[2]
        == "w32: 319 decode steps, 320 calls of step(), 320 forward passes; at the end 0 unfinished, 0 blocks in use"
    )
    assert [line.strip() for line in lines[1::2]] == [
        "w16: 16 of 16 answers as in the plain loop",
        "w32: 32 of 32 answers as in the plain loop",
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("step", lambda self: None, "w16: step 0: step() returned an object of type NoneType"),
        ("step", lambda self: [], "w16: unfinished after 1000 calls of step(): 16 requests"),
        ("step", lambda self: {}["a"], "w16: step 0: step() raised KeyError: 'a'"),
        ("add", lambda self, request, prompt: {}["a"], "w16: add('r00') raised KeyError: 'a'"),
        ("num_unfinished", 0, "w16: expected 255 decode steps, got 0"),
    ],
)
def test_a_workload_that_breaks_off(name, value, message):
    asked = {"case": WORKLOADS, "workload": "w16", "seed": 0}
    want, got = (_workload.drive(asked, each) for each in (reference.Engine, engine(**{name: value})))
    assert _workload.judge(asked, got, want).message == message


def test_an_engine_serves_with_the_layers_of_unit_06():
    from servelab.exercises.capstone import _model
    from servelab.llm import thread
    from servelab.llm.engine import WatchedScheduler, serve
    from servelab.llm.kv import Pages
    from servelab.ranks import SimCluster
    from servelab.ranks.communicator import Communicator
    from servelab.reference import continuous_batching
    from servelab.serving import Request, SchedulerConfig

    whole, prompts = _model.model(1, eos_token_id=-1), {"a": [3, 1, 4, 1, 5, 9], "b": [2, 7]}

    def on_a_rank():
        comm, kv = Communicator(), PagedKV(paged_kv.BlockAllocator(8, 4))
        layered = thread.LayeredLLM(whole.config, whole.weights, comm, tensor_parallel.DecoderLayer)
        pages = Pages.of(reference.rank_model(whole.config, whole.weights, comm), 8, 4, paged_kv)
        made = continuous_batching.ChunkedScheduler(SchedulerConfig(2, 3, eos_token_id=-1), kv)
        scheduler = WatchedScheduler(made, kv)
        todo = [(Request(id, len(tokens), 6), tokens) for id, tokens in prompts.items()]
        return serve(reference.Engine(layered, scheduler, kv, pages), scheduler, todo)[1]

    assert SimCluster(2).run(on_a_rank).values == [thread.plain_loop(whole, prompts, 6)] * 2


def test_telling_the_scheduler_of_an_empty_plan_costs_one_case():
    def step(self):
        finish, schedule = self.scheduler.finish_step, self.scheduler.schedule

        def planned():
            plan = schedule()
            if not plan.scheduled:
                finish(plan, {})
            return plan

        self.scheduler.schedule = planned
        try:
            return reference.Engine.step(self)
        finally:
            self.scheduler.schedule = schedule

    _, _, verdict = judged("engine", engine(step=step))
    assert failed(verdict) == ["a step with nothing to do"]
    message = "step 0, with nothing planned: expected no call of finish_step; finish_step was called with {}"
    assert verdict.first_failure.message == message


def test_another_row_of_a_prompt_leads_to_the_hint_about_rows():
    def _compute(self, plan):
        forward = self.model.forward
        self.model.forward = lambda tokens, positions, kv: forward(tokens, positions, kv).flip(0)
        try:
            return reference.Engine._compute(self, plan)
        finally:
            self.model.forward = forward

    _, _, verdict = judged("engine", engine(_compute=_compute))
    first = verdict.first_failure
    assert (first.spec.name, first.hint) == ("one request from prompt to end", 2)


def test_why_a_request_is_refused_is_said(capsys):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, [*prompt, *[1] * request.prompt_tokens][: request.prompt_tokens])

    message, listing = first_failure("engine", Engine)
    assert "add 'c' (a prompt of 4 tokens, the request says 3): expected ValueError, nothing was raised" in message
    assert "# the model's max_model_len is 48\n" in listing
    exec(listing, {"Engine": Engine})
    assert "  add c: ok\n" in capsys.readouterr().out


def test_who_finds_no_room_is_shown(capsys):
    class CachedKV(reference.CachedKV):
        def reserve(self, id, num_tokens):
            if not self.blocks(id):
                found, length = self.pool.match(self.tokens[id])
                self.adopt(id, found)
                self._full[id] = length // self.block_size
            PagedKV.reserve(self, id, num_tokens)

    message, listing = first_failure("cached_engine", CachedKV, reference.CachedEngine)
    assert "(reserve for c raised OutOfBlocks): 2 blocks should be in use afterwards, not 4" in message
    exec(listing, {"CachedKV": CachedKV, "CachedEngine": reference.CachedEngine})
    assert "  reserve c: OutOfBlocks\nstep 2: 13 of c planned" in capsys.readouterr().out


def test_the_whole_model_on_every_rank_earns_nothing():
    def divided(config, weights, comm):
        reference.rank_model(config, weights, comm)  # for what it refuses
        sums = {name: weight / comm.size for name, weight in weights.items() if name.endswith((".o", ".down"))}
        return LLM(config, weights | sums, comm)

    for whole in (lambda config, weights, comm: LLM(config, weights), divided):
        _, _, verdict = judged("rank_model", whole)
        assert verdict.fraction == 0


def test_an_abort_that_the_scheduler_did_not_hear_of_is_named():
    def abort(self, id):
        if self.kv.blocks(id):
            self.scheduler.abort(id)
        self._forget(id)

    message, _ = first_failure("engine", engine(abort=abort))
    assert "step 3, before it: add 'b': expected no error, it raised ValueError" in message


def test_a_list_that_is_written_over_is_named_and_the_listing_shows_it(capsys):
    class Engine(reference.Engine):
        def add(self, request, prompt):
            super().add(request, prompt)
            self.tokens[request.id] = prompt if len(prompt) == 4 else list(prompt)

        def step(self):
            before = {id: list(tokens) for id, tokens in self.tokens.items()}
            given, self.tokens = self.tokens, before
            new = super().step()
            named = {token.id for token in new}
            self.tokens |= {id: given[id] for id in self.tokens if id not in named}
            return new

    message, listing = first_failure("engine", Engine)
    assert message.endswith(
        "; the caller has written over the list of the prompt after add, which is the caller's right"
    )
    assert "# the caller writes over each prompt's list after add\n" in listing
    printed = []
    for made in (Engine, reference.Engine):
        exec(listing, {"Engine": made})
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]


def test_an_own_list_and_something_else_than_a_list_cost_one_case_each():
    def step(self):
        schedule, plans = self.scheduler.schedule, []
        self.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
        new = reference.Engine.step(self)
        self.scheduler.schedule = schedule
        return new if plans[-1].scheduled else None

    def add(self, request, prompt):
        reference.Engine.add(self, request, prompt)
        self.tokens[request.id] = prompt

    for methods, case in (({"step": step}, "a step with nothing to do"), ({"add": add}, "requests share nothing")):
        _, _, verdict = judged("engine", engine(**methods))
        assert failed(verdict) == [case]


def test_the_plain_loop_as_an_engine_earns_little():
    def _compute(self, plan):
        outputs = {}
        for id, n in plan.scheduled.items():
            self.computed[id] += n
            if self.computed[id] == len(self.tokens[id]):
                tokens = torch.tensor(self.tokens[id])
                hidden = self.model.forward(tokens, torch.arange(len(tokens)), ContiguousKV())
                outputs[id] = int(self.model.logits(hidden[-1]).argmax())
        return outputs

    _, _, verdict = judged("engine", engine(_compute=_compute))
    assert verdict.fraction < 0.2


def test_a_memory_that_does_not_know_the_tokens():
    class CachedEngine(reference.CachedEngine):
        def __init__(self, model, scheduler, kv, pages):
            super().__init__(model, scheduler, kv, pages)
            kv.tokens = {}

    message, _ = first_failure("cached_engine", reference.CachedKV, CachedEngine)
    assert "KeyError: 'a'" in message and "the tokens of 'a' are not in the memory's attribute tokens" in message


def test_what_a_rank_keeps_has_a_unit_and_the_listing_shows_it(capsys):
    def views(config, weights, comm):
        mine = reference.rank_model(config, weights, comm)
        mine.weights |= {name: weight.chunk(comm.size)[comm.rank] for name, weight in weights.items() if ".q" in name}
        return mine

    message, listing = first_failure("rank_model", views)
    assert message.startswith("rank 0, numbers kept in memory: expected ")
    exec(listing, {"rank_model": views})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("rank 1: query and KV heads: [2, 1]; numbers kept in memory: ")
    assert lines[0].endswith("calls: {'forward': 12}; scores: those of the whole model")


def test_kv_heads_that_are_cut_are_named():
    def cut(config, weights, comm):
        mine = reference.rank_model(config, weights, comm)
        names = [name for name in weights if name.endswith((".k", ".v"))]
        return type(mine)(
            mine.config, mine.weights | {name: tensor_parallel.shard(weights[name], 0, comm) for name in names}, comm
        )

    message, _ = first_failure("rank_model", cut)
    assert message == "layers.0.k on rank 0 of 4: expected shape [4, 8], got [2, 8]"
    _, _, verdict = judged("rank_model", cut)
    assert failed(verdict) == ["KV heads are copied"] and verdict.first_failure.hint == 2


def test_a_weight_that_is_cut_the_other_way_is_named(capsys):
    def cut(config, weights, comm):
        mine = reference.rank_model(config, weights, comm)
        queries = {name: tensor_parallel.shard(weights[name], 1, comm) for name in weights if name.endswith(".q")}
        return LLM(mine.config, mine.weights | queries, comm)

    message, listing = first_failure("rank_model", cut)
    assert message == "layers.0.q on rank 0 of 2: expected shape [8, 16], got [16, 8]"
    exec(listing, {"rank_model": cut})
    assert "'layers.0.q': [16, 8]" in capsys.readouterr().out


def test_what_a_rank_keeps_or_takes_beside_its_part_is_listed(capsys):
    def keeps(config, weights, comm):
        mine = reference.rank_model(replace(config, hidden_size=8), dict(weights), comm)
        mine.beside = weights.pop("layers.0.q")
        return mine

    ranks.play(keeps, 2, [3, 1, 4, 1, 5])
    line = capsys.readouterr().out.splitlines()[1]
    assert "weights that were changed or are gone: ['layers.0.q']" in line
    assert "whole weights kept beside: ['layers.0.q']; config.hidden_size: 8; " in line
    ranks.play(lambda config, weights, comm: None, 2, [3, 1, 4, 1, 5])
    assert "rank 1: rank_model returned an object of type NoneType, not a model" in capsys.readouterr().out


def test_the_listing_runs_whatever_the_model(capsys):
    ranks.play(reference.rank_model, 2, [3, 1, 4, 1, 5], intermediate_size=23)
    assert "rank 0: rank_model raised" in capsys.readouterr().out


def test_a_preemption_is_shown(capsys):
    play(reference.Engine, [step({"a": 2}, add("a", [3, 4], 3)), step({}, preempted=["a"])], block_size=4, eos=-1)
    assert "step 1: nothing planned, a preempted -> no token; passes []" in capsys.readouterr().out


def test_a_table_begins_with_blocks_that_it_is_given():
    kv = PagedKV(paged_kv.BlockAllocator(4, 2))
    blocks = kv.pool.allocate(2)
    kv.adopt("a", blocks)
    kv.reserve("a", 5)
    assert kv.blocks("a")[:2] == blocks and len(kv.blocks("a")) == 3 and len(blocks) == 2
    with pytest.raises(ValueError, match="holds blocks already"):
        kv.adopt("a", [])
    kv.adopt("b", [])
    with pytest.raises(OutOfBlocks):
        kv.reserve("b", 4)
    kv.release("a")
    assert kv.num_free == 4 and kv.blocks("b") == []


def test_untouched_stubs_say_that_they_are_not_written():
    cells = {cell.grade_id: cell.source for cell in read_cells(UNIT.solution.read_text(encoding="utf-8"))}
    lines, hidden = [], False
    for line in cells["cached-engine"].splitlines():
        if "### " in line:
            hidden = "BEGIN" in line
            lines += [line.replace("### BEGIN SOLUTION", "raise NotImplementedError")] if hidden else []
        elif not hidden:
            lines.append(line)
    names = dict(vars(reference))
    exec("\n".join(lines), names)
    assert names["CachedEngine"] is not reference.CachedEngine
    subject = exercise.find("capstone.cached_engine")
    asked = subject.challenges(Random(0))[0]
    for kv in (names["CachedKV"], reference.CachedKV):
        with pytest.raises(NotImplementedError):
            subject.drive(asked, kv, names["CachedEngine"])
