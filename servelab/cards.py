"""Model cards and hardware cards: the public dimensions that a memory ledger needs, one small JSON file each.

`model_card` and `hardware_card` read the course's own, from ``data/``. `from_config` makes a card from the public
``config.json`` of a model: the field names of Llama, Mistral, Qwen2, Qwen3, Mixtral, DeepSeek-V2/V3 and OPT.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from servelab.errors import CourseError
from servelab.paths import DATA

MODELS, HARDWARE = DATA / "models", DATA / "hardware"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The dimensions of a decoder-only transformer.

    Counts are numbers of layers, heads, tokens or experts, and sizes are numbers of elements. A part that a model does
    not have is 0 or False.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # not always hidden_size / num_heads
    intermediate_size: int  # width of the MLP of a dense layer
    vocab_size: int
    tied_embeddings: bool = False  # the output head is the input table
    gated_mlp: bool = True  # three matrices (gate, up, down) instead of two
    qkv_bias: bool = False
    all_biases: bool = False  # a bias in every linear layer and every norm (OPT)
    qk_norm: bool = False  # a norm of head_dim weights for queries and one for keys, in each layer (Qwen3)
    position_rows: int = 0  # rows of a learned position table
    sliding_window: int = 0  # tokens that a sliding-window layer keeps
    sliding_layers: int = 0  # how many of the layers have the window
    num_experts: int = 0  # routed experts of a mixture-of-experts (MoE) layer
    experts_per_token: int = 0
    expert_size: int = 0  # MLP width of one expert
    shared_experts: int = 0  # experts that see every token
    router_bias: bool = False  # one correction for each expert beside the router's matrix (DeepSeek-V3)
    dense_layers: int = 0  # layers of an MoE model that have a dense MLP instead
    kv_lora_rank: int = 0  # width of the latent of multi-head latent attention (MLA)
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    source: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class HardwareCard:
    """One GPU: what it holds, how fast it reads, how fast it multiplies."""

    name: str
    memory_gb: float  # 1e9 bytes
    bandwidth_tb_s: float  # 1e12 bytes a second
    dense_bf16_tflops: float  # 1e12 operations a second, without sparsity
    source: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What one card of an instance holds: of each kind of thing, one part in so many.

    ``split_heads=2`` means that a card has half of the heads, and so half of each weight matrix outside the experts.
    What is not split is on every card.
    """

    name: str = ""
    cards: int = 1
    split_heads: int = 1
    split_layers: int = 1
    split_tokens: int = 1  # the tokens of one request's KV cache
    split_requests: int = 1  # a request is in one of so many groups of cards
    split_experts: int = 1  # the weights of the routed experts


SIX_LAYOUTS = (
    Layout(name="A: TP2 x EP4, same requests everywhere", cards=8, split_heads=2, split_experts=8),
    Layout(name="B: attention TP2 x DP4, EP8", cards=8, split_heads=2, split_requests=4, split_experts=8),
    Layout(name="C: TP8", cards=8, split_heads=8, split_experts=8),
    Layout(name="D: TP8, decode context parallel 2", cards=8, split_heads=8, split_tokens=2, split_experts=8),
    Layout(name="E: TP4 on 4 cards", cards=4, split_heads=4, split_experts=4),
    Layout(name="F: attention DP8, EP8", cards=8, split_requests=8, split_experts=8),
)
"""Ways to lay one mixture-of-experts model out over 4 or 8 cards."""

Card = TypeVar("Card", ModelCard, HardwareCard)


def model_names() -> list[str]:
    """The names of the model cards in ``data/models``."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def hardware_names() -> list[str]:
    """The names of the hardware cards in ``data/hardware``."""
    return sorted(path.stem for path in HARDWARE.glob("*.json"))


def model_card(name: str | Path) -> ModelCard:
    """The card called ``name``, e.g. ``"llama-3.1-8b"``, or the one in a file of your own.

    Raises `CourseError` if there is none, or if the file is not a sound card.
    """
    return _read(ModelCard, name, MODELS)


def hardware_card(name: str | Path) -> HardwareCard:
    """The card called ``name``, e.g. ``"h100-sxm"``, or the one in a file of your own.

    Raises `CourseError` if there is none, or if the file is not a sound card.
    """
    return _read(HardwareCard, name, HARDWARE)


def _read(kind: type[Card], name: str | Path, folder: Path) -> Card:
    own = isinstance(name, Path) or name.endswith(".json")
    path = Path(name) if own else folder / f"{name}.json"
    if not own and name not in {known.stem for known in folder.glob("*.json")}:
        known = ", ".join(sorted(known.stem for known in folder.glob("*.json")))
        raise CourseError(f"there is no card {name!r}", where=str(folder), mend=f"Cards: {known}.")
    return _build(kind, _load(path), str(path))


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise CourseError(problem, where=str(path), mend="Look at the path, and at who may read it.") from None
    except ValueError as error:
        raise CourseError(f"is not JSON: {error}", where=str(path), mend="Get the file again, or mend it.") from None
    if not isinstance(data, dict):
        raise CourseError(f"holds a {type(data).__name__}", where=str(path), mend="A card is a JSON object: {...}.")
    return data


def _build(kind: type[Card], data: Mapping[str, Any], where: str) -> Card:
    """A card of these fields. Raises `CourseError` that names the first field that is unknown, missing or unsound."""
    known = {f.name: f for f in fields(kind)}
    for name in data:
        if name not in known:
            mend = f"Remove it. Fields of a {kind.__name__}: {', '.join(known)}."
            raise CourseError(f"field {name!r} is unknown", where=where, mend=mend)
    for name, known_field in known.items():
        if name not in data and known_field.default is MISSING:
            raise CourseError(
                f"field {name!r} is missing", where=where, mend="Look it up where the model is published."
            )
    for name, value in data.items():
        _require_sound(known[name].type, known[name].default is MISSING, name, value, where)
    card = kind(**data)
    if isinstance(card, ModelCard):
        _require_consistent(card, where)
    return card


def _require_sound(kind: Any, positive: bool, name: str, value: Any, where: str) -> None:
    wanted = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[kind]
    right = type(value) is kind or (kind is float and type(value) is int)
    if kind in (int, float):
        wanted += " above 0" if positive else ", 0 or more"
        right = right and (value > 0 if positive else value >= 0) and value < 1e12
    if not right:
        raise CourseError(f"field {name!r} is {value!r}", where=where, mend=f"It must be {wanted}.")


def _require_consistent(card: ModelCard, where: str) -> None:
    """What fields must hold together."""
    rules = (
        (card.num_heads % card.num_kv_heads == 0, "num_kv_heads", "It must divide num_heads."),
        (bool(card.num_experts) == bool(card.experts_per_token), "experts_per_token", "It goes with num_experts."),
        (bool(card.num_experts) == bool(card.expert_size), "expert_size", "It goes with num_experts."),
        (card.experts_per_token <= card.num_experts, "experts_per_token", "It is at most num_experts."),
        (card.dense_layers <= card.num_layers, "dense_layers", "It is at most num_layers."),
        (card.sliding_layers <= card.num_layers, "sliding_layers", "It is at most num_layers."),
        (bool(card.sliding_layers) == bool(card.sliding_window), "sliding_window", "It goes with sliding_layers."),
        (bool(card.kv_lora_rank) == bool(card.qk_nope_head_dim), "qk_nope_head_dim", "It goes with kv_lora_rank."),
        (bool(card.kv_lora_rank) == bool(card.qk_rope_head_dim), "qk_rope_head_dim", "It goes with kv_lora_rank."),
        (bool(card.kv_lora_rank) == bool(card.v_head_dim), "v_head_dim", "It goes with kv_lora_rank."),
    )
    for holds, name, mend in rules:
        if not holds:
            raise CourseError(f"field {name!r} is {getattr(card, name)}", where=where, mend=mend)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "opt")
TIED_BY_DEFAULT = ("opt",)  # what transformers assumes where a config does not say


def from_config(config: str | Path | Mapping[str, Any], name: str = "") -> ModelCard:
    """A card from a model's public ``config.json``: its path, or what is in it.

    Parameters
    ----------
    config : path or mapping
        In the format of the transformers library, of one of the families in `FAMILIES`.
    name : str
        What to call the card; by default the file's folder or the family.

    Raises
    ------
    CourseError
        If the family is unknown, a field that the ledger needs is missing or unsound, or the config asks for something
        that a card cannot say. The message names file, field and mend.
    """
    own = isinstance(config, (str, Path))
    where = str(config) if isinstance(config, (str, Path)) else "config"
    given = _Config(_load(Path(config)) if isinstance(config, (str, Path)) else config, where)
    family = given.get("model_type", None)
    if family not in FAMILIES:
        mend = f"Known: {', '.join(FAMILIES)}. For another family write a card by hand, as in data/models."
        raise CourseError(f"field 'model_type' is {family!r}", where=where, mend=mend)
    card = _opt(given) if family == "opt" else _llama_like(given, family)
    card |= {"vocab_size": given.need("vocab_size"), "source": where}
    card["tied_embeddings"] = given.get("tie_word_embeddings", family in TIED_BY_DEFAULT)
    return _build(ModelCard, card | {"name": name or (Path(where).resolve().parent.name if own else family)}, where)


class _Config:
    """The fields of a ``config.json``, and the errors when one is missing."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where = data, where

    def get(self, name: str, default: Any) -> Any:
        """A field, or the default where it is absent or null."""
        value = self.data.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        if self.get(name, None) is None:
            family = self.data.get("model_type")
            mend = f"A config of model_type {family!r} needs it; is this the model's own config.json?"
            raise CourseError(f"field {name!r} is missing", where=self.where, mend=mend)
        return self.data[name]

    def refuse(self, name: str, allowed: Any, why: str) -> None:
        """Raise unless a field is absent or has the one value that a card can say."""
        if self.get(name, allowed) != allowed:
            problem = f"field {name!r} is {self.data[name]!r}"
            raise CourseError(problem, where=self.where, mend=f"{why}: write a card by hand, as in data/models.")

    def count(self, name: str) -> int:
        """A whole number above 0, for arithmetic."""
        value = self.need(name)
        if type(value) is not int or value < 1:
            raise CourseError(
                f"field {name!r} is {value!r}", where=self.where, mend="It must be a whole number above 0."
            )
        return value


def _llama_like(given: _Config, family: str) -> dict[str, Any]:
    hidden, heads = given.count("hidden_size"), given.count("num_attention_heads")
    given.refuse("attention_bias", False, "A card has no bias of the attention's output alone")
    given.refuse("mlp_bias", False, "A card has no bias of the MLP alone")
    if given.get("head_dim", None) is None and hidden % heads:
        problem = f"field 'head_dim' is missing, and {heads} heads do not divide hidden_size {hidden}"
        raise CourseError(problem, where=given.where, mend="Add the head_dim that the model's code uses.")
    card = {
        "num_layers": given.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": given.get("num_key_value_heads", heads),
        "head_dim": given.get("head_dim", hidden // heads),
        "intermediate_size": given.need("intermediate_size"),
        "qkv_bias": family == "qwen2",
        "qk_norm": family.startswith("qwen3"),
    }
    if family.startswith("deepseek"):
        card |= _latent(given) | _routed(given, "n_routed_experts", "moe_intermediate_size")
        card |= {
            "shared_experts": given.get("n_shared_experts", 0),
            "dense_layers": given.get("first_k_dense_replace", 0),
            "router_bias": family == "deepseek_v3",
        }
    elif family == "mixtral":
        card |= _routed(given, "num_local_experts", "intermediate_size")
    elif family == "qwen3_moe":
        given.refuse("mlp_only_layers", [], "The reader does not know a list of dense layers")
        card |= _routed(given, "num_experts", "moe_intermediate_size")
    return card | _sliding(given, family, card["num_layers"])


def _latent(given: _Config) -> dict[str, Any]:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: given.need(name) for name in names}
    return sizes | {"q_lora_rank": given.get("q_lora_rank", 0), "head_dim": sizes["qk_nope_head_dim"]}


def _routed(given: _Config, experts: str, size: str) -> dict[str, Any]:
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        given.refuse(name, 1, "The reader knows experts in every layer only")
    return {
        "num_experts": given.need(experts),
        "experts_per_token": given.need("num_experts_per_tok"),
        "expert_size": given.need(size),
    }


def _sliding(given: _Config, family: str, num_layers: int) -> dict[str, Any]:
    """Which layers keep a window only. Qwen's need ``use_sliding_window``, and leave the first layers without one.

    Fields that are absent have the defaults of transformers 5.24's configurations.
    """
    window = given.get("sliding_window", 0)
    if not window or not given.get("use_sliding_window", not family.startswith("qwen")):
        return {}
    whole = 28 if family in ("qwen2", "qwen3") else 0
    kinds, full = given.get("layer_types", []), given.get("max_window_layers", whole)
    if not isinstance(kinds, list):
        raise CourseError(f"field 'layer_types' is {kinds!r}", where=given.where, mend="It must be a list.")
    if type(full) is not int:
        raise CourseError(
            f"field 'max_window_layers' is {full!r}", where=given.where, mend="It must be a whole number."
        )
    layers = kinds.count("sliding_attention") if kinds else max(0, num_layers - full)
    return {"sliding_window": window, "sliding_layers": layers} if layers else {}


def _opt(given: _Config) -> dict[str, Any]:
    """OPT: biases everywhere, a learned table of positions with two rows more than it has positions."""
    hidden, heads = given.count("hidden_size"), given.count("num_attention_heads")
    given.refuse("word_embed_proj_dim", hidden, "A card's embedding is as wide as its layers")
    given.refuse("do_layer_norm_before", True, "A card has a norm before each part and one at the end")
    return {
        "num_layers": given.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": given.need("ffn_dim"),
        "gated_mlp": False,
        "qkv_bias": True,
        "all_biases": True,
        "position_rows": given.count("max_position_embeddings") + 2,
    }
