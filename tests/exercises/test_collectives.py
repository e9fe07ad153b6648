"""What the text of the collectives unit claims about its reference, figure by figure; and all of it on real ranks."""

from random import Random

import pytest

from servelab import answers, exercise
from servelab.ranks import Cluster, Link, SimCluster
from servelab.reference import collectives as reference
from servelab.verdicts import Shown

RINGS = ("naive_all_reduce", "ring_all_reduce", "tree_all_reduce")
HALVES = ("ring_reduce_scatter", "ring_all_gather")
NVLINK, ETHERNET = 1 / 450e9, 1 / 12.5e9
DECODE, PREFILL = 16_384, 134_217_728  # bytes of an all-reduce of Llama-3.1-70B: one token, and 8192


def run(name, p, n, link=None, links=None):
    """A run of one collective on int64 tensors in which each rank has its own decimal digit."""
    import torch
    import torch.distributed as dist

    def one_rank():
        tensor = torch.full((n,), 10 ** dist.get_rank())
        getattr(reference, name)(tensor)
        return tensor

    return SimCluster(p, link=link or Link(), links=links or {}).run(one_rank)


def sent(ran):
    return [ran.sent(rank) // 8 for rank in range(ran.world_size)]


def test_the_naive_example_sends_as_much_as_the_ring_but_all_through_the_root():
    assert sent(run("naive_all_reduce", 4, 8)) == [24, 8, 8, 8]
    assert sent(run("ring_all_reduce", 4, 8)) == [12, 12, 12, 12]


def test_reduce_scatter_holds_what_the_table_shows():
    values = [tensor.tolist() for tensor in run("ring_reduce_scatter", 3, 3).values]
    assert values == [[111, 101, 1], [10, 111, 11], [110, 100, 111]]


def test_with_two_elements_on_four_ranks_rank_2_sends_most():
    assert sent(run("ring_all_reduce", 4, 2)) == [2, 3, 4, 3]


def other_way(n):
    """A ring all-reduce in the direction opposite to the tables'."""
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(), dist.get_world_size()
    chunks = torch.ones(n, dtype=torch.int64).tensor_split(p)
    for hop in range(1, 2 * p - 1):
        sent, received = chunks[(rank + hop) % p], chunks[(rank + hop + 1) % p]
        incoming = torch.empty_like(received)
        reference.exchange(sent, (rank - 1) % p, incoming, (rank + 1) % p)
        received.mul_(hop < p).add_(incoming)
    return [chunk.tolist() for chunk in chunks]


def test_the_other_way_round_rank_3_sends_most():
    ran = SimCluster(4).run(other_way, 2)
    assert ran.values == [[[4], [4], [], []]] * 4
    assert sent(ran) == [3, 2, 3, 4]


def by_turns():
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(), dist.get_world_size()
    for sends in (rank % 2 == 0, rank % 2 == 1):
        if sends:
            dist.send(torch.ones(1), (rank + 1) % p)
        else:
            dist.recv(torch.empty(1), (rank - 1) % p)


@pytest.mark.parametrize(("p", "times"), [(2, 2), (3, 3), (4, 2), (5, 3)])
def test_sending_and_receiving_by_turns_takes_two_or_three_times_as_long(p, times):
    assert SimCluster(p, link=Link(bandwidth=4)).run(by_turns).seconds == times


def one_message():
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.empty(1), 0)


def test_send_returns_when_the_last_byte_has_left_and_recv_when_it_has_arrived():
    ran = SimCluster(2, link=Link(alpha=10.0, bandwidth=4)).run(one_message)
    assert {event.kind: event.end for event in ran.events} == {"send": 1.0, "recv": 11.0}


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("n", [0, 1, 7, 64])
def test_all_ranks_of_a_ring_send_what_they_must(p, n):
    ran = run("ring_all_reduce", p, n, Link(alpha=1.0))
    assert sum(sent(ran)) == 2 * (p - 1) * n
    assert all(2 * (n - -(-n // p)) <= elements <= 2 * (n - n // p) for elements in sent(ran))
    assert ran.seconds == 2 * (p - 1)


def test_the_tree_of_six():
    ran = run("tree_all_reduce", 6, 1, Link(bandwidth=8))
    messages = [(event.rank, event.peer) for event in ran.events if event.kind == "send"]
    assert set(messages) == {(a, b) for x, y in ((1, 0), (3, 2), (5, 4), (2, 0), (4, 0)) for a, b in ((x, y), (y, x))}
    assert (len(messages), ran.seconds) == (10, 6)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("n", [8, 800])
def test_the_virtual_clock_shows_what_the_models_say(p, n):
    link = Link(alpha=5e-6, bandwidth=1e9)
    seconds = {name: run(name, p, n, link).seconds for name in RINGS}
    models = [cost(5e-6, 1e-9, 8 * n, p) for cost in (reference.ring_cost, reference.tree_cost)]
    assert [seconds["ring_all_reduce"], seconds["tree_all_reduce"]] == pytest.approx(models)
    naive = reference.naive_cost(5e-6, 1e-9, 8 * n, p) - (p - 2) * 5e-6
    assert seconds["naive_all_reduce"] == pytest.approx(naive)


def equal_parts(n):
    import torch
    import torch.distributed as dist

    p = dist.get_world_size()
    reference.all_to_all(*([torch.zeros(n // p, dtype=torch.int64) for _ in range(p)] for _ in range(2)))


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("n", [0, 840, 8400])
def test_one_pass_and_the_all_to_all_take_what_the_models_say(p, n):
    link = Link(alpha=5e-6, bandwidth=1e9)
    for name in HALVES:
        assert run(name, p, n, link).seconds == pytest.approx(reference.ring_pass_cost(5e-6, 1e-9, 8 * n, p))
    shifts = SimCluster(p, link=link).run(equal_parts, n).seconds
    assert shifts == pytest.approx(reference.all_to_all_cost(5e-6, 1e-9, 8 * n, p))


def test_costs_of_the_example():
    arguments = (1.0, 0.5, 4, 4)
    assert reference.ring_pass_cost(*arguments) == reference.all_to_all_cost(*arguments) == 4.5
    assert [cost(*arguments) for cost in (reference.naive_cost, reference.ring_cost, reference.tree_cost)] == [
        18,
        9,
        12,
    ]
    assert reference.crossover(1.0, 0.5, 4) == pytest.approx(1.6)
    assert reference.ring_cost(1.0, 0.5, 1.6, 4) == pytest.approx(7.2)
    assert reference.tree_cost(1.0, 0.5, 1.6, 4) == pytest.approx(7.2)


@pytest.mark.parametrize("p", range(2, 65))
def test_ring_and_tree_take_equally_long_at_the_crossover(p):
    n = reference.crossover(5e-6, 1e-9, p)
    assert n >= 0 and (n == 0) == (p <= 3)
    assert reference.ring_cost(5e-6, 1e-9, n, p) == pytest.approx(reference.tree_cost(5e-6, 1e-9, n, p))


@pytest.mark.parametrize(("gb_s", "microseconds"), [(450, 522), (300, 783), (63, 3728), (50, 4698), (12.5, 18_790)])
def test_bytes_of_a_prefill_over_real_links(gb_s, microseconds):
    assert 1e6 * reference.ring_cost(0, 1 / (gb_s * 1e9), PREFILL, 8) == pytest.approx(microseconds, rel=1e-3)


def test_decoding_is_latency_bound():
    assert 1e6 * reference.ring_cost(0, NVLINK, DECODE, 8) == pytest.approx(0.06, abs=0.005)
    assert 1e6 * reference.ring_cost(0, ETHERNET, DECODE, 8) == pytest.approx(2.3, abs=0.05)
    assert 1e6 * reference.ring_cost(5e-6, 1 / 14e9, DECODE, 8) == pytest.approx(72, abs=0.5)


def test_advice_on_slow_decoding():
    step = 160 * reference.ring_cost(20e-6, ETHERNET, DECODE, 8)
    assert step == pytest.approx(0.045, abs=0.0005)
    assert 1 - 160 * reference.ring_cost(20e-6, ETHERNET / 4, DECODE, 8) / step < 0.01
    assert 160 * reference.tree_cost(20e-6, ETHERNET, DECODE, 8) == pytest.approx(0.020, abs=0.001)
    prefill = reference.ring_cost(20e-6, ETHERNET, PREFILL, 8)
    assert prefill == pytest.approx(0.0191, abs=0.00005)
    assert reference.ring_cost(0, ETHERNET, PREFILL, 8) == pytest.approx(0.0188, abs=0.00005)
    assert reference.ring_cost(20e-6, 0, PREFILL, 8) == pytest.approx(0.00028)
    assert 3.8 < prefill / reference.ring_cost(20e-6, ETHERNET / 4, PREFILL, 8) < 4


def test_a_tree_over_two_machines_crosses_the_network_twice():
    fast, slow = Link(alpha=1e-6, bandwidth=450e9), Link(alpha=20e-6, bandwidth=12.5e9)
    links = {(a, b): slow for a in range(8) for b in range(8) if (a < 4) != (b < 4)}
    seconds = {name: run(name, 8, DECODE // 8, fast, links).seconds for name in RINGS}
    assert seconds["ring_all_reduce"] == pytest.approx(reference.ring_cost(20e-6, ETHERNET, DECODE, 8), rel=1e-3)
    assert 160 * seconds["tree_all_reduce"] == pytest.approx(0.0075, abs=5e-5)


def test_answers_to_the_questions():
    answers = reference.answers
    assert answers["bytes sent"] == 2 * 7 / 8 * 128
    assert (
        answers["root against ring"] == sent(run("naive_all_reduce", 8, 8))[0] / sent(run("ring_all_reduce", 8, 8))[0]
    )
    assert answers["rounds"] == run("ring_all_reduce", 16, 16, Link(alpha=1.0)).seconds
    algbw, busbw = reference.bandwidths("all_reduce", 1e9, answers["from busbw"] / 1e3, 8)
    assert busbw == pytest.approx(235e9, rel=1e-3) and algbw < busbw


def test_one_slow_link_slows_the_whole_ring():
    fast, slow = Link(bandwidth=1e9), {(0, 1): Link(bandwidth=1e8)}
    assert run("ring_all_reduce", 8, 800, fast, slow).seconds / run("ring_all_reduce", 8, 800, fast).seconds > 9


def test_the_fit_of_three_points():
    assert reference.fit_alpha_beta([0, 0, 10], [1.0, 2.0, 7.0]) == pytest.approx((1.2, 0.58))


def all_reduce(tensor, group=None):
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)


def all_gather(tensor, group=None):
    import torch.distributed as dist

    own = tensor.view(-1).tensor_split(dist.get_world_size(group))
    for index, chunk in enumerate(own):
        dist.broadcast(chunk, group=group, group_src=index)


def swap(outgoing, to, incoming, source, group=None):
    import torch.distributed as dist

    held = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, outgoing, group=group)
    incoming.copy_(held[source])


def ready_all_to_all(outputs, inputs, group=None):
    import torch.distributed as dist

    dist.all_to_all(list(outputs), list(inputs), group=group)


READY = {
    "exchange": swap,
    **dict.fromkeys(RINGS, all_reduce),
    "ring_reduce_scatter": all_reduce,
    "ring_all_gather": all_gather,
    "all_to_all": ready_all_to_all,
}


@pytest.mark.parametrize("name", READY)
def test_a_ready_collective_earns_nothing(name):
    subject = exercise.find(f"collectives.{name}")
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), (getattr(reference, name),))
    verdict = exercise.judge(subject, probes, [exercise.record(subject, p.challenge, (READY[name],)) for p in probes])
    assert verdict.fraction == 0
    assert verdict.first_failure.spec.name == "sends its own messages"


@pytest.mark.parametrize("seed", [exercise.PUBLIC_SEED, 1, 2, 3])
@pytest.mark.parametrize("name", READY)
def test_every_number_of_ranks_is_tried_and_all_but_one_with_a_size_that_it_does_not_divide(name, seed):
    tried, uneven = set(), set()
    for challenge in exercise.find(f"collectives.{name}").challenges(Random(seed)):
        p, n, splits = challenge["world"], challenge["n"], challenge.get("splits")
        if challenge["groups"] is None:
            tried.add(p)
            other_sizes = "shift" in challenge and challenge["shift"] % p
            if other_sizes or n % p or (splits and len({size for row in splits for size in row}) > 1):
                uneven.add(p)
    assert tried >= set(range(1, 9)) and uneven >= set(range(2, 9))


NEAR_MISSES = {
    "naive_all_reduce": ["nothing is sent back"],
    "ring_reduce_scatter": [
        "rank r gets the chunk after its own",
        "the last hop left out",
        "one hop too many",
        "one hop and no more",
    ],
    "ring_all_gather": [
        "off by one: the own chunk is not the first",
        "what arrives is added",
        "into a buffer",
        "the last hop left out",
        "one hop and no more",
        "the own chunk in each hop, whatever its size",
    ],
    "ring_all_reduce": [
        "the reduce-scatter alone",
        "the all-gather first",
        "the last hop left out",
        "one hop too many",
        "a sum in a new tensor, returned",
    ],
    "tree_all_reduce": ["up only", "the last level left out"],
}
OTHER_ALGORITHMS = {
    "naive_all_reduce": ["a tree"],
    "ring_reduce_scatter": [
        "a whole all-reduce",
        "each part straight to its owner",
        "two half rings in opposite directions",
        "what arrives replaces the own share",
    ],
    "ring_all_gather": [
        "an all-reduce of tensors that are zero but for one chunk",
        "each chunk straight to everybody",
    ],
    "ring_all_reduce": [
        "the naive algorithm",
        "a tree",
        "two half rings in opposite directions",
        "sent round, but nothing added",
        "sent round twice, but nothing added",
    ],
    "tree_all_reduce": ["the naive algorithm", "a ring"],
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_another_algorithm_earns_less_than_a_near_miss_of_the_right_one(name):
    subject = exercise.find(f"collectives.{name}")
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), (getattr(reference, name),))
    named = {answer.name: answer.answers(reference) for answer in answers.named_answers(subject)}

    def earned(answer):
        recorded = [exercise.record(subject, probe.challenge, named[answer]) for probe in probes]
        return exercise.judge(subject, probes, recorded).fraction

    others = [earned(answer) for answer in OTHER_ALGORITHMS[name]]
    assert max(others) < min(0.4, *(earned(answer) for answer in NEAR_MISSES[name]))


HINTS = {
    ("exchange", "global ranks asked of a group that is None"): 3,
    ("naive_all_reduce", "everybody to everybody"): 1,
    ("ring_reduce_scatter", "each part straight to its owner"): 1,
    ("ring_reduce_scatter", "two half rings in opposite directions"): 1,
    ("ring_reduce_scatter", "chunks of the first dimension"): 3,
    ("ring_reduce_scatter", "one rank returns the tensor as it is, not flat"): 3,
    ("ring_all_gather", "each chunk straight to everybody"): 1,
    ("ring_all_gather", "the last hop left out"): 2,
    ("ring_all_gather", "into a buffer"): 1,
    ("ring_all_reduce", "padded to a multiple of p"): 2,
    ("costs", "the tree goes up only"): 1,
    ("costs", "binary digits of p"): 2,
    ("all_to_all", "all of it in one batch, with one rank, too"): 1,
}


@pytest.mark.parametrize("name, answer", HINTS)
def test_the_hint_that_is_named_is_about_the_fault(name, answer):
    subject = exercise.find(f"collectives.{name}")
    mine = tuple(getattr(reference, each) for each in subject.answers)
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), mine)
    made = next(each for each in answers.named_answers(subject) if each.name == answer).answers(reference)
    made = made if isinstance(made, tuple) else (made,)
    recorded = exercise.record_all(subject, [probe.challenge for probe in probes], made)
    shown = Shown(subject, probes, exercise.judge(subject, probes, recorded))
    assert shown.hint.startswith(f"Hint {HINTS[name, answer]} ")


def one_element(tensor, group=None, times=1):
    """An element to the next rank, and nothing else."""
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(group), dist.get_world_size(group)
    for _ in range(times if p > 1 and tensor.numel() else 0):
        element = tensor.view(-1)[:1].clone()
        reference.exchange(element, (rank + 1) % p, torch.empty_like(element), (rank - 1) % p, group)
    return tensor.view(-1).tensor_split(p)[rank]


def an_element_each_hop(tensor, group=None):
    import torch.distributed as dist

    return one_element(tensor, group, dist.get_world_size(group) - 1)


def lone_message(tensor, group=None):
    """The first rank's tensor to the second rank, and nothing else."""
    import torch.distributed as dist

    rank, p = dist.get_rank(group), dist.get_world_size(group)
    if p > 1 and rank == 0:
        dist.send(tensor, group=group, group_dst=1)
    elif rank == 1:
        dist.recv(tensor, group=group, group_src=0)
    return tensor.view(-1).tensor_split(p)[rank]


@pytest.mark.parametrize("seed", [exercise.PUBLIC_SEED, 1])
@pytest.mark.parametrize("token", [one_element, an_element_each_hop, lone_message])
@pytest.mark.parametrize("name", [*RINGS, *HALVES])
def test_a_token_message_earns_nothing(name, token, seed):
    subject = exercise.find(f"collectives.{name}")
    probes = exercise.make_probes(subject, Random(seed), (getattr(reference, name),))
    recorded = [exercise.record(subject, probe.challenge, (token,)) for probe in probes]
    assert exercise.judge(subject, probes, recorded).fraction == 0


SIZES = (0, 2, 1001)


def compare(name, n, group):
    """A collective of the unit beside the library's; the largest difference."""
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.randn(n, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    theirs, halves = mine.clone(), {"ring_reduce_scatter": slice(rank, rank + 1), "ring_all_gather": slice(p)}
    (all_gather if name == "ring_all_gather" else all_reduce)(theirs, group)
    getattr(reference, name)(mine, group)
    pairs = zip(mine.tensor_split(p), theirs.tensor_split(p), strict=True)
    return max((one - other).abs().sum().item() for one, other in list(pairs)[halves.get(name, slice(p))])


def shuffle(group):
    """An all-to-all of parts with 0, 1 or 2 elements: whether each part is where it belongs."""
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(group), dist.get_world_size(group)
    outputs = [torch.empty((source + 2 * rank) % 3) for source in range(p)]
    reference.all_to_all(outputs, [torch.full(((rank + 2 * to) % 3,), 10.0 * rank + to) for to in range(p)], group)
    return [part.tolist() for part in outputs] == [[10.0 * i + rank] * ((i + 2 * rank) % 3) for i in range(p)]


def swapped(group):
    """An exchange of r + 1 elements with the ranks beside this one: whether the right ones have come."""
    import torch
    import torch.distributed as dist

    rank, p = dist.get_rank(group), dist.get_world_size(group)
    source = (rank - 1) % p
    incoming = torch.empty(source + 1)
    reference.exchange(torch.full((rank + 1,), float(rank)), (rank + 1) % p, incoming, source, group)
    return incoming.tolist() == [float(source)] * (source + 1)


def everything():
    """All that the unit has built, in the world and among the ranks with even numbers."""
    import torch.distributed as dist

    even, found = dist.new_group(list(range(0, dist.get_world_size(), 2))), {}
    for group in (None, even):
        if group is None or dist.get_rank() % 2 == 0:
            where = "even ranks" if group else "all ranks"
            found |= {(name, n, where): compare(name, n, group) for name in (*RINGS, *HALVES) for n in SIZES}
            found |= {(test.__name__, where): 0.0 if test(group) else 1.0 for test in (shuffle, swapped)}
    return found


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_same_functions_on_real_ranks(p):
    values = Cluster(p, backend="gloo").run(everything).values
    assert [len(found) for found in values] == [34 if rank % 2 == 0 else 17 for rank in range(p)]
    assert [what for found in values for what, difference in found.items() if not difference < 1e-9] == []


@pytest.mark.gpu
def test_the_ring_on_gpus():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    p = min(4, torch.cuda.device_count())
    assert max(Cluster(p, backend="nccl").run(on_gpu, 1001).values) < 1e-9


def on_gpu(n):
    import torch
    import torch.distributed as dist

    from servelab.ranks import device

    mine = torch.arange(n, dtype=torch.float64, device=device()) + dist.get_rank()
    theirs = mine.clone()
    reference.ring_all_reduce(mine)
    dist.all_reduce(theirs)
    return (mine - theirs).abs().max().item()
