"""The loop that serves a workload, and what one sees of it; engines themselves are proved by unit 11's exam."""

import pytest

from servelab.llm import live
from servelab.llm.engine import NewToken, WatchedScheduler, clock_of_steps, decode_steps, serve
from servelab.llm.live import Live
from servelab.llm.tokenizer import ByteTokenizer
from servelab.serving import Request, SchedulerConfig, StepPlan
from servelab.simulation import Step
from servelab.stepping import RecordedKV


class FakeEngine:
    """Answers every request with tokens 10, 11, ..., one each step; ``plans`` are what its scheduler says."""

    def __init__(self, plans):
        self.plans, self.left, self.kv = iter(plans), {}, RecordedKV(8, 4)
        self.config = SchedulerConfig(4, 8)

    @property
    def num_unfinished(self):
        return len(self.left)

    def add(self, request, prompt):
        self.left[request.id] = request.max_tokens

    def schedule(self):
        return next(self.plans, StepPlan())

    def step(self):
        plan, new = self.watched.schedule(), []
        for id in plan.scheduled:
            self.left[id] -= 1
            new.append(NewToken(id, 10 + self.left[id], not self.left[id]))
        self.left = {id: n for id, n in self.left.items() if n}
        return new


def served_by(plans, requests, **more):
    engine = FakeEngine(plans)
    engine.watched = WatchedScheduler(engine, engine.kv)
    return serve(engine, engine.watched, requests, **more)


def test_steps_tokens_and_times_are_written_down():
    plans = [StepPlan({"a": 3}), StepPlan({"a": 1, "b": 2}), StepPlan({"b": 1})]
    requests = [(Request("a", 3, 2), [1, 2, 3]), (Request("b", 2, 2), [1, 2])]
    seen = []
    served, answers = served_by(plans, requests, on_step=seen.append, clock=clock_of_steps())
    assert answers == {"a": [11, 10], "b": [11, 10]}
    assert served.steps == [
        Step(0.0, 1.0, {"a": 3}, (), (), 0),
        Step(1.0, 2.0, {"b": 2}, ("a",), (), 0),
        Step(2.0, 3.0, {}, ("b",), (), 0),
    ]
    assert served.token_times == {"a": [1.0, 2.0], "b": [2.0, 3.0]}
    assert decode_steps(served) == 2
    assert [len(tokens) for tokens in seen] == [1, 2, 1]


def test_what_was_preempted_is_prefilled_again():
    plans = [StepPlan({"a": 3}), StepPlan({}, ["a"]), StepPlan({"a": 4}), StepPlan({"a": 1})]
    served, _ = served_by(plans, [(Request("a", 3, 3), [1, 2, 3])], clock=clock_of_steps())
    assert [(step.prefill, step.decode, step.preempted) for step in served.steps] == [
        ({"a": 3}, (), ()),
        ({}, (), ("a",)),
        ({"a": 4}, (), ()),
        ({}, ("a",), ()),
    ]


def test_an_engine_that_computes_nothing_is_stopped():
    with pytest.raises(RuntimeError, match="1 requests are not finished"):
        served_by([StepPlan({"a": 3})], [(Request("a", 3, 2), [1, 2, 3])])


@pytest.mark.parametrize("watched", [True, False])
def test_live_shows_a_bar_and_text(monkeypatch, capsys, watched):
    pictures = []

    class Handle:
        def update(self, data, raw):
            pictures.append(data["text/plain"])

    monkeypatch.setattr(live, "attended", lambda: watched)
    monkeypatch.setattr(live, "display", lambda *args, **more: Handle())
    monkeypatch.setattr(live, "EVERY", 0)
    shown = Live(4, ByteTokenizer(), {"a": "Why?"})
    shown([NewToken("a", ord("n")), NewToken("b", ord("x"))])
    shown([NewToken("a", ord("o"), True), NewToken("b", ord("y"), True)])
    shown.finish()
    last = pictures[-1] if watched else capsys.readouterr().out
    assert last.startswith("[" + "#" * 30 + "] 4 of 4 tokens, ")
    assert "'Why?' -> 'no'" in last
    assert len(pictures) == (3 if watched else 0)
    if watched:
        assert "] 2 of 4 tokens" in pictures[0] and "s left" in pictures[0]
