"""What the exam of unit 04 does not show: the text's worked examples, the random runs, and `servelab.stepping`."""

from random import Random

import pytest

from servelab.exercises.continuous_batching import _server as server
from servelab.exercises.continuous_batching import paged_scheduler, scheduler
from servelab.reference import continuous_batching as reference
from servelab.serving import SchedulerConfig
from servelab.simulation import Job, StepCost, serve
from servelab.stepping import RecordedKV, play

FOUR = [server.add(0, "a", 5, 4), server.add(0, "b", 3, 2), server.add(0, "c", 6, 6), server.add(0, "d", 2, 1)]
TWO = [server.add(0, "a", 7, 6), server.add(0, "b", 6, 5)]


def played(capsys, scheduler_class, config, blocks, events, **more):
    """What `play` prints, a line a step without its number."""
    kv = RecordedKV(*blocks)
    play(scheduler_class(config, kv), kv, events, config, **more)
    return [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]


def test_first_worked_example(capsys):
    lines = played(capsys, reference.Scheduler, SchedulerConfig(3, 10), (6, 4), FOUR)
    assert lines == [
        "scheduled {'a': 5, 'b': 3}; 3 blocks in use",
        "scheduled {'a': 1, 'b': 1, 'c': 6}; 6 blocks in use; finished ['b']",
        "scheduled {'a': 1, 'c': 1, 'd': 2}; 6 blocks in use; finished ['d']",
        "scheduled {'a': 1, 'c': 1}; 5 blocks in use; finished ['a']",
        *["scheduled {'c': 1}; 3 blocks in use"] * 2,
        "scheduled {'c': 1}; 3 blocks in use; finished ['c']",
        "scheduled {}; 0 blocks in use",
    ]


def test_second_worked_example(capsys):
    lines = played(capsys, reference.PagedScheduler, SchedulerConfig(2, 16), (4, 4), TWO)
    assert lines == [
        *["scheduled {'a': 7, 'b': 6}; 4 blocks in use", "scheduled {'a': 1, 'b': 1}; 4 blocks in use"],
        "scheduled {'a': 1}; preempted ['b']; 3 blocks in use",
        *["scheduled {'a': 1}; 3 blocks in use"] * 2,
        "scheduled {'a': 1}; 3 blocks in use; finished ['a']",
        *["scheduled {'b': 8}; 2 blocks in use", "scheduled {'b': 1}; 3 blocks in use"],
        "scheduled {'b': 1}; 3 blocks in use; finished ['b']",
        "scheduled {}; 0 blocks in use",
    ]
    assert len(played(capsys, reference.Scheduler, SchedulerConfig(2, 16), (4, 4), TWO)) == 12  # 11 and an empty one


@pytest.mark.parametrize(
    ("scheduler_class", "num_blocks", "seqs", "waits"),
    [
        (reference.Scheduler, 32, 8, False),
        (reference.Scheduler, 12, 8, True),
        (reference.PagedScheduler, 12, 4, False),
        (reference.PagedScheduler, 7, 4, True),
    ],
)
def test_the_eight_requests_of_the_sliders(scheduler_class, num_blocks, seqs, waits):
    """Whether anybody waits for memory, as the text says: then a larger memory changes the run."""
    eight = [Job(server_request(i), 3 if i % 3 else 12) for i in range(8)]

    def steps(blocks):
        made = scheduler_class(SchedulerConfig(seqs, 16), RecordedKV(blocks, 4))
        return [(step.prefill, step.decode) for step in serve(made, eight, StepCost(1.0, 0.0, 0.0)).steps]

    assert (steps(num_blocks) != steps(1000)) == waits


def server_request(number):
    return reference.Request(f"r{number}", 4, 12, arrival=float(number))


@pytest.mark.parametrize("module", [scheduler, paged_scheduler])
def test_random_runs_hold_what_they_are_for(module):
    """Whatever the seed: the reference passes; aborts of both kinds; with the second scheduler several preemptions."""
    answer = getattr(reference, module.ANSWERS[0])
    for seed in range(8):
        runs = [asked for asked in module.challenges(Random(seed)) if asked["case"] == module.LONG]
        assert {"add", "add during", "abort", "abort during"} <= {
            event[1] for asked in runs for event in asked["events"]
        }
        transcripts = [module.drive(asked, answer) for asked in runs]
        judged = [module.judge(*pair, None)[0] for pair in zip(runs, transcripts, strict=True)]
        assert all(case.passed for case in judged), judged
        preempted = sum(len(step["plan"].get("preempted", [])) for transcript in transcripts for step in transcript)
        assert (preempted > 3) == (module is paged_scheduler)


def test_a_run_that_stands_still_is_broken_off():
    class Idle(reference.Scheduler):
        def schedule(self):
            return reference.StepPlan()

    asked = server.challenge("x", server.limits(1, 8), (4, 4), FOUR)
    transcript = server.drive(asked, Idle)
    assert len(transcript) == 3
    assert "waits, though it could run" in server.judged(asked, scheduler.RULES, transcript, {})[0].message


def refuses(too_large):
    """A `Scheduler` whose `add` refuses by a rule of its own."""

    class Refuses(reference.Scheduler):
        def add(self, request):
            if too_large(self, request):
                raise ValueError(request.id)
            super().add(request)

    return Refuses


@pytest.mark.parametrize(
    "too_large",
    [
        lambda self, request: request.prompt_tokens >= self.config.max_num_batched_tokens,
        lambda self, request: request.prompt_tokens > self.config.max_num_batched_tokens - len(self.running),
        lambda self, request: self.kv.blocks_for(self._most_tokens(request)) >= self.kv.num_blocks,
    ],
)
def test_a_wrong_refusal_names_the_hint_on_add_whatever_the_case(too_large):
    for asked in scheduler.challenges(Random(0)):
        (case,) = scheduler.judge(asked, scheduler.drive(asked, refuses(too_large)), [])
        if not case.passed:
            assert "expected no error: it can run" in case.message and case.hint == 3
            break
    else:
        pytest.fail("no case failed")


def test_a_refused_id_that_has_come_before_keeps_the_hint_of_its_case():
    class Never(reference.Scheduler):
        def abort(self, id):
            if self.running.pop(id, None):
                self.kv.release(id)

    failed = [scheduler.judge(asked, scheduler.drive(asked, Never), [])[0] for asked in scheduler.challenges(Random(0))]
    assert {case.hint for case in failed if "the earlier one of this id is" in case.message} == {None}


@pytest.mark.parametrize(("priority", "fields"), [([], "max_tokens"), ([1], "max_tokens, priority")])
def test_the_shown_run_names_the_fields_that_its_events_have(priority, fields):
    events = [[*server.add(0, "a", 2, 3), *priority], [1, "abort", "a"]]
    shown = server.show(server.challenge("x", server.limits(1, 8), (4, 4), events), "Scheduler(config, kv)")
    assert f"# step, what, id, prompt_tokens, {fields}\n" in shown


class PutsBack(reference.Scheduler):
    """Goes on to the next head, and puts one that does not fit at the end of the queue."""

    def schedule(self):
        plan = super().schedule()
        while seq := self._head():
            self._dequeue()
            try:
                self.kv.reserve(seq.id, seq.request.prompt_tokens + seq.request.max_tokens - 1)
                break
            except reference.OutOfBlocks:
                self._enqueue(seq)
        return plan


class LeavesTheVictim(reference.PagedScheduler):
    """Preempts one that it does not take out of those that run."""

    def _preempt(self, seq, plan):
        super()._preempt(seq, plan)
        self.running[seq.id] = seq


@pytest.mark.parametrize(
    ("answer", "module", "events"),
    [
        (PutsBack, scheduler, [server.add(0, "a", 5, 9), server.add(1, "b", 4, 2)]),
        (LeavesTheVictim, paged_scheduler, TWO),
    ],
)
def test_a_loop_that_asks_the_memory_for_ever_is_ended(answer, module, events):
    asked = server.challenge("x", server.limits(2, 16), (4, 4), events)
    message = server.judged(asked, module.RULES, server.drive(asked, answer), {})[0].message
    assert "schedule(): expected a StepPlan; it raised EndlessLoop: an endless loop?" in message


@pytest.mark.parametrize("transcript", [[], [{"plan": {"instead": "NoneType"}}], [{"plan": {"scheduled": {"z": 1}}}]])
def test_a_run_that_is_too_short_or_strange_fails(transcript):
    asked = server.challenge("x", server.limits(1, 8), (4, 4), TWO[:1])
    asked["events"][0][0] = 0
    started = [{"before": {"outcomes": [None]}} | step for step in transcript]
    assert not server.judged(asked, scheduler.RULES, started, {})[0].passed


def test_the_recorded_memory_is_a_paged_kv():
    kv = RecordedKV(num_blocks=3, block_size=4)
    kv.reserve("a", 5), kv.reserve("a", 6), kv.release("b")
    assert kv.changes() == {"a": 2} and kv.num_free == 1
    with pytest.raises(reference.OutOfBlocks):
        kv.reserve("b", 9)
    kv.release("a"), kv.reserve("b", 9)
    assert kv.changes() == {"a": 0, "b": 3} and not kv.changes()
