"""Beside the exam of `paged_kv.token_exact`: whose tokens are expected, and what an open earlier part says."""

from dataclasses import replace
from random import Random

import pytest
import torch

from servelab import exercise
from servelab.exercises.paged_kv.token_exact import ANSWERS
from servelab.llm import LLM, load
from servelab.llm.thread import plain_loop
from servelab.reference import paged_kv as reference

SUBJECT = exercise.find("paged_kv.token_exact")
RIGHT = {name: getattr(reference, name) for name in ANSWERS}


@pytest.mark.parametrize("seed", [exercise.PUBLIC_SEED, 1, 2])
def test_the_expected_tokens_are_the_plain_loops(seed):
    config, weights = load(dtype=torch.float64)
    for probe in exercise.make_probes(SUBJECT, Random(seed), tuple(RIGHT.values())):
        asked = probe.challenge
        model = LLM(replace(config, eos_token_id=asked["eos"]), weights)
        prompts = {f"r{n}": list(prompt.encode()) for n, prompt in enumerate(asked["prompts"])}
        assert probe.expected["tokens"] == plain_loop(model, prompts, asked["max_tokens"])


class PrefixCache(reference.PrefixCache):
    def match(self, tokens, key=None):
        raise NotImplementedError


def single(q, *others):
    return reference.paged_attention(q.float(), *others)


def rounded(*given):
    return reference.paged_attention(*given).float()


def unforked(self):
    return type(self)(self.pool)


@pytest.mark.parametrize(
    ("part", "value", "passed", "message"),
    [
        (
            "PrefixCache",
            PrefixCache,
            6,
            "PrefixCache.match (exercise prefix_cache) is not written yet, and this check runs it",
        ),
        ("paged_attention", single, 0, "your code raised RuntimeError: expected scalar type Double but found Float"),
        (
            "paged_attention",
            rounded,
            0,
            "`paged_attention` returns torch.float32 for a q of torch.float64; see exercise 6",
        ),
        (
            "PrefixCache",
            type("Empty", (reference.PrefixCache,), {"match": lambda *_: ([], 0)}),
            7,
            "a table holds 0, not 4",
        ),
        ("ForkableTable", type("Deaf", (reference.ForkableTable,), {"fork": unforked}), 7, "a table holds 0, not 10"),
    ],
)
def test_a_part_of_an_earlier_exercise_that_fails(part, value, passed, message):
    probes = exercise.make_probes(SUBJECT, Random(exercise.PUBLIC_SEED), tuple(RIGHT.values()))
    recorded = [exercise.record(SUBJECT, probe.challenge, tuple((RIGHT | {part: value}).values())) for probe in probes]
    verdict = exercise.judge(SUBJECT, probes, recorded)
    assert sum(case.passed for case in verdict.cases) == passed
    assert message in verdict.first_failure.message
