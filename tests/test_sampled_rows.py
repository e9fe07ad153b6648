"""The last check of unit 04 runs the unit's other parts: what it says of one that is open, and how exact it is."""

from dataclasses import replace
from random import Random

import pytest

from servelab import exercise, parts
from servelab.errors import CourseError
from servelab.exercise import PUBLIC_SEED, make_probes
from servelab.exercises.continuous_batching import token_exact
from servelab.plain import loads
from servelab.reference import continuous_batching, paged_kv

SUBJECT = exercise.find("continuous_batching.token_exact")
REFERENCE = {name: getattr(continuous_batching, name) for name in SUBJECT.answers}


@pytest.fixture(scope="module")
def probes():
    return make_probes(SUBJECT, Random(PUBLIC_SEED), tuple(REFERENCE.values()))


def verdict(probes, **changed):
    answers = tuple((REFERENCE | changed).values())
    recorded = [exercise.record(SUBJECT, probe.challenge, answers) for probe in probes]
    return exercise.judge(SUBJECT, probes, recorded), recorded


def test_only_the_rows_are_its_own():
    assert SUBJECT.own == ("sampled_rows",)


def test_an_open_part_is_named(probes):
    class PagedScheduler(continuous_batching.PagedScheduler):
        def schedule(self):
            raise NotImplementedError

    found, _ = verdict(probes, PagedScheduler=PagedScheduler)
    messages = {case.spec.name: case.message for case in found.cases}
    due = "PagedScheduler.schedule (exercise paged_scheduler) is not written yet, and this check runs it"
    assert messages[token_exact.PAGED] == due
    assert not messages[token_exact.WHOLE] and not messages[token_exact.CHUNKS]


def test_without_the_rows_nothing_else_is_asked(probes):
    def unwritten(*arguments):
        raise NotImplementedError

    found, recorded = verdict(probes, sampled_rows=unwritten, Scheduler=None, flatten_batch=None)
    assert found.fraction == 0
    assert {outcome["raised"]["type"] for outcome in recorded} == {"NotImplementedError"}


def test_a_right_token_over_a_wrong_context_is_seen(probes):
    probe = next(probe for probe in probes if probe.cases[0] == token_exact.CHUNKS)
    transcript = loads(exercise.plain.dumps(probe.expected))
    step = next(step for step in transcript["steps"] if step["scores"])
    step["scores"] = {id: score + 0.01 for id, score in step["scores"].items()}
    own, *_ = token_exact.judge(probe.challenge, transcript, probe.expected)
    assert not own.passed and "is right, but its logit is" in own.message


def test_nothing_passes_for_being_empty(probes):
    for probe in probes:
        if probe.cases == (token_exact.ROWS,):
            continue
        cases = token_exact.judge(probe.challenge, {"plain": {}, "steps": []}, probe.expected)
        assert len(cases) == 1 and not cases[0].passed


def messages(probes, **changed):
    """What the verdict says of each case, and the input that it shows."""
    found, _ = verdict(probes, **changed)
    shown = SUBJECT.show(probes[found.first_failure.failed_on].challenge)
    return {case.spec.name: case.message for case in found.cases}, shown


class Unfinished:
    def __getattr__(self, name):
        raise CourseError(f"{name} comes from unit 03, which is not finished", mend="Finish it.")


def test_with_unit_03_open_the_rows_are_judged_and_it_is_named(probes, monkeypatch):
    monkeypatch.setitem(vars(parts), "paged_kv", Unfinished())
    said, _ = messages(probes)
    assert not said[token_exact.ROWS]
    due = "before the first step: write_kv comes from unit 03, which is not finished\nFinish it."
    assert said[token_exact.WHOLE] == said[token_exact.CHUNKS] == due


@pytest.mark.parametrize(
    ("name", "change", "due"),
    [
        ("paged_attention", lambda right: lambda *given: right(*given).float(), "it returned torch.float32 of shape"),
        ("paged_attention", lambda right: lambda *given: None, "it returned NoneType, expected the same"),
        ("write_kv", lambda right: lambda *given: right(*given[:4], given[4].double()), "(in unit 03's write_kv"),
    ],
)
def test_a_wrong_part_of_unit_03_is_named(probes, monkeypatch, name, change, due):
    monkeypatch.setattr(paged_kv, name, change(getattr(paged_kv, name)))
    said, _ = messages(probes)
    assert not said[token_exact.ROWS] and "unit 03's" in said[token_exact.WHOLE]
    assert due in said[token_exact.WHOLE]


def flat_with(change):
    def flatten_batch(plan, tokens, num_computed, kv):
        return change(continuous_batching.flatten_batch(plan, tokens, num_computed, kv), plan, num_computed)

    return flatten_batch


def count(batch, plan, num_computed):
    num_computed.update({id: num_computed[id] + n for id, n in plan.scheduled.items()})
    return batch


def test_who_changes_the_books_is_named(probes):
    said, _ = messages(probes, flatten_batch=flat_with(count))
    assert said[token_exact.WHOLE] == "step 0: flatten_batch changed num_computed, which is the server's"
    assert not said[token_exact.ROWS]


def test_an_error_says_in_which_part(probes):
    flatten_batch = flat_with(lambda batch, plan, _: replace(batch, tokens=batch.tokens.double()))
    said, _ = messages(probes, flatten_batch=flatten_batch)
    assert said[token_exact.WHOLE].endswith("(in the model, over the batch of flatten_batch)")


def test_a_wrong_plan_is_the_reason_for_an_error(probes):
    class Nothing(continuous_batching.ChunkedScheduler):
        def schedule(self):
            plan = super().schedule()
            plan.scheduled = dict.fromkeys(plan.scheduled, 0)
            return plan

    said, _ = messages(probes, ChunkedScheduler=Nothing)
    assert "request 'a' misses 5 tokens" in said[token_exact.CHUNKS]


def test_rows_that_are_no_dictionary(probes):
    said, _ = messages(probes, sampled_rows=lambda plan, tokens, num_computed: [0])
    assert "expected the rows {" in said[token_exact.ROWS]
    assert said[token_exact.WHOLE] == "step 0: sampled_rows: expected a dictionary from id to row, got list"


def pasted(code, capsys, **changed):
    """What the shown input prints: the steps, then of each request the server's line and the plain loop's."""
    exec(code, vars(continuous_batching) | {"paged_kv": paged_kv} | changed)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    answers = [line.partition(":")[2] for line in lines[len(steps) :]]
    return steps, list(zip(answers[::2], answers[1::2], strict=True))


def test_the_shown_input_shows_the_failure(probes, capsys):
    class Sorted:
        def __init__(self, kv):
            self.kv, self.block_size = kv, kv.block_size

        def blocks(self, id):
            return sorted(self.kv.blocks(id))

    def flatten_batch(plan, tokens, num_computed, kv):
        return continuous_batching.flatten_batch(plan, tokens, num_computed, Sorted(kv))

    _, code = messages(probes, flatten_batch=flatten_batch)
    _, answers = pasted(code, capsys, flatten_batch=flatten_batch)
    assert any(own != plain for own, plain in answers)
    assert all(own == plain for own, plain in pasted(code, capsys)[1])


def test_the_shown_input_shows_steps_and_logits(probes, capsys):
    class Alone(continuous_batching.Scheduler):
        def __init__(self, config, kv):
            super().__init__(replace(config, max_num_seqs=1), kv)

    said, code = messages(probes, Scheduler=Alone)
    steps, answers = pasted(code, capsys, Scheduler=Alone)
    assert said[token_exact.COUNTS].startswith(f"{len(steps)} steps, expected ")
    assert all(own == plain and ", logits " in own for own, plain in answers)
