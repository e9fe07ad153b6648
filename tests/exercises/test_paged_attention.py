"""The references of both attention exercises against torch's own attention, on batches that no challenge has."""

from random import Random

import pytest

from servelab import exercise
from servelab.exercises.paged_kv import _attention, online_softmax

torch = pytest.importorskip("torch")


def contiguous(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
    """Every request alone, on keys and values that lie in order: token by token copied out of the cache."""
    size, outs = k_cache.shape[1], []
    for rows, table, context in zip(q.split(query_lens), block_tables.tolist(), context_lens, strict=True):
        where = [(table[i // size], i % size) for i in range(context)]
        k, v = (torch.stack([cache[place] for place in where], dim=1) for cache in (k_cache, v_cache))
        earlier = torch.zeros(context - len(rows), *rows.shape[1:])
        out = torch.nn.functional.scaled_dot_product_attention(
            torch.cat([earlier, rows]).transpose(0, 1), k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        outs.append(out.transpose(0, 1)[context - len(rows) :])
    return torch.cat(outs)


def random_batch(seed: int) -> dict:
    rng = Random(seed)
    size, kv_heads, ids = rng.randint(1, 7), rng.choice((1, 2, 3)), iter(rng.sample(range(60), 60))
    requests = []
    for _ in range(rng.randint(1, 5)):
        context = rng.randint(1, 30 if size > 2 else 9)
        blocks = [next(ids) for _ in range(-(-context // size))]
        requests.append([rng.choice((1, context, rng.randint(1, context))), context, blocks])
    heads = [kv_heads * rng.choice((1, 2, 4)), kv_heads]
    plan = {"heads": heads, "head_dim": rng.choice((4, 8, 16)), "block_size": size, "num_blocks": 60}
    return _attention.batch("any", seed, requests, unused="nan", scale=rng.choice((0.125, 0.5)), gain=4, **plan)


@pytest.mark.parametrize("name", ["paged_attention", "paged_attention_blockwise"])
@pytest.mark.parametrize("seed", range(25))
def test_the_reference_equals_torch(seed, name):
    import servelab.reference.paged_kv as reference

    inputs = _attention.make_inputs(random_batch(seed))
    torch.testing.assert_close(getattr(reference, name)(*inputs), contiguous(*inputs), rtol=1e-5, atol=2e-6)


def test_written_tokens_are_attended_to():
    """`write_kv` and `paged_attention` agree on where a slot is."""
    import servelab.reference.paged_kv as reference

    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(9, 2, 8, generator=generator) for _ in range(3))
    caches = [torch.full((5, 4, 2, 8), float("nan")) for _ in range(2)]
    slots = torch.tensor([16, 17, 18, 19, 0, 1, 2, 3, 8, -1])
    padded = [torch.cat([x, x[:1]]) for x in (k, v)]
    reference.write_kv(*caches, *padded, slots)
    got = reference.paged_attention(q, *caches, torch.tensor([[4, 0, 2]]), [9], [9], 0.25)
    k, v, q = (x.transpose(0, 1) for x in (k, v, q))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
    torch.testing.assert_close(got, want.transpose(0, 1), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("seed", [2026, 1, 2, 3])
def test_no_gathered_context_is_as_small_as_a_block_wise_tensor_may_be(seed):
    for challenge in online_softmax.challenges(Random(seed)):
        if challenge["case"] != "one block at a time":
            continue
        most = online_softmax.most_elements(challenge)
        query, context, _ = max(challenge["requests"], key=lambda request: request[1])
        heads, kv_heads = challenge["heads"]
        assert most < context * kv_heads * challenge["head_dim"], "the keys of one request, gathered"
        assert most < query * heads * context, "the scores of one request, kept"


@pytest.mark.parametrize("seed", [2026, 1, 2, 3])
def test_every_case_but_the_smallest_has_a_long_context(seed):
    long = {asked["case"] for asked in online_softmax.challenges(Random(seed)) if online_softmax.is_long(asked)}
    assert long == {spec.name for spec in online_softmax.CASES} - {"one block"}


def fraction(answer) -> float:
    """What an answer to `online_softmax` earns."""
    import servelab.reference.paged_kv as reference

    subject = exercise.find("paged_kv.online_softmax")
    probes = exercise.make_probes(subject, Random(exercise.PUBLIC_SEED), (reference.paged_attention_blockwise,))
    recorded = exercise.record_all(subject, [probe.challenge for probe in probes], (answer,))
    return exercise.judge(subject, probes, recorded).fraction


def test_to_gather_is_no_answer_and_a_wrong_mask_is_one_mistake():
    import servelab.reference.paged_kv as reference

    def looks_ahead(q, k_cache, v_cache, block_tables, query_lens, context_lens, scale):
        """One block at a time, and each query sees the whole context."""
        rows = block_tables.repeat_interleave(torch.tensor(query_lens), dim=0)
        contexts = [context for query, context in zip(query_lens, context_lens, strict=True) for _ in range(query)]
        return reference.paged_attention_blockwise(q, k_cache, v_cache, rows, [1] * len(rows), contexts, scale)

    assert fraction(reference.paged_attention) == 0
    assert 0.6 < fraction(looks_ahead) < 0.8
