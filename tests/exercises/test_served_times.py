"""The moments that the case "the times of a served trace" demands are those of the references, whatever is drawn."""

from random import Random

import pytest

from servelab.exercises.continuous_batching import _clock as clock
from servelab.exercises.continuous_batching import chunked_scheduler, scheduler
from servelab.reference import continuous_batching as reference
from servelab.serving import SchedulerConfig, StepPlan


@pytest.mark.parametrize("module", [scheduler, chunked_scheduler])
def test_due_is_when_the_reference_serves(module):
    answer = getattr(reference, module.ANSWERS[0])
    for seed in range(30):
        for asked in (asked for asked in module.challenges(Random(seed)) if "jobs" in asked):
            assert module.drive(asked, answer)["times"] == clock.due(asked, module is chunked_scheduler)


def test_due_by_hand():
    """a: 8 tokens, 2 s; b comes in the middle of the second decode, its step has 7 tokens."""
    asked = clock.challenge("x", {"max_num_seqs": 2, "max_num_batched_tokens": 16}, scheduler.SERVED[0][1])
    assert clock.due(asked, False) == {"a": [2.0, 3.0, 4.75, 5.75], "b": [4.75, 5.75, 6.75]}


class OneAStep(reference.Scheduler):
    def schedule(self):
        most, self.config = self.config, SchedulerConfig(min(len(self.running) + 1, self.config.max_num_seqs), 16)
        plan, self.config = super().schedule(), most
        return plan


class NeverDone(reference.Scheduler):
    def schedule(self):
        return StepPlan({}, [*self.sequences][:1])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            OneAStep,
            "request 'c' arrived at 0.5 s: expected its first token at 4.25 s (TTFT 3.75 s);"
            " it came at 4.75 s (TTFT 4.25 s)",
        ),
        (NeverDone, "on the simulated clock: RuntimeError: nothing is scheduled at"),
    ],
)
def test_a_message_says_whose_token_came_when(answer, message):
    asked = clock.challenge("x", {"max_num_seqs": 3, "max_num_batched_tokens": 16}, scheduler.SERVED[1][1])
    (case,) = scheduler.judge(asked, scheduler.drive(asked, answer), None)
    assert not case.passed and case.message.startswith(message)


@pytest.mark.parametrize("module", [scheduler, chunked_scheduler])
def test_a_shown_trace_runs_and_prints_the_moments(module, capsys):
    asked = next(asked for asked in module.challenges(Random(0)) if "jobs" in asked)
    exec(module.show(asked), vars(reference) | {})
    first = clock.due(asked, module is chunked_scheduler)["b"][0]
    assert f" {first:.3f} |" in capsys.readouterr().out
