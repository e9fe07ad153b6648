"""Figures that unit 04's text states come out of the reference's code."""

import itertools

import pytest

from servelab.cards import hardware_card, model_card
from servelab.plots import iterations
from servelab.reference import continuous_batching as unit
from servelab.reference import memory, paged_kv
from servelab.serving import PagedKV, Request, SchedulerConfig
from servelab.simulation import Job, StaticBatches, StepCost, serve
from servelab.traces import read_trace

H100 = hardware_card("h100-sxm")
LONGEST = 2048
LIMITS = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=LONGEST, watermark_blocks=10)


def floor(name: str, tp: int = 1) -> StepCost:
    return StepCost.from_floor(memory.mixed_step_floor, model_card(name), H100, tp)


@pytest.mark.parametrize(
    ("name", "tp", "batch", "ratio"),
    [
        ("llama-3.1-8b", 1, 32, 1.51),
        ("llama-3.1-8b", 1, 128, 3.09),
        ("llama-3.1-8b", 1, 256, 5.19),
        ("llama-3.1-70b", 4, 32, 1.15),
        ("llama-3.1-70b", 4, 128, 1.60),
        ("llama-3.1-70b", 4, 256, 2.21),
    ],
)
def test_tpot_against_a_batch_of_one(name, tp, batch, ratio):
    assert round(unit.tpot_ratio(floor(name, tp), batch, 2048), 2) == ratio


def test_a_step_cost_is_the_floor_of_unit_01():
    card, cost = model_card("llama-3.1-8b"), floor("llama-3.1-8b")
    for batch, context, prompt in ((1, 2048, 0), (128, 2048, 0), (32, 1024, 500), (0, 0, 4096), (600, 10, 0)):
        want = memory.mixed_step_floor(card, H100, batch, context, prompt)
        assert cost.seconds(batch + prompt, batch * context) == pytest.approx(want)


def crossing(name: str) -> int | None:
    """The fewest tokens that are cheaper to swap than to recompute, beside 32 others of 1024 tokens."""
    cost, size = floor(name), memory.kv_bytes_per_token(model_card(name))
    return next(
        (n for n in range(1, 20_000) if unit.swap_seconds(n, size, 63.0) < unit.recompute_seconds(cost, n, 32, 1024)),
        None,
    )


def test_recompute_and_swap_cross_where_the_text_says():
    assert crossing("llama-3.1-8b") == 566
    assert crossing("llama-2-7b") is None
    cost = floor("llama-3.1-8b")
    assert round(1e3 * cost.seconds(32, 32 * 1024), 3) == 6.076
    assert round(1e3 * cost.seconds(32 + 1024, 32 * 1024), 3) == 14.905
    assert round(1e3 * unit.recompute_seconds(cost, 1024, 32, 1024), 3) == 8.829
    assert round(1e3 * unit.swap_seconds(1024, 131_072, 63.0), 3) == 4.261
    assert unit.recompute_seconds(cost, 300, 32, 1024) == 0


@pytest.fixture(scope="module")
def served():
    """The unit's 200 chat requests on OPT-13B at 4 requests/s, by server."""
    chat = [r for r in read_trace("conv") if r.prompt_tokens + r.output_tokens <= LONGEST][:200]
    stretch = (len(chat) - 1) / chat[-1].arrival / 4.0
    jobs = [
        Job(Request(str(n), r.prompt_tokens, LONGEST - r.prompt_tokens, r.arrival * stretch), r.output_tokens)
        for n, r in enumerate(chat)
    ]
    cost = StepCost.from_floor(memory.mixed_step_floor, model_card("opt-13b"), hardware_card("a100-40-sxm"))

    def kv() -> PagedKV:
        return PagedKV(paged_kv.BlockAllocator(15_728 // 16, 16))

    servers = {
        "static": StaticBatches(unit.Scheduler(LIMITS, kv()), 7),
        "contiguous": unit.Scheduler(LIMITS, kv()),
        "paged": unit.PagedScheduler(LIMITS, kv()),
    }
    return {name: serve(server, jobs, cost) for name, server in servers.items()}, kv()


def test_three_servers_on_one_trace(served):
    runs, kv = served
    running = {name: round(iterations.mean_running(run), 1) for name, run in runs.items()}
    assert running == {"static": 2.9, "contiguous": 6.7, "paged": 14.6}
    rates = {name: round(unit.throughput(run.timings())) for name, run in runs.items()}
    assert rates == {"static": 149, "contiguous": 311, "paged": 516}
    rows = iterations.kv_use_text(runs, kv).splitlines()[2:]
    assert rows[1].startswith("| contiguous | 6.7 | 87.0% | 38.2% | 0 |")
    assert rows[2].startswith("| paged | 14.6 | 83.6% | 82.9% | 14 |")


def test_littles_law_holds_exactly(served):
    for run in served[0].values():
        timings = run.timings()
        window = max(t.token_times[-1] for t in timings) - min(t.arrival for t in timings)
        inside = sum(map(unit.e2e, timings)) / window
        events = sorted([(t.arrival, 1) for t in timings] + [(t.token_times[-1], -1) for t in timings])
        area, number = 0.0, 0
        for (moment, change), (following, _) in itertools.pairwise(events):
            number += change
            area += number * (following - moment)
        assert inside == pytest.approx(area / window)
    timings = served[0]["paged"].timings()
    window = max(t.token_times[-1] for t in timings) - min(t.arrival for t in timings)
    assert round(len(timings) / window, 2) == 2.78


def test_metrics_agree_with_the_steps(served):
    run = served[0]["paged"]
    for timing in run.timings():
        assert timing.arrival <= timing.admitted < timing.token_times[0]
        assert sum(unit.itl(timing)) + unit.ttft(timing) == pytest.approx(unit.e2e(timing))
