"""Beside the exam of `paged_kv.token_exact`: whose tokens are expected, and what an open earlier part says."""

from dataclasses import replace
from random import Random
from types import FunctionType

import pytest
import torch

from servelab import exercise
from servelab.exercises.paged_kv.token_exact import ANSWERS
from servelab.llm import LLM, load
from servelab.llm.thread import plain_loop
from servelab.reference import paged_kv as reference
from servelab.serving import FlatBatch

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


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("block_tables", lambda table: table[0], "block_tables of the FlatBatch must be [1, W], got [2]"),
        ("slot_mapping", lambda slots: slots[:1], "a FlatBatch has 5 tokens, 5 positions and 1 slots"),
        (
            "slot_mapping",
            lambda slots: slots.tolist(),
            "slot_mapping of the FlatBatch must be a tensor [T], got [0, 1,",
        ),
        ("positions", lambda numbers: numbers.double(), "positions of the FlatBatch must hold int64, got float64"),
        ("context_lens", lambda lens: lens[0], "context_lens of the FlatBatch must be a list of one number, got 5"),
        ("query_lens", lambda lens: [1], "query_lens of the FlatBatch is [1], and it has 5 tokens"),
    ],
)
def test_a_batch_of_another_shape_is_no_fault_of_the_earlier_parts(field, change, message):
    def misshapen(*fields):
        batch = FlatBatch(*fields)
        return replace(batch, **{field: change(getattr(batch, field))})

    generate = FunctionType(reference.generate.__code__, vars(reference) | {"FlatBatch": misshapen})
    probes = exercise.make_probes(SUBJECT, Random(exercise.PUBLIC_SEED), tuple(RIGHT.values()))
    recorded = exercise.record_all(SUBJECT, [probes[0].challenge], tuple((RIGHT | {"generate": generate}).values()))
    failed = exercise.judge(SUBJECT, probes[:1], recorded).first_failure
    assert failed.message.startswith(message) and failed.hint == 2
