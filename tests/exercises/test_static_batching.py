"""What the text of the static batching unit claims about its reference, figure by figure."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from servelab import exercise
from servelab.answers import named_answers
from servelab.batching import Batch, Request, Slot, require_lengths, to_steps
from servelab.reference import static_batching as reference
from servelab.traces import read_azure_csv, read_trace

Q1 = [2000] + [20] * 8
CELLS = ("useful", "padding", "held", "empty")
STEP_S = 0.05


def at_once(lengths, slots):
    return reference.static_schedule([Request(0, 0, n) for n in lengths], slots)


def static_steps(lengths, slots):
    return at_once(lengths, slots)[-1].finish


def test_the_worked_example():
    a, b, c, d, e = (Request(*row) for row in ((0, 2, 2), (0, 4, 5), (1, 3, 3), (7, 1, 1), (9, 2, 3)))
    schedule = reference.static_schedule([a, b, c, d, e], 2)
    assert [(batch.start, batch.finish) for batch in schedule] == [(0, 5), (7, 10), (10, 13)]
    assert list(schedule[0].slots) == [Slot(a, 2, 4, 3), Slot(b, 0, 9, 0)]
    assert list(schedule[1].slots) == [Slot(c, 0, 6, 0), Slot(d, 2, 2, 2)]
    assert list(schedule[2].slots) == [Slot(e, 0, 5, 0), Slot(None, empty=5)]
    counts = {"useful": 26, "padding": 4, "held": 5, "empty": 5, "locked_out": 5, "forming": 2}
    assert reference.waste(schedule) == counts


def test_one_long_answer_beside_eight_short_ones():
    found = reference.waste(at_once(Q1, 9))
    assert (found["useful"], found["held"]) == (2160, 15_840)
    assert found["useful"] / sum(found[kind] for kind in CELLS) == pytest.approx(0.12)


def test_padding_of_four_prompts():
    schedule = reference.static_schedule([Request(0, n, 1) for n in (64, 128, 512, 2048)], 4)
    padding = reference.waste(schedule)["padding"]
    assert (padding, 4 * schedule[0].prompt_columns) == (5440, 8192)
    assert round(padding / 8192, 3) == 0.664


@pytest.mark.parametrize(
    ("lengths", "slots", "static", "bound", "fcfs"),
    [
        ([3, 3, 3], 2, 6, 5, 6),
        ([4, 1, 2, 5], 2, 9, 6, 8),
        ([7, 1, 1, 1, 1, 1, 8], 4, 15, 8, 9),
        (Q1, 9, 2000, 2000, 2000),
        (Q1 * 10, 9, 20_000, 2400, 4060),
        ([100] * 90, 9, 1000, 1000, 1000),
        ([2000] + [20] * 800, 9, 3760, 2000, 2000),
        ([20] * 800 + [2000], 9, 3760, 2000, 3760),
    ],
)
def test_steps(lengths, slots, static, bound, fcfs):
    assert static_steps(lengths, slots) == static
    assert reference.continuous_bound(lengths, slots) == bound
    assert reference.fcfs_steps(lengths, slots) == fcfs


def test_ten_batches_leave_a_tail_and_nine_do_not():
    assert sum(Q1 * 10) / (9 * 4060) == pytest.approx(0.591, abs=5e-4)
    gain = [static_steps(Q1 * n, 9) / reference.fcfs_steps(Q1 * n, 9) for n in (9, 10)]
    assert gain[0] > gain[1] == pytest.approx(4.926, abs=5e-4)
    free, runs = [0] * 9, []
    for length in Q1 * 10:
        slot = free.index(min(free))
        runs.append((free[slot], free[slot] + length))
        free[slot] += length
    (start, finish), others = runs[81], runs[:81] + runs[82:]
    assert (start, finish, max(end for _, end in others)) == (2060, 4060, 2440)
    most = ([2000] + [1] * 8) * 9
    assert static_steps(most, 9) / reference.fcfs_steps(most, 9) == pytest.approx(8.90, abs=5e-3)


def test_the_gain_drops_where_another_straggler_finds_no_free_slot():
    gain = [static_steps(Q1 * n, 9) / reference.fcfs_steps(Q1 * n, 9) for n in range(1, 21)]
    drops = [n for n in range(2, 21) if gain[n - 1] < gain[n - 2]]
    assert drops == [10, 19]
    assert [round(gain[n - 1], 2) for n in (9, 10, 18, 19)] == [7.38, 4.93, 7.69, 6.17]


def test_the_first_sliders_show_what_the_text_asks_for():
    """From a batch size of 6 on more waiting for batches to form than locked out; no moment reads like a cell's."""
    for size in range(1, 12):
        made = reference.static_schedule([Request(5 * i, 2 + 5 * i % 11, 6 if i % 4 else 24) for i in range(11)], size)
        found = reference.waste(made)
        assert (found["forming"] > found["locked_out"]) == (size >= 6)
        if size == 4:
            moments = {moment for batch in made for moment in (batch.start, batch.finish)}
            assert not moments & {cells for batch in made for cells in (batch.prompt_columns, batch.columns)}


def test_fcfs_lies_between_the_bound_and_static_batches_and_gains_at_most_the_number_of_slots():
    rng = Random(5)
    for _ in range(300):
        slots = rng.randint(1, 6)
        lengths = [rng.randint(1, rng.choice((3, 30))) for _ in range(rng.randint(1, 30))]
        static, fcfs = static_steps(lengths, slots), reference.fcfs_steps(lengths, slots)
        assert reference.continuous_bound(lengths, slots) <= fcfs <= static <= slots * fcfs


def test_cells_fill_the_rectangles_and_queueing_is_the_time_from_arrival_to_start():
    rng = Random(6)
    for _ in range(100):
        slots = rng.randint(1, 6)
        requests = [Request(rng.randint(0, 60), rng.randint(0, 9), rng.randint(1, 9)) for _ in range(30)]
        schedule = reference.static_schedule(requests, slots)
        found = reference.waste(schedule)
        assert sum(found[kind] for kind in CELLS) == sum(slots * batch.columns for batch in schedule)
        assert all(slot.cells == batch.columns for batch in schedule for slot in batch.slots)
        waits = [batch.start - s.request.arrival for batch in schedule for s in batch.slots if s.request]
        assert len(waits) == 30 and min(waits) >= 0
        assert found["locked_out"] + found["forming"] == sum(waits)


def test_the_chat_trace_is_as_the_text_says():
    trace = to_steps(read_trace("conv", max_requests=512), STEP_S)
    tokens = sum(request.output for request in trace)
    assert 6.5 < sum(request.prompt for request in trace) / tokens < 7.5
    used, wait, found = {}, {}, {}
    for size in (1, 8, 128, 256):
        schedule = reference.static_schedule(trace, size)
        found[size] = reference.waste(schedule)
        used[size] = tokens / (size * sum(batch.steps for batch in schedule))
        wait[size] = (found[size]["locked_out"] + found[size]["forming"]) / 512 * STEP_S
    assert [round(used[size], 3) for size in (1, 8, 256)] == [1, 0.408, 0.237]
    assert [round(wait[size]) for size in (8, 128, 256)] == [672, 27, 30]
    assert found[256]["forming"] > found[256]["locked_out"] > 0
    assert found[8]["padding"] > found[8]["useful"] > found[8]["held"] > 0


def test_a_file_in_the_azure_format(tmp_path):
    rows = ["2023-11-16 18:00:00.00,100,3", "2023-11-16 18:00:00.12,40,5", "bad row", "2023-11-16 18:00:01.00,9,1"]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    trace = read_azure_csv(path)
    requests = to_steps(trace, STEP_S)
    assert requests == [Request(0, 100, 3), Request(3, 40, 5), Request(20, 9, 1)] and trace.num_skipped == 1
    assert [(batch.start, batch.finish) for batch in reference.static_schedule(requests, 2)] == [(3, 8), (20, 21)]


def test_the_answer_about_forming():
    schedule = reference.static_schedule([Request(10 * i, 500, 50) for i in range(500)], 16)
    found = reference.waste(schedule)
    assert found["padding"] == found["held"] == 0 < found["locked_out"] < found["forming"]


def test_misuse():
    for row in ((-1, 1, 1), (0, -1, 1), (0, 1, 0)):
        with pytest.raises(ValueError, match="expected arrival"):
            Request(*row)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        to_steps([], 0)
    for lengths, slots in (([], 1), ([1, 0], 1), ([1], 0)):
        with pytest.raises(ValueError, match="expected lengths"):
            require_lengths(lengths, slots)
    assert Batch(0, 3, []).columns == 0


def named(name, answer):
    subject = exercise.find(f"static_batching.{name}")
    return next(a for a in named_answers(subject) if a.name == answer).make(reference)


def verdict(name, answer):
    subject = exercise.find(f"static_batching.{name}")
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), (getattr(reference, name),))
    recorded = [exercise.record(subject, probe.challenge, (answer,)) for probe in probes]
    return exercise.judge(subject, probes, recorded)


def first_failure(name, answer):
    return verdict(name, answer).first_failure


@pytest.mark.parametrize(
    ("name", "answer", "text"),
    [
        ("static_schedule", lambda requests, batch_size: None, "expected a list of Batch, got None"),
        ("static_schedule", lambda requests, batch_size: [(0, 1)], "batch 0 is a tuple, expected a Batch"),
        ("static_schedule", lambda requests, batch_size: [None], "batch 0 is None, expected a Batch"),
        ("static_schedule", lambda requests, batch_size: [Batch], "batch 0 is a type, expected a Batch"),
        ("static_schedule", lambda requests, batch_size: "two", "expected a list of Batch, got 'two'"),
        ("static_schedule", lambda requests, batch_size: [Batch(0, 1, 2)], "batch 0: slots is an int, expected a list"),
        ("static_schedule", lambda requests, batch_size: [], "expected a list of Batch, got an empty list"),
        ("static_schedule", lambda requests, batch_size: [Batch(0, None, [])], "batch 0, finish: expected a number"),
        ("static_schedule", lambda requests, batch_size: [Batch(0, 1, [])], "batch 0 has no request"),
        ("waste", lambda schedule: None, "expected a dict with the keys useful"),
        ("waste", lambda schedule: {"useful": 0}, "expected 5, got 0"),
        ("fcfs_steps", lambda lengths, slots: None, "expected 1, got None"),
        ("continuous_bound", lambda lengths, slots: "1", "expected 4, got '1'"),
    ],
)
def test_messages(name, answer, text):
    assert text in first_failure(name, answer).message


ODD = (None, True, -1, 1.5, float("nan"), 10**400, "x", b"x", [], {}, [None], {1}, range(3), np.zeros(3), object, 1j)


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize(
    "made",
    [
        lambda value: value,
        lambda value: [value],
        lambda value: [Batch(value, value, [Slot(Request(0, 3, 1))])],
        lambda value: [Batch(0, 1, value)],
        lambda value: [Batch(0, 1, [value])],
        lambda value: [Batch(0, 1, [Slot(value)])],
        lambda value: [Batch(0, 1, [Slot(Request(0, 3, 1), value, value, value, value)])],
        lambda value: [Batch(0, 1, [Slot(SimpleNamespace(arrival=value, prompt=value, output=value))])],
    ],
)
def test_no_driver_and_no_judge_raises_over_what_an_answer_returns(made, value):
    failure = first_failure("static_schedule", lambda requests, batch_size: made(value) if requests else [])
    assert failure.judged and "raised" not in failure.message and "cannot be read" not in failure.message


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("name", ["waste", "continuous_bound", "fcfs_steps"])
def test_nor_over_a_number_or_a_dictionary(name, value):
    failure = first_failure(name, lambda *given, **named: value)
    assert failure.judged and "expected" in failure.message


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("an index for the request of a slot", "batch 0, slot 0: request is an int, expected a Request or None"),
        (
            "a list of numbers for the request of a slot",
            "batch 0, slot 0: request is a list, expected a Request or None",
        ),
        ("tuples for slots", "batch 0, slot 0 is a tuple, expected a Slot"),
        ("requests for slots", "batch 0, slot 0 is a Request, expected a Slot"),
        ("one batch and no list", "expected a list of Batch, got an object of type Batch"),
    ],
)
def test_what_is_of_another_type_is_named_by_its_place(answer, text):
    assert first_failure("static_schedule", named("static_schedule", answer)).message == text


@pytest.mark.parametrize(
    ("name", "answer", "case", "hint"),
    [
        ("static_schedule", "nothing returned", "returns a list of batches", 2),
        (
            "static_schedule",
            "prompt columns take time, and the next batch waits for them",
            "runs to its longest answer",
            2,
        ),
        ("static_schedule", "a step between two batches, as part of the first", "runs to its longest answer", 2),
        ("static_schedule", "decode-only: one step too few", "runs to its longest answer", 2),
        ("static_schedule", "the next batch starts a step later", "starts when it is full", 1),
        ("static_schedule", "the prompt is not useful", "counts the tokens of prompt and answer", 3),
        ("static_schedule", "a finished request leaves an empty slot", "holds what has finished", 3),
        ("continuous_bound", "one more than rounded down", "no more than the larger of the two", 2),
        ("continuous_bound", "the sum of both", "no more than the larger of the two", 1),
        ("continuous_bound", "FCFS steps for the bound", "no more than the larger of the two", 1),
        ("continuous_bound", "static batches", "no more than the larger of the two", 1),
        ("continuous_bound", "rounded down", "a part of a step is a step", 2),
        ("fcfs_steps", "the longest first", "first come, first served", 2),
        ("fcfs_steps", "the shortest first", "first come, first served", 2),
        ("fcfs_steps", "the last of the queue first", "first come, first served", 2),
        ("fcfs_steps", "static batches", "a freed slot is taken at once", 2),
        ("fcfs_steps", "slots in turn, whichever is free", "a freed slot is taken at once", 2),
        ("fcfs_steps", "a step between two requests", "a freed slot is taken at once", 2),
        ("fcfs_steps", "the bound used as FCFS steps", "a request stays in its slot", 1),
    ],
)
def test_the_first_failure_is_about_the_mistake(name, answer, case, hint):
    failure = first_failure(name, named(name, answer))
    assert (failure.spec.name, failure.hint) == (case, hint)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("continuous_bound", "a very large number"),
        ("continuous_bound", "all the tokens, a slot or nine"),
        ("continuous_bound", "the sum of both"),
        ("fcfs_steps", "a very large number"),
        ("fcfs_steps", "one slot"),
        ("fcfs_steps", "the longest alone"),
        ("fcfs_steps", "the bound used as FCFS steps"),
    ],
)
def test_a_number_that_is_never_too_small_earns_nothing_for_it(name, answer):
    assert verdict(name, named(name, answer)).fraction == 0


@pytest.mark.parametrize(
    ("name", "answer"),
    [("continuous_bound", "one more than rounded down"), ("fcfs_steps", "a step between two requests")],
)
def test_a_slip_of_a_step_costs_one_case_and_the_check_that_is_missing(name, answer):
    assert sum(not case.passed for case in verdict(name, named(name, answer)).cases) == 2
