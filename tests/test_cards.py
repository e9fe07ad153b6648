"""Model and hardware cards: the course's own, cards from public configs, and what is said about bad ones.

The configs are written by hand from the published numbers: only the fields that the reader looks at, and a few others.
"""

import json

import pytest

from servelab.cards import (
    HARDWARE,
    MODELS,
    SIX_LAYOUTS,
    from_config,
    hardware_card,
    hardware_names,
    model_card,
    model_names,
)
from servelab.errors import CourseError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
}
OPT = {
    "model_type": "opt",
    "do_layer_norm_before": True,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "max_position_embeddings": 2048,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "vocab_size": 50272,
    "word_embed_proj_dim": 5120,
}
PUBLISHED = {
    "llama-3.1-8b": LLAMA,
    "qwen2.5-7b": QWEN2,
    "qwen3-0.6b": QWEN3,
    "qwen3-235b-a22b": QWEN3_MOE,
    "mixtral-8x7b": MIXTRAL,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v3": DEEPSEEK_V3,
    "opt-13b": OPT,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_public_config_gives_the_course_s_card(name):
    card = model_card(name)
    assert from_config(PUBLISHED[name], name=card.name) == card


def test_a_config_file_is_named_after_its_folder(tmp_path):
    path = tmp_path / "my-llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    card = from_config(path)
    assert (card.name, card.source) == ("my-llama", str(path))
    assert from_config(str(path)) == card


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4096}, (4096, 32)),
        ({"sliding_window": None}, (0, 0)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 512, "max_window_layers": 20}, (512, 12)),
        ({"sliding_window": 512, "max_window_layers": 32}, (0, 0)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, (512, 16)),
        ({"sliding_window": 512, "model_type": "qwen2"}, (0, 0)),
        ({"sliding_window": 512, "model_type": "qwen3", "use_sliding_window": True}, (512, 4)),
    ],
)
def test_sliding_windows(changes, window):
    card = from_config(LLAMA | {"model_type": "mistral"} | changes)
    assert (card.sliding_window, card.sliding_layers) == window


def test_defaults_of_a_config():
    old = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "tie_word_embeddings")}
    card = from_config(old)
    assert (card.num_kv_heads, card.head_dim, card.tied_embeddings, card.name) == (32, 128, False, "llama")
    assert from_config(DEEPSEEK_V2 | {"q_lora_rank": None}).q_lora_rank == 0


def without(config, name):
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize(
    ("config", "field", "mend"),
    [
        (LLAMA | {"model_type": "mamba"}, "model_type", "Known: llama"),
        (without(LLAMA, "model_type"), "model_type", "Known: llama"),
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers", "own config.json"),
        (without(LLAMA, "vocab_size"), "vocab_size", "own config.json"),
        (without(MIXTRAL, "num_local_experts"), "num_local_experts", "own config.json"),
        (without(DEEPSEEK_V3, "kv_lora_rank"), "kv_lora_rank", "own config.json"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size", "whole number"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads", "above 0"),
        (LLAMA | {"num_attention_heads": 33}, "head_dim", "head_dim that"),
        (LLAMA | {"num_key_value_heads": 5}, "num_kv_heads", "divide"),
        (LLAMA | {"intermediate_size": -1}, "intermediate_size", "above 0"),
        (LLAMA | {"tie_word_embeddings": 1}, "tied_embeddings", "true or false"),
        (LLAMA | {"attention_bias": True}, "attention_bias", "by hand"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias", "by hand"),
        (LLAMA | {"sliding_window": 512, "layer_types": 3}, "layer_types", "a list"),
        (LLAMA | {"sliding_window": 512, "max_window_layers": "3"}, "max_window_layers", "whole number"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers", "by hand"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step", "by hand"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim", "by hand"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before", "by hand"),
    ],
)
def test_a_bad_config_is_refused_by_field_with_a_mend(config, field, mend):
    with pytest.raises(CourseError) as error:
        from_config(config)
    assert repr(field) in error.value.problem and mend in error.value.mend and error.value.where == "config"


@pytest.mark.parametrize("name", model_names())
def test_every_model_card_reads_and_has_a_source(name):
    card = model_card(name)
    assert card.source and card.name.lower().replace(" ", "-") == name


@pytest.mark.parametrize("name", hardware_names())
def test_every_hardware_card_reads_and_has_a_source(name):
    assert hardware_card(name).source


def test_the_folders_hold_cards_and_a_readme_only():
    for folder in (MODELS, HARDWARE):
        assert {path.suffix for path in folder.iterdir()} == {".json", ".md"}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(CourseError, match="there is no card 'llama-9'\nCards: deepseek-v2, ") as error:
        model_card("llama-9")
    assert str(MODELS) == error.value.where
    with pytest.raises(CourseError, match="h100-sxm"):
        hardware_card("h1000")


@pytest.mark.parametrize(
    ("change", "problem", "mend"),
    [
        ({"heads": 4}, "field 'heads' is unknown", "Fields of a ModelCard: name, num_layers"),
        ({"num_layers": None}, "field 'num_layers' is None", "a whole number above 0"),
        ({"num_layers": 0}, "field 'num_layers' is 0", "above 0"),
        ({"num_layers": True}, "field 'num_layers' is True", "whole number"),
        ({"q_lora_rank": -1}, "field 'q_lora_rank' is -1", "0 or more"),
        ({"experts_per_token": 2}, "field 'experts_per_token' is 2", "goes with num_experts"),
        ({"num_experts": 4, "experts_per_token": 5, "expert_size": 9}, "field 'experts_per_token' is 5", "at most"),
        ({"dense_layers": 99}, "field 'dense_layers' is 99", "at most num_layers"),
        ({"sliding_layers": 1}, "field 'sliding_window' is 0", "goes with sliding_layers"),
        ({"kv_lora_rank": 8}, "field 'qk_nope_head_dim' is 0", "goes with kv_lora_rank"),
    ],
)
def test_a_card_file_of_one_s_own_is_checked(tmp_path, change, problem, mend):
    sound = json.loads((MODELS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(sound), encoding="utf-8")
    assert model_card(str(path)) == model_card("llama-3.1-8b")
    path.write_text(json.dumps(sound | change), encoding="utf-8")
    with pytest.raises(CourseError) as error:
        model_card(path)
    assert error.value.problem == problem and mend in error.value.mend and error.value.where == str(path)


@pytest.mark.parametrize(("text", "problem"), [("[]", "holds a list"), ("{", "is not JSON"), ("\xff", "is not JSON")])
def test_a_file_that_is_no_card(tmp_path, text, problem):
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode("latin-1"))
    for read in (model_card, hardware_card, from_config):
        with pytest.raises(CourseError, match=problem):
            read(path)
    with pytest.raises(CourseError, match="cannot be read"):
        model_card(tmp_path / "none.json")


def test_a_missing_field_of_a_card(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text('{"name": "mine", "memory_gb": 24}', encoding="utf-8")
    with pytest.raises(CourseError, match="field 'bandwidth_tb_s' is missing"):
        hardware_card(path)


def test_six_layouts_are_lettered():
    assert [layout.name[0] for layout in SIX_LAYOUTS] == list("ABCDEF")
