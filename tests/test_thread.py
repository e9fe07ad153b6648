"""The lines that units 03, 04 and 06 print at their end: right parts give all answers, and a wrong part is seen."""

import pytest

from servelab.exercises.capstone import _model
from servelab.llm import thread
from servelab.reference import collectives, continuous_batching, paged_kv, tensor_parallel
from servelab.serving import SchedulerConfig
from servelab.simulation import StaticBatches

PAGED = ("generate", "BlockAllocator", "ForkableTable", "PrefixCache", "write_kv", "paged_attention")
STEP = ("sampled_rows", "flatten_batch")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small random model instead of the tiny one, and short prompts."""
    begin = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    prompts = {f"r{n}": [*begin, n, 7][: 12 - n % 2] for n in range(4)}
    dims = {"num_heads": 8, "num_kv_heads": 2, "eos_token_id": -1}
    monkeypatch.setattr(thread, "tiny_model", lambda: _model.model(1, **dims))
    monkeypatch.setattr(thread, "tiny_prompts", lambda number=4: dict(list(prompts.items())[:number]))
    monkeypatch.setattr(thread, "MAX_TOKENS", 10)
    for function in (thread.plain_loop, thread.in_turn, thread.forked, thread.prefix_cached):
        monkeypatch.setattr(function, "__defaults__", (10,))


def parts(unit, names):
    return [getattr(unit, name) for name in names]


def test_paged_kv(capsys):
    thread.paged_kv(*parts(paged_kv, PAGED))
    assert capsys.readouterr().out.splitlines() == [
        "         paged: 4 of 4 answers as in the plain loop",
        "        forked: 2 of 2 answers as in the plain loop",
        " prefix-cached: 4 of 4 answers as in the plain loop; tokens found in the cache: 24",
    ]


def append(self, n_tokens):
    """An append whose copies nobody hears of."""
    paged_kv.ForkableTable.append(self, n_tokens)
    return []


@pytest.mark.parametrize(
    ("part", "change", "seen"),
    [
        ("ForkableTable", lambda right: type("NoCopy", (right,), {"append": append}), "        forked: 0 of 2"),
        ("write_kv", lambda right: lambda k_cache, v_cache, k, v, slots: None, "         paged: 0 of 4"),
        (
            "paged_attention",
            lambda right: lambda *given: right(*given[:5], given[4], given[6]),
            "         paged: 0 of 4",
        ),
    ],
)
def test_a_wrong_part_of_unit_03_is_seen(capsys, part, change, seen):
    given = dict(zip(PAGED, parts(paged_kv, PAGED), strict=True))
    thread.paged_kv(*(given | {part: change(given[part])}).values())
    out = capsys.readouterr().out
    assert seen in out and "differs from token" in out


def servers():
    def made(name, budget):
        scheduler_class = getattr(continuous_batching, name)
        return lambda kv: scheduler_class(SchedulerConfig(4, budget, eos_token_id=-1), kv)

    return {
        "static": (lambda kv: StaticBatches(made("Scheduler", 64)(kv), 3), 16),
        "paged": (made("PagedScheduler", 64), 16),
        "preempted": (made("PagedScheduler", 64), 6),
        "chunked": (made("ChunkedScheduler", 5), 16),
    }


def test_continuous_batching(capsys):
    thread.continuous_batching(*parts(continuous_batching, STEP), servers(), paged_kv)
    lines = capsys.readouterr().out.splitlines()
    assert all("4 of 4 answers as in the plain loop" in line for line in lines) and len(lines) == 4
    assert "preemptions: 0" not in lines[2] and "steps: 10," in lines[1] and "steps: 20," in lines[0]


def test_a_wrong_flat_batch_is_seen(capsys):
    def flatten_batch(plan, tokens, num_computed, kv):
        batch = continuous_batching.flatten_batch(plan, tokens, num_computed, kv)
        batch.positions.sub_(batch.positions.min())
        return batch

    thread.continuous_batching(continuous_batching.sampled_rows, flatten_batch, servers(), paged_kv)
    assert "4 of 4" not in capsys.readouterr().out


def test_tensor_parallel(capsys):
    thread.tensor_parallel(tensor_parallel.DecoderLayer, collectives.ring_all_reduce)
    end = "2 of 2 answers as in the plain loop, the same on all ranks; all-reduces:"
    assert capsys.readouterr().out.splitlines() == [
        f"          TP=1: {end} 0, weights of a layer: 2,432",
        f"          TP=2: {end} 80, weights of a layer: 1,216",
        f"          TP=4: {end} 80, weights of a layer: 672",
    ]


def test_a_missing_sum_is_seen(capsys, monkeypatch):
    class Partial(tensor_parallel.RowParallelLinear):
        def forward(self, x):
            return x @ self.weight.T

    monkeypatch.setattr(tensor_parallel, "RowParallelLinear", Partial)
    thread.tensor_parallel(tensor_parallel.DecoderLayer, sizes=(2,))
    assert "0 of 2" in capsys.readouterr().out
