"""What the text of the fragmentation exercise claims about its reference, on the course's own trace."""

from random import Random
from types import FunctionType

import pytest

from servelab import exercise
from servelab.reference import paged_kv as reference
from servelab.traces import Request, read_trace

POLICIES = ("max", "pow2", "oracle", "paged")
KINDS = ("used", "reserved", "internal", "external", "free")
POOL = 15_728


@pytest.fixture(scope="module")
def found():
    chat = [r for r in read_trace("conv") if r.prompt_tokens + r.output_tokens <= 2048][:400]
    return {policy: reference.fragmentation(chat, policy, POOL) for policy in POLICIES}


def test_shares_add_up_to_one(found):
    for shares in found.values():
        assert sum(getattr(shares, kind) for kind in KINDS) == pytest.approx(1)


def test_each_policy_uses_more_than_the_one_before(found):
    used = [found[policy].used for policy in POLICIES]
    assert used == sorted(used) and len(set(used)) == len(used)


def test_the_kinds_of_waste_are_as_the_text_says(found):
    assert found["max"].internal > max(found["max"].reserved, found["max"].external)
    assert found["oracle"].internal == 0 and found["oracle"].external > 0 and found["oracle"].reserved > 0
    assert found["paged"].reserved + found["paged"].internal < 0.01
    assert found["paged"].preemptions == 59
    assert all(found[policy].preemptions == 0 for policy in POLICIES[:3])


def test_what_seven_regions_leave_over_is_external_while_requests_wait(found):
    leftover = (POOL - 7 * 2048) / POOL
    assert leftover == pytest.approx(0.0885, abs=5e-5)
    assert leftover - 0.005 < found["max"].external <= leftover


def test_a_request_that_can_never_run_is_refused():
    with pytest.raises(ValueError, match="longer than max_len"):
        reference.fragmentation([Request(0.0, 30, 3)], "paged", 64, max_len=32)


def test_the_preemption_that_the_text_walks_through():
    found = reference.fragmentation([Request(0.0, 15, 20), Request(0.0, 15, 5)], "paged", 48, max_len=48)
    assert [slots["used"] for slots in found.history] == [32, *range(17, 36), *range(17, 21)]
    assert found.history[1] == {"used": 17, "reserved": 15, "internal": 0, "external": 16}
    assert found.used == pytest.approx(600 / (24 * 48)) and found.preemptions == 1


def test_a_request_that_grows_for_ever_is_stopped():
    request = reference.Resident(0.0, prompt=2, output=2, held=3)
    request.advance(16)
    assert (request.held, request.size) == (4, 16)
    with pytest.raises(RuntimeError, match="move on to the next request"):
        request.advance(16)


def test_a_faulty_part_ends_in_an_error_and_not_in_an_endless_loop(monkeypatch):
    monkeypatch.setattr(reference, "first_fit", lambda running, size, capacity: None)
    with pytest.raises(RuntimeError, match="none advances"):
        reference.fragmentation([Request(0.0, 5, 3)], "max", 64, max_len=32)


def failures(**parts):
    """Message and hint of each failed case, where some of the functions are other ones."""
    names = dict(vars(reference)) | parts
    answers = [FunctionType(getattr(reference, name).__code__, names) for name in ("place", "fragmentation")]
    names["place"] = answers[0]
    answers[1].__defaults__ = reference.fragmentation.__defaults__
    subject = exercise.find("paged_kv.fragmentation")
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), (reference.fragmentation,))
    recorded = exercise.record_all(subject, [probe.challenge for probe in probes], (answers[1],))
    cases = exercise.judge(subject, probes, recorded).cases
    return {case.spec.name: (case.message, case.hint) for case in cases if not case.passed}


def test_a_negative_kind_is_not_a_pool_that_overflows():
    def count(running, capacity, waiting):
        used, taken = sum(r.held for r in running), sum(r.size for r in running)
        reserved = sum(r.final for r in running) - used
        left = {"external" if waiting else "free": capacity - taken}
        return {"used": used, "reserved": reserved, "internal": taken - used - reserved, **left}

    message, hint = failures(count=count)["each slot counted as what it is"]
    assert message.endswith("got reserved 1, internal -1: a kind is negative") and hint == 3


def test_an_admission_without_a_gap_points_at_first_fit():
    message, hint = failures(first_fit=lambda running, size, capacity: capacity - size)["first fit, lowest slot"]
    assert "a request runs for which first fit has no gap yet (or regions overlap)" in message and hint == 2
