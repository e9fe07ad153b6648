"""The reference of unit 01 gives the published figures, and those that the unit's text states."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from servelab import answers, exercise
from servelab.cards import SIX_LAYOUTS, Layout, hardware_card, model_card
from servelab.exercises.memory import _calls as calls
from servelab.plain import plain
from servelab.reference import memory as reference

# Parameters, bytes of KV a token in bf16, GiB of 8192 tokens. Dimensions: litgpt config.py at 2685705 and the configs
# that it links. Published counts: the models' own pages (Llama-2-7B 6,738,415,616; Llama-3.1-8B 8,030,261,248;
# Qwen2.5-7B 7,615,616,512; Mixtral 46.7B; SmolLM2 134,515,008); KV of DeepSeek-V3, Qwen2.5-72B and Llama-3.1-405B:
# "Insights into DeepSeek-V3", ISCA 2025, Table 1. OPT-13B: Kwon et al., SOSP 2023, section 3.
TABLE = {
    "llama-2-7b": (6_738_415_616, 524_288, 4.0),
    "llama-2-13b": (13_015_864_320, 819_200, 6.25),
    "llama-2-70b": (68_976_648_192, 327_680, 2.5),
    "llama-3.1-8b": (8_030_261_248, 131_072, 1.0),
    "llama-3.1-70b": (70_553_706_496, 327_680, 2.5),
    "llama-3.1-405b": (405_853_388_800, 516_096, 3.9375),
    "qwen2.5-7b": (7_615_616_512, 57_344, 0.4375),
    "qwen2.5-72b": (72_706_203_648, 327_680, 2.5),
    "qwen3-0.6b": (596_049_920, 114_688, 0.875),
    "qwen3-8b": (8_190_735_360, 147_456, 1.125),
    "qwen3-32b": (32_762_123_264, 262_144, 2.0),
    "qwen3-30b-a3b": (30_532_122_624, 98_304, 0.75),
    "qwen3-235b-a22b": (235_093_634_560, 192_512, 1.46875),
    "mixtral-8x7b": (46_702_792_704, 131_072, 1.0),
    "deepseek-v2": (235_741_434_880, 69_120, 0.52734375),
    "deepseek-v3": (671_026_419_200, 70_272, 0.5361328125),
    "opt-13b": (12_853_473_280, 819_200, 6.25),
    "opt-66b": (65_719_701_504, 2_359_296, 18.0),
    "opt-175b": (174_604_468_224, 4_718_592, 36.0),
    "gpt-3-175b": (174_604_259_328, 4_718_592, 36.0),
    "smollm2-135m": (134_515_008, 23_040, 0.17578125),
}
# Parameters that one token uses, in billions
ACTIVE = {
    "qwen3-30b-a3b": 3.353,
    "qwen3-235b-a22b": 22.19,
    "mixtral-8x7b": 12.88,
    "deepseek-v2": 21.4,
    "deepseek-v3": 37.6,
}
H100 = hardware_card("h100-sxm")
QWEN = model_card("qwen3-235b-a22b")
LLAMA = model_card("llama-3.1-70b")


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_models(name):
    card, (parameters, per_token, gib) = model_card(name), TABLE[name]
    assert sum(reference.parameters(card).values()) == parameters
    assert reference.weight_bytes(card) == 2 * parameters
    assert reference.kv_bytes_per_token(card) == per_token
    assert reference.kv_gib(card, 8192) == gib


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters(name):
    card = model_card(name)
    active = reference._weights_used(card, card.experts_per_token) / 1e9
    assert active == pytest.approx(ACTIVE[name], abs=0.06 if ACTIVE[name] > 21.2 else 0.005)


def test_fp8_halves_the_cache_and_that_is_the_other_number_in_print():
    """rtp-llm.ai gives 96 KB for Qwen3-235B: that is an fp8 cache."""
    assert reference.kv_bytes_per_token(QWEN, 1) == 96_256


def test_published_ratios_of_kv():
    """ISCA 2025, Table 1 prints 4.66 (right) and 7.28 (its own numbers give 7.34)."""
    deepseek, qwen, llama = (TABLE[name][1] for name in ("deepseek-v3", "qwen2.5-72b", "llama-3.1-405b"))
    assert qwen / deepseek == pytest.approx(4.66, abs=0.005)
    assert llama / deepseek == pytest.approx(7.344, abs=0.0005)


# GiB a card, cards that hold a request, GiB in all: ai-infra-book, case-studies/model-parallelism.md at 548c568 (A),
# vLLM's docs on expert, data and context parallel deployment (B, C, D, F)
LAYOUTS = {
    "A": (0.734375, 8, 5.875),
    "B": (0.734375, 2, 1.46875),
    "C": (0.3671875, 8, 2.9375),
    "D": (0.18359375, 8, 1.46875),
    "E": (0.3671875, 4, 1.46875),
    "F": (1.46875, 1, 1.46875),
}


@pytest.mark.parametrize("layout", SIX_LAYOUTS, ids=lambda layout: layout.name[0])
def test_the_six_layouts(layout):
    gib, holders, in_all = LAYOUTS[layout.name[0]]
    assert reference.kv_bytes_per_rank(QWEN, 8192, layout) == gib * 2**30
    assert layout.cards // layout.split_requests == holders
    assert gib * holders == in_all


def test_weights_of_layout_a_and_what_fits_beside_them():
    a, b = SIX_LAYOUTS[:2]
    assert reference.weight_bytes_per_rank(QWEN, a) == 64_821_419_008
    assert reference.kv_bytes_per_rank(QWEN, 8192, a) == 788_529_152
    assert reference.kv_room(H100, QWEN, a, 1.0, 0) == 15_178_580_992
    assert [reference.max_concurrent(H100, QWEN, layout, 8192, 1.0, 0) for layout in (a, b)] == [19, 76]


@pytest.mark.parametrize(
    ("tp", "pp", "gib"), [(1, 1, 2.5), (4, 1, 0.625), (8, 1, 0.3125), (4, 2, 0.3125), (16, 1, 0.3125)]
)
def test_kv_a_card_of_the_70b_model(tp, pp, gib):
    layout = Layout(cards=tp * pp, split_heads=tp, split_layers=pp)
    assert reference.kv_bytes_per_rank(LLAMA, 8192, layout) / 2**30 == gib


# Tokens in the instance at 0.92 of 80e9 bytes less 2e9
@pytest.mark.parametrize(
    ("tp", "dp", "weight_size", "tokens"),
    [
        (2, 1, 2, 6_386),
        (4, 1, 2, 443_398),
        (4, 2, 2, 886_796),
        (8, 1, 2, 1_317_421),
        (2, 4, 1, 886_796),
        (4, 2, 1, 1_317_421),
        (8, 1, 1, 1_532_734),
    ],
)
def test_room_for_the_70b_model(tp, dp, weight_size, tokens):
    layout = Layout(cards=tp * dp, split_heads=tp, split_requests=dp)
    found = reference.max_tokens(H100, LLAMA, layout, weight_dtype_bytes=weight_size)
    # the figures divide all weights by TP; norms are on every card, a few tokens' worth
    assert found == pytest.approx(tokens, abs=60)


def test_the_text_s_numbers_of_the_70b_model():
    layouts = [Layout(cards=tp * dp, split_heads=tp, split_requests=dp) for tp, dp in ((2, 1), (4, 1), (4, 2), (8, 1))]
    found = [int(reference.max_tokens(H100, LLAMA, layout)) for layout in layouts]
    assert found == [6_378, 443_373, 886_747, 1_317_364]
    one = Layout(cards=4, split_heads=4)
    assert reference.weight_bytes_per_rank(LLAMA, one) / 1e9 == pytest.approx(35.28, abs=0.005)
    assert reference.kv_room(H100, LLAMA, one) / 1e9 == pytest.approx(36.32, abs=0.005)
    assert reference.kv_room(H100, LLAMA, Layout(cards=2, split_heads=2)) / 1e9 == pytest.approx(1.04, abs=0.005)


# Milliseconds of a decode step on H100 at 2048 tokens of context, computed from (W + B S kv) / (tp bandwidth)
@pytest.mark.parametrize(
    ("name", "tp", "batch", "ms"),
    [
        ("llama-3.1-8b", 1, 1, 4.87),
        ("llama-3.1-8b", 1, 32, 7.36),
        ("llama-3.1-8b", 1, 128, 15.05),
        ("llama-3.1-8b", 1, 256, 25.31),
        ("llama-3.1-70b", 4, 1, 10.58),
        ("llama-3.1-70b", 4, 32, 12.13),
        ("llama-3.1-70b", 4, 128, 16.94),
        ("llama-3.1-70b", 4, 256, 23.35),
    ],
)
def test_step_floors(name, tp, batch, ms):
    assert reference.decode_step_floor(model_card(name), H100, batch, 2048, tp) * 1e3 == pytest.approx(ms, abs=0.005)


@pytest.mark.parametrize(
    ("name", "tokens"), [("llama-3.1-8b", 122_532), ("llama-3.1-70b", 430_625), ("llama-2-7b", 25_705)]
)
def test_tokens_that_weigh_as_much_as_the_weights(name, tokens):
    card = model_card(name)
    found = reference.weight_bytes(card) / reference.kv_bytes_per_token(card)
    assert found == pytest.approx(tokens, abs=1)
    if name == "llama-3.1-8b":  # the text says from which token on
        assert 122_532 < found < 122_533


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("a100-40-sxm", 200.6),
        ("a100-80-sxm", 153.0),
        ("h100-sxm", 295),
        ("h100-pcie", 378),
        ("h200-sxm", 206),
        ("b200", 281),
        ("l40s", 419),
        ("l4", 403),
        ("a10g", 117),
        ("rtx-4090", 164),
    ],
)
def test_ridge_points(name, ridge):
    assert reference.ridge_point(hardware_card(name)) == pytest.approx(ridge, abs=0.5)


def test_critical_batches():
    models = ("llama-3.1-8b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")
    found = [reference.critical_batch(model_card(name), H100) for name in models]
    assert [round(batch) for batch in found] == [295, 1181, 4724, 9447]
    dense = model_card("llama-3.1-8b")
    assert reference.critical_batch(dense, H100, 1, 2) == found[0] / 2
    assert reference.critical_batch(dense, H100, 1, 1) == found[0]


@pytest.mark.parametrize(
    ("name", "intensity"),
    [
        ("llama-2-7b", 1),
        ("llama-3.1-8b", 4),
        ("llama-3.1-70b", 8),
        ("llama-3.1-405b", 16),
        ("qwen3-235b-a22b", 16),
        ("deepseek-v3", 241.8),
    ],
)
def test_attention_intensity(name, intensity):
    assert reference.attention_intensity(model_card(name)) == pytest.approx(intensity, abs=0.05)


@pytest.mark.parametrize("card", calls.all_models(), ids=lambda card: card.name)
def test_norms_biases_positions_and_routers_are_few(card):
    bare = replace(card, qkv_bias=False, all_biases=False, qk_norm=False, position_rows=0, router_bias=False)
    routed = card.num_layers - card.dense_layers if card.num_experts else 0
    norms = (2 * card.num_layers + 1) * card.hidden_size + card.num_layers * (card.q_lora_rank + card.kv_lora_rank)
    few = sum(reference.parameters(card).values()) - sum(reference.parameters(bare).values()) + norms
    few += routed * card.hidden_size * card.num_experts
    active = reference._weights_used(card, card.experts_per_token) - reference.parameters(card)["embedding"]
    assert few / active < 0.005


def test_experts_that_mixtral_reads():
    found = [reference.experts_read(model_card("mixtral-8x7b"), tokens) for tokens in (1, 4, 16)]
    assert found == pytest.approx([2, 5.47, 7.92], abs=0.005)


def test_the_advice_in_the_unit_s_last_question():
    layouts = [Layout(cards=8, split_heads=tp, split_requests=dp) for tp, dp in ((2, 4), (4, 2), (8, 1))]
    assert [reference.max_concurrent(H100, LLAMA, layout, 3000) for layout in layouts] == [8, 294, 439]
    assert reference.max_concurrent(H100, LLAMA, layouts[0], 3000, weight_dtype_bytes=1) == 292
    assert int(reference.max_tokens(H100, LLAMA, layouts[0], weight_dtype_bytes=1)) == 886_779


def test_of_the_worked_example_only_the_last_row_does_not_fit():
    small = model_card("llama-3.1-8b")
    held = {n: reference.weight_bytes(small) + n * 2048 * 131_072 for n in (1, 32, 128, 256)}
    assert [n for n, size in held.items() if size > 80e9] == [256]


def message(got, want):
    (case,) = calls.judge({"case": "a"}, {"returned": got, "error": None}, {"returned": want, "error": None})
    assert not case.passed
    return case.message


def test_a_message_tells_close_numbers_apart():
    assert message(7.242976e-06, 7.23952e-06).endswith("(1.00048 times it)")
    assert message(17_753, 17_753.8333).endswith("(0.999953 times it)")
    assert message(2.0, 4.0) == "expected 4, got 2 (0.5 times it)"
    assert message(1.00000000002, 1.0) == "expected 1.0, got 1.00000000002 (1.00000000002 times it)"


def test_a_message_names_the_keys_that_are_missing_or_too_many():
    assert message({"a": 1}, {"a": 1, "kv": 2}) == "keys of the dictionary: missing: kv"
    assert message({"a": 1, "x": 2}, {"a": 1}) == "keys of the dictionary: not asked for: x"
    assert message({"x": 2}, {"a": 1}) == "keys of the dictionary: missing: a; not asked for: x"
    assert message([1], {"a": 1}) == "expected a dictionary, got [1]"
    assert message({"a": 2}, {"a": 1}) == "a: expected 1, got 2"


@pytest.mark.parametrize(
    "value", [None, True, -1, float("nan"), 2**1024 - 1, "x", [], {1: 2}, np.zeros(3), object], ids=str
)
@pytest.mark.parametrize("name", ["kv_cache", "weights", "per_rank", "capacity", "floors", "roofline"])
def test_no_driver_and_no_judge_raises_over_what_an_answer_returns(name, value):
    found = exercise.find(f"memory.{name}")
    for probe in exercise.make_probes(found, Random(1), tuple(getattr(reference, part) for part in found.answers)):
        given = exercise.record(found, probe.challenge, (lambda **arguments: value,) * len(found.answers))
        for case in exercise.judge(found, [probe], [given]).cases:
            assert "your code raised" not in case.message and "cannot be read" not in case.message


def test_a_message_names_what_is_no_number_and_no_dictionary():
    assert message(plain(object()), 3) == "expected 3, got an object of type object"
    assert message(plain(np.zeros(2)), 3.0) == "expected 3, got an array of shape [2]"
    assert message(plain(object()), {"a": 1}) == "expected a dictionary, got an object of type object"
    assert message(plain(np.zeros(2)), {"a": 1}) == "expected a dictionary, got an array of shape [2]"
    assert message(2**1024 - 1, 3).startswith("expected 3, got 179,769,313,486,")


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("memory.kv_cache", "sliding layers left out of a token", 3),
        ("memory.weights", "`dense_layers` of a dense model", 1),
        ("memory.per_rank", "split tokens rounded down", 2),
        ("memory.floors", "the two times added", 2),
        ("memory.floors", "milliseconds", 2),
        ("memory.floors", "weights of one byte multiplied at twice the peak", 2),
        ("memory.per_rank", "the stage with the fewest sliding layers", 2),
        ("memory.floors", "bytes only", 2),
        ("memory.floors", "the embedding multiplies", 2),
        ("memory.floors", "one operation for a weight and a token", 2),
        ("memory.floors", "the fullest card's weights, replicated ones whole", 2),
        ("memory.floors", "the prompt's tokens added to the context", 1),
    ],
)
def test_a_known_mistake_is_sent_to_the_hint_that_is_about_it(name, answer, hint):
    found = exercise.find(name)
    (given,) = (one.answers(reference) for one in answers.named_answers(found) if one.name == answer)
    probes = exercise.make_probes(found, Random(1), tuple(getattr(reference, part) for part in found.answers))
    recorded = [exercise.record(found, probe.challenge, given) for probe in probes]
    assert exercise.judge(found, probes, recorded).first_failure.hint == hint
