"""What the text of the continuous batching unit claims about policies and chunks, figure by figure."""

from itertools import pairwise
from statistics import median

import pytest

from servelab.cards import hardware_card, model_card
from servelab.reference import continuous_batching as course
from servelab.reference import memory, paged_kv
from servelab.serving import PagedKV, Request, SchedulerConfig
from servelab.simulation import Job, StepCost, serve
from servelab.stepping import RecordedKV, Run

COST = StepCost.from_floor(memory.mixed_step_floor, model_card("llama-3.1-8b"), hardware_card("h100-sxm"))


def server(scheduler_class, max_num_seqs, budget, num_blocks, *key):
    kv = PagedKV(paged_kv.BlockAllocator(num_blocks, block_size=16))
    return scheduler_class(SchedulerConfig(max_num_seqs, budget), kv, *key)


@pytest.mark.parametrize(
    ("key", "order"),
    [
        (lambda seq: 0, "ABCD"),
        (course.by_priority, "BDCA"),
        (course.shortest_remaining, "CABD"),
        (course.aged(0.5), "BDAC"),
        (course.aged(1), "BACD"),
        (course.aged(0), "BDCA"),
        (course.aged(100), "ABCD"),
    ],
)
def test_the_order_of_four_requests(key, order):
    four = [("A", 0, 2, 3), ("B", 1, 0, 4), ("C", 2, 1, 2), ("D", 3, 0, 6)]
    scheduler = server(course.PolicyScheduler, 1, 64, 10, key)
    for id, arrival, priority, max_tokens in four:
        scheduler.add(Request(id, 10, max_tokens, arrival, priority))
    ended = []
    while len(ended) < len(four):
        plan = scheduler.schedule()
        ended += scheduler.finish_step(plan, dict.fromkeys(plan.scheduled, 1000))
    assert "".join(ended) == order


def wait_of_the_patient(key, num_urgent):
    urgent = [Job(Request(str(n), 100, 20, arrival=n / 50), 20) for n in range(num_urgent)]
    patient = Job(Request("patient", 100, 20, arrival=0.1, priority=5), 20)
    served = serve(server(course.PolicyScheduler, 4, 1024, 400, key), [*urgent, patient], COST)
    return served.token_times["patient"][0] - 0.1


def test_the_patient_starve_without_ageing_only():
    half, whole = (wait_of_the_patient(course.by_priority, n) for n in (200, 400))
    assert whole == pytest.approx(2 * half, rel=0.05)
    for rate in (5, 20):
        short, long = (wait_of_the_patient(course.aged(rate), n) for n in (100, 400))
        assert short == pytest.approx(long)
        assert 5 / rate < short < 2 * 5 / rate


@pytest.mark.parametrize(
    ("scheduler_class", "budget", "ratio", "first_ms"),
    [
        (course.PolicyScheduler, 16_384, 40.3, 198.5),
        (course.ChunkedScheduler, 16_384, 40.3, 198.5),
        (course.ChunkedScheduler, 512, 1.5, 205.5),
        (course.ChunkedScheduler, 256, 1.1, 296.1),
    ],
)
def test_the_stall_behind_a_long_prompt(scheduler_class, budget, ratio, first_ms):
    chats = [Job(Request(f"chat {n}", 200, 400), 400) for n in range(8)]
    long = Job(Request("long", 14_050, 1, arrival=0.5), 1)
    served = serve(server(scheduler_class, 64, budget, 4000), [*chats, long], COST)
    gaps = [after - before for before, after in pairwise(served.token_times["chat 0"])]
    assert 1000 * median(gaps) == pytest.approx(5, abs=0.1)
    assert round(max(gaps) / median(gaps), 1) == ratio
    assert round(1000 * (served.token_times["long"][0] - 0.5), 1) == first_ms


def test_the_chunks_of_three_requests():
    config, kv = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8), RecordedKV(num_blocks=10, block_size=4)
    events = [[0, "add", "A", 4, 4], [0, "add", "B", 13, 3], [0, "add", "C", 5, 2]]
    plan, plans = {}, []
    for record in Run(course.ChunkedScheduler(config, kv), kv, events, config).go():
        changed = plan | record["plan"].get("scheduled", {})
        plan = {id: n for id, n in changed.items() if id not in record["plan"].get("dropped", [])}
        plans.append(plan)
    first = [{"A": 4, "B": 4}, {"A": 1, "B": 7}, {"A": 1, "B": 2, "C": 5}]
    assert plans == [*first, {"A": 1, "B": 1, "C": 1}, {"B": 1}, {}]
