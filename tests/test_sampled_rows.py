"""The last check of unit 04 runs the unit's other parts: what it says of one that is open, and how exact it is."""

from random import Random

import pytest

from servelab import exercise
from servelab.exercise import PUBLIC_SEED, make_probes
from servelab.exercises.continuous_batching import token_exact
from servelab.plain import loads
from servelab.reference import continuous_batching

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
    class Open(continuous_batching.PagedScheduler):
        def schedule(self):
            raise NotImplementedError

    found, _ = verdict(probes, PagedScheduler=Open)
    messages = {case.spec.name: case.message for case in found.cases}
    assert messages[token_exact.PAGED].endswith("Open.schedule is not written yet, and this check runs it")
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
