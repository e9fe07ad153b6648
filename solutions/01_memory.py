# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 Memory: the serving ledger
#
# How many requests can this GPU serve at once? How long does a step take at least? Both questions are answered, before
# anything is run, by adding up bytes: those of the **weights**, which are there once, and those of the **KV cache**,
# which grow with every token of every request.
#
# Llama-3.1-8B in bf16 takes 16.06 GB of weights. One request of 8192 tokens takes 1 GiB beside them. On an 80 GB card
# the KV cache soon is the larger part, and it sets the batch size.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `kv_bytes_per_token`, `kv_gib` | What does a token leave behind? | 18 | 25 |
# | 2 | `parameters`, `weight_bytes` | How large are the weights, and which part of them is where? | 20 | 40 |
# | 3 | `kv_bytes_per_rank`, `weight_bytes_per_rank` | What does one card of several hold? | 18 | 40 |
# | 4 | `kv_room`, `max_tokens`, `max_concurrent` | How many tokens and requests fit? | 14 | 25 |
# | 5 | `decode_step_floor` and three more | How fast can a step be at best? | 14 | 35 |
# | 6 | `ridge_point`, `critical_batch`, `attention_intensity` | When does a larger batch stop being free? | 8 | 20 |
# | 7 | reflection | | 8 | 20 |
#
# Each exercise uses the functions of those before it.

# %% [markdown]
# ## Units, and cards
#
# GB is 1e9 bytes, GiB is 2^30, about 7 % more. Vendors write GB. Memory tools often write "GB" and mean GiB. In this
# course a number says which one it is. A bf16 or fp16 number has 2 bytes, an fp8 one has 1.
#
# A **card** is a model's or a GPU's public dimensions. The fields are those of `servelab.cards.ModelCard`. Each card has
# its source.

# %% tags=["export"]
from servelab.cards import HardwareCard, Layout, ModelCard, hardware_card, hardware_names, model_card, model_names
from servelab.checking import check

# %%
print("models:", ", ".join(model_names()))
print("GPUs:  ", ", ".join(hardware_names()))
print(model_card("llama-3.1-8b"))
print(hardware_card("h100-sxm"))

# %% [markdown]
# A model of your own: save its public `config.json` and read it with `servelab.cards.from_config("path/to/config.json")`.
# It knows the Llama, Mistral, Qwen2, Qwen3, Mixtral, DeepSeek-V2/V3 and OPT formats. Anything else it refuses, and says
# which field is the reason.

# %% [markdown]
# ## 1. What a token leaves behind
#
# To compute the next token, attention needs the **key** and the **value** of every earlier token, in every layer. They
# are computed once and kept. That is the KV cache.
#
# In **multi-head attention** (MHA) each query head has its own key and value head. In **grouped-query attention** (GQA)
# several query heads share one, and in **multi-query attention** (MQA) all of them share a single one. What is cached is
# keys and values, so the number of *KV heads* counts.

# %% [markdown]
# ### A worked example
#
# One token in bf16, one layer after the other (dimensions: litgpt's `config.py`, which links each `config.json`):
#
# | model | layers | query heads | KV heads | head_dim | elements a layer | bytes a token |
# |---|---|---|---|---|---|---|
# | Llama-2-7B (MHA) | 32 | 32 | 32 | 128 | 8192 | 524,288 |
# | Llama-3.1-8B (GQA) | 32 | 32 | 8 | 128 | 2048 | 131,072 |
# | Qwen3-32B (GQA) | 64 | 64 | 8 | 128 | 2048 | 262,144 |
#
# Qwen3-32B has a hidden size of 5120 and 64 query heads. The quotient would be 80, but its heads have 128. So take
# `head_dim` from the card.

# %% [markdown]
# ```
#  one token, one layer, Llama-3.1-8B
#
#  keys    [ head 0 | head 1 | ... | head 7 ]    8 x 128 elements
#  values  [ head 0 | head 1 | ... | head 7 ]    8 x 128 elements
# ```

# %% [markdown]
# ### Two exceptions
#
# **Multi-head latent attention** (MLA, DeepSeek-V2 and V3) keeps neither keys nor values. It keeps one **latent** vector
# a layer, `kv_lora_rank` wide, from which both are computed, and beside it one rotary key, `qk_rope_head_dim` wide. The
# two serve all heads. A card with a `kv_lora_rank` above 0 is such a model. DeepSeek-V3: 61 layers of 512 + 64 elements
# are 70,272 bytes a token, as published ("Insights into DeepSeek-V3", ISCA 2025, Table 1).
#
# A **sliding-window layer** looks back over `sliding_window` tokens and keeps no more than that. `sliding_layers` of the
# layers do so; the others keep everything. Until the window is full there is no difference.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `kv_bytes_per_token(model, dtype_bytes)`: what one more token takes while every layer keeps it, that is, before
# any window is full. Then `kv_gib(model, tokens, dtype_bytes)`: the whole cache of a context, in GiB, windows included.
#
# <details><summary>Hint 1: which numbers to multiply</summary>
#
# Two (a key and a value), the layers, the KV heads, the elements of a head, the bytes of an element.
#
# </details>
# <details><summary>Hint 2: the latent</summary>
#
# A layer of MLA keeps the latent and the rotary key: add their widths. There is no factor of two, and the number of
# heads does not matter.
#
# </details>
# <details><summary>Hint 3: windows</summary>
#
# A new token is in every layer, the sliding ones too: windows concern `kv_gib` only. There, count token-layers: each
# full layer holds all tokens, each sliding-window layer at most the window. All layers have the same size for a token,
# so divide the bytes of a token by the number of layers first. At the end divide by 2 to the power of 30.
#
# </details>


# %% nbgrader={"grade_id": "kv-cache", "solution": true} tags=["export"]
def kv_bytes_per_token(model: ModelCard, dtype_bytes: int = 2) -> int:
    """Bytes of KV cache that one more token takes, in all layers together, before any sliding window is full.

    Parameters
    ----------
    model : ModelCard
        With ``kv_lora_rank`` above 0 it has latent attention (MLA).
    dtype_bytes : int
        Bytes of one cached element: 2 for bf16, 1 for fp8.
    """
    ### BEGIN SOLUTION
    elements = 2 * model.num_kv_heads * model.head_dim
    if model.kv_lora_rank:
        elements = model.kv_lora_rank + model.qk_rope_head_dim
    return model.num_layers * elements * dtype_bytes
    ### END SOLUTION


def kv_gib(model: ModelCard, tokens: int, dtype_bytes: int = 2) -> float:
    """GiB of KV cache of one context of ``tokens`` tokens; a sliding-window layer keeps at most its window."""
    ### BEGIN SOLUTION
    kept = tokens * (model.num_layers - model.sliding_layers)
    kept += min(tokens, model.sliding_window) * model.sliding_layers
    return kept * kv_bytes_per_token(model, dtype_bytes) / model.num_layers / 2**30
    ### END SOLUTION


# %% [markdown]
# Try it: the bytes of a token, and the cache of 8192 tokens.

# %%
for name in ("llama-2-7b", "llama-3.1-8b", "qwen3-32b", "qwen3-235b-a22b", "deepseek-v3"):
    card = model_card(name)
    print(f"{card.name:>16}: {kv_bytes_per_token(card, 2):>8,} bytes a token, {kv_gib(card, 8192, 2):.5f} GiB")

# %% nbgrader={"grade_id": "kv-cache-check", "grade": true, "locked": true, "points": 18}
check("memory.kv_cache", kv_bytes_per_token, kv_gib)

# %% [markdown]
# Numbers for one model can differ by a factor of two in two articles, because one of them means an fp8 cache.
# Qwen3-235B-A22B takes 192,512 bytes a token in bf16 and 96,256 in fp8. And the published ratio of Llama-3.1-405B to
# DeepSeek-V3, 7.28, does not agree with its own table: 516,096 / 70,272 is 7.34.

# %% [markdown]
# ## 2. The weights
#
# A decoder-only transformer has few kinds of weights, and all their shapes follow from the card. You count them in six
# groups. The groups are chosen by how they can be divided among cards, which is exercise 3.
#
# | group | what is in it |
# |---|---|
# | `embedding` | the table of the vocabulary, and the output head unless it is tied to the table |
# | `query` | the matrices that have one slice for each *query* head: queries and attention output |
# | `kv` | the matrices that have one slice for each *KV* head: keys and values |
# | `mlp` | the MLPs of dense layers, and shared experts |
# | `experts` | the routed experts of an MoE model |
# | `replicated` | what every card has in full: norms, routers, some biases, positions, MLA's down-projections |

# %% [markdown]
# ### Shapes
#
# With hidden size h, `n` query heads, `k` KV heads of `head_dim` d, and an MLP of width f:
#
# | | shape | group | when |
# |---|---|---|---|
# | embedding table; output head | vocabulary x h each | `embedding` | head only if not tied |
# | queries; output | h x nd; nd x h | `query` | |
# | keys; values | h x kd each | `kv` | |
# | MLP: gate, up, down | h x f three times | `mlp` | without gate if not `gated_mlp`: two |
# | two norms a layer, one at the end | h each | `replicated` | |
# | bias of queries; of keys and values | nd; kd each | `query`; `kv` | `qkv_bias` |
# | norm of queries and of keys | d each, in each layer | `replicated` | `qk_norm` |
# | table of positions | `position_rows` x h | `replicated` | learned positions |

# %% [markdown]
# With `all_biases` (OPT) there are four more: each norm has a bias of h (`replicated`), the attention output has one of h
# (`replicated`), and the MLP has one of f on the way up (`mlp`) and one of h on the way down (`replicated`). No card has
# both `all_biases` and experts.
#
# A bias that is added to a *sum over cards* is not divided among them: that is why the biases of h are `replicated`. Unit
# 06 comes back to it.

# %% [markdown]
# ### Mixture of experts
#
# An **MoE** layer has `num_experts` MLPs of width `expert_size`, and each token goes through `experts_per_token` of them.
# A **router**, a matrix of h x `num_experts`, chooses (with `router_bias`, one more number for each expert). Shared
# experts see every token; they have the same width. The first `dense_layers` layers have an ordinary MLP instead of
# experts.
#
# Mixtral-8x7B stores 46.7 billion parameters. Each token uses 12.9 billion of them.

# %% [markdown]
# ### Latent attention
#
# With n query heads, `r` = `kv_lora_rank`, `rq` = `q_lora_rank`, and the widths `nope`, `rope` and `v` of the card:
#
# | | shape | group |
# |---|---|---|
# | queries down, and their norm | h x rq, rq | `replicated` |
# | queries up | rq x n(nope + rope) | `query` |
# | latent and rotary key down, and the latent's norm | h x (r + rope), r | `replicated` |
# | keys and values up | r x n(nope + v) | `query` |
# | output | nv x h | `query` |
#
# Keys and values have one slice for each *query* head here, so `kv` is 0. Without a `q_lora_rank` there is nothing down:
# the queries are one matrix of h x n(nope + rope).

# %% [markdown]
# ### A worked example
#
# Llama-3.1-8B: 32 layers, h 4096, 32 query heads and 8 KV heads of 128, f 14336, vocabulary 128,256, nothing tied.
#
# | group | count | parameters |
# |---|---|---|
# | `embedding` | 2 tables of 128,256 x 4096 | 1,050,673,152 |
# | `query` | 32 layers, 2 matrices of 4096 x 4096 | 1,073,741,824 |
# | `kv` | 32 layers, 2 matrices of 4096 x 1024 | 268,435,456 |
# | `mlp` | 32 layers, 3 matrices of 4096 x 14336 | 5,637,144,576 |
# | `experts` | | 0 |
# | `replicated` | 65 norms of 4096 | 266,240 |
# | | | **8,030,261,248** |
#
# This is the published number, to the last digit.

# %% [markdown]
# ### Your task (about 40 minutes)
#
# Write `parameters(model)`, a dictionary with these six groups and no other keys (their order does not matter), and
# `weight_bytes(model, dtype_bytes)`. Helpers are welcome: attention is one, with a second for MLA.
#
# <details><summary>Hint 1: a dense model first</summary>
#
# Write the four large groups and the norms. Check them against the worked example, and only then add the rest. An
# embedding that is tied counts once. In a model without experts every layer has a dense MLP, whatever `dense_layers`
# says.
#
# </details>
# <details><summary>Hint 2: flags, and experts</summary>
#
# A flag is a number in Python, 0 or 1, so that a bias can be a product with it. Split the layers in two numbers: those
# with a dense MLP and those with experts. Without experts all are of the first kind. Shared experts exist only in the
# second.
#
# </details>
# <details><summary>Hint 3: MLA</summary>
#
# Let two helpers return the `query`, `kv` and `replicated` parameters of one layer's attention, one for each kind of
# attention, and add the rest outside. If `q_lora_rank` is 0, the matrix "up" starts at h, and the matrix and the norm
# "down" have no elements. All of MLA's norms are there in addition to the two of the layer.
#
# </details>


# %% nbgrader={"grade_id": "weights", "solution": true} tags=["export"]
def parameters(model: ModelCard) -> dict[str, int]:
    """Parameters by how they can be divided among cards; the six groups and their contents are in the text above.

    Returns
    -------
    dict of str to int
        ``embedding``, ``query``, ``kv``, ``mlp``, ``experts`` and ``replicated``. Their sum is the model's parameters.
    """
    ### BEGIN SOLUTION
    h, bias = model.hidden_size, model.all_biases
    query, kv, copied = _latent_attention(model) if model.kv_lora_rank else _attention(model)
    dense = model.dense_layers if model.num_experts else model.num_layers
    sparse = model.num_layers - dense
    matrices = 3 if model.gated_mlp else 2
    expert = matrices * h * model.expert_size
    norms = (2 * model.num_layers + 1) * h * (1 + bias)
    router = (h + model.router_bias) * model.num_experts
    return {
        "embedding": model.vocab_size * h * (1 if model.tied_embeddings else 2),
        "query": model.num_layers * query,
        "kv": model.num_layers * kv,
        "mlp": dense * (matrices * h + bias) * model.intermediate_size + sparse * model.shared_experts * expert,
        "experts": sparse * model.num_experts * expert,
        "replicated": model.num_layers * copied + norms + dense * bias * h + sparse * router + model.position_rows * h,
    }


def _attention(model: ModelCard) -> tuple[int, int, int]:
    h, d = model.hidden_size, model.head_dim
    query = model.num_heads * d * (2 * h + model.qkv_bias)
    kv = 2 * model.num_kv_heads * d * (h + model.qkv_bias)
    return query, kv, h * model.all_biases + 2 * d * model.qk_norm


def _latent_attention(model: ModelCard) -> tuple[int, int, int]:
    h, down, latent = model.hidden_size, model.q_lora_rank, model.kv_lora_rank
    nope, rope, v = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    slices = (down or h) * (nope + rope) + latent * (nope + v) + v * h
    return model.num_heads * slices, 0, h * (down + latent + rope) + down + latent
    ### END SOLUTION


def weight_bytes(model: ModelCard, dtype_bytes: float = 2) -> float:
    """Bytes of all weights; ``dtype_bytes`` is 2 for bf16, 1 for fp8, 0.5 for 4-bit weights without their scales."""
    ### BEGIN SOLUTION
    return sum(parameters(model).values()) * dtype_bytes
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, then two large models.

# %%
for group, count in parameters(model_card("llama-3.1-8b")).items():
    print(f"{group:>12} {count:>16,}")
for name in ("llama-3.1-8b", "qwen3-235b-a22b", "deepseek-v3"):
    print(f"{name}: {sum(parameters(model_card(name)).values()):,} parameters")

# %% nbgrader={"grade_id": "weights-check", "grade": true, "locked": true, "points": 20}
check("memory.weights", parameters, weight_bytes)

# %% [markdown]
# ## 3. What one card holds
#
# Several cards can serve one model together. Units 06 to 09 teach how they do it. For the ledger it is enough to know
# **what one card holds**: which heads, which layers, which tokens, which requests, which experts. A `Layout` says, for
# each of these, among how many cards it is split. What is not split is on every card.
#
# | `Layout` | a card holds | field term |
# |---|---|---|
# | `split_heads=t` | 1/t of the heads, and so of `query`, `mlp` and `embedding` | TP, tensor parallel |
# | `split_layers=p` | 1/p of the layers | PP, pipeline parallel |
# | `split_tokens=c` | 1/c of a request's tokens, in the KV cache | decode context parallel |
# | `split_requests=d` | the requests of one of d groups of cards | DP, data parallel |
# | `split_experts=e` | 1/e of the routed experts' weights | EP, expert parallel (with TP inside) |

# %% [markdown]
# ### KV heads cannot be split further than one
#
# Splitting the heads divides the KV cache, until each card has one KV head. Beyond that, heads are **replicated**: with t
# cards and k KV heads a card holds the larger of k/t and 1. (vLLM's `ModelConfig.get_num_kv_heads` has this rule.) The
# weights of keys and values follow their heads.
#
# The latent of MLA serves all heads, so every card of a head split needs all of it. It is divided by splitting layers or
# tokens only.
#
# Three things do *not* divide a request's KV on a card that holds it: splitting experts (experts have no KV), splitting
# requests (a request is whole within its group), and a number of cards as such.

# %% [markdown]
# ### A worked example: six layouts
#
# Qwen3-235B-A22B in bf16: 94 layers, 4 KV heads, 192,512 bytes a token. One request of 8192 tokens is 1.46875 GiB.
# Where is it on 8 cards? (Layout E: 4.)
#
# | layout | heads | tokens | requests | experts | KV heads a card | GiB a card | cards that hold it | GiB in all | copies |
# |---|---|---|---|---|---|---|---|---|---|
# | A TP2 x EP4, the same requests everywhere | 2 | 1 | 1 | 8 | 2 | 0.734375 | 8 | **5.875** | 4 |
# | B attention TP2 x DP4, EP8 | 2 | 1 | 4 | 8 | 2 | 0.734375 | 2 | 1.46875 | 1 |
# | C TP8 | 8 | 1 | 1 | 8 | 1 | 0.3671875 | 8 | 2.9375 | 2 |
# | D TP8, decode context parallel 2 | 8 | 2 | 1 | 8 | 1, half the tokens | 0.18359375 | 8 | 1.46875 | 1 |
# | E TP4, on 4 cards | 4 | 1 | 1 | 4 | 1 | 0.3671875 | 4 | 1.46875 | 1 |
# | F attention DP8, EP8 | 1 | 1 | 8 | 8 | 4 | 1.46875 | 1 | 1.46875 | 1 |

# %% [markdown]
# A stands in the book [ai-infra-book](https://github.com/bojieli/ai-infra-book) (`case-studies/model-parallelism.md`),
# as a ledger and not as a deployment: the same requests run in four groups of two cards, so there are four copies. B is
# what vLLM does with `-tp 2 -dp 4 --enable-expert-parallel`: a request is in one of four groups. The KV *on a card that
# holds it* is the same in both. 1.46875 GiB over TP x EP = 8 cards would be 0.18 GiB, four times too little.
#
# C wastes half of its KV memory on second copies, and D removes them by splitting tokens (vLLM `-tp 8 -dcp 2`).

# %% [markdown]
# ```
#  A   [ heads 0-1 | heads 2-3 ]  x 4 groups, the same requests      B   [ heads 0-1 | heads 2-3 ]   requests of group 0
#         card 0      card 1                                                card 0      card 1
#                                                                        [ heads 0-1 | heads 2-3 ]   requests of group 1
#                                                                           card 2      card 3       ... and two more
#  C   [ 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3 ]   one KV head a card, each twice
# ```

# %% [markdown]
# ### Your task (about 40 minutes)
#
# Write `kv_bytes_per_rank(model, tokens, layout, dtype_bytes)`: the KV bytes of one request of `tokens` tokens on a card
# that holds it. Where `split_tokens` does not divide the tokens that a layer keeps, take the card with one more. Sliding
# and full layers are spread evenly over the stages of `split_layers`: a card has 1/p of each kind.
#
# Write `weight_bytes_per_rank(model, layout, dtype_bytes)`. With `split_layers`, a stage at the end has the embedding or
# the output head and the others do not. Take the mean card: 1/p of all weights.
#
# Both raise `ValueError` if the layout does not divide the model: query heads or layers leave a remainder, or the KV
# heads and `split_heads` are not a multiple of each other in either direction. The last rule is about keys and values:
# whether you apply it to MLA too is up to you, no layout here depends on it.
#
# `cards` need not be checked: here it is a multiple of heads x layers x requests in every layout.
#
# (A rank is a numbered process, and here each has one card. Unit 05 has more about ranks.)

# %% [markdown]
# <details><summary>Hint 1: heads on a card</summary>
#
# Start with a helper that refuses what does not divide and returns the KV heads of one card. What must divide is the
# model's heads and layers; the number of cards plays no part. With MLA the cache is the same for any number of heads, so
# the share of a card is 1 there.
#
# </details>
# <details><summary>Hint 2: tokens, windows, copies</summary>
#
# A sliding-window layer keeps at most its window, and *that* is then split over cards. Round up separately for the two
# kinds of layers. Every stage has an equal share of each kind. `cards`, `split_requests` and `split_experts` do not
# appear in the function.
#
# </details>
# <details><summary>Hint 3: weights</summary>
#
# Take the six groups. Three are divided by the head split, `kv` goes by the heads that a card has of all KV heads,
# the experts have a split of their own, and the last group is whole. In MLA `kv` is 0 anyway.
#
# </details>


# %% nbgrader={"grade_id": "per-rank", "solution": true} tags=["export"]
def kv_bytes_per_rank(model: ModelCard, tokens: int, layout: Layout, dtype_bytes: int = 2) -> float:
    """KV bytes of one request of ``tokens`` tokens on a card that holds it; of split tokens, on the fullest one.

    Split layers are divided evenly, the sliding and the full ones alike.

    Parameters
    ----------
    layout : Layout
        What one card holds.
    dtype_bytes : int
        Bytes of one cached element.

    Raises `ValueError` if the layout does not divide the model's heads or layers.
    """
    ### BEGIN SOLUTION
    share = _kv_heads(model, layout) / model.num_kv_heads
    if model.kv_lora_rank:
        share = 1
    kept = -(-tokens // layout.split_tokens) * (model.num_layers - model.sliding_layers)
    kept += -(-min(tokens, model.sliding_window) // layout.split_tokens) * model.sliding_layers
    return kept * share * kv_bytes_per_token(model, dtype_bytes) / model.num_layers / layout.split_layers


def _kv_heads(model: ModelCard, layout: Layout) -> int:
    """KV heads on one card."""
    split = layout.split_heads
    few, many = sorted((model.num_kv_heads, split))
    if model.num_heads % split or many % few or model.num_layers % layout.split_layers:
        raise ValueError(f"{layout} does not divide {model.name}")
    return max(1, model.num_kv_heads // split)
    ### END SOLUTION


def weight_bytes_per_rank(model: ModelCard, layout: Layout, dtype_bytes: float = 2) -> float:
    """Bytes of weights on one card; with split layers, the mean over the stages.

    Raises `ValueError` if the layout does not divide the model's heads or layers.
    """
    ### BEGIN SOLUTION
    share, parts = _kv_heads(model, layout) / model.num_kv_heads, parameters(model)
    split = (parts["embedding"] + parts["query"] + parts["mlp"]) / layout.split_heads
    rest = parts["kv"] * share + parts["experts"] / layout.split_experts + parts["replicated"]
    return (split + rest) / layout.split_layers * dtype_bytes
    ### END SOLUTION


# %% [markdown]
# Try it: the table of the six layouts, from your functions.

# %%
from servelab.cards import SIX_LAYOUTS

qwen = model_card("qwen3-235b-a22b")
for layout in SIX_LAYOUTS:
    on_card, holders = kv_bytes_per_rank(qwen, 8192, layout), layout.cards // layout.split_requests
    weights = weight_bytes_per_rank(qwen, layout)
    print(f"{layout.name:40} {on_card / 2**30:.8f} x {holders} = {on_card * holders / 2**30:.5f} GiB KV", end="")
    print(f", {weights:,.0f} bytes of weights a card")

# %% nbgrader={"grade_id": "per-rank-check", "grade": true, "locked": true, "points": 18}
check("memory.per_rank", kv_bytes_per_rank, weight_bytes_per_rank)

# %% [markdown]
# Look at the last column too: in E a card would have to hold 117.6 GB of weights, more than an 80 GB card has. The table
# of the KV alone does not show it. That is why weights and KV belong in one ledger.

# %% [markdown]
# ## 4. How much fits
#
# A server is told which share of each card it may use (vLLM: `gpu_memory_utilization`, by default 0.92, and 0.9 in older
# releases). From that it takes the weights and an overhead for activations and buffers. The rest is the **KV room**.
#
# | one card of 80 GB, Llama-3.1-70B in bf16, TP4 | GB |
# |---|---|
# | 92 % of 80 GB | 73.60 |
# | overhead (a round number for teaching) | 2.00 |
# | weights: 1/4 of 141.1 GB | 35.28 |
# | KV room | 36.32 |
#
# One token takes 327,680 bytes / 4 on such a card, so there is room for 443,373 tokens.

# %% [markdown]
# ```
#  one card   [ weights 35.28 | overhead 2 | KV room 36.32          | not used 6.4 ]
#              0                                                   73.6            80 GB
# ```
#
# TP2 would leave 1.04 GB for KV: 6,378 tokens, not one request of 8192. The model "fits" on two cards and cannot
# be served there.

# %% [markdown]
# ### Groups and whole requests
#
# With `split_requests=d` each of d groups has its own requests. A request is in one group, so a group's leftover room is
# of no use to the others. Layouts A and B on 80 GB cards, all of the memory used and no overhead: 15.18 GB are left beside the
# weights, which is room for 19 requests of 8192 tokens a group. That is 19 distinct requests in A, and 4 x 19 = 76 in B.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write three functions with the same arguments:
#
# - `kv_room`: bytes for KV on one card; 0 if weights and overhead do not fit.
# - `max_tokens`: tokens of *distinct* requests in the whole instance, not rounded. As with `kv_bytes_per_token`,
#   no window is full yet. A token on only one of `split_tokens` cards takes room on that one alone.
# - `max_concurrent`: how many requests of `tokens` tokens each, windows included; each takes what exercise 3 says of its
#   fullest card.
#
# <details><summary>Hint 1: order</summary>
#
# The utilisation is a share of the card's memory, and only of that. Overhead and weights come off afterwards.
# `memory_gb` is in GB. Weights and KV can have elements of different sizes.
#
# </details>
# <details><summary>Hint 2: one token on one card</summary>
#
# Ask exercise 3 for as many tokens as the token split is wide: then each card holds exactly one of them. How many
# tokens does a group take up when each of its cards has room for x? Groups multiply the result.
#
# </details>
# <details><summary>Hint 3: whole requests</summary>
#
# Round down for one group, and only then multiply. Ask exercise 3 for the bytes of a whole request: it knows about
# windows.
#
# </details>


# %% nbgrader={"grade_id": "capacity", "solution": true} tags=["export"]
def kv_room(
    gpu: HardwareCard,
    model: ModelCard,
    layout: Layout,
    utilisation: float = 0.92,
    overhead_bytes: float = 2e9,
    weight_dtype_bytes: float = 2,
    kv_dtype_bytes: int = 2,
) -> float:
    """Bytes that one card has left for KV; 0 where weights and overhead do not fit.

    Parameters
    ----------
    utilisation : float
        The share of the card's memory that may be used, 0 to 1.
    overhead_bytes : float
        Bytes on each card for activations and buffers.
    weight_dtype_bytes, kv_dtype_bytes : float, int
        Bytes of one weight and of one cached element. The latter does not matter here.
    """
    ### BEGIN SOLUTION
    usable = utilisation * gpu.memory_gb * 1e9
    return max(0, usable - overhead_bytes - weight_bytes_per_rank(model, layout, weight_dtype_bytes))
    ### END SOLUTION


def max_tokens(
    gpu: HardwareCard,
    model: ModelCard,
    layout: Layout,
    utilisation: float = 0.92,
    overhead_bytes: float = 2e9,
    weight_dtype_bytes: float = 2,
    kv_dtype_bytes: int = 2,
) -> float:
    """Tokens of distinct requests that the whole instance has room for, before any window is full; not rounded.

    The parameters are those of `kv_room`.
    """
    ### BEGIN SOLUTION
    room = kv_room(gpu, model, layout, utilisation, overhead_bytes, weight_dtype_bytes)
    return room / kv_bytes_per_rank(model, 1, layout, kv_dtype_bytes) * layout.split_tokens * layout.split_requests
    ### END SOLUTION


def max_concurrent(
    gpu: HardwareCard,
    model: ModelCard,
    layout: Layout,
    tokens: int,
    utilisation: float = 0.92,
    overhead_bytes: float = 2e9,
    weight_dtype_bytes: float = 2,
    kv_dtype_bytes: int = 2,
) -> int:
    """How many requests of ``tokens`` tokens each the whole instance can hold at once; otherwise as `kv_room`."""
    ### BEGIN SOLUTION
    room = kv_room(gpu, model, layout, utilisation, overhead_bytes, weight_dtype_bytes)
    return int(room // kv_bytes_per_rank(model, tokens, layout, kv_dtype_bytes)) * layout.split_requests
    ### END SOLUTION


# %% [markdown]
# Try it: Llama-3.1-70B on 80 GB cards.

# %%
h100, llama = hardware_card("h100-sxm"), model_card("llama-3.1-70b")
for tp, dp in ((2, 1), (4, 1), (4, 2), (8, 1)):
    layout = Layout(cards=tp * dp, split_heads=tp, split_requests=dp)
    room, tokens = kv_room(h100, llama, layout), max_tokens(h100, llama, layout)
    print(f"TP{tp} x DP{dp}: {room / 1e9:5.2f} GB KV room a card, {int(tokens):9,} tokens", end="")
    print(f", {max_concurrent(h100, llama, layout, 8192)} requests of 8192 tokens")

# %% nbgrader={"grade_id": "capacity-check", "grade": true, "locked": true, "points": 14}
check("memory.capacity", kv_room, max_tokens, max_concurrent)

# %% [markdown]
# TP8 holds 1,317,364 tokens. Two replicas of TP4 hold 886,747 on the same eight cards, because each replica has its own
# weights. Where KV room is scarce, more cards for one replica can pay off more than proportionally: Llama-3.1-70B in FP8
# went from 923 to 12,830 KV blocks between one and two H100, and to 3.93 times the throughput (vLLM blog, 2025-02-17).

# %% [markdown]
# ### Explore: one card's memory
#
# Move the sliders: what is on one card? The picture is drawn from your functions. The table under it has the same
# numbers. The thick line is where exercise 4 stops: at 92 % of the card less 2 GB, 71.6 GB of 80. What is beyond it is
# missing. A bar that is more than three times as long is cut off, with its length beside it.

# %%
from IPython.display import Markdown, display
from ipywidgets import Dropdown, IntSlider, SelectionSlider

from servelab.plots import memory
from servelab.plots.explore import explore


def draw(model: str, gpu: str, weights: str, kv: str, tp: int, context: int, requests: int) -> None:
    card, device, sizes = model_card(model), hardware_card(gpu), {"bf16": 2, "fp8": 1, "4-bit": 0.5}
    layout = Layout(cards=tp, split_heads=tp, split_experts=tp)
    try:
        held = weight_bytes_per_rank(card, layout, sizes[weights])
        cache = requests * kv_bytes_per_rank(card, context, layout, sizes[kv])
    except ValueError as error:
        print(f"TP{tp}: {error}")
        return
    ledger = {f"{card.name}, TP{tp}": memory.Ledger(0.92 * device.memory_gb * 1e9 - 2e9, held, cache)}
    display(memory.memory_bars(ledger), Markdown(memory.memory_text(ledger)))


explore(
    draw,
    model=Dropdown(options=model_names(), value="llama-3.1-70b"),
    gpu=Dropdown(options=hardware_names(), value="h100-sxm"),
    weights=SelectionSlider(options=["4-bit", "fp8", "bf16"], value="bf16"),
    kv=SelectionSlider(options=["fp8", "bf16"], value="bf16"),
    tp=SelectionSlider(options=[1, 2, 4, 8, 16], value=4),
    context=IntSlider(8192, 1024, 131_072, 1024, continuous_update=False),
    requests=IntSlider(32, 0, 256, 1, continuous_update=False),
)

# %% [markdown]
# Questions to try: at which TP does a card's KV stop shrinking for Llama-3.1-70B? Which is better for long contexts, fp8
# weights or an fp8 cache? What does TP do to the KV of DeepSeek-V3?

# %% [markdown]
# ## 5. How fast a step can be
#
# One forward pass is one step. It has to read the weights that it uses, and the KV cache of every request that it
# decodes. It has to do two operations (multiply, add) for each weight and token. Memory and arithmetic overlap, so a
# step takes **at least the larger of the two times**. This is a floor: kernels, communication and scheduling come on top.
#
# A **decode** step gives each request of the batch one token. A **prefill** step reads a prompt. A **mixed** step does
# both (unit 04).

# %% [markdown]
# ### A worked example
#
# Llama-3.1-8B in bf16 on an H100 (3.35 TB/s, 989 dense TFLOP/s), contexts of 2048 tokens:
#
# | batch | weights GB | KV GB | floor ms | of batch 1 | tokens/s at the floor |
# |---|---|---|---|---|---|
# | 1 | 16.06 | 0.27 | 4.87 | x1 | 205 |
# | 32 | 16.06 | 8.59 | 7.36 | x1.51 | 4,349 |
# | 128 | 16.06 | 34.36 | 15.05 | x3.09 | 8,505 |
# | 256 | 16.06 | 68.72 | 25.31 | x5.19 | 10,116 |
#
# The weights are read once a step, whatever the batch. KV is read once for each request: from 122,533 tokens in the
# batch on, it is more than the weights. (The last row would not fit on the 80 GB card. A floor does not know that;
# exercise 4 does.)

# %% [markdown]
# ### What is counted
#
# - **bytes**: all weights, the embedding included, which is the usual convention (a look-up reads only a few rows of an
#   input table); of routed experts those that the step reads, see below. The KV of `batch` contexts. Writing KV is left
#   out.
# - **operations**: 2 for each *active* weight outside the embedding, and each token. Active means: of the routed
#   experts only the share k/E that a token uses. Norms, biases, positions and routers count like any other weight, though
#   on the course's cards they are less than 0.5 % of the active ones. The products of attention itself and the output head
#   are left out, so that it stays a floor. The peak is that of bf16, whatever the size of a stored weight. (Exercise 6 has
#   other arithmetic.)
# - **tp cards**: weights and operations are divided by `tp` evenly, replicated weights too. Do not use
#   `weight_bytes_per_rank`: this stays a floor. KV goes by exercise 3: no further than one KV head a card.
#
# For MoE, tokens choose different experts. If each token picks k of E evenly, a layer reads
# E(1 - (1 - k/E)^B) of them for B tokens on average. Mixtral (2 of 8): 2 for one token, 5.47 for four, nearly all for
# sixteen.

# %% [markdown]
# ```
#  ms per step                            . bytes / bandwidth: starts at the weights, rises with the KV
#    |                              .  /
#    |                         .     /
#    |                    .        /      / operations / peak: rises from 0
#    |               .           /
#    |  .  .  .  .             /
#    |                       /
#    +------------------------------------ tokens in the step
# ```

# %% [markdown]
# ### Your task (about 35 minutes)
#
# Write `experts_read(model, tokens)` (0 for a dense model), then the three floors, in seconds. B is the number of
# tokens in the step: a mixed step has `batch` decoded tokens and `prompt_tokens` of a prompt, and reads the KV of the
# decodes only.
#
# <details><summary>Hint 1: one function for all</summary>
#
# A decode step is a mixed step without a prompt, and a prefill step is one without decodes. So the whole work is in the
# mixed one. All tokens of the step are multiplied with weights, but only the decodes' KV is read: the prompt's tokens add
# nothing to the contexts.
#
# </details>
# <details><summary>Hint 2: bytes against operations</summary>
#
# bandwidth_tb_s and dense_bf16_tflops are both in 1e12 a second. Compute the two times in seconds, then take the larger
# one, in decoding too. `parameters` has the groups. The embedding is read but not multiplied; every other weight costs
# two operations for a token.
#
# With `tp` cards divide all weights evenly, replicated ones too, without `weight_bytes_per_rank`. For the KV on a card,
# make a `Layout` that splits heads over the `tp` cards. Weights and KV have sizes of their own; the peak does not depend
# on either.
#
# </details>
# <details><summary>Hint 3: experts</summary>
#
# Bytes and operations use different shares of the experts' weights. Bytes: the experts that the whole step reads, of
# all. Operations: what one token uses, of all, and that for each token.
#
# </details>


# %% nbgrader={"grade_id": "floors", "solution": true} tags=["export"]
def experts_read(model: ModelCard, tokens: int) -> float:
    """Routed experts that a layer reads for ``tokens`` tokens, on average, if each token picks its k evenly."""
    ### BEGIN SOLUTION
    if not model.num_experts:
        return 0
    return model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** tokens)
    ### END SOLUTION


def mixed_step_floor(
    model: ModelCard,
    gpu: HardwareCard,
    batch: int,
    context: int,
    prompt_tokens: int,
    tp: int = 1,
    weight_dtype_bytes: float = 2,
    kv_dtype_bytes: int = 2,
) -> float:
    """Seconds that a step takes at least: ``batch`` decodes with ``context`` tokens each, and a chunk of a prompt.

    Parameters
    ----------
    batch, context : int
        Requests that are decoded, and the tokens that each of them has in the cache.
    prompt_tokens : int
        Tokens of prompts that the step reads besides.
    tp : int
        Cards that share the heads and the weights.
    weight_dtype_bytes, kv_dtype_bytes : float, int
        Bytes of one weight and of one cached element as they are read. The arithmetic is bf16.
    """
    ### BEGIN SOLUTION
    tokens = batch + prompt_tokens
    weights = _weights_used(model, experts_read(model, tokens)) * weight_dtype_bytes / tp
    layout = Layout(cards=tp, split_heads=tp)
    kv = batch * kv_bytes_per_rank(model, context, layout, kv_dtype_bytes)
    active = _weights_used(model, model.experts_per_token) - parameters(model)["embedding"]
    operations = 2 * active * tokens / tp
    return max((weights + kv) / gpu.bandwidth_tb_s, operations / gpu.dense_bf16_tflops) / 1e12


def _weights_used(model: ModelCard, experts: float) -> float:
    """Parameters when so many routed experts a layer are used."""
    parts = parameters(model)
    unused = 1 - experts / model.num_experts if model.num_experts else 0
    return sum(parts.values()) - parts["experts"] * unused
    ### END SOLUTION


def decode_step_floor(
    model: ModelCard,
    gpu: HardwareCard,
    batch: int,
    context: int,
    tp: int = 1,
    weight_dtype_bytes: float = 2,
    kv_dtype_bytes: int = 2,
) -> float:
    """Seconds that a decode step of ``batch`` requests with ``context`` cached tokens each takes at least."""
    ### BEGIN SOLUTION
    return mixed_step_floor(model, gpu, batch, context, 0, tp, weight_dtype_bytes, kv_dtype_bytes)
    ### END SOLUTION


def prefill_floor(
    model: ModelCard, gpu: HardwareCard, tokens: int, tp: int = 1, weight_dtype_bytes: float = 2
) -> float:
    """Seconds that a step takes at least that reads ``tokens`` tokens of prompts and decodes nothing."""
    ### BEGIN SOLUTION
    return mixed_step_floor(model, gpu, 0, 0, tokens, tp, weight_dtype_bytes)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and Llama-3.1-70B on four cards.

# %%
llama_8b = model_card("llama-3.1-8b")
for batch in (1, 32, 128, 256):
    one = decode_step_floor(llama_8b, h100, batch, 2048)
    four = decode_step_floor(llama, h100, batch, 2048, tp=4)
    print(f"batch {batch:3}: 8B {one * 1e3:5.2f} ms, {batch / one:6,.0f} tokens/s; 70B TP4 {four * 1e3:5.2f} ms")
for tokens in (16, 256, 2048):
    print(f"prefill of {tokens} tokens: at least {prefill_floor(llama_8b, h100, tokens) * 1e3:.2f} ms")

# %% nbgrader={"grade_id": "floors-check", "grade": true, "locked": true, "points": 14}
check("memory.floors", experts_read, decode_step_floor, prefill_floor, mixed_step_floor)

# %% [markdown]
# Batching has a price: at batch 128 each token of the 8B model takes at least 3.09 times as long as alone. The 70B model on
# four cards pays 1.15 times at batch 32. "Continuous batching raises TPOT slightly" is true or false by the numbers.

# %% [markdown]
# ## 6. The roofline
#
# The **arithmetic intensity** of a piece of work is its operations per byte read. A GPU's **ridge point** is its peak
# over its bandwidth. Work of a lower intensity is **memory-bound**: the bandwidth decides its time. Work of a higher one
# is **compute-bound**.
#
# A matrix of bf16 weights that is applied to B tokens does 2B operations for each 2 bytes: its intensity is B. So the
# ridge point, in bf16, *is* a batch size, the **critical batch**. Below it more tokens cost no time in such a layer.
#
# ```
#  operations/s
#    |            ridge     ____________  peak
#    |                  . /
#    |               /    .
#    |            /       .      slope: bandwidth
#    |         /          .
#    +---------------------------------- operations per byte
# ```

# %% [markdown]
# ### A worked example
#
# | GPU | TB/s | dense bf16 TFLOP/s | ridge point |
# |---|---|---|---|
# | A100-80 SXM | 2.039 | 312 | 153 |
# | H100 SXM | 3.35 | 989 | 295 |
# | H200 SXM | 4.8 | 989 | 206 |
# | L4 | 0.3 | 121 | 403 |
#
# Three things move the critical batch:
#
# - **experts**: of B tokens, only B k/E reach one expert under even routing. Mixtral (2 of 8) needs 4 times the batch: 1181
#   on an H100.
# - **weights only** in int8: half of the bytes, the same operations at the same peak, so half of the batch.
# - **weights and arithmetic** in fp8: half of the bytes, and the peak doubles. Nothing changes.

# %% [markdown]
# ### Attention is different
#
# In decoding, each request reads *its own* KV. More requests bring more operations and more bytes alike, so the intensity
# depends neither on the batch nor on the context. With GQA each cached key is used by n/k query heads, for one product
# with the query (2 operations an element), and each value for one product with the weights: in bf16 that is n/k
# operations per byte. 1 for Llama-2-7B, 4 for Llama-3.1-8B, 16 for Llama-3.1-405B: far below every ridge point.
#
# MLA, computed on the latent, uses all of what a token keeps (r + rope elements) for the score and the latent
# again (r elements) for the output, in each of its n heads. DeepSeek-V3: 128 x 2 x (576 + 512) / (576 x 2) = 241.8,
# near the ridge.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write `ridge_point(gpu)`, `critical_batch(model, gpu, weight_dtype_bytes, compute_dtype_bytes)` and
# `attention_intensity(model, kv_dtype_bytes)`. Arithmetic with elements of 1 byte runs at twice the bf16 peak.
#
# <details><summary>Hint 1: the dense case</summary>
#
# Ridge point: one division; both fields are in 1e12. In bf16 a dense model's critical batch is the ridge point.
#
# </details>
# <details><summary>Hint 2: three factors</summary>
#
# The weights' size in bytes relates to 2, and so does the size of what is multiplied, in the opposite direction. Experts
# bring the inverse of the share that a token uses; a dense model has no such factor.
#
# </details>
# <details><summary>Hint 3: attention</summary>
#
# Count for one token in the cache, one layer. Operations: 2 for each element used, over all query heads. Bytes: what
# exercise 1 counted for one layer. `head_dim` cancels out.
#
# </details>


# %% nbgrader={"grade_id": "roofline", "solution": true} tags=["export"]
def ridge_point(gpu: HardwareCard) -> float:
    """Operations per byte at which the bf16 peak and the bandwidth take equally long."""
    ### BEGIN SOLUTION
    return gpu.dense_bf16_tflops / gpu.bandwidth_tb_s
    ### END SOLUTION


def critical_batch(
    model: ModelCard, gpu: HardwareCard, weight_dtype_bytes: float = 2, compute_dtype_bytes: float = 2
) -> float:
    """Tokens in a step at which the model's MLPs go from memory-bound to compute-bound.

    Parameters
    ----------
    weight_dtype_bytes, compute_dtype_bytes : float
        Size of a weight as it is stored and read, and as it is multiplied. int8 weight-only: 1 and 2. fp8: 1 and 1.
    """
    ### BEGIN SOLUTION
    spread = model.num_experts / model.experts_per_token if model.num_experts else 1
    return ridge_point(gpu) * spread * weight_dtype_bytes / compute_dtype_bytes
    ### END SOLUTION


def attention_intensity(model: ModelCard, kv_dtype_bytes: int = 2) -> float:
    """Operations per byte of KV that decode attention does: in MLA on the latent, else on keys and values."""
    ### BEGIN SOLUTION
    used = 2 * model.head_dim
    if model.kv_lora_rank:
        used = 2 * model.kv_lora_rank + model.qk_rope_head_dim
    return 2 * model.num_heads * used / (kv_bytes_per_token(model, kv_dtype_bytes) / model.num_layers)
    ### END SOLUTION


# %% [markdown]
# Try it: the ridge point of each GPU, and three models.

# %%
for name in hardware_names():
    print(f"{name:>12}: ridge point {ridge_point(hardware_card(name)):5.1f} operations/byte")
for name in ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"):
    card = model_card(name)
    batch, intensity = critical_batch(card, h100), attention_intensity(card)
    print(f"{name:>12}: critical batch {batch:.0f} on an H100, attention {intensity:.1f} operations/byte")

# %% nbgrader={"grade_id": "roofline-check", "grade": true, "locked": true, "points": 8}
check("memory.roofline", ridge_point, critical_batch, attention_intensity)

# %% [markdown]
# ## 7. Looking back
#
# Six short questions (about 10 minutes).
#
# - **cards for 70B**: on how many 80 GB cards at least, 1, 2, 4 or 8 (all for TP), can Llama-3.1-70B in bf16 serve one
#   request of 8192 tokens? 92 % of a card, less 2 GB.
# - **KV a card at TP16**: GiB a card, for Llama-3.1-70B in bf16 and 8192 tokens (2.5 GiB in all) at TP16.
# - **four copies**: see A below.
# - **tokens that weigh as much as the weights**: for Llama-2-7B in bf16, at how many tokens in the cache is the KV as large
#   as the weights?
# - **FP8 KV**: see B below.
# - **batch past the ridge**: see C below.

# %% [markdown]
# **A.** Layout A keeps four copies of a request's KV, layout B one. Why?
#
# - (a) in A the same requests run in each of four groups; in B each request is in one group;
# - (b) in A the heads are split over fewer cards;
# - (c) in A the experts are split over fewer cards, and KV goes with the experts.
#
# **B.** An fp8 cache beside bf16 weights
#
# - (a) halves the time of each decode step;
# - (b) doubles the tokens that fit, and shortens a decode step most where batch and contexts are large;
# - (c) doubles the tokens that fit only where the weights are fp8 as well.
#
# **C.** The batch of an 8B model on an H100 grows past the critical batch, 295. Is decode attention compute-bound now?
#
# - (a) yes, every part of the step has the same intensity;
# - (b) yes, as soon as contexts are long enough;
# - (c) no, its intensity is 4 whatever the batch.
#
# In the cell, replace each `None` and delete the line that raises. Three significant digits are enough for a number;
# memory is in GiB.
#
# <details><summary>Hint 1: where to look</summary>
#
# The first and B are about exercise 4, with exercise 5 for the time. TP16 and A are about exercise 3. The tokens are
# bytes of exercise 2 over bytes of exercise 1. C is in exercise 6.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "cards for 70B": None,  # 1, 2, 4 or 8
    "KV a card at TP16": None,  # a number, in GiB, with three significant digits
    "four copies": None,  # "a", "b" or "c"
    "tokens that weigh as much as the weights": None,  # a number, with three significant digits
    "FP8 KV": None,  # "a", "b" or "c"
    "batch past the ridge": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["cards for 70B"] = 4
answers["KV a card at TP16"] = 0.3125
answers["four copies"] = "a"
answers["tokens that weigh as much as the weights"] = 25_705.0
answers["FP8 KV"] = "b"
answers["batch past the ridge"] = "c"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 5}
check("memory.reflection", answers)

# %% [markdown]
# ### In your own words (about 10 minutes)
#
# You have eight 80 GB cards in one node, and Llama-3.1-70B in bf16. Chats average 3,000 tokens. A colleague proposes
# TP2 x DP4: "four replicas, four times the throughput". Advise, in about 100 words.
#
# Three points, given by hand, one each:
#
# 1. the KV room of the proposal in numbers, and what it means for these chats;
# 2. a layout that you would choose, with its room in tokens or requests;
# 3. what would have to change for TP2 x DP4 to become reasonable, with a number.

# %% [markdown] nbgrader={"grade_id": "advice", "grade": true, "solution": true, "points": 3}
# ### BEGIN SOLUTION
# Against. At TP2 the weights are 70.56 GB a card; 92 % of 80 GB less 2 GB leaves 1.04 GB, or 6,378 tokens in each replica:
# two chats of 3,000 tokens, eight on the node. The cards would mostly read weights for two tokens a step.
#
# TP4 x DP2 has room for 443,373 tokens a replica, 886,747 in all, or 294 chats. TP8 has room for 1,317,364, or 439, but
# more communication in each step. I would start with TP4 x DP2 and measure.
#
# With fp8 weights, TP2 x DP4 has 35.28 GB of weights a card, and room for 886,779 tokens in all, or 292 chats, like TP4 x DP2 in bf16.
# Then four replicas are worth a try, if the quality holds.
# ### END SOLUTION
