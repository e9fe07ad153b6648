"""The framework of an exercise: verdicts, scores, and a judge that no transcript can break or buy."""

from dataclasses import replace
from random import Random
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from servelab import exercise as exercises
from servelab import plain, verdicts
from servelab.errors import CourseError
from servelab.exercise import Case, CaseSpec, Exercise, Probe, judge, make_probes, record
from servelab.quiz import Quiz

CASES = (CaseSpec("doubles"), CaseSpec("keeps zero", hint=2, weight=3))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def _judge(challenge, transcript, expected):
    name = "doubles" if challenge else "keeps zero"
    got = transcript["returned"]
    return [Case(name, plain.close(got, expected["returned"]), f"expected {expected['returned']}, got {got}")]


TOY = Exercise(
    name="toy.double_it",
    answers=("double",),
    cases=CASES,
    challenges=lambda rng: [0, 1, rng.randint(2, 99), rng.randint(100, 999)],
    drive=lambda challenge, double: {"returned": plain.plain(double(challenge))},
    judge=_judge,
    version="0",
)


LATER = replace(TOY, name="toy.quadruple_it", answers=("quadruple", "double"), earlier=("double",))


@pytest.fixture
def a_unit_of_two(monkeypatch):
    """As if there were a unit with these two exercises."""
    unit = {each.name: each for each in (TOY, LATER)}
    monkeypatch.setattr(exercises, "names", lambda unit_name: list(unit))
    monkeypatch.setattr(exercises, "find", unit.__getitem__)


def reference(number):
    return 2 * number


PROBES = make_probes(TOY, Random(1), (reference,))


def verdict(double, probes=PROBES):
    return judge(TOY, probes, [record(TOY, probe.challenge, (double,)) for probe in probes])


def test_names():
    assert (TOY.unit, TOY.grade_id, TOY.check_id) == ("toy", "double-it", "double-it-check")
    assert TOY.spec("keeps zero").hint == 2


def test_the_reference_earns_everything():
    found = verdict(reference)
    assert found.passed and found.fraction == 1 and found.score(15) == 15 and found.first_failure is None
    assert [case.covered for case in found.cases] == [3, 1]


def test_a_partial_answer_earns_its_weights_and_is_shown_its_smallest_failure():
    found = verdict(lambda number: 2 * number if number < 2 else number)
    assert not found.passed and found.fraction == 0.75 and found.score(10) == 7.5
    assert (found.first_failure.spec.name, found.first_failure.failed_on) == ("doubles", 2)
    assert "expected" in found.first_failure.message


def test_what_doing_nothing_passes_counts_beside_something_only():
    toy = replace(TOY, cases=(CASES[0], replace(CASES[1], alone=False)))
    zero, right_once = lambda n: 0, lambda n: 2 * n if n < 2 else 0
    for double, fraction in ((zero, 0), (reference, 1)):
        found = judge(toy, PROBES, [record(toy, probe.challenge, (double,)) for probe in PROBES])
        assert found.fraction == fraction
    only_zero = PROBES[:1]  # challenges that test nothing else are judged as they are: mutants meet them one by one
    assert judge(toy, only_zero, [record(toy, 0, (zero,))]).cases[1].passed
    found = judge(toy, PROBES[:2], [record(toy, probe.challenge, (right_once,)) for probe in PROBES[:2]])
    assert found.passed
    shown = judge(toy, PROBES, [record(toy, probe.challenge, (zero,)) for probe in PROBES]).cases[1]
    assert not shown.judged and shown.message.startswith("this proves nothing by itself")


def test_the_first_failure_is_of_the_most_basic_case_and_its_smallest_challenge():
    found = verdict(lambda number: -1)
    assert found.fraction == 0 and found.first_failure == found.cases[0]
    assert found.first_failure.failed_on == 1


def test_scores_are_rounded_to_cents():
    cases = tuple(CaseSpec(name) for name in "abc")
    three = Exercise("t.x", ("x",), cases, list, lambda *_: 0, lambda c, t, e: [Case(c, t == "ok")], "0")
    probes = [Probe(name, None, (name,)) for name in "abc"]
    found = judge(three, probes, [{"transcript": "ok"}, {"transcript": "ok"}, {"transcript": "no"}])
    assert found.score(10) == 6.67 and found.score(0) == 0


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        [],
        {},
        "",
        [{}] * 4,
        [None] * 4,
        [{"transcript": None}] * 4,
        [{"transcript": {}}] * 4,
        [{"raised": None}] * 4,
        [{"transcript": {"returned": 0}, "raised": {}}] * 4,
        [{"transcript": {"returned": 0}}] * 3,
        [{"transcript": {"returned": None}}] * 4,
        [{"passed": True}] * 4,
        [[Case("doubles", True)]] * 4,
    ],
    ids=repr,
)
def test_nothing_recorded_earns_nothing(recorded):
    found = judge(TOY, PROBES, recorded)
    assert not found.passed and found.fraction == 0 and found.score(100) == 0
    assert all(case.message for case in found.cases)


@given(st.lists(st.fixed_dictionaries({"transcript": JSON}) | JSON, min_size=4, max_size=4) | JSON)
def test_the_judge_never_raises(recorded):
    assert 0 <= judge(TOY, PROBES, recorded).fraction <= 1


@given(JSON)
def test_only_the_right_value_earns(value):
    recorded = [{"transcript": {"returned": value}} for _ in PROBES]
    found = judge(TOY, PROBES, recorded)
    expected = {probe.expected["returned"] for probe in PROBES if probe.challenge}
    assert len(expected) > 1 and not found.cases[0].passed


def test_no_probes_earn_nothing():
    found = judge(TOY, [], [])
    assert not found.passed and found.fraction == 0


def test_an_exercise_without_cases_earns_nothing():
    bare = Exercise("t.x", ("x",), (), list, lambda *_: 0, lambda *_: [], "0")
    found = judge(bare, [], [])
    assert not found.passed and found.score(10) == 0


def test_a_case_that_no_challenge_covers_is_not_passed():
    found = verdict(reference, [probe for probe in PROBES if probe.challenge])
    assert not found.passed and found.fraction == 0.25


def with_judge(judge_function):
    return Exercise("t.x", ("x",), CASES, list, lambda *_: 0, judge_function, "0")


PROBE = Probe(1, None, ("doubles",))


def test_a_case_that_the_judge_does_not_name_fails():
    found = judge(with_judge(lambda *_: []), [PROBE], [{"transcript": 1}])
    assert not found.cases[0].passed and found.cases[0].message == "this could not be judged"


def test_a_case_that_another_stopped_says_which():
    found = judge(
        with_judge(lambda *_: [Case("keeps zero", False, "lost")]),
        [Probe(0, None, ("doubles", "keeps zero"))],
        [{"transcript": 0}],
    )
    assert not found.cases[0].judged and found.cases[0].message == 'on the same input, "keeps zero" failed'


def test_a_failure_that_was_judged_comes_before_a_run_that_ended_too_early():
    both = ("doubles", "keeps zero")
    probes = [Probe(number, None, both) for number in range(3)]
    told = [[], [Case("keeps zero", False, "lost")], [Case("doubles", True), Case("keeps zero", False, "later")]]
    found = judge(with_judge(lambda challenge, *_: told[challenge]), probes, [{"transcript": 0}] * 3)
    assert found.fraction == 0 and [case.judged for case in found.cases] == [False, True]
    first = found.first_failure
    assert (first.spec.name, first.failed_on, first.message, first.hint) == ("keeps zero", 1, "lost", 2)
    shown = verdicts.Shown(TOY, probes, found)
    assert "not judged  doubles: this could not be judged" in verdicts.as_text(shown)
    assert shown.headline.endswith("0 of 2 cases passed, 1 not judged") and "Hint 2" in shown.hint
    assert '<td style="text-align:left">not judged</td>' in verdicts.as_html(shown)


@pytest.mark.parametrize(("hint", "said"), [(None, ""), (2, "Hint 2 of this exercise is about this.")])
def test_where_code_broke_off_only_a_hint_that_the_judge_chose_is_named(hint, said):
    broken = with_judge(lambda *_: [Case("doubles", False, "step 1: your code raised KeyError", hint)])
    found = judge(broken, [PROBE], [{"transcript": 1}])
    assert verdicts.Shown(TOY, [PROBE], found).hint == said


def test_a_long_message_is_shown_once():
    def raises(number):
        raise ValueError("x" * 100)

    text = verdicts.as_text(verdicts.Shown(TOY, PROBES, verdict(raises)))
    assert text.count("x" * 100) == 1 and 'FAIL  keeps zero: as for "doubles"' in text


def test_where_nothing_was_judged_the_first_case_is_shown():
    found = judge(with_judge(lambda *_: []), [Probe(1, None, ("keeps zero",))], [{"transcript": 1}])
    assert [case.judged for case in found.cases] == [True, False]  # no probe tests the first one
    assert not found.passed and found.first_failure.spec.name == "doubles"


def test_a_case_that_the_probe_does_not_name_is_ignored():
    cases = [Case("doubles", True), Case("keeps zero", True), Case("invented", False)]
    found = judge(with_judge(lambda *_: cases), [PROBE], [{"transcript": 1}])
    assert [case.passed for case in found.cases] == [True, False]


@pytest.mark.parametrize("outcomes", [(True, False), (False, True), (False, False), (True, False, True)])
def test_of_a_case_named_twice_the_failure_counts(outcomes):
    cases = [Case("doubles", outcome, "twice") for outcome in outcomes]
    assert not judge(with_judge(lambda *_: cases), [PROBE], [{"transcript": 1}]).cases[0].passed


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), TypeError(), MemoryError(), StopIteration()])
def test_a_judge_that_raises_fails_the_probe(error):
    def stumble(*_):
        yield Case("doubles", True)
        raise error

    assert judge(with_judge(stumble), [PROBE], [{"transcript": 1}]).fraction == 0


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raising(error):
    def answer(number):
        raise error

    return answer


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ValueError("what went wrong"), "ValueError"),
        (NotImplementedError(), "NotImplementedError"),
        (SystemExit(0), "SystemExit"),
        (RecursionError(), "RecursionError"),
        (MemoryError(), "MemoryError"),
        (Mute(), "Mute"),
        (ValueError("x" * 10**6), "ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.usefixtures("a_unit_of_two")
def test_whatever_escapes_the_driver_is_an_outcome(error, name):
    outcome = record(TOY, 1, (raising(error),))
    assert outcome["raised"]["type"] == name and len(outcome["raised"]["message"]) <= 300
    found = verdict(raising(error))
    said = "is not written yet" if name == "NotImplementedError" else name
    assert found.fraction == 0 and said in found.cases[0].message


def test_the_user_may_interrupt():
    with pytest.raises(KeyboardInterrupt):
        record(TOY, 1, (raising(KeyboardInterrupt()),))


@pytest.mark.parametrize("transcript", [object(), float("nan"), [[[[]]]], {1: 2}, {"a": {3}}, "x" * plain.MAX_BYTES])
def test_what_is_recorded_is_plain(transcript):
    outcome = record(with_drive(lambda *_: transcript), 1, (None,))
    assert plain.loads(plain.dumps(outcome)) == outcome


def with_drive(drive):
    return Exercise("t.x", ("x",), CASES, list, drive, lambda *_: [], "0")


def test_probes_are_plain_and_repeatable():
    assert make_probes(TOY, Random(1), (reference,)) == PROBES != make_probes(TOY, Random(2), (reference,))
    assert [Probe.from_plain(plain.loads(plain.dumps(probe.as_plain()))) for probe in PROBES] == PROBES


@pytest.mark.usefixtures("a_unit_of_two")
@pytest.mark.parametrize("wrong", [lambda number: number / 0, raising(NotImplementedError())])
def test_a_reference_that_raises_makes_no_probes(wrong):
    with pytest.raises(AssertionError, match="raised"):
        make_probes(TOY, Random(1), (wrong,))


def test_a_reference_that_fails_its_judge_makes_no_probes():
    severe = Exercise("t.x", ("x",), CASES, lambda rng: [1], lambda *_: 0, lambda *_: [Case("doubles", False)], "0")
    with pytest.raises(AssertionError, match="fails its own judge"):
        make_probes(severe, Random(1), (reference,))


def test_a_learner_cannot_change_a_probe():
    greedy = Exercise(
        "t.x",
        ("x",),
        CASES,
        lambda rng: [[1, 2]],
        lambda c, x: x(c),
        lambda c, t, e: [Case("doubles", c == [1, 2])],
        "0",
    )
    (probe,) = make_probes(greedy, Random(1), (list.clear,))
    assert probe.challenge == [1, 2]


@pytest.mark.parametrize(
    "name", ["", "paged_kv", "nowhere.x", "paged_kv.nothing", "../x.y", "a.b.c", "paged_kv.", ".x"]
)
def test_a_wrong_name_is_explained(name):
    with pytest.raises(CourseError) as caught:
        exercises.find(name)
    assert caught.value.mend


def test_an_exercise_is_read_off_its_module(tmp_path):
    path = tmp_path / "double_it.py"
    path.write_text("# nothing\n", encoding="utf-8")
    module = ModuleType("servelab.exercises.toy.double_it")
    module.__file__, module.ANSWERS, module.CASES = str(path), TOY.answers, TOY.cases
    module.challenges, module.drive, module.judge = TOY.challenges, TOY.drive, TOY.judge
    found = exercises.from_module(module)
    assert found.name == "toy.double_it" and found.show([1]) == "[1]" and len(found.version) == 12


def test_an_error_is_described_with_the_line_of_the_learners_cell():
    source = "def answer(number):\n    return [nomber for _ in '1'][0]\n"
    scope: dict = {}
    exec(compile(source, "/tmp/ipykernel_4242/1234.py", "exec"), scope)
    outcome = record(TOY, 1, (scope["answer"],))
    assert outcome["raised"] == {
        "type": "NameError",
        "message": "name 'nomber' is not defined (answer, line 2 of its cell)",
    }


@pytest.mark.usefixtures("a_unit_of_two")
def test_a_method_that_is_not_written_is_named():
    class Half:
        def double(self, number):
            raise NotImplementedError

    found = verdict(Half().double)
    assert "Half.double is not written yet" in found.first_failure.message


@pytest.mark.usefixtures("a_unit_of_two")
def test_an_open_part_of_another_exercise_is_not_called_the_answers_own():
    def double(number):
        raise NotImplementedError

    later = replace(LATER, drive=lambda challenge, quadruple, double: quadruple(challenge))
    outcome = record(later, 1, (double, double))
    assert outcome["raised"]["type"] == exercises.OPEN_PART
    said = "double (exercise double_it) is not written yet, and this check runs it"
    assert [case.message for case in judge(later, PROBES[:1], [outcome]).cases if case.message] == [said]
    assert record(TOY, 1, (double,))["raised"] == {
        "type": "NotImplementedError",
        "message": "double is not written yet",
    }


def test_a_part_of_another_unit_that_is_not_finished_is_no_fault_of_the_answer():
    todo = "\n".join(f"  exercise-{n}: has not passed its check" for n in range(20))

    def double(number):
        raise CourseError("table comes from the exercise table, which is not finished", mend=todo)

    message = record(TOY, 1, (double,))["raised"]["message"]
    assert message.startswith("what this builds on is not written yet: table comes from") and message.endswith(todo)
    found = verdict(double)
    assert "your code raised" not in found.first_failure.message
    assert not verdicts.Shown(TOY, PROBES, found).hint


def test_torch_computes_on_one_core_while_an_answer_is_driven():
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        record(TOY, 1, (lambda number: seen.append(torch.get_num_threads()),))
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_after_a_run_that_does_not_end_nothing_else_is_tried():
    class NotOver(Exception):
        never_ends = True

    tried = []

    def double(number):
        tried.append(number)
        if number == 1:
            raise NotOver
        return 2 * number

    outcomes = exercises.record_all(TOY, [probe.challenge for probe in PROBES], (double,))
    assert tried == [0, 1] and outcomes[2:] == [exercises.NOT_RUN] * 2
    found = judge(TOY, PROBES[2:] + PROBES[:1], [exercises.NOT_RUN, exercises.NOT_RUN, outcomes[0]])
    assert [case.passed for case in found.cases] == [False, True]
    assert found.cases[0].message == "an earlier input did not come to an end" and not found.cases[0].judged


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("15,840", ""),
        (" 15840 ", ""),
        (15840, ""),
        ("15,84", "expected a number, got '15,84'. Count."),
        ("C", "expected a number, got 'C'. Count."),
        ("1,584,000%", ""),
        (None, "no answer. Count."),
    ],
)
def test_a_quiz_reads_numbers_as_texts_print_them(given, said):
    quiz = Quiz({"requests": "Count."})
    (case,) = quiz.judge("requests", quiz.drive("requests", {"requests": given, "x": 1}) if given else None, 15840)
    assert case.passed == (not said) and case.message.startswith(said)
