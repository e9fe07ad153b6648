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
# # 11 Capstone: serve a real model
#
# You have a block allocator and paged attention (unit 03), a scheduler and a flat batch (unit 04), an all-reduce (unit 05)
# and layers that are split over ranks (unit 06). Here they become one server: an **engine** that takes requests and gives
# tokens. It serves a small language model with real weights, and what it answers can be compared, token by token, with the
# plain loop over one request.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `Engine` | How do the parts work together? | 45 | 60 |
# | 2 | two workloads | What does continuous batching bring? | - | 15 |
# | 3 | `rank_model` | What if the model is split over ranks? | 20 | 25 |
# | 4 | `CachedKV`, `CachedEngine` | What need not be computed? | 20 | 45 |
# | 5 | a server that others can talk to | | - | 15 |
# | 6 | looking back | | 15 | 25 |

# %% [markdown]
# ### The model
#
# `servelab.llm.model` is a Llama-style decoder in some 150 lines; read them, they are short. Two of its methods matter here:
#
# | call | what it gives |
# |---|---|
# | `model.forward(tokens, positions, kv)` | the hidden state behind each of T tokens, `[T, hidden_size]` |
# | `model.logits(hidden)` | for each of these, a score for every token of the vocabulary, `[T, vocab_size]` |
#
# The T tokens may belong to many requests: nothing in the model looks from one token to another but attention, and attention
# is an argument. `kv` is asked for it in every layer.

# %% [markdown]
# ### The pages
#
# `servelab.llm.kv.Pages` holds the keys and values: a pair of caches `[blocks, block_size, heads, head_dim]` for each layer,
# with your `write_kv` and `paged_attention`. `pages.bind(batch)` is what `forward` wants as `kv`: it knows the slots, block
# tables and lengths of this step's `FlatBatch`, which your `flatten_batch` made.

# %% tags=["export"]
from collections.abc import Sequence
from dataclasses import replace

import torch

from servelab.checking import check
from servelab.kv import OutOfBlocks
from servelab.llm import LLM, LLMConfig
from servelab.llm.engine import NewToken, WatchedScheduler, serve
from servelab.llm.generate import greedy
from servelab.llm.here import model_here
from servelab.llm.kv import Pages
from servelab.llm.model import Weights
from servelab.parts import collectives, continuous_batching, paged_kv, tensor_parallel
from servelab.ranks.communicator import Communicator
from servelab.serving import PagedKV, Request, SchedulerConfig, StepPlan

# %% [markdown]
# ### Which model
#
# The tiny model is part of the course. A byte is a token, and it was trained on this course's own text, so it knows the words
# and not much more. If `python3 course.py fetch-model` has fetched SmolLM2-135M-Instruct (Allal et al., 2025), the notebook
# serves that one. On a machine with a CUDA GPU it serves from the GPU in bfloat16, and makes the exact comparisons there in
# float64.
#
# | | SmolLM2-135M-Instruct | the tiny model |
# |---|---|---|
# | layers | 30 | 2 |
# | query heads, KV heads | 9, 3 | 8, 2 |
# | hidden size, MLP | 576, 1536 | 128, 352 |
# | vocabulary | 49,152 | 256 |
#
# SmolLM2 is slow on a CPU, and wants memory: 0.5 GB in float32, 1.1 GB in float64, and 1 GB for the fast parts of section 2.
# Cells that take longer than a few seconds with it say so; the next one takes ten or more, to read the model. The times are
# those of two cores with nothing else to do; on a busy machine they may be ten times as long. Interrupting such a cell is safe:
# go on, or run it again later; only what shows its results needs it. The checks are the same for both models. To serve the tiny
# one all the same, set `real` to False here.

# %%
real = True
here = model_here(real=real)
print(f"{here.name}: {sum(weight.numel() for weight in here.model.weights.values()):,} parameters")
prompt = here.encode("What is a block?")
print(len(prompt), "tokens ->", repr(here.tokenizer.decode(greedy(here.model, prompt, 40))))

# %%
from IPython.display import Markdown, display

from servelab.plots import iterations

# %% [markdown]
# ## 1. The engine
#
# `greedy` is the plain loop: one request, one token a step, all of the KV in one piece. It is right, and it is slow, because
# each step reads all weights for one token. Your engine makes the same steps for many requests at once.
#
# ```
#  add ---> scheduler.add             step:  scheduler.schedule -> StepPlan: how many tokens of whom
#                                              flatten_batch    -> FlatBatch: one row of tokens
#  abort -> scheduler.abort                    model.forward    -> hidden states, a row for each token
#                                              model.logits     -> scores behind the last token of each request
#                                            scheduler.finish_step(plan, outputs) -> who is finished
# ```
#
# The scheduler decides, and the KV memory knows the blocks. The engine keeps what neither of them has: the token ids of each
# request, and how many of them have been computed.

# %% [markdown]
# ### A worked example
#
# `a` has a prompt of 3 tokens, `b` one of 4. The plans are given:
#
# | step | preempted | plan | the row of tokens | computed before | a new token for |
# |---|---|---|---|---|---|
# | 0 | | 3 of a, 2 of b | a0 a1 a2 b0 b1 | a 0, b 0 | a, from row 2 |
# | 1 | | 1 of a, 2 of b | a3 b2 b3 | a 3, b 2 | a from row 0, b from row 2 |
# | 2 | b | 1 of a | a4 | a 4, b 0 | a, from row 0 |
# | 3 | | 5 of b | b0 b1 b2 b3 b4 | b 0 | b, from row 4 |
#
# In step 0 the prompt of `b` is not through, so the row behind `b1` says nothing that anybody asked for. In step 3 `b`
# computes its prompt and its first token again: it has lost its KV, and none of its tokens.

# %% [markdown]
# ### What may go wrong
#
# Each of these is a case of the check:
#
# - the row of a chunk's first token is used instead of its last, or row i for the i-th request;
# - a token is delivered for a chunk that does not end the prompt;
# - positions count from the beginning of the step, or are not set back after a preemption;
# - scores are computed for all tokens of the step: for 2048 prompt tokens and SmolLM2's vocabulary they are 400 MB in float32;
# - an aborted request keeps its blocks, or what was noted of it turns up again when its id does;
# - a request that is refused leaves something behind;
# - a step is lost when an answer ends, or one more is made behind the last.

# %% [markdown]
# ### Your task (about 60 minutes)
#
# Write `Engine`. `step` asks the scheduler for one plan, and makes one forward pass for it. (If no request is there, it need
# not ask.) If the plan schedules nothing, there is no pass, and `finish_step` is not called. The scheduler ends answers:
# `finish_step` says whose token was the last, because of EOS or of `max_tokens`. A server runs for months, so keep nothing of a
# request that has left.
#
# The check plays plans like those above. Its last case serves w16 and w32, the two workloads of section 2, with your
# `Scheduler` of unit 04 and a very small model: 255 and 319 decode steps, the tokens of the plain loop, and all blocks free at
# the end. The seconds do not count.
#
# <details><summary>Hint 1: the order of things in a step</summary>
#
# Ask for the plan. Whoever was preempted has nothing computed any more, also if nothing is scheduled. If something is, make
# the flat batch of all known tokens, run the model once, and note what is computed now. Take the scores, and of each row the
# likeliest token, as a plain int. Tell the scheduler, write the new tokens behind the known ones, where the next step finds
# them, and return all of them in one list.
#
# </details>
# <details><summary>Hint 2: which rows</summary>
#
# Only requests of which all known tokens are computed after the step get a token, each from its last row. Your `sampled_rows`
# of unit 04 finds these rows, from what was computed before the step. (Or add up the batch's numbers of rows as you go along
# the plan: each sum is the place behind a request's last row. The batch's context lengths are what is computed afterwards.)
# Index the hidden states first, and ask for scores then.
#
# </details>
# <details><summary>Hint 3: coming and going</summary>
#
# Two dictionaries by id are enough: the known tokens, and the number computed. A request enters both when the scheduler has
# taken it, not before, with a list of its own. It leaves both when the scheduler says that it is finished, and when it is
# aborted; an abort may also name an id that nobody knows. What the model can never hold is refused first: prompt and longest
# answer together must not exceed the model's longest length.
#
# </details>


# %% nbgrader={"grade_id": "engine", "solution": true} tags=["export"]
class Engine:
    """Serve requests with a model: a scheduler decides, one forward pass computes, every answer gets its next token.

    Parameters
    ----------
    model : LLM
        Its forward pass takes the tokens of all requests of a step at once.
    scheduler : object
        With ``add``, ``abort``, ``schedule`` and ``finish_step`` as unit 04 defines them.
    kv : PagedKV
        The blocks of each request; the scheduler reserves them and gives them back.
    pages : Pages
        The keys and values that lie in these blocks.

    Notes
    -----
    A step costs one forward pass, and O(tokens of the step) beside it, however many requests wait. Requests take the
    steps that the scheduler plans and no other: w16 of ``data/workloads.json`` has 255 decode steps, w32 has 319.
    """

    def __init__(self, model: LLM, scheduler, kv: PagedKV, pages: Pages):
        self.model, self.scheduler, self.kv, self.pages = model, scheduler, kv, pages
        ### BEGIN SOLUTION
        self.tokens: dict[str, list[int]] = {}  # prompt and answer
        self.computed: dict[str, int] = {}
        ### END SOLUTION

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and are neither finished nor aborted."""
        ### BEGIN SOLUTION
        return len(self.tokens)
        ### END SOLUTION

    def add(self, request: Request, prompt: Sequence[int]) -> None:
        """Queue a request with the token ids of its prompt.

        The list stays the caller's: it is not changed here, and what the caller writes into it later changes nothing.

        Raises
        ------
        ValueError
            If the prompt is not as long as the request says, if prompt and longest answer are more than the model's
            ``max_model_len`` tokens, or if the scheduler refuses the request. Nothing has changed then.
        """
        ### BEGIN SOLUTION
        if len(prompt) != request.prompt_tokens:
            raise ValueError(f"request {request.id} has a prompt of {len(prompt)} tokens, not {request.prompt_tokens}")
        if request.prompt_tokens + request.max_tokens > self.model.config.max_model_len:
            raise ValueError(f"request {request.id} may have more than {self.model.config.max_model_len} tokens")
        self.scheduler.add(request)
        self.tokens[request.id], self.computed[request.id] = list(prompt), 0
        ### END SOLUTION

    def abort(self, id: str) -> None:
        """Forget a request; its KV is free at once. Nothing happens if there is no such request."""
        ### BEGIN SOLUTION
        self.scheduler.abort(id)
        self._forget(id)
        ### END SOLUTION

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        """Make one step and return the tokens that it gave, in any order.

        The likeliest token is taken (greedy), as an int. A request gets no token while some of its known tokens are
        still not computed. A step whose plan schedules nothing is not run: no forward pass, and no ``finish_step``.
        """
        ### BEGIN SOLUTION
        plan = self.scheduler.schedule()
        self.computed |= dict.fromkeys(plan.preempted, 0)
        if not plan.scheduled:
            return []
        outputs = self._compute(plan)
        finished = self.scheduler.finish_step(plan, outputs)
        for id, token in outputs.items():
            self.tokens[id].append(token)
        for id in finished:
            self._forget(id)
        return [NewToken(id, token, id in finished) for id, token in outputs.items()]

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        """Run the plan; the next token of each request that has no other left to compute."""
        batch = continuous_batching.flatten_batch(plan, self.tokens, self.computed, self.kv)
        hidden = self.model.forward(batch.tokens, batch.positions, self.pages.bind(batch))
        rows = continuous_batching.sampled_rows(plan, self.tokens, self.computed)
        for id, fresh in plan.scheduled.items():
            self.computed[id] += fresh
        best = iter(self.model.logits(hidden[list(rows.values())]).argmax(1).tolist())
        return {id: next(best) for id in rows}

    def _forget(self, id: str) -> None:
        self.tokens.pop(id, None)
        self.computed.pop(id, None)
        ### END SOLUTION


# %% [markdown]
# Try it: the plans of the worked example, with the small random model of the check. The numbers behind `passes` are the tokens
# of each forward pass. The last line is what the plain loop says, and your tokens have to be the same.

# %%
from servelab.exercises.capstone._script import add, answer, step
from servelab.exercises.capstone.engine import play

plans = [
    step({"a": 3, "b": 2}, add("a", [11, 12, 13], 3), add("b", [21, 22, 23, 24], 2)),
    step({"a": 1, "b": 2}),
    step({"a": 1}, preempted=["b"]),
    step({"b": 5}),
]
play(Engine, plans, block_size=4, eos=-1)
print("the plain loop: a:", answer([11, 12, 13], 3), "b:", answer([21, 22, 23, 24], 2))

# %% [markdown]
# And with the real parts: three schedulers of yours, memory that is ample or tight, prompts whole or in chunks. Every answer
# has to be the plain loop's, to the token. In float64 two scores are hardly ever so close that the order of a sum decides.
#
# (With SmolLM2 answers are shorter here, and the two cells take half a minute to a minute; on a busy machine several minutes.)

# %%
exact = model_here(torch.float64, real)
most, chunk = (24, 7) if exact.name == "the tiny model" else (8, 24)  # tokens of an answer, and of a small budget
questions = ["What is a block?", "Who is preempted?", "Why?", "What is in the cache?"]
prompts = {f"r{n}": exact.encode(text) for n, text in enumerate(questions)}
print(f"the plain loop: {len(prompts)} answers, one after another", flush=True)
plain = {id: list(greedy(exact.model, tokens, most)) for id, tokens in prompts.items()}
asked = [(Request(id, len(tokens), most), tokens) for id, tokens in prompts.items()]
room = -(-(max(map(len, prompts.values())) + most - 1) // 8)  # blocks of 8 for the longest


def serve_all(scheduler_class: type, num_blocks: int, budget: int) -> None:
    """Serve the four questions, and compare."""
    kv = PagedKV(paged_kv.BlockAllocator(num_blocks, 8))
    config = SchedulerConfig(4, budget, eos_token_id=exact.tokenizer.eos_token_id)
    scheduler = WatchedScheduler(scheduler_class(config, kv), kv)
    pages = Pages.of(exact.model, num_blocks, 8, paged_kv)
    print(f"{scheduler_class.__name__}, {num_blocks} blocks, budget {budget}:", end=" ", flush=True)
    served, said = serve(Engine(exact.model, scheduler, kv, pages), scheduler, asked)
    lost = sum(len(step.preempted) for step in served.steps)
    print(f"{len(served.steps)} steps, preempted: {lost},", end=" ")
    print(f"as the plain loop: {said == plain}, blocks free again: {kv.num_free}")


# %%
serve_all(continuous_batching.Scheduler, 4 * room, 512)
serve_all(continuous_batching.PagedScheduler, 4 * room, 512)
serve_all(continuous_batching.PagedScheduler, room + 3, 512)
serve_all(continuous_batching.ChunkedScheduler, 4 * room, chunk)
serve_all(continuous_batching.ChunkedScheduler, room + 3, chunk)

# %% nbgrader={"grade_id": "engine-check", "grade": true, "locked": true, "points": 45}
check("capstone.engine", Engine)

# %% [markdown]
# ### Why tokens can differ after all
#
# In exact arithmetic a batch changes nothing. In floating point a sum depends on its order, and for another shape a kernel may
# choose another order. In float64 that is far below the distance of two scores. In bfloat16 it is not: for 1.7 % of the tokens
# SmolLM2's likeliest one is not that of float32, and of 48 answers, served static and continuous, 11 differed. In float32 all
# 48 were the same. (Measured with SmolLM2-135M-Instruct on a CPU, on ten prompts, and on the two workloads below.)

# %% [markdown]
# ### Explore: the timeline of your engine
#
# Six requests, every second one with a long answer, on a clock on which a step takes a second. A small budget cuts the
# prompts, few blocks mean preemption. Whatever you choose, the tokens stay the same; only the steps change, so the tiny model
# will do. In the panel below, the line is the share of the KV slots that are taken, the area the share that hold a token.

# %%
from ipywidgets import IntSlider

from servelab.llm.engine import clock_of_steps
from servelab.llm.model import load
from servelab.plots.explore import explore

quick = LLM(*load())
six = [(Request(f"r{n}", 12, 16 if n % 2 else 5), list(range(40 + n, 52 + n))) for n in range(6)]


def draw(max_num_seqs: int, budget: int, num_blocks: int) -> None:
    """Serve the six requests and draw what each step computed."""
    kv = PagedKV(paged_kv.BlockAllocator(num_blocks, 4))
    config = SchedulerConfig(max_num_seqs, budget, eos_token_id=-1)
    scheduler = WatchedScheduler(continuous_batching.ChunkedScheduler(config, kv), kv)
    pages = Pages.of(quick, num_blocks, 4, paged_kv)
    served, _ = serve(Engine(quick, scheduler, kv, pages), scheduler, six, clock=clock_of_steps())
    display(iterations.timeline(served, kv))
    display(Markdown(iterations.timeline_text(served)))


sliders = {"max_num_seqs": (4, 1, 6), "budget": (16, 6, 80), "num_blocks": (16, 7, 48)}
explore(draw, **{name: IntSlider(*limits, continuous_update=False) for name, limits in sliders.items()})

# %% [markdown]
# ## 2. Two workloads
#
# Answers have a long tail: most are short, a few are long. Two workloads of this shape lie in `data/workloads.json`:
#
# | | answers | slots |
# |---|---|---|
# | w16 | 12 of 16 tokens, 3 of 64, 1 of 256 | 16: all at once |
# | w32 | 24 of 16 tokens, 6 of 64, 2 of 256 | 8 |
#
# All requests are there at the beginning, in a fixed order, and EOS is ignored, so that lengths and order are the same for
# every model. Then the number of steps is exact, whatever the machine. We count **decode steps**: steps in which somebody is
# decoded. w16 takes 255 of them: its longest answer, whose first token comes from the prefill.

# %% [markdown]
# w32 takes 636 decode steps in static batches of 8, and 319 with continuous batching. In this order two of the four batches
# hold an answer of 256 tokens, and two have a longest one of 64: 2 x 255 + 2 x 63 = 636. With continuous batching the second
# of the long answers finds a free slot after 64 steps. So all is done after 64 + 256 = 320 steps, of which only the first
# decodes nobody.

# %% [markdown]
# ### Live
#
# w16 with your engine. A bar shows how far it is, and below it the last 100 characters of three answers, one of each length.
# Since EOS is ignored, an answer may go on behind its end; SmolLM2 then makes up the next turn of the chat.
# (Half a minute to a minute with SmolLM2. The bar stays at 0 until the first step is done: that one computes all prompts.)

# %%
from servelab.llm.engine import decode_steps, workload
from servelab.llm.live import Live
from servelab.simulation import StaticBatches


def run_workload(name: str, model: LLM, pages, static: bool = False):
    """Serve a workload in 128 blocks of 16, live: the run, and the KV memory that it ran in."""
    todo = workload(name)
    requests, kv = todo.requests(here.encode), PagedKV(paged_kv.BlockAllocator(num_blocks=128, block_size=16))
    config = SchedulerConfig(todo.slots, max_num_batched_tokens=4096, eos_token_id=-1)
    made = continuous_batching.Scheduler(config, kv)
    scheduler = WatchedScheduler(StaticBatches(made, todo.slots) if static else made, kv)
    first = sorted(todo.max_tokens.index(length) for length in set(todo.max_tokens))  # one answer of each length
    shown = {requests[n][0].id: todo.texts[n] for n in first}
    print(f"{name}, {'static' if static else 'continuous'}:")
    live = Live(sum(todo.max_tokens), here.tokenizer, shown)
    served, _ = serve(Engine(model, scheduler, kv, pages), scheduler, requests, live)
    live.finish()
    return served, kv


runs = {"w16": run_workload("w16", here.model, Pages.of(here.model, 128, 16, paged_kv))}

# %% [markdown]
# ### Fast parts
#
# `LLM` and `paged_attention` are made to be read. Two modules of the course have the same parts, made for speed: `FastLLM`
# computes what `LLM` does, from weights that are laid out for a few rows at a time; `fast_pages` makes pages whose attention
# takes all decoding requests at once, and reads the block tables once a step, not once a layer. Your engine, your scheduler and
# your block tables stay as they are.
#
# With these parts w16 comes again, and w32 both ways. (About two minutes with SmolLM2, many more on a busy machine.)

# %%
from servelab.llm.fast_attention import fast_pages
from servelab.llm.fast_model import FastLLM

fast = FastLLM(here.model.config, here.model.weights)
their_pages = fast_pages(fast, num_blocks=128, block_size=16)
fast_runs = {
    "w16, fast parts": run_workload("w16", fast, their_pages),
    "w32, fast parts": run_workload("w32", fast, their_pages),
    "w32, fast parts, static": run_workload("w32", fast, their_pages, static=True),
}

# %% [markdown]
# The step counts are exact. The seconds are those of your machine, today. All requests are there from the start, so TTFT is
# mostly the wait for a slot.

# %%
rows = ["| | decode steps | tokens/s | TTFT p50, p99 | TPOT p50, p99 |", "|---|---|---|---|---|"]
for name, (served, _) in (runs | fast_runs).items():
    timings, columns = served.timings(), []
    for metric in (continuous_batching.ttft, continuous_batching.tpot):
        values = [metric(timing) for timing in timings]
        columns.append(", ".join(f"{1e3 * continuous_batching.percentile(values, p):.0f} ms" for p in (50, 99)))
    rate = continuous_batching.throughput(timings)
    rows.append(f"| {name} | {decode_steps(served)} | {rate:.0f} | {' | '.join(columns)} |")
display(Markdown("\n".join(rows)))

# %% [markdown]
# Continuous batching makes fewer steps, and fuller ones. TTFT falls for those who waited for a batch, and the whole run is
# shorter. TPOT follows the length of a step, not the number of steps, and a fuller step takes longer: so TPOT wins little, and
# may lose.
#
# For comparison, tokens/s with SmolLM2 in float32 on two threads of a server CPU, as `benchmarks/serve.py` measures them; with
# an engine like yours and either kind of parts:
#
# | | w16 | w32 |
# |---|---|---|
# | static, fast parts | 33.0 | 32.6 |
# | continuous, fast parts | 35.4 | 54.0 |
# | continuous, your kind of parts | 20.7 | 26.1 |
# | Hugging Face transformers, static | 10.1 | 12.7 |
# | Hugging Face transformers, continuous | 15.9 | 18.8 |
#
# w16 is one batch of 16 on 16 slots. Both ways make the same steps there: 33.0 and 35.4 are two measurements of the same work.

# %% [markdown]
# ### KV use over time
#
# The line is what is taken, the area what holds a token. Your `Scheduler` reserves the whole answer at admission. In the static
# run whole batches come, and go as their answers end.

# %%
taken = {name: served for name, (served, _) in fast_runs.items() if name.startswith("w32")}
memory = fast_runs["w32, fast parts"][1]
display(iterations.kv_use(taken, memory))
display(Markdown(iterations.kv_use_text(taken, memory)))

# %% [markdown]
# ## 3. The same engine on ranks
#
# A model that is too large for one device, or too slow on it, is split by tensor parallelism (unit 06). Nothing in your
# engine has to change. Every rank runs the same engine: the same scheduler, the same block tables, the same plans. What
# differs is the model, which holds a rank's heads and MLP columns, and the pages, which hold a rank's KV heads.
#
# ```
#             rank 0                               rank 1
#    scheduler: plan {a: 1, b: 5}         scheduler: plan {a: 1, b: 5}
#    its heads, its pages                 its heads, its pages
#         |----- all-reduce, twice a layer -----|
#    logits: the same numbers             logits: the same numbers
#    argmax: the same tokens              argmax: the same tokens
# ```
#
# Your ring adds each chunk up once and then hands the sum around, so all ranks hold the same hidden states, bit for bit. They
# sample the same tokens, and their schedulers go on in step without a word between them.

# %% [markdown]
# ### Which part of which weight
#
# 8 query heads and 2 KV heads of size 16 on 4 ranks, rank 2:
#
# | weight | shape | on rank 2 | why |
# |---|---|---|---|
# | `q` | [128, hidden] | rows 64 to 95 | heads 4 and 5 |
# | `k`, `v` | [32, hidden] | rows 16 to 31 | KV head 1, which heads 4 to 7 use; rank 3 has it, too |
# | `o` | [hidden, 128] | columns 64 to 95 | they take what the rank's heads give |
# | `gate`, `up` | [mlp, hidden] | the third quarter of the rows | as q |
# | `down` | [hidden, mlp] | the third quarter of the columns | as o |
# | embedding, norms | | whole | every rank needs them |
#
# Names are those of `LLMConfig.shapes()`: `"layers.0.q"`, ..., `"embedding"`, `"norm"`. The model adds the partial sums up
# itself, if it has a communicator.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `rank_model`. Unit 06's functions do most of it: use `tensor_parallel.shard` and `tensor_parallel.my_heads`.
#
# <details><summary>Hint 1: what the model needs</summary>
#
# An `LLM` is made of a configuration, weights by name, and a communicator. Make all three for this rank. Which way a weight is
# cut depends on the last part of its name only; what is not split is passed on.
#
# </details>
# <details><summary>Hint 2: heads</summary>
#
# `my_heads` gives two ranges. Their lengths are the rank's numbers of heads, which belong into its configuration: pages are
# made from it. The KV rows begin at the first KV head times the head size, and with more ranks than KV heads several ranks
# take the same rows.
#
# </details>
# <details><summary>Hint 3: memory and refusals</summary>
#
# A slice of a tensor keeps the whole tensor in memory; copy it. `shard` and `my_heads` refuse what cannot be cut evenly, with
# the error that is asked for.
#
# </details>


# %% nbgrader={"grade_id": "rank-model", "solution": true} tags=["export"]
def rank_model(config: LLMConfig, weights: Weights, comm: Communicator) -> LLM:
    """The model on this rank of a tensor-parallel group, out of the whole model's weights.

    Parameters
    ----------
    config : LLMConfig
        Of the whole model. The rank's model has it with the rank's numbers of query and KV heads. ``intermediate_size``
        may be the whole one or the rank's; all else is as it was, for each rank holds hidden states of full width.
    weights : dict of str to Tensor
        Of the whole model, named and shaped as ``config.shapes()`` says. Neither the tensors nor the dictionary change:
        other ranks may read the same. What the rank keeps of a weight that is split is a tensor of its own, and no more.
    comm : Communicator
        The group. The rank's model adds up partial sums with it.

    Raises
    ------
    ValueError
        If heads or MLP do not go onto so many ranks.
    """
    ### BEGIN SOLUTION
    queries, keys = tensor_parallel.my_heads(config.num_heads, config.num_kv_heads, comm.rank, comm.size)
    rows = slice(keys.start * config.head_dim, keys.stop * config.head_dim)

    def part(name: str, weight: torch.Tensor) -> torch.Tensor:
        kind = name.rpartition(".")[2]
        if kind in ("k", "v"):
            return weight[rows].clone()
        dims = {"q": 0, "gate": 0, "up": 0, "o": 1, "down": 1}
        return tensor_parallel.shard(weight, dims[kind], comm) if kind in dims else weight

    mine = replace(config, num_heads=len(queries), num_kv_heads=len(keys))
    return LLM(mine, {name: part(name, weight) for name, weight in weights.items()}, comm)
    ### END SOLUTION


# %% [markdown]
# Try it: the engine of exercise 1 on 1, 2 and 4 simulated ranks, over the all-reduce of unit 05. Rank 0 reports. (SmolLM2 is
# served on 1 and 3 ranks here. Simulated ranks take turns, so they are no faster: about ten seconds on two free cores.)

# %%
from servelab.ranks import SimCluster


class Whole:
    """The whole model, for all ranks to read: of a class there is one, of a notebook's other values one for each rank."""


Whole.config = exact.model.config
Whole.weights = {name: weight.cpu() for name, weight in exact.model.weights.items()}  # simulated ranks have no GPU


def serve_on_a_rank():
    """What each rank runs: its part of the model, in an engine of its own. Rank 0 returns the answers."""
    comm = Communicator(all_reduce=collectives.ring_all_reduce)
    mine = rank_model(Whole.config, Whole.weights, comm)
    kv = PagedKV(paged_kv.BlockAllocator(4 * room, 8))
    config = SchedulerConfig(4, 64, eos_token_id=Whole.config.eos_token_id)
    scheduler = WatchedScheduler(continuous_batching.ChunkedScheduler(config, kv), kv)
    engine = Engine(mine, scheduler, kv, Pages.of(mine, 4 * room, 8, paged_kv))
    _, said = serve(engine, scheduler, asked[:2])
    return (said, sum(weight.numel() for weight in mine.weights.values())) if comm.rank == 0 else None


for size in (1, 3) if Whole.config.num_kv_heads == 3 else (1, 2, 4):
    print(f"ranks: {size};", end=" ", flush=True)
    run = SimCluster(size, timeout=900).run(serve_on_a_rank)
    said, numbers = run.values[0]
    same = all(said[id] == plain[id] for id in said)
    print(f"as the plain loop: {same}; weights on rank 0: {numbers:,};", end=" ")
    print(f"all-reduces: {len(run.collectives(0))}")

# %% nbgrader={"grade_id": "rank-model-check", "grade": true, "locked": true, "points": 20}
check("capstone.rank_model", rank_model)

# %% [markdown]
# ### With your own layers
#
# `rank_model` cuts the weights; the layers are still the course's. You have written one yourself: unit 06's `DecoderLayer`. The
# next cell makes a model of them, and your engine serves four requests with it on two ranks. So your block tables, paged
# attention, scheduler, ring and layers all work in one server. (The tiny model again, whose 2 KV heads go onto 2 ranks. The
# pages are made for the KV heads of your `rank_model`.)

# %%
from servelab.errors import CourseError
from servelab.llm import thread


def serve_with_layers(DecoderLayer: type) -> dict[str, list[int]]:
    """What each rank runs: your engine, over a model of your layers. Returns the answers."""
    comm, whole = Communicator(all_reduce=collectives.ring_all_reduce), thread.tiny_model()
    layered = thread.LayeredLLM(whole.config, whole.weights, comm, DecoderLayer)
    pages = Pages.of(rank_model(whole.config, whole.weights, comm), 64, 8, paged_kv)
    kv = PagedKV(paged_kv.BlockAllocator(num_blocks=64, block_size=8))
    config = SchedulerConfig(4, 16, eos_token_id=whole.config.eos_token_id)
    scheduler = WatchedScheduler(continuous_batching.ChunkedScheduler(config, kv), kv)
    todo = [(Request(id, len(tokens), thread.MAX_TOKENS), tokens) for id, tokens in thread.tiny_prompts().items()]
    return serve(Engine(layered, scheduler, kv, pages), scheduler, todo)[1]


try:
    own_layer = tensor_parallel.DecoderLayer
except CourseError as missing:
    print(missing)
else:
    run = SimCluster(2, timeout=900).run(serve_with_layers, own_layer)
    alike = "" if run.values[0] == run.values[1] else "not "
    note = f", {alike}the same on both ranks; all-reduces: {len(run.collectives(0))}"
    thread.report("2 ranks", run.values[0], thread.plain_loop(thread.tiny_model(), thread.tiny_prompts()), note)

# %% [markdown]
# ### Right, and slower
#
# Split over ranks, the tokens stay the same. The time does not. Medians of a decode step of SmolLM2, measured on a machine with
# two cores:
#
# | requests | three processes with gloo | one process with one thread |
# |---|---|---|
# | 1 | 270 ms | 73 ms |
# | 8 | 347 ms | 179 ms |
#
# One all-reduce of the 8 requests' hidden states, [8, 576], took 1.1 to 1.2 ms.
#
# Each rank has a third of the arithmetic. But a step has 60 all-reduces, two in each layer, and where three processes share two
# cores, one of them always waits for its turn; section 6 asks what the one has to do with the other. Tensor parallelism pays
# where each rank has a device of its own, links are fast and weights are large. Here it is a test of correctness.

# %% [markdown]
# ## 4. What need not be computed
#
# Unit 03's `PrefixCache` finds the blocks of a prompt's beginning. Your engine can use it without any change to the scheduler:
#
# - a request that gets its first blocks begins its table with those that were found;
# - the scheduler does not know, and schedules all tokens of the prompt, chunk by chunk;
# - the engine leaves out of the forward pass what was found. A step in which nothing else is scheduled needs no pass at all.
#
# Where a plan's tokens were all found, `finish_step` is called all the same, with no token: the scheduler has to hear that its
# plan is done. So found tokens cost steps and budget, but no computation. (vLLM tells its scheduler of the hit, which saves the
# budget, too. That would be a change to your scheduler.)

# %% [markdown]
# ### A worked example
#
# Blocks of 4. `a` with 11 tokens has been computed: the pool knows two full blocks. Then `b` comes, which begins with the same
# 9 tokens and has 2 of its own. The plans are given:
#
# | step | plan | computed before, for the scheduler | found | in the forward pass | new token |
# |---|---|---|---|---|---|
# | 1 | 6 of b | 0 | 8 | nothing | |
# | 2 | 5 of b | 6 | 8 | 3: tokens 8, 9 and 10 | yes |
# | 3 | 1 of b | 11 | 8 | 1: token 11 | yes |
#
# The table of `b` is two blocks long after step 1, and three after step 2.

# %% [markdown]
# ### Two moments
#
# **When is a block found?** When a request that holds no blocks reserves some: at its admission, and again after a preemption,
# when it may well find its own. The last known token is never found (`match` sees to it), so there is always a row to take the
# next token from.
#
# **When is a block remembered?** When its KV has been computed: after the forward pass, and before the scheduler hears of the
# step's end, because that is when a finished request gives its blocks back. A block that is only reserved, or full but for the
# token that was just sampled, is not computed yet. After every step the pool knows all full blocks that have
# been computed.

# %% [markdown]
# ### Your task (about 45 minutes)
#
# Write `CachedKV` and `CachedEngine`. `PagedKV.adopt(id, blocks)` begins the table of a request that holds no blocks with some
# to which it has references, as those of `match` have; its `reserve` appends to a table that is there. If there is no room,
# your `reserve` raises and leaves everything as it was, also the references that `match` took.
#
# `CachedEngine` inherits from your `Engine`, of which it needs another `step`, or another of the methods that `step` calls; the
# cell shows only where it begins. It may also be written anew. The check looks at the tokens, at the number of tokens in each
# forward pass, and at how many blocks are in use.
#
# <details><summary>Hint 1: two counts</summary>
#
# For each request there are two numbers now: how far the scheduler is, and from where on the KV has to be computed. Before a
# step, the second is the larger of the first and what was found. What is left of the plan runs through the forward pass as a
# plan of its own. If you keep one number only, let it be the larger one, but never beyond where the plan ends.
#
# </details>
# <details><summary>Hint 2: reserve</summary>
#
# Only a request without blocks looks. Let its table begin with what was found, and let `PagedKV` do the rest. If that raises,
# release the request again, but only if it was this call that looked. A chunk may be shorter than what was found; then the
# table is longer than asked for, and nothing is missing. If the plan that is left schedules nothing, nothing may run.
#
# </details>
# <details><summary>Hint 3: remember</summary>
#
# The pool wants the tokens and the table. It needs to be told only when one more block is full. What has been remembered, and
# what was found, are the same kind of number: tokens at the beginning whose blocks the pool knows. It starts anew whenever a
# request looks. Let the engine's own mapping of known tokens be the memory's, so that answers are in it as they grow.
#
# </details>


# %% nbgrader={"grade_id": "cached-engine", "solution": true} tags=["export"]
class CachedKV(PagedKV):
    """The KV memory of a server whose pool remembers: a request begins with the blocks that hold its first tokens.

    Parameters
    ----------
    pool : PrefixCache
        Of unit 03.

    Attributes
    ----------
    tokens : mapping of str to list of int
        Of each request the known tokens, prompt and answer. The engine puts its own mapping here.
    """

    def __init__(self, pool):
        super().__init__(pool)
        self.tokens: dict[str, list[int]] = {}
        ### BEGIN SOLUTION
        self._full: dict[str, int] = {}  # blocks at the beginning that the pool knows
        ### END SOLUTION

    def reserve(self, id: str, num_tokens: int) -> None:
        """As `PagedKV.reserve`; the table of a request that holds no blocks begins with those that the pool finds.

        So it may be longer than ``num_tokens`` need. Raises `OutOfBlocks`; nothing has changed then.
        """
        ### BEGIN SOLUTION
        fresh = not self.blocks(id)
        if fresh:
            found, _ = self.pool.match(self.tokens[id])
            self.adopt(id, found)
            self._full[id] = len(found)
        try:
            super().reserve(id, num_tokens)
        except OutOfBlocks:
            if fresh:
                self.release(id)
            raise
        ### END SOLUTION

    def num_cached(self, id: str) -> int:
        """Tokens at the beginning of a request that holds blocks whose KV need not be computed."""
        ### BEGIN SOLUTION
        return self._full[id] * self.block_size
        ### END SOLUTION

    def remember(self, id: str, num_tokens: int) -> None:
        """Tell the pool of the full blocks among the first ``num_tokens`` of a request, whose KV has been computed."""
        ### BEGIN SOLUTION
        full = self.blocks(id)[: num_tokens // self.block_size]
        if full[self._full[id] :]:
            self.pool.insert(self.tokens[id][:num_tokens], full)
            self._full[id] = len(full)
        ### END SOLUTION


class CachedEngine(Engine):
    """An engine on a `CachedKV` that computes no token whose KV was found.

    The scheduler does not know of the cache and schedules found tokens, too; they take no part in the forward pass.
    """

    def __init__(self, model: LLM, scheduler, kv: CachedKV, pages: Pages):
        super().__init__(model, scheduler, kv, pages)
        ### BEGIN SOLUTION
        kv.tokens = self.tokens

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        rest = StepPlan()
        for id, fresh in plan.scheduled.items():
            end = self.computed[id] + fresh
            self.computed[id] = min(end, max(self.computed[id], self.kv.num_cached(id)))
            left = end - self.computed[id]
            if left:
                rest.scheduled[id] = left
        outputs = super()._compute(rest) if rest.scheduled else {}
        for id in plan.scheduled:
            self.kv.remember(id, self.computed[id])
        return outputs
        ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and what the plain loop says of `b`.

# %%
from servelab.exercises.capstone import cached_engine

common = [1, 2, 3, 4, 5, 6, 7, 8, 9]
plans = [step({"a": 11}, add("a", [*common, 10, 11], 1)), step({"b": 6}, add("b", [*common, 20, 21], 2))]
plans += [step({"b": 5}), step({"b": 1})]
cached_engine.play(CachedKV, CachedEngine, plans, block_size=4, eos=-1)
print("the plain loop: b:", answer([*common, 20, 21], 2))

# %% [markdown]
# And a chat: each turn begins with all the turns before it, and with their answers. (About ten seconds with SmolLM2 on two free
# cores, minutes on a busy machine.)

# %%
kv = CachedKV(paged_kv.PrefixCache(num_blocks=64, block_size=8))
config = SchedulerConfig(4, 512, eos_token_id=exact.tokenizer.eos_token_id)
scheduler = WatchedScheduler(continuous_batching.ChunkedScheduler(config, kv), kv)
engine = CachedEngine(exact.model, scheduler, kv, Pages.of(exact.model, 64, 8, paged_kv))
talk = exact.encode("What is a block?")
for question in ("And who frees it?", "When?", "Why?"):
    blocks, found = kv.pool.match(talk)
    kv.pool.free(blocks)
    print(f"a prompt of {len(talk)} tokens, found: {found},", end=" ", flush=True)
    _, said = serve(engine, scheduler, [(Request("turn", len(talk), most), talk)])
    same = said["turn"] == list(greedy(exact.model, talk, most))
    print(f"as the plain loop: {same}")
    talk = [*talk, *said["turn"], *exact.encode(question)]

# %% nbgrader={"grade_id": "cached-engine-check", "grade": true, "locked": true, "points": 20}
check("capstone.cached_engine", CachedKV, CachedEngine)

# %% [markdown]
# ## 5. A server that others can talk to
#
# Your engine takes token ids and gives token ids, to whoever shares its process. A server adds the rest: text, HTTP, and
# clients that come and go as they like. `serve_api` puts an endpoint over your engine that speaks the OpenAI API, so that
# programs written for other servers can talk to what you built.
#
# Nothing here is graded.

# %% [markdown]
# ### Two threads
#
# ```
#            HTTP               prompt, abort
#   clients ------> HTTP thread --------------> engine thread
#           <------  reads, checks,  <--------   add, abort, step: your Engine
#           text     tokenizes,       text       while there is work, else it sleeps
#                    sends events
# ```
#
# Only one thread calls your engine, so it needs no locks. Between two steps it looks at what has come in: a new request is
# added, one whose client has hung up is aborted. That is the loop of unit 04, with a door.
#
# The tiny model answers here, so that there is nothing to wait for.

# %%
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

from servelab.llm.api import serve_api
from servelab.llm.model import load
from servelab.llm.tokenizer import ByteTokenizer

tiny, tokenizer = LLM(*load(dtype=torch.float64)), ByteTokenizer()
served_kv = PagedKV(paged_kv.BlockAllocator(num_blocks=256, block_size=16))
limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, eos_token_id=tokenizer.eos_token_id)
served_engine = Engine(
    tiny, continuous_batching.ChunkedScheduler(limits, served_kv), served_kv, Pages.of(tiny, 256, 16, paged_kv)
)
server = serve_api(served_engine, tokenizer, model="tiny", max_model_len=tiny.config.max_model_len)
print(f"{server.url}\n\nfrom a shell: curl {server.url}/v1/models")

# %% [markdown]
# ### One question, one answer
#
# A request is a JSON object that is posted. Python's own HTTP client is enough to send it. A greedy engine has no
# temperature, so the endpoint takes 0 or none, and refuses any other; whatever would change the answer and is not built is
# refused with an error that names the field.


# %%
def post(path: str, **fields) -> http.client.HTTPResponse:
    """Send a request to the endpoint; the answer is there to be read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", path, json.dumps({"model": "tiny"} | fields))
    return connection.getresponse()


came = json.load(post("/v1/completions", prompt="The server", max_tokens=40))
print(json.dumps(came, indent=1))
alone = tokenizer.decode(greedy(tiny, tokenizer.encode("The server"), 40))
print("the plain loop's text:", came["choices"][0]["text"] == alone)
print(json.load(post("/v1/completions", prompt="The server", temperature=0.7))["error"]["message"])

# %% [markdown]
# ### A stream
#
# With `"stream": true` the answer comes in **server-sent events**: lines that begin with `data: `, each with a JSON object,
# a blank line behind each, and `[DONE]` at the end. The time to the first event is what a user feels as TTFT, the gaps
# between events are the ITL, both of unit 04. A character of several bytes is sent when its last byte is there.

# %%
for line in post("/v1/completions", prompt="The server", max_tokens=3, stream=True):
    print(line.decode(), end="")

# %% [markdown]
# A chat has roles. The tokenizer's **chat template** turns the messages into one prompt; this model knows no roles, and
# continues the last paragraph.


# %%
def pieces(path: str, **fields):
    """The text of a stream, piece by piece as it comes."""
    for line in post(path, stream=True, **fields):
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            choice = json.loads(data)["choices"][0]
            yield choice["delta"].get("content", "") if "delta" in choice else choice["text"]


for piece in pieces("/v1/chat/completions", messages=[{"role": "user", "content": "What is a block?"}], max_tokens=120):
    print(piece, end="", flush=True)

# %% [markdown]
# ### Eight at the same time
#
# Each client waits for its own answer only. Your scheduler puts them into the same steps.


# %%
def ask(prompt: str) -> str:
    """One client: the whole text of its stream."""
    return "".join(pieces("/v1/completions", prompt=prompt, max_tokens=60))


begins = ["The scheduler", "A block", "The cache", "A request", "Every step", "The model", "A token", "Memory"]
with ThreadPoolExecutor(len(begins)) as clients:
    for begin, text in zip(begins, clients.map(ask, begins), strict=True):
        print(repr(begin + text))
print(f"{served_kv.num_free} of {served_kv.num_blocks} blocks are free")

# %% [markdown]
# ### A client hangs up
#
# It stops reading after a few tokens of a long answer. The HTTP thread notices, the engine thread aborts the request between
# two steps, and its blocks are free again: your `abort`, called by an event that no test has planned.

# %%
import time

stream = post("/v1/completions", prompt="The server", max_tokens=1000, stream=True)
print(stream.readline().decode(), end="")
print(f"{served_kv.num_blocks - served_kv.num_free} blocks in use")
stream.close()
for _ in range(500):
    if not served_engine.num_unfinished:
        break
    time.sleep(0.01)
print(f"{served_kv.num_blocks - served_kv.num_free} blocks in use")

# %% [markdown]
# ### The public client
#
# Programs know the endpoint by its **base URL**. If the package `openai` is installed, the next cell talks to your engine
# with it. It wants a key; any will do, since this server asks for none, which is why it listens on this machine only.

# %%
try:
    import openai
except ModuleNotFoundError:
    print("the package openai is not installed, and the course does without it")
else:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    hello = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=40, temperature=0
    )
    print(repr(hello.choices[0].message.content), hello.usage)

# %% [markdown]
# Closing ends the streams that still run with an error, so that no client takes half an answer for a whole one. Then both
# threads end and the port is free. In a program, write `with serve_api(...) as server:` and that happens by itself. To go on
# after the next cell, run the one that starts the server again.
#
# If your engine raises, the requests in it get status 500, and so does every later one: a scheduler that missed the end of
# a step is not to be trusted with the next. `server.error` has what was raised.

# %%
server.close()

# %% [markdown]
# ## 6. Looking back
#
# Seven short questions (about 15 minutes).
#
# - **sorted and static**: w32 is served in static batches of 8, but sorted by the length of the answer, the shortest first. How
#   many decode steps does that take?
# - **fewest steps**: w32 on 8 slots, in any order and with any scheduler: what is the smallest possible number of decode steps,
#   if the first step decodes nobody?
# - **ranks of SmolLM2**: what is the largest number of ranks that SmolLM2-135M can be split over, as `rank_model` splits it?
# - **numbers a step**: 8 requests are decoded with SmolLM2 on 3 ranks. How many numbers does each rank hand over to all-reduces
#   in one step, all of them together?
# - **slower on ranks**, **who gains**, **other tokens**: see A, B and C below.

# %% [markdown]
# **A.** On two cores, why is a decode step of SmolLM2 slower on three processes with gloo than on one?
#
# - (a) three processes do three times the arithmetic;
# - (b) every layer waits twice for the slowest of the three;
# - (c) the KV heads are copied, so each rank reads as much KV as one process.
#
# **B.** Which requests gain most in latency when static batches give way to continuous batching?
#
# - (a) the short ones behind a batch with a long answer;
# - (b) the long ones, whose steps become shorter;
# - (c) all alike.
#
# **C.** A server in bfloat16 gives another answer to the same prompt when it is busy. Temperature is 0. What is the likeliest
# reason?
#
# - (a) the scheduler has mixed up the rows of two requests;
# - (b) a preempted request has lost a token;
# - (c) another batch means sums in another order, and two scores were closer than the rounding.
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: where to look</summary>
#
# The lengths of w32 are in section 2, and so is the rule for static batches. A slot gives one token a step. SmolLM2's numbers
# are in the table at the beginning, the all-reduces in section 3. C is at the end of exercise 1.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "sorted and static": None,  # a number
    "fewest steps": None,  # a number
    "ranks of SmolLM2": None,  # a number
    "numbers a step": None,  # a number
    "slower on ranks": None,  # "a", "b" or "c"
    "who gains": None,  # "a", "b" or "c"
    "other tokens": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["sorted and static"] = 300
answers["fewest steps"] = 255
answers["ranks of SmolLM2"] = 3
answers["numbers a step"] = 276480
answers["slower on ranks"] = "b"
answers["who gains"] = "a"
answers["other tokens"] = "c"
### END SOLUTION

# %%
for asked_for, mine in answers.items():
    print(f"{asked_for}: {mine}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 10}
check("capstone.reflection", answers)

# %% [markdown]
# ### In your own words (about 10 minutes)
#
# A team serves a model of 70 billion parameters on 4 GPUs with an engine like yours: continuous batching, paged KV, a prefix
# cache, TP4. Users send chats with a common system prompt of 1,500 tokens. Throughput is fine. The P99 of TTFT is 6 s in the
# evening. Say, in about 150 words, what you would look at and in which order, and what you would change for each thing that
# you may find.
#
# Five points, given by hand, one each:
#
# 1. which parts TTFT consists of here, and which of them a full server makes longer;
# 2. what in a record of the steps tells waiting for a slot, for KV and for the token budget apart;
# 3. whether the prefix cache works: what you would count, and what may keep it from working;
# 4. a change for at least two of the causes, with what it costs;
# 5. why TP8 would or would not help.

# %% [markdown] nbgrader={"grade_id": "slow-evenings", "grade": true, "solution": true, "points": 5}
# ### BEGIN SOLUTION
# TTFT is queueing, then the prefill's own steps. A full server lengthens the first most, and the second if the prompt's chunks
# share the budget with many decodes.
#
# I would look at the steps of the evening. Waiting with places and blocks to spare: the budget. Waiting with all places taken:
# slots. Waiting with few blocks free, and preemptions in the record: KV.
#
# Then the tokens found at admission: about 1,500 of each prompt should be. If not, blocks may be evicted before they are used
# again, replicas may share the sessions without looking at prefixes, or the prompt may begin with something that differs, such
# as the date.
#
# Against slots: a higher `max_num_seqs`, which costs TPOT. Against KV: FP8 KV, which costs some accuracy, or another replica.
# Against the budget: a larger one, which costs ITL. Against lost hits: routing by prefix.
#
# TP8 halves the weights on a card, so there is more room for KV, and prefill gets faster; decode may not, since all-reduces
# cost more. If the queue is the cause, a second replica of TP4 serves twice as much, and is the first thing to try.
# ### END SOLUTION
