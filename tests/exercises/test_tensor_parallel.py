"""Unit 06: the reference is the dense layer, cut; and the figures of its text come out of it."""

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from servelab import exercise  # noqa: E402
from servelab.answers import named_answers  # noqa: E402
from servelab.cards import HardwareCard, hardware_card, model_card  # noqa: E402
from servelab.exercise import PUBLIC_SEED, make_probes, record  # noqa: E402
from servelab.exercises.tensor_parallel import _ranks as ranks  # noqa: E402
from servelab.exercises.tensor_parallel import token_exact  # noqa: E402
from servelab.plain import decode_array  # noqa: E402
from servelab.ranks import Cluster, Link, SimCluster  # noqa: E402
from servelab.ranks.communicator import Communicator, split  # noqa: E402
from servelab.reference import tensor_parallel as reference  # noqa: E402

ON_RANKS = ("linear_layers", "mlp", "attention", "vocabulary", "sequence_parallel")


@cache
def probes_of(name: str, seed: int) -> list:
    subject = exercise.find(f"tensor_parallel.{name}")
    return make_probes(subject, Random(seed), tuple(getattr(reference, answer) for answer in subject.answers))


def layered(name: str, seed: int) -> list:
    """The probes in which a layer ran that has a dense counterpart."""
    found = [probe for probe in probes_of(name, seed) if "ranks" in probe.challenge]
    special = {"misuse", "groups"}
    alone = ("gather", "scatter", "copied", "shard")
    found = [p for p in found if not special & set(p.challenge) and p.challenge.get("kind") not in alone]
    return [p for p in found if p.challenge.get("finish")] or found  # gradients are whole only then


def tensors(challenge: dict) -> dict:
    """The challenge's tensors, as leaves."""
    names = ("weight", "bias", "second", "second_bias", "gate", "up", "down", "norm", "q", "k", "v", "o")
    names += ("x", "table", "logits")
    return {name: ranks.leaf(challenge[name]) for name in names if challenge.get(name) is not None}


def dense(name: str, challenge: dict, given: dict):
    """The same computation on one rank, in plain torch: no line of it is the reference's."""
    x = given.get("x")
    if name == "linear_layers":
        y = x @ given["weight"].T + given.get("bias", 0)
        return y.clamp(min=0) @ given["second"].T + given["second_bias"] if challenge["kind"] == "pair" else y
    if name in ("mlp", "sequence_parallel"):
        if "norm" in given:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * given["norm"]
        a = x @ given["gate"].T
        return (a * a.sigmoid() * (x @ given["up"].T)) @ given["down"].T
    if name == "attention":
        return dense_attention(x, given, *challenge["heads"])
    if challenge["kind"] == "embedding":
        return given["table"][torch.tensor(challenge["tokens"])]
    return F.cross_entropy(given["logits"], torch.tensor(challenge["labels"]), reduction="none")


def dense_attention(x, given: dict, heads: int, kv_heads: int):
    q, k, v = (
        (x @ given[name].T).unflatten(2, (n, -1)) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2) @ given["o"].T


def made(probe, name: str) -> list:
    return [torch.tensor(decode_array(rank["made"][name]).copy()) for rank in probe.expected["ranks"]]


@pytest.mark.parametrize("seed", [PUBLIC_SEED, 11])
@pytest.mark.parametrize("name", ON_RANKS)
def test_the_reference_is_the_dense_layer_cut(name, seed):
    probes = layered(name, seed)
    assert probes
    for probe in probes:
        compare_with_dense(name, probe)


def compare_with_dense(name: str, probe) -> None:
    challenge, given = probe.challenge, tensors(probe.challenge)
    tolerance = ranks.ROUNDED if challenge.get("dtype") == "bfloat16" else ranks.EXACT
    y = dense(name, challenge, given)
    (y * ranks.tensor(challenge["factor"])).sum().backward()
    results = made(probe, "loss" if "logits" in given else "result")
    if challenge.get("kind") == "column" or name == "sequence_parallel":
        results = [torch.cat(results, 1 if name == "sequence_parallel" else -1)]
    for result in results:
        assert_close(result, y.detach(), tolerance)
    for rank, left in enumerate(probe.expected["ranks"]):
        for label, value in left["made"].items():
            if label.startswith("gradient of") and value is not None:
                grad = torch.tensor(decode_array(value).copy())
                assert_close(grad, part_of(challenge, label, given, rank, name), tolerance)


def part_of(challenge: dict, label: str, given: dict, rank: int, name: str) -> torch.Tensor:
    """This rank's part of the dense gradient that ``label`` names."""
    what, _, layer = label.removeprefix("gradient of ").partition(" of layer ")
    size, row = challenge["ranks"], challenge.get("kind") == "row" or layer == "2"
    key = {"rows": "table", "weight2": "second", "bias2": "second_bias"}.get(what + layer.replace("1", ""), what)
    grad = given[key].grad
    if key == "x" and name != "sequence_parallel":
        return grad.chunk(size, -1)[rank] if row else grad
    if key == "logits":
        return grad[:, challenge["bounds"][rank] : challenge["bounds"][rank + 1]]
    if key == "norm" or (what == "bias" and row):
        return grad
    if key in ("k", "v"):
        heads = challenge["heads"][1]
        return grad.tensor_split(heads)[rank * heads // size] if size > heads else grad.chunk(size)[rank]
    by_columns = key in ("down", "o") or (what == "weight" and row) or key == "x"
    return grad.tensor_split(size, 1 if by_columns else 0)[rank]


def assert_close(got, want, tolerance: float) -> None:
    atol = tolerance * max(1.0, want.abs().max().item())
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=atol)


# -- a whole layer


def whole_layer(heads: int, kv_heads: int) -> torch.Tensor:
    """Attention and MLP with norms and residuals, forward and backward; the gradient of the input."""
    comm, hidden = Communicator(), 2 * heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(hidden, hidden), (2 * kv_heads, hidden), (2 * kv_heads, hidden), (hidden, hidden)]
    shapes += [(36, hidden), (36, hidden), (hidden, 36)]
    q, k, v, o, *matrices = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    replicas = split(comm, max(1, comm.size // kv_heads))
    attention = reference.TensorParallelAttention(q, k, v, o, heads, kv_heads, comm, replicas)
    mlp = reference.TensorParallelMLP(*matrices, comm)
    x = torch.randn(2, 3, hidden, generator=generator, dtype=torch.float64).requires_grad_()
    y = x + attention(F.rms_norm(x, (hidden,)))
    (y + mlp(F.rms_norm(y, (hidden,)))).square().sum().backward()
    attention.finish_gradients()
    return x.grad


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 2), (6, 2, 6), (9, 3, 3), (4, 1, 4)])
def test_two_all_reduces_forward_and_two_backward(heads, kv_heads, size):
    run = SimCluster(size).run(whole_layer, heads, kv_heads)
    for grad in run.values:
        assert_close(grad, whole_layer(heads, kv_heads), 1e-9)
    activations = [e for e in run.collectives(0) if e.elements == 2 * 3 * 2 * heads]
    others = [e for e in run.collectives(0) if e not in activations]
    assert [event.name for event in activations] == ["all_reduce"] * 4
    assert len(others) == (2 if size > kv_heads else 0)


def test_a_layer_on_real_ranks_leaves_the_record_of_simulated_ones():
    real, simulated = (engine(2).run(whole_layer, 4, 1) for engine in (Cluster, SimCluster))
    assert_close(real.values[1], simulated.values[1], 1e-12)
    records = [[(e.name, e.elements, e.ranks) for e in run.collectives(1)] for run in (real, simulated)]
    assert records[0] == records[1] and len(records[0]) == 6


# -- what a learner is told


def test_a_run_that_breaks_off_names_rank_and_reason():
    def absent(x, comm):
        return x if comm.rank == 0 else comm.all_reduce(x.detach().clone())

    def raises(x, comm):
        raise RuntimeError("not today")

    subject = exercise.find("tensor_parallel.conjugate_pair")
    challenge = next(p.challenge for p in probes_of("conjugate_pair", PUBLIC_SEED) if p.challenge["ranks"] == 2)
    for function, words in ((absent, ["rank 1: in all_reduce", "waits for rank 0"]), (raises, ["rank 0", "not today"])):
        outcome = record(subject, challenge, (function, function))
        case = next(iter(subject.judge(challenge, outcome["transcript"], {})))
        assert not case.passed and all(word in case.message for word in words), case.message


def verdict_of(name: str, *answers) -> exercise.Verdict:
    subject, probes = exercise.find(f"tensor_parallel.{name}"), probes_of(name, PUBLIC_SEED)
    return exercise.judge(subject, probes, [record(subject, probe.challenge, answers) for probe in probes])


def first_failure(name: str, *answers) -> exercise.CaseVerdict:
    return verdict_of(name, *answers).first_failure


def test_a_missing_return_and_a_call_inside_the_graph_are_named():
    no_return = first_failure("conjugate_pair", reference.copy_to_ranks, lambda x, comm: None)
    assert "reduce_from_ranks returned None: is its return missing?" in no_return.message
    in_graph = first_failure("conjugate_pair", reference.copy_to_ranks, lambda x, comm: comm.all_reduce(x))
    assert "autograd does not see what comm does" in in_graph.message


def unwritten(name: str):
    """A class or a function as it is handed out."""
    space: dict = {}
    head = f"class {name}:\n    def __init__(self, *_, **__):" if name[0].isupper() else f"def {name}(*_):"
    exec(f"{head}\n        raise NotImplementedError", space)
    return space[name]


@pytest.mark.parametrize(
    ("name", "part", "asked_by"),
    [
        ("mlp", "ColumnParallelLinear", "linear_layers"),
        ("token_exact", "RowParallelLinear", "linear_layers"),
        ("token_exact", "TensorParallelMLP", "mlp"),
        ("token_exact", "my_heads", "attention"),
    ],
)
def test_an_open_part_of_an_earlier_exercise_is_named(monkeypatch, name, part, asked_by):
    probes_of(name, PUBLIC_SEED)  # of the reference with all of its parts
    monkeypatch.setattr(reference, part, unwritten(part))
    answers = [getattr(reference, answer) for answer in exercise.find(f"tensor_parallel.{name}").answers]
    message = first_failure(name, *answers).message
    assert message.startswith(part) and message.endswith(
        f" (exercise {asked_by}) is not written yet, and this check runs it"
    )


def test_an_open_part_of_the_exercise_itself_is_not_called_an_earlier_one():
    subject, probe = exercise.find("tensor_parallel.mlp"), probes_of("mlp", PUBLIC_SEED)[0]
    raised = record(subject, probe.challenge, (unwritten("TensorParallelMLP"),))["raised"]
    assert raised == {"type": "NotImplementedError", "message": "TensorParallelMLP.__init__ is not written yet"}


def layer_with(forward):
    return type("DecoderLayer", (reference.DecoderLayer,), {"forward": forward})


def test_a_wrong_decoder_layer_is_sent_to_the_half_and_the_hint_that_it_is_about():
    from servelab.llm.model import rotate

    def halves(self, x, angles, attend, keys=rotate, sums=1):
        normed = F.rms_norm(x, self.attn_norm.shape, self.attn_norm, self.config.rms_norm_eps)
        flat = (self.q(normed), F.linear(normed, self.k), F.linear(normed, self.v))
        q, k, v = (each.unflatten(1, (-1, self.config.head_dim)) for each in flat)
        y = F.linear(attend(rotate(q, *angles), keys(k, *angles), v).flatten(1), self.o.weight)
        x = reference.reduce_from_ranks(x + y, self.o.comm) if sums == "late" else x + self.o.comm.all_reduce(y)
        if sums == 2:
            x = self.o.comm.all_reduce(x.clone()) / self.o.comm.size
        return x + self.mlp(F.rms_norm(x, self.mlp_norm.shape, self.mlp_norm, self.config.rms_norm_eps))

    def failure(**changes):
        return first_failure("token_exact", layer_with(lambda *given: halves(*given, **changes)))

    not_rotated = failure(keys=lambda k, *_: k)
    assert (not_rotated.spec.name, not_rotated.hint) == ("a layer on one rank", 2)
    assert "what attend gets as k: [1, 0, 0] expected" in not_rotated.message
    assert not_rotated.message.endswith("token 0 is right, and position 0 is not rotated")
    added_before = failure(sums="late")
    assert (added_before.spec.name, added_before.hint) == ("KV heads split over the ranks", 3)
    assert added_before.message.endswith("; what attend gets is right")
    twice = failure(sums=2)
    assert (twice.spec.name, twice.hint) == ("two all-reduces a layer", 3)


def named(name: str, answer: str) -> exercise.CaseVerdict:
    """How a named answer fails first."""
    subject = exercise.find(f"tensor_parallel.{name}")
    found = next(each for each in named_answers(subject) if each.name == answer)
    return first_failure(name, *found.answers(reference))


def test_a_hint_is_about_the_failure():
    for name, answer, hint in (
        ("conjugate_pair", "g sums gradients, too", 2),
        ("conjugate_pair", "f overwrites the gradient", 3),
        ("sequence_parallel", "gathered once for gate and once for up", 2),
        ("sequence_parallel", "f's gradient in place of the scatter's", 2),
        ("token_exact", "the query layer kept on the class, which all ranks share", 3),
        ("token_exact", "the KV head with the rank's number", 1),
        ("token_exact", "the first KV heads on every rank", 1),
    ):
        assert named(name, answer).hint == hint, (name, answer)


def test_gathered_logits_are_called_too_much():
    failure = named("vocabulary", "full logits gathered")
    assert failure.spec.name == "few and small collectives for the loss"
    assert "at most 3 collectives with 8 elements for 2 tokens, got all_gather of 10 elements" in failure.message


@pytest.mark.parametrize("number", range(10))
def test_what_is_shown_of_the_decoder_layer_can_be_pasted(number, capsys):
    probe = probes_of("token_exact", PUBLIC_SEED)[number]
    space = dict(vars(reference)) | {"SimCluster": SimCluster}
    exec(exercise.find("tensor_parallel.token_exact").show(probe.challenge), space)
    printed = capsys.readouterr().out
    if "layer" not in probe.challenge:
        return
    assert printed.count("\n") == len(probe.expected["ranks"])
    for (prompt, token, *_), rank in zip(space["run"].values, probe.expected["ranks"], strict=True):
        for got, step in ((prompt, "the prompt"), (token, "the token after it")):
            assert_close(got, torch.tensor(decode_array(rank["made"][step])), 1e-12)


def test_a_view_is_called_one():
    class Column(reference.ColumnParallelLinear):
        def __init__(self, weight, bias, comm, copied=False):
            super().__init__(weight, bias, comm, copied)
            self.weight = torch.nn.Parameter(weight.chunk(comm.size)[comm.rank]) if comm.size > 1 else self.weight

    def view(full, dim, comm):
        return full.chunk(comm.size, dim)[comm.rank]

    message = first_failure("linear_layers", view, reference.ColumnParallelLinear, reference.RowParallelLinear).message
    assert "all of it: a view" in message
    message = first_failure("linear_layers", reference.shard, Column, reference.RowParallelLinear).message
    assert "12 elements for the 6 of weight: is it a view?" in message


def test_numbers_that_look_alike_are_told_apart():
    got = ranks.differs(*(ranks.plain(torch.tensor([x])) for x in (1.93447, 1.934474)), 1e-9, 2)
    assert got == "[0] expected 1.934474, got 1.93447"


def test_an_unfinished_earlier_unit_is_named_and_no_hint_given():
    from servelab.errors import CourseError
    from servelab.verdicts import Shown

    def step(*args, **more):
        raise CourseError("mixed_step_floor comes from the exercise floors", mend="Finish floors.")

    subject, answers = exercise.find("tensor_parallel.step_time"), [reference.all_reduce_seconds, reference.bound_by]
    probes = probes_of("step_time", PUBLIC_SEED)
    recorded = [record(subject, probe.challenge, (*answers, step, step)) for probe in probes]
    shown = Shown(subject, probes, exercise.judge(subject, probes, recorded))
    message = shown.verdict.first_failure.message
    assert (
        message.startswith("what this builds on is not written yet: mixed_step_floor") and "Finish floors." in message
    )
    assert not shown.hint


@pytest.mark.parametrize("name", ["conjugate_pair", *ON_RANKS])
def test_what_is_shown_can_be_pasted_and_gives_what_the_check_saw(name, capsys):
    for probe in probes_of(name, PUBLIC_SEED):
        if "ranks" not in probe.challenge:
            continue
        space = dict(vars(reference)) | {"SimCluster": SimCluster}
        exec(exercise.find(f"tensor_parallel.{name}").show(probe.challenge), space)
        printed = capsys.readouterr().out
        for rank, shown in enumerate(space["run"].values):
            assert any(what in shown for what in ("result", "loss", "shard")) and f"rank {rank}, sent: [" in printed
            for what, value in shown.items():
                assert f"rank {rank}, {what}: " in printed
                if torch.is_tensor(value):
                    assert_close(value, made(probe, what)[rank], 1e-12)


def test_what_the_docstring_demands_is_missed_by_name():
    class Fused(torch.nn.Module):
        def __init__(self, gate, up, down, comm):
            super().__init__()
            self.comm, self.both = (
                comm,
                torch.nn.Parameter(torch.cat([reference.shard(w, 0, comm) for w in (gate, up)])),
            )
            self.down = reference.RowParallelLinear(down, None, comm)

        def forward(self, x):
            gate, up = F.linear(reference.copy_to_ranks(x, self.comm), self.both).chunk(2, -1)
            return self.down(F.silu(gate) * up)

    verdict = verdict_of("mlp", Fused)
    failed = {case.spec.name: case.message for case in verdict.cases if not case.passed}
    assert set(failed) == {"holds its part of three matrices", "gradients of the weights", "within its own group"}
    assert all("the layer has no `self.gate`: see its docstring" in message for message in failed.values())


def test_a_result_of_a_wrong_shape_is_no_error_of_the_check():
    def along_batch(x, comm):
        return torch.cat([x] * comm.size)

    verdict = verdict_of("sequence_parallel", along_batch, reference.scatter_tokens, reference.SequenceParallelMLP)
    messages = {case.spec.name: case.message for case in verdict.cases if not case.passed}
    assert "expected float64 of shape [1, 8, 1], got float64 of shape [2, 4, 1]" in messages["gathers all tokens"]
    assert "the result has shape [2, 4, 1] instead of [1, 8, 1]" in messages["gradient of gathered tokens"]
    assert not any("raised" in message for message in messages.values())


def test_gradients_that_g_sums_are_called_t_times_too_large():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return comm.all_reduce(x.clone())

        @staticmethod
        def backward(ctx, grad):
            return ctx.comm.all_reduce(grad.clone()), None

    message = first_failure("conjugate_pair", reference.copy_to_ranks, Summed.apply).message
    assert message.endswith("; all of it is 2 times what it should be")


def test_an_error_of_several_lines_is_whole_in_the_first():
    def raises(x, comm):
        raise RuntimeError("not\n today")

    subject = exercise.find("tensor_parallel.conjugate_pair")
    challenge = probes_of("conjugate_pair", PUBLIC_SEED)[0].challenge
    failed = record(subject, challenge, (raises, raises))["transcript"]["failed"]
    assert failed.partition("\n")[0] == "rank 0 raised RuntimeError: not today"


def test_shard_alone_has_a_verdict_of_its_own():
    verdict = verdict_of(
        "linear_layers", reference.shard, *map(unwritten, ("ColumnParallelLinear", "RowParallelLinear"))
    )
    assert [case.spec.name for case in verdict.cases if case.passed] == ["shard alone: a rank's part, copied"]


@pytest.mark.parametrize(("name", "open_cases"), [("attention", 4), ("sequence_parallel", 3)])
def test_open_finish_gradients_stop_only_what_is_about_them(name, open_cases):
    subject = exercise.find(f"tensor_parallel.{name}")

    def finish_gradients(self):
        raise NotImplementedError

    *functions, layer = (getattr(reference, answer) for answer in subject.answers)
    verdict = verdict_of(name, *functions, type("Layer", (layer,), {"finish_gradients": finish_gradients}))
    failed = [case for case in verdict.cases if not case.passed]
    assert len(failed) == open_cases and all("finish_gradients is not written yet" in c.message for c in failed)


# -- figures of the text and of facts


def test_traffic_of_llama_70b():
    llama = model_card("llama-3.1-70b")
    for tokens, tp, boundary in ((8192, 37.58e9, 134.2e6), (32, 146.8e6, 0.524e6)):
        assert reference.tp_bytes(llama, tokens, 8) == pytest.approx(tp, rel=5e-4)
        assert reference.boundary_bytes(llama, tokens) == pytest.approx(boundary, rel=1e-3)
        assert reference.tp_bytes(llama, tokens, 8) / reference.boundary_bytes(llama, tokens) == 280
    assert reference.layer_elements(1, 1, 8, backward=True) == 7
    assert reference.tp_bytes(llama, 1, 4) / reference.boundary_bytes(llama, 1) == 240


def test_all_reduce_of_128_mib_and_of_16_kib():
    for rate, microseconds in ((450, 522), (300, 783), (63, 3728), (50, 4698), (12.5, 18790)):
        assert reference.all_reduce_seconds(2**27, 8, Link(0.0, rate * 1e9)) * 1e6 == pytest.approx(
            microseconds, abs=0.5
        )
    small = reference.all_reduce_seconds(2**14, 8, Link(1e-6, 450e9))
    assert small == pytest.approx(14e-6, rel=0.01)
    assert reference.boundary_bytes(model_card("llama-3.1-70b"), 32) == 524_288
    for rate, crossing in ((12.5e9, 500e3), (450e9, 18e6)):
        either_side = [reference.bound_by(n * crossing, 8, Link(5e-6, rate)) for n in (0.99, 1.01)]
        assert either_side == ["latency", "bandwidth"]
    nvlink = Link(1e-6, 450e9)
    assert [reference.bound_by(n, 8, nvlink) for n in (3.5e6, 3.6e6, 3.7e6)] == ["latency", "latency", "bandwidth"]


def test_a_layers_all_reduces_take_as_long_as_its_computation_at_166_us():
    """The picture of exercise 4: 10 ms over four ranks, and two all-reduces of 256 x 4096 float32."""

    def all_reduces(nbytes: int) -> None:
        for _ in range(2):
            Communicator().all_reduce(torch.zeros(nbytes // 4))

    message, link = 256 * 4096 * 4, Link(166e-6, 25e9)
    assert 2 * reference.all_reduce_seconds(message, 4, link) == pytest.approx(10e-3 / 4, rel=3e-3)
    assert reference.all_reduce_seconds(message, 4, Link(0, 25e9)) == pytest.approx(0.25e-3, rel=0.01)
    run = SimCluster(4, link=link).run(all_reduces, message)
    assert max(event.end for event in run.of_rank(0)) == pytest.approx(2.5e-3, rel=3e-3)


def test_step_time_against_degree():
    """The table of exercise 8. At TP16 each KV head is on two cards."""
    qwen = model_card("qwen3-8b")
    card = HardwareCard(name="2 TB/s", memory_gb=80, bandwidth_tb_s=2.0, dense_bf16_tflops=312)
    expected = {
        Link(): (8.79, 4.40, 2.20, 1.10, 0.59),
        Link(1e-6, 200e9): (8.79, 4.54, 2.64, 2.11, 2.75),
        Link(5e-6, 25e9): (8.79, 5.14, 4.39, 6.18, 11.43),
    }
    degrees = (1, 2, 4, 8, 16)
    for link, times in expected.items():
        found = [reference.step_seconds(qwen, card, link, tp, 1, 8192) * 1e3 for tp in degrees]
        assert found == pytest.approx(times, abs=0.0051)
    fastest = [reference.fastest_degree(qwen, card, link, degrees, 1, 8192) for link in expected]
    assert fastest == [16, 8, 4]


def test_gpt_fast_time_for_each_all_reduce():
    measured = {2: (168.84, 18), 4: (254.02, 24), 8: (328.43, 29)}
    layers = model_card("llama-2-7b").num_layers
    for tp, (rate, microseconds) in measured.items():
        assert (1 / rate - 1 / 104.9 / tp) / (2 * layers) * 1e6 == pytest.approx(microseconds, abs=0.5)


def test_the_advice_on_two_nodes():
    model, h100 = model_card("llama-3.1-405b"), hardware_card("h100-sxm")
    assert 2 * model.num_layers == 252
    read = [405e9 / tp / (h100.bandwidth_tb_s * 1e12) * 1e3 for tp in (8, 16)]
    assert read == pytest.approx([15.1, 7.6], abs=0.05)
    message = reference.boundary_bytes(model, 1)
    assert message == 32 * 2**10
    for tp, link, milliseconds in (
        (16, Link(20e-6, 12.5e9), 152),
        (16, Link(2e-6, 12.5e9), 16),
        (8, Link(1e-6, 450e9), 3.6),
    ):
        assert 252 * reference.all_reduce_seconds(message, tp, link) * 1e3 == pytest.approx(milliseconds, rel=0.03)
    assert 16 * 20e-6 * 12.5e9 / message == pytest.approx(122, abs=0.1)
    assert reference.boundary_bytes(model, 8192) == pytest.approx(268e6, rel=0.002)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_layers_on_a_gpu():
    """Two gloo ranks share one GPU: the layers take whatever device their weights are on."""

    def two_layers() -> torch.Tensor:
        comm, generator = Communicator(), torch.Generator().manual_seed(0)
        A, B, x = (torch.randn(s, generator=generator).double().cuda() for s in ((8, 6), (6, 8), (3, 6)))
        column, row = reference.ColumnParallelLinear(A, None, comm), reference.RowParallelLinear(B, None, comm)
        return row(column(x).relu()).detach().cpu()

    for y in Cluster(2, backend="gloo").run(two_layers).values:
        assert_close(y, two_layers(), 1e-12)


def test_a_decoder_layer_is_the_models_own():
    """On 1, 2 and 4 ranks, with the elements that the text's table has."""
    from servelab.llm import LLM, thread
    from servelab.llm.kv import ContiguousKV

    whole = thread.tiny_model()
    table = zip(probes_of("token_exact", PUBLIC_SEED), (1, 2, 4), (176_128, 88_064, 46_080), (64, 32, 32), strict=False)
    for probe, size, matrices, kv in table:
        tokens, own = torch.tensor(probe.challenge["tokens"]), f"layers.{probe.challenge['layer']}."
        weights = {name.replace(own, "layers.0."): w for name, w in whole.weights.items()} | {
            "norm": torch.ones(128).double()
        }
        one = LLM(replace(whole.config, num_layers=1), weights)
        want = one.forward(tokens, torch.arange(5), ContiguousKV())
        assert len(probe.expected["ranks"]) == size
        for made in (rank["made"] for rank in probe.expected["ranks"]):
            got = torch.tensor(
                np.concatenate([decode_array(made[step]) for step in ("the prompt", "the token after it")])
            )
            assert torch.allclose(F.rms_norm(got, (128,), eps=whole.config.rms_norm_eps), want, rtol=1e-9, atol=1e-9)
            assert made[token_exact.MATRIX_ELEMENTS] == matrices
            assert made[token_exact.KV_ELEMENTS] == 5 * kv
        sent = probe.expected["ranks"][0]["calls"].get("forward", [])
        assert sum(call[1] for call in sent) == (2 * 640 if size > 1 else 0)
