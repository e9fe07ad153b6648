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
# # 04 Continuous batching
#
# A static batch leaves slots unused while its longest answer runs, and locks out whoever arrives in the meantime (unit
# 02). The cure is to decide again before every forward pass. One forward pass over all that run is an **iteration**, or
# step; it gives each of them one token. So Yu et al. (Orca, OSDI 2022) call this **iteration-level scheduling**. Servers
# call it continuous batching.
#
# In this unit you write the part of the server that decides.

# %% [markdown]
# ## Between two steps
#
# ```
#            +-----------------------------------------------------+
#            |                                                     |
#            v                                                     |
#   1. retire           2. admit              3. form the next batch
#   who has its last    who waits in front    how many tokens of whom
#   token leaves, its   joins, if there is    does the step compute
#   KV is free at once  room for it
#            |                                                     ^
#            +-----------------------------------------------------+
# ```
#
# A request that joins has to be **prefilled** first: its step computes the whole prompt, and gives the first token. From
# then on each step computes one token of it and gives the next: it is **decoded**. So one step can hold prompts and single
# tokens side by side, and a new request does not fill a slot for free: its prompt makes that step longer.

# %% [markdown]
# ### Room for what?
#
# Whether a request can join is asked three times:
#
# | limit | in `SchedulerConfig` or the KV memory | why |
# |---|---|---|
# | requests that run | `max_num_seqs` | buffers of fixed size, and the latency that users accept |
# | tokens of a step, the **token budget** | `max_num_batched_tokens` | the length of a step, and memory for activations |
# | KV | `kv.num_free` blocks | what the weights leave of the GPU's memory |

# %% [markdown]
# ### Two ideas, not one
#
# Continuous batching decides *when* requests come and go. Paging decides *where* their KV lies. Orca had the first without
# the second: a request got KV for its longest possible answer when it was admitted, and kept it. That works, and it is
# your first scheduler. It fits fewer requests, because most of what it reserves stays empty for most of the time. Your
# second scheduler takes blocks as tokens come, as vLLM does, and pays with a new problem: it can run out of blocks in the
# middle of an answer. Section 8 measures both on one trace.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `Scheduler` | Who runs in the next step? | 15 | 65 |
# | 2 | `PagedScheduler` | What if the blocks run out? | 18 | 55 |
# | 3 | `PolicyScheduler` | Who comes first? | 14 | 30 |
# | 4 | `ChunkedScheduler` | How long may a step be? | 14 | 20, from scratch 60 |
# | 5 | `flatten_batch` | What does the model get? | 10 | 25 |
# | 6 | `metrics` | What do users notice? | 10 | 30 |
# | 7 | `batching_cost` | What does a larger batch cost? | 4 | 15 |
# | 9 | `sampled_rows` | Does every way of serving give the same tokens? | 5 | 15 |
# | 8, 10 | one trace, three servers; looking back | | 10 | 45 |

# %% [markdown]
# ### How the classes grow
#
# Each of the four schedulers is a subclass of the one before, so a mistake in an earlier one is inherited: let its check
# pass first, because within a unit no reference steps in for it. You may also write each class from scratch. The checks
# call `add`, `abort`, `schedule` and `finish_step`, and look at plans and at who holds how many blocks. They never look
# inside. So of a class that is given to you, only its name and the arguments of `__init__` must stay: add methods,
# override inherited ones, and delete a given method if the inherited one already does it. When you have changed a class,
# run the cells of the later ones again, too: until then they extend the old one.
#
# One case, "the times of a served trace" of `Scheduler` and `ChunkedScheduler`, looks at nothing but moments: a few
# requests arrive on a simulated clock, memory is ample, and each token must come exactly when it is due.
#
# What a scheduler gets and gives is in `servelab.serving`:
#
# | class | what it is | fields and methods |
# |---|---|---|
# | `Request` | what a client sends | `id`, `prompt_tokens`, `max_tokens`, `arrival`, `priority` |
# | `SchedulerConfig` | the limits | `max_num_seqs`, `max_num_batched_tokens`, `watermark_blocks`, `eos_token_id` |
# | `StepPlan` | your decision | `scheduled`: a dictionary from id to number of tokens; `preempted`: a list of ids |
# | `Sequence` | for your own books, if you like; from exercise 3 on a policy's key takes one | `request`, `outputs`, `num_computed`; `id`, `num_tokens`, `missing` |
# | `PagedKV` | the KV memory, over unit 03's pool | `num_blocks`, `block_size`, `num_free`, `blocks_for(tokens)`, `blocks(id)`, `reserve(id, tokens)`, `release(id)` |

# %% tags=["export"]
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping

from servelab.checking import check
from servelab.kv import OutOfBlocks
from servelab.serving import FlatBatch, PagedKV, Request, SchedulerConfig, Sequence, StepPlan
from servelab.simulation import StepCost, Timing

# %% [markdown]
# ### What it builds on
#
# The checks of this unit need no earlier unit, but for exercise 9: it runs a model over unit 03's `paged-attention`. What
# is measured and drawn between them needs more: the length of a step comes from unit 01 (`floors`, which may build on
# `kv-cache`, `weights` and `per-rank`), and sections 5, 8 and 9 use `block-allocator` and `paged-attention` of unit 03. If
# yours have passed their checks, they run here, else the reference's. Where a copy of the course has no reference, a cell
# that needs a missing one stops with an error that names it. Cells below that use what it would have defined (`cost`,
# `limits`, `served`) then stop with a `NameError`. An exercise of this unit that is still open does the same: cells that
# measure or draw with it stop, and so do those that use what these define.
#
# The next cell says whose code you have; no others are needed. It imports PyTorch, which takes 5 to 15 seconds in a new
# kernel.

# %%
print("From earlier units:")
from servelab.parts import memory, paged_kv

print(f"{memory.__name__}, {paged_kv.__name__}")

# %% [markdown]
# ## 1. First come, first served
#
# **The conversation.** The server calls `add` when a request arrives. Before every step it calls `schedule` and runs what
# the plan says. After it, it calls `finish_step` with the plan and the sampled tokens, and learns from you who is
# finished. A plan that schedules nothing is not run, and there is no `finish_step` for it.
#
# **Counts.** A prompt of P tokens and an answer of n tokens take n steps, because the step that computes the prompt gives
# the first token. A token that is sampled is computed (fed back) in the *next* step. The last one never is. So the KV
# cache holds P + n - 1 tokens at most.
#
# **The end.** An answer ends with the EOS token, which counts as a token of the answer, or after `max_tokens` tokens,
# whichever is first. Nobody knows beforehand which it will be.

# %% [markdown]
# ### The rule
#
# Who runs, runs in every step until its end. Then look at the request that has waited longest, the **head** of the queue.
# It joins if it passes all three limits:
#
# - fewer than `max_num_seqs` run;
# - the whole prompt fits into what the running leave of the budget;
# - the KV has room for the prompt and the longest possible answer, reserved at once.
#
# Repeat with the next head. The first head that fails ends it for this step, whoever is behind. A small request that could
# squeeze past a large one must not: under load there is always another small one, and the large one would wait for ever.
# Orca's scheduler is first come, first served in this sense, too: who came earlier has run at least as many iterations.

# %% [markdown]
# ### A worked example
#
# Three requests may run, the budget is 10 tokens, the KV has 6 blocks of 4. All arrive before step 0.
#
# | request | prompt | `max_tokens` | KV reserved |
# |---|---|---|---|
# | a | 5 | 4 | 8 tokens: 2 blocks |
# | b | 3 | 2 | 4 tokens: 1 block |
# | c | 6 | 6 | 11 tokens: 3 blocks |
# | d | 2 | 1 | 2 tokens: 1 block |

# %% [markdown]
# | step | scheduled | finished | blocks in use | why nobody else |
# |---|---|---|---|---|
# | 0 | a 5, b 3 | | 3 | c needs 6 tokens, the budget has 2 left. d would fit, and must not overtake |
# | 1 | a 1, b 1, c 6 | b | 6 | three run |
# | 2 | a 1, c 1, d 2 | d | 6 | nobody waits |
# | 3 | a 1, c 1 | a | 5 | |
# | 4 to 6 | c 1 | c, in step 6 | 3 | |
#
# b finished in step 1. Its slot and its block serve d in the plan of step 2: not one step later.

# %% [markdown]
# The state of the scheduler between steps 1 and 2, after `finish_step`:
#
# ```
#   waiting (oldest first)      running                      KV blocks
#   +-----+                     +-----+-----+                +---+---+---+---+---+---+
#   |  d  |   -- admit -->      |  a  |  c  |  -- retire ->  | a | a | c | c | c |   |
#   +-----+                     +-----+-----+                +---+---+---+---+---+---+
#     2 prompt tokens             2 of 4  1 of 6 tokens of
#                                 the answer are there
# ```

# %% [markdown]
# ### What may go wrong
#
# A server runs for months, so the rare calls matter:
#
# - **A request that can never run** blocks everybody behind it for ever: more KV than the whole memory
#   ([vLLM issue 35541](https://github.com/vllm-project/vllm/issues/35541)), or a prompt larger than the budget
#   ([tenstorrent/vllm issue 436](https://github.com/tenstorrent/vllm/issues/436)). Here `add` refuses it. Be exact: a
#   request that fills the whole memory, or the whole budget, can run.
# - **Aborts.** A client may hang up at any moment: before the first block, after the end, twice (vLLM pull requests
#   [18485](https://github.com/vllm-project/vllm/pull/18485) and [25067](https://github.com/vllm-project/vllm/pull/25067)),
#   or while a step runs. In that case its token still arrives in `finish_step`, and nobody wants it.
# - **An id comes again**, once the earlier request is finished or aborted. It is another request, with a new place in the
#   queue, even if the step that computed the old one is still running.
# - **Two ways out.** A request leaves by its end or by an abort. If each path gives back slot and blocks on its own, one
#   day both do ([SGLang issue 11970](https://github.com/sgl-project/sglang/issues/11970)).

# %% [markdown]
# ### Your task (about 65 minutes)
#
# Write `Scheduler`. A plan should cost O(running + admitted), never O(waiting): a queue is longest when there is least
# time. No check measures that, because times depend on the machine; a cell at the end of section 2 does.
#
# The later classes change four decisions: who is the head, who is preempted, how much of a request one step computes, and
# how large that may get, which `add` compares with the budget. If each is a small method of its own, they replace that
# method and inherit the rest.

# %% [markdown]
# <details><summary>Hint 1: what to remember</summary>
#
# Three collections are enough: all unfinished requests by id; those that run, in the order of admission (a dictionary
# keeps its order, and takes out an id in O(1)); and a queue of those that wait. Every plan is made anew from them, whether
# or not anyone runs: the head of the queue is looked at in each step.
#
# </details>
# <details><summary>Hint 2: the plan and the end</summary>
#
# Start the plan with one token for each that runs, and subtract them from the budget. Then loop over heads with the three
# limits as the condition; `reserve` asks the third question for you, because it raises `OutOfBlocks` and changes nothing
# if the answer is no. What you reserve is the most tokens that will ever be in the cache. In `finish_step`, append the
# token first and ask for the end after that: it may be the first one, and token 0 is a token. Return whom you retire, and
# forget it now: the next call may be an `add` with the same id.
#
# </details>
# <details><summary>Hint 3: misuse, aborts and long runs</summary>
#
# `add` looks at everything before it changes anything, and compares with the whole memory and the whole budget, not with
# what is free now. Let the end of an answer and an abort share the code that forgets a request. Taking an aborted one out
# of the middle of a queue costs O(waiting): leave it there, and drop it when it has become the head. Recognise it by the
# object, not by its id, which may be that of a newer request. `finish_step` passes over ids that do not run any more.
#
# </details>


# %% nbgrader={"grade_id": "scheduler", "solution": true} tags=["export"]
class Scheduler:
    """Decide before every step which requests run: first come, first served, with room reserved for the whole answer.

    Parameters
    ----------
    config : SchedulerConfig
        The limits of a step.
    kv : PagedKV
        The KV memory. Only its documented methods are used.

    Notes
    -----
    `schedule` costs O(running + admitted), however many requests wait.
    """

    def __init__(self, config: SchedulerConfig, kv):
        self.config, self.kv = config, kv
        ### BEGIN SOLUTION
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.waiting: deque[Sequence] = deque()  # an aborted one stays until it is the head
        ### END SOLUTION

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        ValueError
            If a request with this id is not finished yet, or if this one could never run: its prompt is larger than
            the token budget, or prompt and longest answer, without its last token, do not fit into the whole KV
            memory. Nothing has changed then.
        """
        ### BEGIN SOLUTION
        if request.id in self.sequences:
            raise ValueError(f"request {request.id} is not finished")
        if self.kv.blocks_for(self._most_tokens(request)) > self.kv.num_blocks:
            raise ValueError(f"request {request.id} does not fit into {self.kv.num_blocks} blocks")
        if self._largest_step(request) > self.config.max_num_batched_tokens:
            raise ValueError(f"request {request.id} does not fit into a step")
        self.sequences[request.id] = Sequence(request)
        self._enqueue(self.sequences[request.id])
        ### END SOLUTION

    def abort(self, id: str) -> None:
        """Forget a request, waiting or running; its KV is free at once. Nothing happens if there is no such request."""
        ### BEGIN SOLUTION
        if self.sequences.pop(id, None) and self.running.pop(id, None):
            self.kv.release(id)
        ### END SOLUTION

    def schedule(self) -> StepPlan:
        """Plan the next step: a token for each running request, then the whole prompts of those that are admitted.

        Nobody is preempted.
        """
        ### BEGIN SOLUTION
        plan = StepPlan(dict.fromkeys(self.running, 1))
        left = self.config.max_num_batched_tokens - len(self.running)
        while (seq := self._head()) and len(self.running) < self.config.max_num_seqs and seq.missing <= left:
            try:
                self.kv.reserve(seq.id, self._most_tokens(seq.request))
            except OutOfBlocks:
                break
            self._dequeue()
            self.running[seq.id] = seq
            plan.scheduled[seq.id] = seq.missing
            left -= seq.missing
        return plan
        ### END SOLUTION

    def finish_step(self, plan: StepPlan, outputs: dict[str, int]) -> list[str]:
        """Take over what a step has computed; return the ids of the requests that it finished.

        Parameters
        ----------
        plan : StepPlan
            As `schedule` returned it. A request may have been aborted since, and its id used for a new one.
        outputs : dict
            The sampled token of each scheduled request of which no known token was left to compute.

        Returns
        -------
        list of str
            Those whose last token this was. Their KV and their places are free for the next plan.
        """
        ### BEGIN SOLUTION
        finished = []
        for id, fresh in plan.scheduled.items():
            if id not in self.running:
                continue
            seq = self.running[id]
            seq.num_computed += fresh
            if id in outputs:
                seq.outputs.append(outputs[id])
                if outputs[id] == self.config.eos_token_id or len(seq.outputs) == seq.request.max_tokens:
                    finished.append(id)
                    self.abort(id)
        return finished

    def _most_tokens(self, request: Request) -> int:
        return request.prompt_tokens + request.max_tokens - 1

    def _largest_step(self, request: Request) -> int:
        return request.prompt_tokens

    def _enqueue(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def _dequeue(self) -> None:
        self.waiting.popleft()

    def _head(self) -> Sequence | None:
        """The next that waits, past those that were aborted."""
        while self.waiting and self.sequences.get(self.waiting[0].id) is not self.waiting[0]:
            self._dequeue()
        return self.waiting[0] if self.waiting else None
        ### END SOLUTION


# %% [markdown]
# Try it: the worked example, then the same with b ending at its first token and a client that hangs up. `RecordedKV` is a
# `PagedKV` with a pool of its own. `play` makes the calls that a server would make, by a list of events.

# %%
from servelab.stepping import RecordedKV, play

config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=10)
events = [  # step, what, id, prompt_tokens, max_tokens
    (0, "add", "a", 5, 4),
    (0, "add", "b", 3, 2),
    (0, "add", "c", 6, 6),
    (0, "add", "d", 2, 1),
]
kv = RecordedKV(num_blocks=6, block_size=4)
play(Scheduler(config, kv), kv, events, config)
print("with an abort and an early EOS:")
kv = RecordedKV(num_blocks=6, block_size=4)
play(Scheduler(config, kv), kv, [*events, (3, "abort", "c")], config, eos_after={"b": 1})

# %% nbgrader={"grade_id": "scheduler-check", "grade": true, "locked": true, "points": 15}
check("continuous_batching.scheduler", Scheduler)

# %% [markdown]
# ### Move the sliders
#
# Eight requests, every third with an answer of 12 tokens, the others with 3. A step takes a second in this picture. Look
# for three things:
#
# - with enough of everything, every row begins as soon as the request arrives;
# - with few blocks, rows wait although there are free slots, and the KV panel tells why: the line is what is reserved, the
#   area what holds a token;
# - with `max_num_seqs=1` nothing is left of batching.

# %%
from IPython.display import Markdown, display
from ipywidgets import IntSlider

from servelab.plots import iterations
from servelab.plots.explore import explore
from servelab.simulation import Job, serve

A_SECOND_A_STEP = StepCost(weights=1.0, kv_token=0.0, token=0.0)
eight = [Job(Request(f"r{i}", 4, 12, arrival=float(i)), 3 if i % 3 else 12) for i in range(8)]


def draw_steps(scheduler_class: type, max_num_seqs: int, num_blocks: int) -> None:
    """Serve the eight requests and draw who runs in which step."""
    kv, limits = RecordedKV(num_blocks, block_size=4), SchedulerConfig(max_num_seqs, max_num_batched_tokens=16)
    served = serve(scheduler_class(limits, kv), eight, A_SECOND_A_STEP)
    display(iterations.timeline(served, kv))
    display(Markdown(iterations.timeline_text(served)))


explore(
    lambda max_num_seqs, num_blocks: draw_steps(Scheduler, max_num_seqs, num_blocks),
    max_num_seqs=IntSlider(4, 1, 8, continuous_update=False),
    num_blocks=IntSlider(12, 4, 32, continuous_update=False),
)

# %% [markdown]
# ## 2. Blocks as tokens come
#
# Most of what `Scheduler` reserves is empty: a request that has just been admitted with `max_tokens=1000` holds room for a
# thousand tokens and uses it for none. Paging (unit 03) allows to take a block when a token needs it. So admit a request
# when its **known tokens** fit, the prompt for now, and let it grow.
#
# Nobody has promised the blocks that it will need later. When they run out, somebody has to go. Kwon et al. (SOSP 2023,
# section 4.5) serve first come, first served, and **preempt** the latest arrival: it loses its KV, and its place in the
# batch. It keeps its tokens, which are on the client's screen already. When there is room again it is **recomputed**: one
# step computes the prompt and the answer so far, all at once, and gives the next token. (The other way is to swap its
# blocks out to CPU memory. Section 7 compares the two.)

# %% [markdown]
# ### The rule
#
# 1. Who runs comes first, the oldest first. Each needs room for the token that this step computes. If there is no free
#    block, preempt the latest arrival of those who run, and try again. The latest may be the very request that needs the
#    block. Nobody is preempted for anything else.
# 2. The preempted go to the front of the queue, the oldest of them first: they arrived before all who wait there.
# 3. Then heads are admitted, as before, with two changes. A head needs room for its known tokens. And while others run, an
#    admission must leave `watermark_blocks` blocks free on top: a small reserve, so that the next step does not preempt
#    whom this one has admitted. If nothing runs, not even somebody admitted in this step, the watermark is ignored.
#
# In a step that preempted somebody, rule 3 is a choice. Admit nobody then, as vLLM does, or whoever fits, the victim
# included: the checks accept both.
#
# A request never holds more blocks than its known tokens need.

# %% [markdown]
# ### A worked example
#
# Two requests may run, the budget is 16 tokens, the KV has 4 blocks of 4. a has a prompt of 7 and `max_tokens=6`, b a
# prompt of 6 and `max_tokens=5`. Both arrive before step 0.
#
# | step | scheduled | preempted | blocks of a | blocks of b | |
# |---|---|---|---|---|---|
# | 0 | a 7, b 6 | | 2 | 2 | both fit now; for both whole answers it would take 6 blocks |
# | 1 | a 1, b 1 | | 2 | 2 | tokens 8 and 7 have room in the last blocks |
# | 2 | a 1 | b | 3 | 0 | token 9 of a needs a block, and b came later |
# | 3 to 5 | a 1 | | 3 | 0 | b needs 2 blocks, one is free. a finishes in step 5 |
# | 6 | b 8 | | 0 | 2 | 6 tokens of the prompt, and the 2 of the answer that it had |
# | 7, 8 | b 1 | | 0 | 3 | b finishes in step 8 |
#
# Nine steps. `Scheduler` would take eleven: first a, then b.

# %% [markdown]
# The preempted request, in step 2 and in step 6:
#
# ```
#   step 2   tokens   [p p p p p p | x y]        2 tokens of the answer are known
#            KV       [. . . . . . | .  ]        none is computed any more
#
#   step 6   scheduled 8: the step computes all of them, and z is sampled
#            tokens   [p p p p p p | x y z]
#            KV       [* * * * * * | * *  ]
# ```
#
# Before it was preempted it stood just there, with 7 of 8 tokens computed. What a preemption costs is computing those 7
# again.

# %% [markdown]
# ### What may go wrong
#
# - **A livelock.** A preempted request is admitted again when a part of it fits, runs out of blocks at once, is preempted,
#   and so on ([vLLM pull request 21809](https://github.com/vllm-project/vllm/pull/21809)). All known tokens must fit.
# - **Nobody finishes.** If the *oldest* were preempted, the requests could go round for ever. With the latest as victim the
#   oldest never loses anything, so it finishes, and then the next.
# - **A step that is too small.** Recomputing takes one step for the prompt and the answer so far. If `add` compared only
#   the prompt with the budget, a request could be preempted that no step has room for any more, and everybody would wait
#   behind it. So `add` refuses a request whose P + `max_tokens` - 1 tokens are more than the budget. Exercise 4 takes
#   this back.
# - **A watermark that nobody can reach** when nothing runs: the server never starts.

# %% [markdown]
# ### Your task (about 55 minutes)
#
# Write `PagedScheduler`. Two things change: `schedule`, and what `add` compares with the budget, now the P + `max_tokens`
# - 1 tokens of the longest answer. The class below gives only `schedule`. For the second, override the method of your
# `Scheduler` that says how large a step may get, if it has one; else write `add` once more.
#
# The order in which you take blocks within a step is up to you, and so is whether you take the block for a sampled token
# in `finish_step`, where one is free, or in the next plan. Preempt only in a plan: until then somebody may leave. `abort`
# must also work for a request that was preempted and waits.

# %% [markdown]
# <details><summary>Hint 1: growing</summary>
#
# `reserve` takes the number of tokens in all, not the number of new ones, and does nothing if there is room already. For
# every request that runs, ask for its known tokens in each step; at most one block is new. At admission the same call asks
# for the prompt. It does not know the watermark, so compare with `num_free` before you call it.
#
# </details>
# <details><summary>Hint 2: preempting</summary>
#
# Go through a copy of the running, because it shrinks under your hands: the last of them, in the order of admission, is
# the victim, again and again until `reserve` succeeds or the request itself has gone. To preempt is to release the blocks,
# to set the number of computed tokens back to zero, and to leave the answer alone. What is missing then is prompt plus
# answer, which is what the step that resumes must compute, and what must fit into the budget of that step.
#
# </details>
# <details><summary>Hint 3: queue, watermark, refusal</summary>
#
# The victims of one step come latest first. Put each at the front of the queue as it comes, and the oldest stands in front
# in the end. For the watermark, ask whether anyone runs at the moment of each admission, not once a step. For the refusal,
# think of the most tokens that a request can have when it is preempted for the last time. A running request may need the
# watermark's blocks: that is what they are for.
#
# </details>


# %% nbgrader={"grade_id": "paged-scheduler", "solution": true} tags=["export"]
class PagedScheduler(Scheduler):
    """First come, first served, with blocks taken as tokens come, and preemption when they run out.

    A request is admitted when its known tokens fit. If a running one finds no block, the latest arrival among the
    running is preempted: it loses its KV, keeps its tokens, and waits in front of the queue. `add` also refuses a request
    whose tokens, without the last, are more than the token budget: one step may have to compute them all.
    """

    def schedule(self) -> StepPlan:
        """Plan the next step: those who run and find room, then those that are admitted."""
        ### BEGIN SOLUTION
        plan, self.left = StepPlan(), self.config.max_num_batched_tokens
        for seq in list(self.running.values()):
            n = self._chunk(seq)
            if n and self._make_room(seq, n, plan):
                self._schedule(seq, n, plan)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def _admit(self, plan: StepPlan) -> None:
        while (seq := self._head()) and len(self.running) < self.config.max_num_seqs:
            n, needed = self._chunk(seq), self.kv.blocks_for(seq.num_tokens) + self.config.watermark_blocks
            if not n or (self.running and needed > self.kv.num_free):
                break
            self._dequeue()
            self.kv.reserve(seq.id, n)
            self.running[seq.id] = seq
            self._schedule(seq, n, plan)

    def _make_room(self, seq: Sequence, n: int, plan: StepPlan) -> bool:
        """Preempt others until the next ``n`` tokens fit; whether the request still runs then."""
        while seq.id in self.running:
            try:
                self.kv.reserve(seq.id, seq.num_computed + n)
                return True
            except OutOfBlocks:
                self._preempt(self._victim(), plan)
        return False

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        del self.running[seq.id]
        self.kv.release(seq.id)
        seq.num_computed = 0
        self.left += plan.scheduled.pop(seq.id, 0)
        plan.preempted.append(seq.id)
        self._requeue(seq)

    def _schedule(self, seq: Sequence, n: int, plan: StepPlan) -> None:
        plan.scheduled[seq.id] = n
        self.left -= n

    def _chunk(self, seq: Sequence) -> int:
        """Tokens of the sequence that this step can still compute: all that are missing, or none."""
        return seq.missing if seq.missing <= self.left else 0

    def _largest_step(self, request: Request) -> int:
        return self._most_tokens(request)

    def _victim(self) -> Sequence:
        return next(reversed(self.running.values()))

    def _requeue(self, seq: Sequence) -> None:
        self.waiting.appendleft(seq)

    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, with both schedulers.

# %%
config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
for scheduler_class in (Scheduler, PagedScheduler):
    print(scheduler_class.__name__)
    kv = RecordedKV(num_blocks=4, block_size=4)
    play(scheduler_class(config, kv), kv, [(0, "add", "a", 7, 6), (0, "add", "b", 6, 5)], config)

# %% nbgrader={"grade_id": "paged-scheduler-check", "grade": true, "locked": true, "points": 18}
check("continuous_batching.paged_scheduler", PagedScheduler)

# %% [markdown]
# ### The same eight requests
#
# The picture of exercise 1 with the second scheduler. Here are 7 blocks: watch who is preempted, what is computed twice,
# and that everybody still finishes. Then set 12: nobody has to wait for memory any more, and the line lies close to the
# area.

# %%
explore(
    lambda max_num_seqs, num_blocks: draw_steps(PagedScheduler, max_num_seqs, num_blocks),
    max_num_seqs=IntSlider(4, 1, 8, continuous_update=False),
    num_blocks=IntSlider(7, 4, 32, continuous_update=False),
)

# %% [markdown]
# ### What a step costs
#
# A check counts nothing that depends on the machine. Here you can see what your schedulers cost: the time of a step with
# 64 requests running, while 1,000 to 100,000 wait. A plan that looks at the whole queue has ratios near 10 and 100. Up to
# 3 may be the machine; run the cell again.

# %%
from servelab import measure

for scheduler_class in (Scheduler, PagedScheduler):
    print(scheduler_class.__name__)
    measure.scheduler(scheduler_class)

# %% [markdown]
# ## 3. Policies
#
# First come, first served does not know that one request comes from a person who is waiting and the next from a nightly
# batch job. A **policy** does. In this exercise it is a function, the **key**: from a `Sequence` to a number. The smallest
# key is admitted first. When blocks run out, the largest key is preempted first. Equal keys are served first come, first
# served.
#
# | policy | key | who gains | who pays |
# |---|---|---|---|
# | FCFS | the same for all | nobody waits for ever | whoever is behind a long answer |
# | priority | `request.priority` | the urgent | the others, without limit |
# | shortest remaining | tokens that may still come: `max_tokens` - generated | most requests, so the mean | long answers, without limit |
# | priority with ageing | `request.priority` + `rate` * `request.arrival` | the urgent, up to a limit | the others, up to a limit |
#
# Shortest remaining is only as good as `max_tokens`: a client that allows 4096 tokens and gets 20 is treated as long.

# %% [markdown]
# ### Starvation, and the cure
#
# As long as more urgent requests keep coming, `by_priority` never admits the others: they **starve**. **Ageing** lets the
# time that a request has waited count for it. At time t it has waited t - arrival seconds. If each of them is worth
# `rate` of priority, its key is
#
# ```
#  priority - rate * (t - arrival)  =  priority + rate * arrival  -  rate * t
# ```
#
# The last term is the same for all that wait, so it changes no order, and the key can do without it. That is why ageing is
# linear: the order of two waiting requests never changes, nothing is ever sorted again, and a heap is enough. And it
# bounds the wait: a request of priority p can only be overtaken by one of priority q that arrives less than
# (p - q) / `rate` seconds after it.

# %% [markdown]
# ### What does not change
#
# The rest of `PagedScheduler` stays. The request with the smallest key is the head of the queue, and if it does not fit,
# nobody overtakes it. Only two things are new: who is the head, and who is the victim. A victim goes back into the queue
# by its key, not to the front.
#
# A key may depend on the request and on the answer so far. So it changes while a request runs, and stays as it is while
# the request waits.

# %% [markdown]
# ### Priority inversion
#
# A less urgent request is served and a more urgent one is not: that is **priority inversion**. It has two forms.
#
# - A waiting request is admitted before one with a smaller key, or a request loses its blocks while one with a larger key
#   keeps its own. That is a mistake, and the check looks for it.
# - All `max_num_seqs` slots are taken by larger keys when a smaller one arrives. Nobody was admitted wrongly. One of the
#   runners could be preempted for the slot, at the price of computing its KV again. vLLM 0.33 does not do that
#   ([pull request 45561](https://github.com/vllm-project/vllm/pull/45561) proposes it), and neither does this course. It is
#   a decision, so the check accepts both.

# %% [markdown]
# ### A worked example
#
# One slot (`max_num_seqs=1`), and four requests that all wait before the first step:
#
# | request | arrival | priority | max_tokens | FCFS | priority | shortest remaining | aged, rate 0.5 | aged, rate 1 |
# |---|---|---|---|---|---|---|---|---|
# | A | 0 | 2 | 3 | 0 | 2 | 3 | 2 | 2 |
# | B | 1 | 0 | 4 | 0 | 0 | 4 | 0.5 | 1 |
# | C | 2 | 1 | 2 | 0 | 1 | 2 | 2 | 3 |
# | D | 3 | 0 | 6 | 0 | 0 | 6 | 1.5 | 3 |
# | *order* | | | | A B C D | B D C A | C A B D | B D A C | B A C D |
#
# At rate 0 ageing is priority; the higher the rate, the closer it comes to FCFS.

# %% [markdown]
# The two ends of the order, with `by_priority` and two slots:
#
# ```
#          waiting                    running
#    +-----+-----+-----+            +-----+-----+
#    | C 1 | A 2 | E 3 |            | B 0 | D 0 |
#    +-----+-----+-----+            +-----+-----+
#       |                                    |
#       the smallest key                     of the largest keys, the last that came
#       joins when a slot                    leaves when no block is free,
#       and blocks are free                  and goes back to waiting by its key
# ```

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write the three keys and `PolicyScheduler`. You may build on your `PagedScheduler`: then its mistakes are inherited, so
# let its check pass first. The class below gives only `__init__`; what it must override depends on how you have written
# the earlier ones. Whatever the key, a step should cost O(running), and O(log waiting) for each request that is admitted
# or comes back. The check looks at plans and never at how you store the queue.

# %% [markdown]
# <details><summary>Hint 1: the keys</summary>
#
# Each of the first two is one expression over fields of the sequence and its request: what the answer may still be is its
# limit less what is there. The third is a function that makes a function: the inner one knows `rate`, and its formula
# stands above. Later arrivals must get larger keys.
#
# </details>
# <details><summary>Hint 2: the queue</summary>
#
# Keep the waiting in a heap of tuples. The key comes first in the tuple. Behind it comes a number that counts up with
# each `add` (`Sequence.place` is there for it): it settles ties, and no two tuples are compared further than that. A
# request keeps its number for life, so that it comes back among its equals where it was. Removing an aborted request from
# the middle of a heap is slow; leave it there, and drop it when it is the head. An id may come back later as another
# request: compare the sequences, not the ids.
#
# </details>
# <details><summary>Hint 3: the victim</summary>
#
# Compare the running by the same pair of key and number, with the keys as they are now. The largest pair is the victim. It
# may be the very request that needs a block, or one that this step has already planned: then take it out of the plan,
# and give its tokens back to the budget.
#
# </details>


# %% nbgrader={"grade_id": "policies", "solution": true} tags=["export"]
def by_priority(seq: Sequence) -> float:
    """Serve urgent requests first."""
    ### BEGIN SOLUTION
    return seq.request.priority
    ### END SOLUTION


def shortest_remaining(seq: Sequence) -> float:
    """Serve those first that may generate the fewest tokens from here on."""
    ### BEGIN SOLUTION
    return seq.request.max_tokens - len(seq.outputs)
    ### END SOLUTION


def aged(rate: float) -> Callable[[Sequence], float]:
    """Serve urgent requests first, but let each second of waiting count as much as ``rate`` of priority.

    Returns the key, a function of the sequence alone.
    """

    ### BEGIN SOLUTION
    def key(seq: Sequence) -> float:
        return seq.request.priority + rate * seq.request.arrival

    return key
    ### END SOLUTION


class PolicyScheduler(PagedScheduler):
    """Serve in the order of a key: the smallest is admitted first, the largest is preempted first.

    Of equal keys, the request that was added first is admitted first and preempted last. Without a key, all are equal.

    Parameters
    ----------
    config, kv
        As for `Scheduler`.
    key : callable, optional
        From a `Sequence` to a number. It depends on ``request`` and ``outputs`` only.

    Notes
    -----
    `schedule` costs O(running), and O(log waiting) for each request that is admitted or preempted.
    """

    def __init__(self, config: SchedulerConfig, kv, key: Callable[[Sequence], float] = lambda seq: 0):
        super().__init__(config, kv)
        self.key = key
        ### BEGIN SOLUTION
        self.waiting: list[tuple] = []  # a heap; an aborted request stays until it is the head
        self.count = itertools.count()

    def _enqueue(self, seq: Sequence) -> None:
        seq.place = next(self.count)
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        heapq.heappush(self.waiting, (*self._rank(seq), seq))

    def _rank(self, seq: Sequence) -> tuple:
        return self.key(seq), seq.place

    def _dequeue(self) -> None:
        heapq.heappop(self.waiting)

    def _head(self) -> Sequence | None:
        while self.waiting and self.sequences.get(self.waiting[0][-1].id) is not self.waiting[0][-1]:
            self._dequeue()
        return self.waiting[0][-1] if self.waiting else None

    def _victim(self) -> Sequence:
        return max(self.running.values(), key=self._rank)
        ### END SOLUTION


# %% [markdown]
# Try it: the worked example. With one slot, the order in which requests end is the order in which they were admitted.


# %%
def new_server(scheduler_class, max_num_seqs, budget, num_blocks, *key):
    """A scheduler of that class over an empty memory with blocks of 16 tokens."""
    return scheduler_class(SchedulerConfig(max_num_seqs, budget), RecordedKV(num_blocks, block_size=16), *key)


four = [("A", 0, 2, 3), ("B", 1, 0, 4), ("C", 2, 1, 2), ("D", 3, 0, 6)]
keys = {"FCFS": lambda seq: 0, "priority": by_priority, "shortest remaining": shortest_remaining}
for name, key in (keys | {"aged, rate 0.5": aged(0.5), "aged, rate 1": aged(1)}).items():
    scheduler = new_server(PolicyScheduler, 1, 64, 10, key)
    for letter, arrival, priority, max_tokens in four:
        scheduler.add(Request(letter, 10, max_tokens, arrival, priority))
    ended = []
    while len(ended) < len(four):
        plan = scheduler.schedule()
        ended += scheduler.finish_step(plan, dict.fromkeys(plan.scheduled, 1000))
    print(f"{name:<20} {' '.join(ended)}")

# %% nbgrader={"grade_id": "policies-check", "grade": true, "locked": true, "points": 14}
check("continuous_batching.policies", PolicyScheduler, by_priority, shortest_remaining, aged)

# %% [markdown]
# ### Starvation, measured
#
# From here on requests are served on a simulated clock. A step takes as long as its floor in unit 01 for Llama-3.1-8B on
# an H100: weights and KV are read once, and every token has to be computed.
#
# The server has four slots and can serve about 40 requests a second. Urgent ones arrive 50 times a second, for 2, 4, 8
# and 16 seconds. One patient request, with priority 5 to their 0, arrives after 0.1 s. How long does it wait for its first
# token?

# %%
from servelab.cards import hardware_card, model_card

model, gpu = model_card("llama-3.1-8b"), hardware_card("h100-sxm")
cost = StepCost.from_floor(memory.mixed_step_floor, model, gpu)


def wait_of_the_patient(key, num_urgent):
    """Seconds until the first token of a request that urgent ones keep overtaking."""
    urgent = [Job(Request(str(n), 100, 20, arrival=n / 50), 20) for n in range(num_urgent)]
    patient = Job(Request("patient", 100, 20, arrival=0.1, priority=5), 20)
    served = serve(new_server(PolicyScheduler, 4, 1024, 400, key), [*urgent, patient], cost)
    return served.token_times["patient"][0] - 0.1


print(f"{'urgent':>8}{'FCFS':>10}{'priority':>10}{'aged, 1':>10}{'aged, 5':>10}{'aged, 20':>10}")
for num_urgent in (100, 200, 400, 800):
    keys = (lambda seq: 0), by_priority, aged(1), aged(5), aged(20)
    print(f"{num_urgent:>8}" + "".join(f"{wait_of_the_patient(key, num_urgent):>8.2f} s" for key in keys))

# %% [markdown]
# Under `by_priority` the wait doubles with the stream: it ends when the stream does. Under ageing it stops growing. The
# bound of 5 / `rate` seconds is on the arrivals that may still overtake; those have to be served first, and the server is
# overloaded, so the wait is somewhat longer than that.

# %% [markdown]
# ## 4. Chunked prefill
#
# Eight people read their answers as they come, one token every 5 ms. Then somebody sends a prompt of 14,050 tokens, the
# longest of unit 03's trace. It fits into the budget of 16,384, so one step computes all of it, and the other eight wait
# for that step. What do they see? The gap between two tokens is the **inter-token latency** (ITL); Sarathi-Serve's paper
# calls it the time between tokens (TBT).

# %%
from statistics import median


def stall(scheduler_class, budget):
    """Median and longest gap between the tokens of one of eight chats, and the long prompt's time to first token."""
    chats = [Job(Request(f"chat {n}", 200, 400), 400) for n in range(8)]
    long = Job(Request("long", 14_050, 1, arrival=0.5), 1)
    served = serve(new_server(scheduler_class, 64, budget, 4000), [*chats, long], cost)
    times = served.token_times["chat 0"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return median(gaps), max(gaps), served.token_times["long"][0] - 0.5


def print_stall(scheduler_class, budgets):
    """What a long prompt does to the others, for each budget."""
    print(f"{'budget':>8}{'median gap':>14}{'longest gap':>14}{'ratio':>8}{'TTFT of the long prompt':>26}")
    for budget in budgets:
        usual, longest, first = stall(scheduler_class, budget)
        gaps = f"{1000 * usual:>11.1f} ms{1000 * longest:>11.1f} ms{longest / usual:>8.1f}"
        print(f"{budget:>8}{gaps}{1000 * first:>23.1f} ms")


print_stall(PolicyScheduler, [16_384])

# %% [markdown]
# One gap of 40 usual ones, in the middle of a sentence. Agrawal et al. (Sarathi-Serve, OSDI 2024, Fig. 9) measured up to
# 28.3 times the decode-only gap when whole prompts join the decodes.
#
# Putting prefills into steps of their own does not help: then the decodes pause for as long. A server that prefers
# prefills can starve them ([SGLang issue 32549](https://github.com/sgl-project/sglang/issues/32549) reports one decode
# step in 24 s).

# %% [markdown]
# ### The idea
#
# A decode step reads all weights and computes little: there is arithmetic to spare. So cut the prompt into **chunks**,
# and let each step take along as much of it as keeps the step short. The limit is the **token budget**,
# `max_num_batched_tokens`, and now it is small: Sarathi-Serve uses 512 where latency matters most and 2048 where it
# matters less. The budget is filled in this order:
#
# 1. one token for each running request that has its whole prompt behind it;
# 2. the prompt that is unfinished, as much as fits;
# 3. new requests, by key; of the last one, as much as fits.

# %% [markdown]
# ### A worked example
#
# A budget of 8, three slots, and three requests that wait before step 0. B's prompt is larger than the budget: until
# now, `add` had to refuse it.
#
# | request | prompt | max_tokens | step 0 | step 1 | step 2 | step 3 | step 4 |
# |---|---|---|---|---|---|---|---|
# | A | 4 | 4 | 4, first token | 1 | 1 | 1, done | |
# | B | 13 | 3 | 4 | 7 | 2, first token | 1 | 1, done |
# | C | 5 | 2 | | | 5, first token | 1, done | |
# | *tokens of the step* | | | 8 | 8 | 8 | 3 | 1 |
#
# B gets no token from steps 0 and 1: what the model says after half a prompt is of no use. In step 2 its last chunk
# leaves five tokens of the budget, and C joins.

# %% [markdown]
# The budget of each step, one letter a token:
#
# ```
#  step    0           1           2           3           4
#      [AAAABBBB]  [ABBBBBBB]  [ABBCCCCC]  [ABC.....]  [B.......]
# ```

# %% [markdown]
# ### What may go wrong
#
# - A chunk is counted twice, when it is planned and when it is finished: then the end of the prompt is never computed.
# - The chunk goes first and the decodes get what is left: that is the stall again.
# - The budget has room, and a prompt that would need more than the room waits. Part of it fits.
# - A long request that was preempted is admitted because its *first chunk* fits. It runs out of blocks half-way, is
#   preempted, and so on ([vLLM pull request 21809](https://github.com/vllm-project/vllm/pull/21809)). As before, all known
#   tokens must fit. You may reserve their blocks at once or chunk by chunk.
# - A client hangs up in the middle of its prompt, and the next request is taken for the unfinished one.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write `ChunkedScheduler`. It takes a key as `PolicyScheduler` does, and refuses only what its memory could never hold.
# With no key, and blocks enough, every plan is determined. When blocks run out, the largest key is preempted, be it in
# the middle of its prompt, and begins again. If your other methods leave nothing for `schedule` to do, delete it here.
#
# The check ends with the 10,000 requests of unit 03's conversation trace, their answers cut to at most 8 tokens. Thousands
# wait at a time, and it takes a few seconds. A queue that is searched for its smallest key at each admission takes several
# times as long as a heap, and passes, too.

# %% [markdown]
# <details><summary>Hint 1: where the budget goes</summary>
#
# Keep one number: what is left of the budget in this step. Each request asks for all that it is missing and gets that or
# what is left, whichever is less. A decoding request is missing one token. If the running are asked in the order of their
# admission, the unfinished prompt is the last of them: while it was unfinished, it used the budget up, so nobody could
# join behind it.
#
# </details>
# <details><summary>Hint 2: how far a prompt is</summary>
#
# `num_computed` of the sequence says it, and it moves in one place only: when the step is finished. A request of which
# tokens are still missing then has no new token among the outputs. The order of the budget does not change when a
# request is preempted: it is missing everything again, prompt and answer.
#
# </details>
# <details><summary>Hint 3: if you build on your PagedScheduler</summary>
#
# Let it ask a method how many tokens of a sequence this step can still compute. Whole prompts mean all that are missing
# or none; chunks mean the smaller of the two numbers. With such a method, and one for what `add` refuses, this class has
# two methods of one line each, and no `schedule`.
#
# </details>


# %% nbgrader={"grade_id": "chunked-scheduler", "solution": true} tags=["export"]
class ChunkedScheduler(PolicyScheduler):
    """Cut prompts into chunks, so that no step computes more tokens than its budget and every decode runs in it.

    The running requests come first, one token each; what they leave of the budget goes to the unfinished prompt, and
    then to new requests. A prompt may be larger than the budget; `add` refuses what the whole memory could not hold.

    Notes
    -----
    `schedule` costs O(running), and O(log waiting) for each request that is admitted or preempted.
    """

    def schedule(self) -> StepPlan:
        """Plan the next step: decodes, then the unfinished prompt, then new requests, each as far as the budget goes."""
        ### BEGIN SOLUTION
        return super().schedule()

    def _chunk(self, seq: Sequence) -> int:
        return min(seq.missing, self.left)

    def _largest_step(self, request: Request) -> int:
        return 1
        ### END SOLUTION


# %% [markdown]
# Try it: the worked example.

# %%
config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8)
kv = RecordedKV(num_blocks=10, block_size=4)
events = [(0, "add", "A", 4, 4), (0, "add", "B", 13, 3), (0, "add", "C", 5, 2)]
play(ChunkedScheduler(config, kv), kv, events, config)

# %% nbgrader={"grade_id": "chunked-scheduler-check", "grade": true, "locked": true, "points": 14}
check("continuous_batching.chunked_scheduler", ChunkedScheduler)

# %% [markdown]
# ### The stall, after
#
# The same eight chats and the same prompt, with chunks:

# %%
print_stall(ChunkedScheduler, [16_384, 2048, 1024, 512, 256])

# %% [markdown]
# At 512 the longest gap is 1.5 usual ones, and the long prompt waits little longer for its own first token, because a step
# of 512 tokens already keeps the arithmetic busy. At 256 it does not: the step is bound by reading the weights, and the
# prompt needs more steps.
#
# ### Move the sliders
#
# Four chats of 60 tokens, and a long prompt after 100 ms: above all of it in one step, with your `PolicyScheduler` and the
# budget of 16,384; below in chunks, with your `ChunkedScheduler` and the budget of the slider. Look for three things:
#
# - above, the chats' bars are as wide as the long prompt's, while it is computed: that is the stall;
# - with a smaller budget, the chats' bars become narrower, and the long prompt's last one ends later;
# - the shorter the prompt, the shorter the stall that is there to cut.


# %%
def stalled(scheduler_class, budget: int, prompt_tokens: int):
    """Serve four chats, and a long prompt that arrives while they decode."""
    chats = [Job(Request(f"chat {n}", 200, 60), 60) for n in range(4)]
    late = Job(Request("long", prompt_tokens, 1, arrival=0.1), 1)
    return serve(new_server(scheduler_class, 64, budget, 4000), [*chats, late], cost)


def draw_stall(budget: int, prompt_tokens: int) -> None:
    """Draw who runs when, with the whole prompt in one step and in chunks."""
    whole, cut = stalled(PolicyScheduler, 16_384, prompt_tokens), stalled(ChunkedScheduler, budget, prompt_tokens)
    both = {"the whole prompt": whole, f"chunks, a budget of {budget} tokens": cut}
    display(iterations.timelines(both))
    display(Markdown(iterations.stall_text(both)))


explore(
    draw_stall,
    budget=IntSlider(1024, 128, 4096, 128, continuous_update=False),
    prompt_tokens=IntSlider(14_050, 1050, 14_050, 500, continuous_update=False),
)

# %% [markdown]
# The floor flatters small chunks. In Sarathi-Serve's measurements chunks of 512 cost up to 25 % of the prefill's time,
# chunks of 2048 next to nothing; each chunk reads the KV of all chunks before it, and kernels like sizes that are
# multiples of their tiles.

# %% [markdown]
# ## A scheduler is made of decisions
#
# Everything that this unit's checks demand follows from what a scheduler is for: limits are kept, nothing is computed
# twice or lost, everybody finishes. The rest was decided. Other people decided otherwise. The tables name each decision
# with the course's choice, vLLM's (version 0.33.0, whose scheduler was run to find out), and where they are known those of
# Orca (Yu et al., OSDI 2022) and Sarathi-Serve.

# %% [markdown]
# **Memory**
#
# | decision | this course | vLLM 0.33 | others |
# |---|---|---|---|
# | room at admission | `Scheduler`: prompt and longest answer. Later: all known tokens | all known tokens (`scheduler_reserve_full_isl`, on by default) | Orca: prompt and longest answer. Sarathi-Serve: the whole prompt |
# | blocks taken | as tokens are planned | the same | Orca: all at admission. Sarathi-Serve: the prompt's at admission |
# | spare blocks (watermark) | a setting; ignored when nothing runs | the same; 0 by default | |
# | a request that can never fit | `add` refuses it | the scheduler lets it wait, and all behind it; the engine looks at lengths when it starts | |
# | without chunks: prompt and answer over the budget | `add` refuses it: after a preemption all of it would be one step | a budget below the longest sequence (`max_model_len`) is refused at the start | |
# | cached prefixes | not looked for | looked for at each admission, first or repeated; a full block counts as cached once it is planned, so the next request of the same step can hit it | |

# %% [markdown]
# **Order**
#
# | decision | this course | vLLM 0.33 | others |
# |---|---|---|---|
# | within a step | running, then new | the same | Sarathi-Serve: decodes, the unfinished chunk, new |
# | the head does not fit | nobody overtakes it | the same | |
# | equal priorities | in the order in which they were added | earlier arrival, then the smaller id | |
# | a long prompt's share of a step | what is left of the budget | the same; `long_prefill_token_threshold` can cap it, unless the prompt is alone | |
# | an urgent request, all slots taken | waits | waits | |

# %% [markdown]
# **Preemption**
#
# | decision | this course | vLLM 0.33 | others |
# |---|---|---|---|
# | what happens to the KV | dropped and computed again | the same; its full blocks stay cached until they are needed | swapping it to CPU memory: Kwon et al., SOSP 2023, section 4.5 |
# | the victim | FCFS: the latest arrival. Else the largest key, of equals the last added | FCFS: the last that was admitted. Priority: largest priority, then latest arrival; of those that arrived together, the first admitted | |
# | it goes back | by key; under FCFS to the front | FCFS: to the front. Priority: by priority | |
# | new requests in that step | none; the checks accept some | none | Sarathi-Serve's code can admit the victim again in the same step |

# %% [markdown]
# None of these is right or wrong by itself. Each is a sentence that a user of the server may have to know: why did my
# request wait, who pays for it, and what would have to change?
#
# The tables are tested. `tests/test_vllm_referee.py`, in the course's repository, holds a class of a few methods over this
# unit's reference that takes vLLM's side in ties, in the choice among equal victims and in cached prefixes. The two rows on
# requests that are too large it leaves untested. Its `add` is that of `ChunkedScheduler`: with or without chunks it refuses
# nothing over the budget, but, where vLLM would let it wait, what the whole memory could not hold; and no recorded run has
# a request that is too large for either.
#
# It replays 200 recorded runs of vLLM's own scheduler, 26,137 steps with and without chunks, priorities and a prefix cache,
# and agrees with every step: tokens of each request, victims, prefix hits, who finished, blocks in use. Take any one of its
# choices away, and some run comes out differently.

# %% [markdown]
# ## 5. One flat batch
#
# A plan says how many tokens of which request the next step computes: 1 of a decode, 300 of a chunk. A tensor is a
# rectangle. Unit 02 filled it up with padding, and paid for every padded cell.
#
# Orca's second idea is **selective batching** (Yu et al., OSDI 2022): nearly every layer treats each token alone. So put
# all tokens of the step in one row, whichever request they belong to. With 3, 1, 2 and 1 tokens (their Fig. 5) the
# linear layers see a matrix of 7 rows. Only attention must know whose tokens are whose. It has no weights to share, so
# nothing is lost by going through it request by request.

# %% [markdown]
# ### What attention needs to know
#
# Unit 03's `write_kv` and `paged_attention` take exactly this. T tokens of B requests:
#
# | field of `FlatBatch` | shape | what it says |
# |---|---|---|
# | `tokens` | T | the ids, one request behind another |
# | `positions` | T | the place of each token in *its request*, from 0: what a position embedding needs |
# | `query_lens` | B | how many of the tokens are whose |
# | `context_lens` | B | how many tokens attention sees: those in the cache and the new ones |
# | `slot_mapping` | T | where each new token's KV goes: `block * block_size + offset` |
# | `block_tables` | B x W | each request's blocks, padded with -1 to the longest table |
#
# The two lengths are lists of `int`, the others tensors of `int64`. `FlatBatch` is in `servelab.serving`.

# %% [markdown]
# ### A worked example
#
# Blocks of 4. The plan schedules one token of `a`, three of `b`, two of `c`:
#
# | request | known tokens | computed | scheduled | blocks |
# |---|---|---|---|---|
# | a: a decode | 6 | 5 | 1 | 2, 5 |
# | b: the rest of a prompt | 7 | 4 | 3 | 0, 3 |
# | c: a whole prompt | 2 | 0 | 2 | 4 |
#
# ```
# request          a |  b   b   b |  c   c
# position         5 |  4   5   6 |  0   1
# slot            21 | 12  13  14 | 16  17
# query_lens       1 |          3 |      2
# context_lens     6 |          7 |      2
# block_tables  2, 5 |       0, 3 |  4, -1
# ```
#
# Position 5 of `a` is in its second block, block 5, at offset 1: slot 5 * 4 + 1 = 21.

# %% [markdown]
# ### Your task (about 25 minutes)
#
# Write `flatten_batch`. It is called between `schedule` and `finish_step`: the blocks are reserved, `num_computed` does
# not count the plan's tokens yet. Requests stand in the order of `plan.scheduled`.
#
# <details><summary>Hint 1: which tokens</summary>
#
# Whoever is not in the plan's scheduled requests does not appear at all. Of one that is, the computed tokens come first
# and are in the cache. The step takes the next ones, as many as scheduled. Their places in the request are their
# positions, also in a decode. Behind the last of them the context ends.
#
# </details>
# <details><summary>Hint 2: slots</summary>
#
# A position divided by the block size: the quotient says which entry of the request's own table, the remainder which
# offset in that block. The entry is the block's number, and only that number times the block size is an address.
#
# </details>
# <details><summary>Hint 3: tables</summary>
#
# A request may hold more blocks than its context needs; its whole table goes in. Find the longest table first, then fill
# up the others. -1 is no block, 0 is one. `kv.blocks` returns a new list each time. Everything else that you are given
# belongs to the caller. `torch.tensor` makes int64 out of a list of int.
#
# </details>

# %% nbgrader={"grade_id": "flatten-batch", "solution": true} tags=["export"]
import torch


def flatten_batch(
    plan: StepPlan, tokens: Mapping[str, list[int]], num_computed: Mapping[str, int], kv: PagedKV
) -> FlatBatch:
    """The batch of a step, as `write_kv` and `paged_attention` take it. O(tokens of the step + blocks of its requests).

    Parameters
    ----------
    plan : StepPlan
        At least one request is scheduled.
    tokens : mapping of str to list of int
        Of each request the ids of all known tokens, prompt and answer; of others, too.
    num_computed : mapping of str to int
        Of each request the tokens whose KV is in the cache before the step; of others, too.
    kv : PagedKV
        Has room for the tokens of the step. Not changed, like the other arguments.
    """
    ### BEGIN SOLUTION
    ids, positions, slots, query_lens, context_lens, tables = [], [], [], [], [], []
    for id, fresh in plan.scheduled.items():
        start, table = num_computed[id], kv.blocks(id)
        span = range(start, start + fresh)
        ids += tokens[id][start : start + fresh]
        positions += span
        slots += [table[p // kv.block_size] * kv.block_size + p % kv.block_size for p in span]
        query_lens.append(fresh)
        context_lens.append(start + fresh)
        tables.append(table)
    width = max(map(len, tables))
    padded = [table + [-1] * (width - len(table)) for table in tables]
    ids, positions, slots, padded = map(torch.tensor, (ids, positions, slots, padded))
    return FlatBatch(ids, positions, query_lens, context_lens, slots, padded)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example first. Its blocks come from unit 03's allocator, so your block numbers may be others.

# %%
known = {"a": [11, 12, 13, 14, 15, 16], "b": [21, 22, 23, 24, 25, 26, 27], "c": [31, 32]}
pages = PagedKV(paged_kv.BlockAllocator(num_blocks=8, block_size=4))
first, second = StepPlan({"b": 4, "a": 5}), StepPlan({"a": 1, "b": 3, "c": 2})
for plan, computed in ((first, {}), (second, first.scheduled)):
    for name, count in plan.scheduled.items():
        pages.reserve(name, computed.get(name, 0) + count)
batch = flatten_batch(second, known, {"a": 5, "b": 4, "c": 0}, pages)
for name, column in vars(batch).items():
    print(f"{name:>12}: {column if isinstance(column, list) else column.tolist()}")

# %% [markdown]
# And through attention. A toy layer gives each token id a query, a key and a value. Two steps write the keys and values of
# three requests into one paged cache, chunk behind chunk. The outputs of the second step must be those of each request
# computed alone, in one piece, without a cache.

# %%
torch.manual_seed(0)
embed_q, embed_k, embed_v = torch.randn(3, 100, 2, 8)  # 100 token ids, 2 heads of 8
caches = torch.zeros(2, pages.num_blocks, pages.block_size, 2, 8)
for plan, computed in ((first, dict.fromkeys(known, 0)), (second, {"a": 5, "b": 4, "c": 0})):
    batch = flatten_batch(plan, known, computed, pages)
    paged_kv.write_kv(*caches, embed_k[batch.tokens], embed_v[batch.tokens], batch.slot_mapping)
    q, lens = embed_q[batch.tokens], (batch.query_lens, batch.context_lens)
    out = paged_kv.paged_attention(q, *caches, batch.block_tables, *lens, scale=8**-0.5).split(batch.query_lens)
for (name, n), rows in zip(second.scheduled.items(), out, strict=True):
    q, k, v = (table[known[name]].transpose(0, 1) for table in (embed_q, embed_k, embed_v))
    alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)[-n:]
    print(f"{name}: the last {n} of {len(known[name])} tokens, largest difference {(rows - alone).abs().max():.0e}")

# %% nbgrader={"grade_id": "flatten-batch-check", "grade": true, "locked": true, "points": 10}
check("continuous_batching.flatten_batch", flatten_batch)

# %% [markdown]
# A decode is a chunk of one token, and a whole prompt is a chunk whose context is all its own. That is why one step can
# hold all three, and why `schedule` only has to say how many tokens each request gets.

# %% [markdown]
# ## 6. What users feel
#
# A request arrives, waits, is admitted, and gets its tokens one by one:
#
# ```
#  arrival   admitted      token 1   2    3           4
#     |---------|-------------|------|----|-----------|
#      queueing    prefill
#     |<------- TTFT -------->|                          time to first token
#                             |<-ITL>|    |<-- ITL -->|  inter-token latency: each gap
#     |<--------------------- E2E ------------------->|  end to end
# ```
#
# **TPOT**, time per output token, is (E2E - TTFT) / (n - 1) for an answer of n tokens: the mean gap. The first token is
# not in it, since TTFT has counted that. An answer of one token has no gap and no TPOT; it is left out and not counted as 0.

# %% [markdown]
# ### A worked example
#
# Arrival 1.0, admitted 1.5, tokens at 2.0, 2.1, 2.3 and 2.9 seconds:
#
# | | |
# |---|---|
# | TTFT | 1.0 s. From the arrival: the user waits from then on |
# | ITL | 0.1, 0.2, 0.6 s |
# | TPOT | (1.9 - 1.0) / 3 = 0.3 s |
# | E2E | 1.9 s |
#
# TPOT hides the gap of 0.6. A stall shows in the ITL, in its 99th percentile rather than in its mean.

# %% [markdown]
# **Percentiles** are numpy's, linear. Of n sorted values, counted from 0, the p-th percentile is the value at place
# p / 100 * (n - 1), on the line between its two neighbours. Of 10, 20, 30, 40, 100 the 90th is at place 3.6:
# 40 + 0.6 * 60 = 76. (The nearest-rank rule would say 100. Two tools that report "P90" need not mean the same.)
#
# **Throughput** counts the tokens of all answers, and divides by the whole run, from the first arrival to the last token,
# whether the server was busy or not. Tokens of prompts are no output.

# %% [markdown]
# **Goodput.** Throughput can be bought with latency, so it needs a limit beside it. A **service level objective** (SLO) is
# one: TTFT of at most 1 s, TPOT of at most 40 ms. DistServe (Zhong et al., OSDI 2024) calls *goodput* the highest request
# rate at which a given share of the requests, say 90 %, meets the SLOs, for each GPU provisioned.
#
# Here rates come from a grid. The goodput is the highest rate of the grid at which at least 90 % of the requests meet
# **both** limits, divided by the GPUs. Lower rates that failed do not matter. If no rate passes, it is 0.
#
# | requests/s | meet TTFT | meet TPOT | meet both | |
# |---|---|---|---|---|
# | 1 | 100 % | 100 % | 100 % | passes |
# | 2 | 95 % | 93 % | 90 % | passes |
# | 4 | 91 % | 92 % | 83 % | fails |
#
# On two GPUs that is a goodput of 1 request/s per GPU.

# %% [markdown]
# ### Your task (about 30 minutes)
#
# Write seven functions. A request is a `Timing(arrival, admitted, token_times)` of `servelab.simulation`, all in seconds;
# `token_times` has at least one entry.
#
# <details><summary>Hint 1: one request</summary>
#
# Two of the three fields are enough for all of them: `admitted` is part of TTFT and does not bound it. There is one gap
# less than there are tokens. With one token, TPOT would divide by zero: return None instead.
#
# </details>
# <details><summary>Hint 2: many values, many requests</summary>
#
# `numpy.percentile` uses this definition unless told otherwise, and you may call it. By hand: sort a copy, since the list
# is the caller's. Requests are in any order, so look for the first arrival and the last token among all of them.
#
# </details>
# <details><summary>Hint 3: goodput</summary>
#
# Go through the rates. For each, count the requests that meet one limit and the other, each request by itself; a mean over
# requests can hide a tenth of them. At most means that the limit itself is allowed. A request without a TPOT breaks no
# limit on it. Nine of ten are enough, and six of seven are not: do not round. If you count those that fail, remember that
# 1 - 0.9 is a little less than 0.1 in floats. Collect the rates that pass, then take the largest.
#
# </details>


# %% nbgrader={"grade_id": "metrics", "solution": true} tags=["export"]
import numpy as np

SHARE = 0.9  # of the requests, that must meet both limits


def ttft(timing: Timing) -> float:
    """Time to first token, in seconds."""
    ### BEGIN SOLUTION
    return timing.token_times[0] - timing.arrival
    ### END SOLUTION


def e2e(timing: Timing) -> float:
    """End-to-end latency: from the arrival to the last token, in seconds."""
    ### BEGIN SOLUTION
    return timing.token_times[-1] - timing.arrival
    ### END SOLUTION


def itl(timing: Timing) -> list[float]:
    """Inter-token latencies: every gap between two tokens, in order, in seconds."""
    ### BEGIN SOLUTION
    return [later - earlier for earlier, later in itertools.pairwise(timing.token_times)]
    ### END SOLUTION


def tpot(timing: Timing) -> float | None:
    """Time per output token, in seconds: the mean gap. None if the answer has one token."""
    ### BEGIN SOLUTION
    gaps = len(timing.token_times) - 1
    return (e2e(timing) - ttft(timing)) / gaps if gaps else None
    ### END SOLUTION


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile, 0 to 100, linear between values as numpy's. O(n log n). The list is not changed."""
    ### BEGIN SOLUTION
    return float(np.percentile(values, p))
    ### END SOLUTION


def throughput(timings: list[Timing]) -> float:
    """Tokens of answers per second, from the first arrival to the last token; at least one request, in any order."""
    ### BEGIN SOLUTION
    start, end = min(t.arrival for t in timings), max(t.token_times[-1] for t in timings)
    return sum(len(t.token_times) for t in timings) / (end - start)
    ### END SOLUTION


def goodput(runs: Mapping[float, list[Timing]], ttft_slo: float, tpot_slo: float, gpus: int = 1) -> float:
    """The highest rate at which at least ``SHARE`` of the requests meet both limits, per GPU; 0 if there is none.

    Parameters
    ----------
    runs : mapping of float to list of Timing
        For each rate of a grid, in requests/s and in any order, the requests that were served at that rate.
    ttft_slo, tpot_slo : float
        Seconds; a request may take exactly so long. One without a TPOT meets every limit on it.
    """

    ### BEGIN SOLUTION
    def meets(timing: Timing) -> bool:
        return ttft(timing) <= ttft_slo and (tpot(timing) or 0) <= tpot_slo

    passing = [rate for rate, timings in runs.items() if sum(map(meets, timings)) >= SHARE * len(timings)]
    return max(passing, default=0) / gpus
    ### END SOLUTION


# %% [markdown]
# Try it: the worked examples.

# %%
example = Timing(1.0, 1.5, (2.0, 2.1, 2.3, 2.9))
gaps = ", ".join(f"{gap:.1f}" for gap in itl(example))
print(f"TTFT {ttft(example):.1f} s, ITL {gaps} s, TPOT {tpot(example):.1f} s, E2E {e2e(example):.1f} s")
print("one token, TPOT:", tpot(Timing(0.0, 0.1, (0.4,))))
print("P90 of 10, 20, 30, 40, 100:", percentile([10, 20, 30, 40, 100], 90))
print(f"throughput: {throughput([example, Timing(0.0, 0.1, (0.4,))]):.2f} tokens/s")
fast, slow = Timing(0.0, 0.1, (0.5, 0.52)), Timing(0.0, 1.5, (2.0, 2.02))
print("goodput:", goodput({1: [fast] * 10, 2: [fast] * 9 + [slow], 4: [fast] * 8 + [slow] * 2}, 1.0, 0.04, gpus=2))

# %% nbgrader={"grade_id": "metrics-check", "grade": true, "locked": true, "points": 10}
check("continuous_batching.metrics", ttft, e2e, itl, tpot, percentile, throughput, goodput)

# %% [markdown]
# ## 7. What batching costs
#
# A `StepCost` has unit 01's floor as four constants: a step takes `max(weights + kv_tokens * kv_token, tokens * token) +
# overhead` seconds. The weights are read once a step, and are the same for one request and for a hundred. The KV is read
# for each request. So a larger batch makes every step longer, for everybody in it.
#
# "Continuous batching raises TPOT slightly" is true or false by the numbers. Yours will say which, for two models.

# %% [markdown]
# ### Giving the KV back
#
# A preempted request needs its KV again. There are two ways (Kwon et al., SOSP 2023, section 4.5):
#
# - **recompute**: its known tokens ride in a later step as one more prompt. The step would have run anyway, for the others.
#   What it costs is what the step takes *longer*. While a step waits for memory, arithmetic is free: nothing at first.
# - **swap**: its KV is copied to the host's memory and back later. Both times all its bytes cross the link, PCIe for
#   instance: 63 GB/s each way for PCIe 5 x16, 31.5 for PCIe 4.
#
# Both are floors. Real swapping copies block by block, and small blocks make small, slow transfers. In the paper's
# measurements (section 7.3) recomputing was never more than 20 % above swapping, and the two came out comparable for blocks
# of 16 to 64 tokens.

# %% [markdown]
# ### A worked example
#
# Llama-3.1-8B on an H100, PCIe 5; a request with 1024 tokens is preempted while 32 others decode, with 1024 each:
#
# | | |
# |---|---|
# | the step without it | 16.06 GB of weights and 4.29 GB of KV: 6.076 ms, by memory |
# | the step with its 1024 tokens | 1056 tokens at 14.1 us: 14.905 ms, by arithmetic |
# | recompute | 14.905 - 6.076 = 8.829 ms |
# | swap | 2 x 1024 x 131,072 bytes at 63 GB/s: 4.261 ms |
#
# The times come from exact values, not from the rounded ones beside them.

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `tpot_ratio`, `recompute_seconds` and `swap_seconds`. They are one or two lines each.
#
# <details><summary>Hint 1: the ratio</summary>
#
# `cost.seconds(tokens, kv_tokens)` gives the length of a step. A decode step of a batch has one token a request, and reads
# the context of each. Divide the batch's step by that of a batch of one with the same context.
#
# </details>
# <details><summary>Hint 2: the two ways back</summary>
#
# Recompute: take the length of the step with the extra tokens, and subtract that of the step without. The recomputed
# request has nothing in the cache, so it adds tokens and no KV to read. Swap: the bytes cross the link twice; GB is 1e9.
#
# </details>


# %% nbgrader={"grade_id": "batching-cost", "solution": true} tags=["export"]
def tpot_ratio(cost: StepCost, batch: int, context: int) -> float:
    """How many times as long a decode step of ``batch`` requests takes as that of one; each has ``context`` tokens."""
    ### BEGIN SOLUTION
    return cost.seconds(batch, batch * context) / cost.seconds(1, context)
    ### END SOLUTION


def recompute_seconds(cost: StepCost, tokens: int, batch: int, context: int) -> float:
    """By how much ``tokens`` tokens to recompute lengthen the step in which ``batch`` others decode.

    Parameters
    ----------
    tokens : int
        Known tokens of the preempted request, at least 1, all in one step.
    batch, context : int
        The others, at least one, and the tokens that each of them has in the cache.
    """
    ### BEGIN SOLUTION
    return cost.seconds(batch + tokens, batch * context) - cost.seconds(batch, batch * context)
    ### END SOLUTION


def swap_seconds(tokens: int, kv_bytes_per_token: int, link_gb_s: float) -> float:
    """Seconds in which the KV of ``tokens`` tokens goes to the host and comes back; the link takes GB/s each way."""
    ### BEGIN SOLUTION
    return 2 * tokens * kv_bytes_per_token / (link_gb_s * 1e9)
    ### END SOLUTION


# %% [markdown]
# Try it: TPOT against batch size, with the throughput that it buys, for contexts of 2048 tokens. The constants come from
# unit 01's `mixed_step_floor`.

# %%
h100 = hardware_card("h100-sxm")
llama_8b = StepCost.from_floor(memory.mixed_step_floor, model_card("llama-3.1-8b"), h100)
llama_70b = StepCost.from_floor(memory.mixed_step_floor, model_card("llama-3.1-70b"), h100, tp=4)
for batch in (1, 32, 128, 256):
    for name, floor in (("8B", llama_8b), ("70B TP4", llama_70b)):
        rate = batch / floor.seconds(batch, batch * 2048)
        print(f"{name:>8}, batch {batch:3}: TPOT x{tpot_ratio(floor, batch, 2048):.2f}, {rate:7,.0f} tokens/s")

# %% nbgrader={"grade_id": "batching-cost-check", "grade": true, "locked": true, "points": 4}
check("continuous_batching.batching_cost", tpot_ratio, recompute_seconds, swap_seconds)

# %% [markdown]
# **Slightly, or three times.** The 70B model on four cards pays x1.15 for a batch of 32: its weights outweigh the KV of 32
# requests. The 8B model pays x3.09 for a batch of 128, since the KV of 128 requests is more than twice its weights. And
# throughput rises by less and less: from batch 128 to 256 by 19 % for the 8B model, while TPOT grows by two thirds.
#
# This is the decode alone. A whole prompt that rides in a step stalls everybody else in it, and more: up to 28.3 times the
# time between two tokens in Sarathi-Serve's measurements (Agrawal et al., OSDI 2024, Fig. 9). That is what chunks are for.

# %% [markdown]
# Recompute or swap? An H100, PCIe 5, 32 others with 1024 tokens each. Where a row says "free", the recomputed tokens fit
# under the time that the step takes for memory anyway.


# %%
def ways_back(name: str, tokens: int, link_gb_s: float = 63.0) -> str:
    """A row of the table: milliseconds to recompute and to swap."""
    card = model_card(name)
    cost = StepCost.from_floor(memory.mixed_step_floor, card, h100)
    again = recompute_seconds(cost, tokens, 32, 1024)
    swapped = swap_seconds(tokens, memory.kv_bytes_per_token(card), link_gb_s)
    shown, cheaper = f"{1e3 * again:.3f}" if again else "free", "swap" if swapped < again else "recompute"
    return f"| {card.name} | {tokens:,} | {shown} | {1e3 * swapped:.3f} | {cheaper} |"


rows = [ways_back(name, n) for name in ("llama-3.1-8b", "llama-2-7b") for n in (256, 512, 565, 566, 1024, 4096)]
display(Markdown("\n".join(["| model | tokens | recompute ms | swap ms | cheaper |", "|---" * 5 + "|", *rows])))

# %% [markdown]
# **Where it crosses.** Recomputing starts at nothing and then rises by 14.1 us a token for the 8B model; swapping rises by
# 4.2 us a token from the start. So short contexts are recomputed and long ones swapped, from 566 tokens on here. Llama-2-7B
# has four times the KV a token, without grouped queries: 16.6 us to swap and 13.1 us to recompute. There recomputing is
# cheaper at every length. What was left out moves the point: attention's own arithmetic (against recomputing long contexts),
# many small copies (against swapping), chunks that spread the tokens over several steps in which arithmetic is free.
#
# The scheduler of this unit recomputes: no second memory, no copies to wait for, and with a prefix cache part of it may be
# found again.

# %% [markdown]
# ## 8. One trace, three servers
#
# Why do people say that continuous batching goes with PagedAttention? Take them apart: OPT-13B on one 40 GB card. Kwon et
# al. (Table 1) give it 12 GB for KV, and 15.7K tokens. At 819,200 bytes a token 12 GiB hold 15,728: 983 blocks of 16. The
# same 200 requests of the course's chat trace, none longer than OPT's 2048 tokens, arrive at six rates.
#
# | server | who runs | KV of a request |
# |---|---|---|
# | static | batches of 7; nobody joins a batch | 2047 tokens, the longest it may become |
# | contiguous | whoever fits, decided every step: your `Scheduler` | 2047 tokens, as Orca reserved it |
# | paged | whoever fits, decided every step: your `PagedScheduler` | blocks, as tokens come |
#
# 2047 tokens are 128 blocks, so 7 requests fit. The first two are drawn better than they were: members of a static batch
# that are done take part in no step any more, and nobody has to find a *contiguous* region.
#
# The cell behind the next runs all three at all rates, which takes 5 to 10 seconds.

# %%
from servelab.simulation import StaticBatches
from servelab.traces import read_trace

LONGEST, RATES = 2048, (0.5, 1.0, 1.5, 2.0, 2.5, 4.0)
opt = StepCost.from_floor(memory.mixed_step_floor, model_card("opt-13b"), hardware_card("a100-40-sxm"))
limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=LONGEST, watermark_blocks=10)
chat = [r for r in read_trace("conv") if r.prompt_tokens + r.output_tokens <= LONGEST][:200]
chat_rate = (len(chat) - 1) / chat[-1].arrival


def memory_13b() -> PagedKV:
    """The KV memory of one server."""
    return PagedKV(paged_kv.BlockAllocator(num_blocks=15_728 // 16, block_size=16))


def at_rate(rate: float) -> list[Job]:
    """The requests, with arrivals so much closer or further apart that ``rate`` of them come in a second."""
    jobs = []
    for number, r in enumerate(chat):
        request = Request(str(number), r.prompt_tokens, LONGEST - r.prompt_tokens, r.arrival * chat_rate / rate)
        jobs.append(Job(request, r.output_tokens))
    return jobs


# %%
servers = {
    "static": lambda: StaticBatches(Scheduler(limits, memory_13b()), batch_size=7),
    "contiguous": lambda: Scheduler(limits, memory_13b()),
    "paged": lambda: PagedScheduler(limits, memory_13b()),
}
served = {(name, rate): serve(make(), at_rate(rate), opt) for name, make in servers.items() for rate in RATES}
full = {name: served[name, RATES[-1]] for name in servers}
print(f"at {RATES[-1]} requests/s:")
display(Markdown(iterations.kv_use_text(full, memory_13b())))
display(iterations.kv_use(full, memory_13b()))

# %% [markdown]
# The line is what is taken, the area what holds a token.
#
# - **static** takes room for 7 and has 2.9 requests running on average: whoever is done leaves, and nobody comes.
# - **contiguous** refills every step and keeps its 7 places full, 6.7 on average. There is no block table in that
#   achievement. But of the slots it has taken, fewer than half hold a token (38.2 % of all slots against 87.0 %).
# - **paged** takes what it fills, and runs 14.6 requests. The price is preemption: 14 times here.
#
# And what do users notice? In the next picture each marker is one rate. They are written at the line of the paged server,
# and come in the same order on the others. Below stands the throughput, at the side the *median* TTFT of the 200 requests,
# on a logarithmic scale.

# %%
curves = {name: [] for name in servers}
for (name, rate), run in served.items():
    timings = run.timings()
    usual = percentile([ttft(timing) for timing in timings], 50)
    curves[name].append(iterations.Point(rate, throughput(timings), usual))
display(iterations.latency_curves(curves))
display(Markdown(iterations.latency_text(curves)))
for name in servers:
    found = goodput({rate: served[name, rate].timings() for rate in RATES}, ttft_slo=1.0, tpot_slo=0.04)
    print(f"{name:>10}: goodput {found} requests/s with TTFT of at most 1 s and TPOT of at most 40 ms")

# %% [markdown]
# **Two ideas, not one.** Deciding every step doubles the throughput at the highest rate (149 to 311 tokens/s), without
# paging. Orca did that. Paging lets more requests into each step, and takes it to 516. Either works without the other; a
# static batch on paged memory would still lock everybody out until its last member is done.
#
# They go together because the second removes the limit that the first runs into: once freed slots are filled at once, KV
# memory decides how many run. The paper measured the same for OPT-13B on one A100: with ShareGPT's requests at 2 a second,
# Orca (Max) ran 7.00 requests on average, and vLLM 30.42 (Kwon et al., Fig. 13). Ours are longer.
#
# At low rates the lines of the contiguous and the paged server coincide. Nobody waits for memory there, so paging buys nothing.

# %% [markdown]
# ### Little's law as a check
#
# In any system, the mean number of requests inside is the arrival rate times the mean time that each spends there:
# **L = lambda W**. Over a window that begins and ends empty this is exact, whatever the scheduler does. So it tests a
# measurement: count L from events, lambda and W from the requests, and compare.


# %%
def mean_inside(timings: list[Timing]) -> float:
    """Requests that have arrived and are not done, averaged over time, by walking through all events."""
    events = sorted([(t.arrival, 1) for t in timings] + [(t.token_times[-1], -1) for t in timings])
    area, inside = 0.0, 0
    for (moment, change), (following, _) in itertools.pairwise(events):
        inside += change
        area += inside * (following - moment)
    return area / (events[-1][0] - events[0][0])


for rate in (1.0, 2.0, 4.0):
    timings = served["paged", rate].timings()
    seconds = max(t.token_times[-1] for t in timings) - min(t.arrival for t in timings)
    done, spent = len(timings) / seconds, sum(map(e2e, timings)) / len(timings)
    print(f"asked for {rate} requests/s: done {done:.2f}/s x {spent:.2f} s = {done * spent:.2f}", end="")
    print(f", counted {mean_inside(timings):.2f}")

# %% [markdown]
# The rate is that of *completions*. Offered 4 requests a second, the server does 2.78, and the queue grows until no more
# come. Read the paper's "7.00 requests at 2 a second" (above) with care for the same reason: Orca (Max) was overloaded
# there, and 7.00 / 2 = 3.5 s is not the time that its requests took.

# %% [markdown]
# ### Explore: the iteration timeline
#
# Twelve requests with prompts of 60 to 400 tokens, on an 8B model with little memory. Each row is a request; the picture
# is drawn from your `ChunkedScheduler` and its policies. Try: a budget of 32, of 512. Three seats. 40 blocks, and watch
# who is preempted under which policy. The same in letters below: P prefill, d decode, x preempted, . waits.


# %%
from ipywidgets import Dropdown

POLICIES = {
    "first come": lambda seq: 0,
    "priority": by_priority,
    "shortest remaining": shortest_remaining,
    "priority, aged": aged(50.0),
}
crowd = [
    Job(Request(chr(65 + i), (60, 400, 120)[i % 3], 48 + 8 * (i % 5), 0.012 * i, (2, 1, 0, 1)[i % 4]), 32 + 4 * (i % 5))
    for i in range(12)
]


def show_timeline(policy: str, budget: int, max_num_seqs: int, num_blocks: int) -> None:
    """Serve the twelve requests and draw who runs when."""
    limits, kv = SchedulerConfig(max_num_seqs, budget), RecordedKV(num_blocks, block_size=16)
    run = serve(ChunkedScheduler(limits, kv, POLICIES[policy]), crowd, llama_8b)
    display(iterations.timeline(run, kv))
    display(Markdown(iterations.timeline_text(run)))
    print(iterations.step_lines(run))


explore(
    show_timeline,
    policy=Dropdown(options=list(POLICIES)),
    budget=IntSlider(256, 16, 1024, 16, continuous_update=False),
    max_num_seqs=IntSlider(8, 1, 12, continuous_update=False),
    num_blocks=IntSlider(70, 40, 300, 10, continuous_update=False),
)

# %% [markdown]
# ## 9. The same tokens
#
# Scheduling must not change a single token: who shares a step with whom, where a prompt is cut and who is preempted are
# nobody's business but the server's. So the last check of this unit lets all of it serve a model: your schedulers plan,
# your `flatten_batch` lines the tokens up, unit 03's paged attention looks into the pages, and the course's tiny model,
# one token a byte, answers greedily. A plain loop answers the same prompts one after another, without pages and batches.
# Both compute in float64, so that no near-tie between two tokens decides. The answers must be equal, token for token.
#
# One piece is still missing.

# %% [markdown]
# ### A step has more rows than answers
#
# The model returns a row for each token of the flat batch. It is turned into **logits**, a score for each token of the
# vocabulary, and the highest score is the next token. But a step of 2048 tokens in which 32 requests get a token has 2016
# rows that nobody asked for. A Llama-3.1-8B that turned all of them into logits would write 1 GB of them, in float32.
#
# So servers pick the rows first. vLLM calls the tensor of their numbers `logits_indices`
# (`vllm/v1/worker/gpu_model_runner.py`); it takes the last row of *every* request, and throws away what comes out for
# prompts that are not finished. Here such a request gives no row at all.

# %% [markdown]
# ### A worked example
#
# Four requests in one step, in this order. `d` was preempted and is computed again. The plan is another server's: yours put
# an unfinished prompt last. `sampled_rows` takes either, and the check asks for both.
#
# | request | known tokens | computed | scheduled | its rows | computed after the step | gives a token |
# |---|---|---|---|---|---|---|
# | a: a decode | 6 | 5 | 1 | 0 | 6 of 6 | row 0 |
# | b: a chunk | 9 | 2 | 4 | 1 to 4 | 6 of 9 | no |
# | c: the last chunk | 5 | 3 | 2 | 5, 6 | 5 of 5 | row 6 |
# | d: prompt and answer so far | 7 | 0 | 7 | 7 to 13 | 7 of 7 | row 13 |
#
# ```
# row        0 |  1   2   3   4 |  5   6 |  7   8   9  10  11  12  13
# request    a |  b   b   b   b |  c   c |  d   d   d   d   d   d   d
# taken      ^                           ^                           ^
# ```

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `sampled_rows`. It is called where `flatten_batch` is, with the same arguments but the memory: `num_computed` does
# not count the plan's tokens yet.
#
# The check then runs `flatten_batch`, `Scheduler`, `PagedScheduler` and `ChunkedScheduler` as well, and `write_kv` and
# `paged_attention` of unit 03's `paged-attention`. What is open or wrong in one of them fails here, too, so let their
# checks pass first. Its first case asks for rows only and needs none of them. Beside the tokens it compares three things: the rows of
# each step; how many tokens went through the model, because an answer may not be computed on the side; and the logit of
# each token, to 0.001, because the right token can come out over wrong keys and values.

# %% [markdown]
# <details><summary>Hint 1: which row</summary>
#
# The rows stand in the order of the plan. Count how many there are up to the end of a request, those of the requests in
# front of it included. Its last row is one less than that, since rows are counted from 0.
#
# </details>
# <details><summary>Hint 2: who gets a token</summary>
#
# Neither the number of scheduled tokens nor the length of the prompt tells: a chunk may have one token, a decode that
# comes back after a preemption has many. What counts is whether anything known is still missing after the step. Rows of a
# request that gets none still count for those behind it.
#
# </details>
# <details><summary>Hint 3: the rows are right, the tokens are not</summary>
#
# Then look at the part that the failed case has of its own. All ways fail: `flatten_batch`, at positions, slots or
# contexts. Only those with a preemption: the scheduler did not plan all known tokens again, or its books say that some
# are still in the cache. Only chunks: something between one chunk and the next. A right token with another logit:
# attention saw somebody else's blocks. The wrong number of steps: someone waits who could run. Unit 03 is named: finish or
# mend its `paged-attention` there, then restart this kernel; its output has the queries' type, here float64. The failing
# input is Python for a cell of your own; it prints the steps, and answers and logits beside the plain loop's.
#
# </details>


# %% nbgrader={"grade_id": "token-exact", "solution": true} tags=["export"]
def sampled_rows(plan: StepPlan, tokens: Mapping[str, list[int]], num_computed: Mapping[str, int]) -> dict[str, int]:
    """The rows of a step's flat batch that give a token. O(requests of the step).

    Parameters
    ----------
    plan : StepPlan
        At least one request is scheduled.
    tokens : mapping of str to list of int
        Of each request the ids of all known tokens, prompt and answer; of others, too.
    num_computed : mapping of str to int
        Of each request the tokens whose KV is in the cache before the step; of others, too.

    Returns
    -------
    dict of str to int
        Of each request that has all known tokens computed after this step, its last row, counted from 0. No others.
    """
    ### BEGIN SOLUTION
    rows, end = {}, 0
    for id, fresh in plan.scheduled.items():
        end += fresh
        if num_computed[id] + fresh == len(tokens[id]):
            rows[id] = end - 1
    return rows
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and what the rows cost that are left out.

# %%
tokens = {name: list(range(length)) for name, length in (("a", 6), ("b", 9), ("c", 5), ("d", 7))}
rows = sampled_rows(StepPlan({"a": 1, "b": 4, "c": 2, "d": 7}), tokens, {"a": 5, "b": 2, "c": 3, "d": 0})
print(rows)
for num_rows in (2048, 32):
    print(f"{num_rows:>5} rows of logits, float32: {num_rows * model_card('llama-3.1-8b').vocab_size * 4 / 1e9:.3f} GB")

# %% nbgrader={"grade_id": "token-exact-check", "grade": true, "locked": true, "points": 5}
check("continuous_batching.token_exact", sampled_rows, flatten_batch, Scheduler, PagedScheduler, ChunkedScheduler)

# %% [markdown]
# ### What was computed for them
#
# The check uses short prompts. Here are four of about 45 tokens, with 24 tokens of answer each. The whole of one takes 9
# blocks of 8 at most, all four 36. Where there are fewer, requests wait or are preempted.

# %%
from servelab.llm import thread

small = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, eos_token_id=0)
large = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, eos_token_id=0)
ways = {
    "whole answers": (lambda kv: Scheduler(large, kv), 20),
    "paged": (lambda kv: PagedScheduler(large, kv), 40),
    "preempted": (lambda kv: PagedScheduler(large, kv), 30),
    "chunks": (lambda kv: ChunkedScheduler(small, kv), 30),
}
thread.continuous_batching(sampled_rows, flatten_batch, ways, paged_kv)

# %% [markdown]
# The answers are the same, and so is the number of rows: 4 times 24, one for each token. The number of tokens that were
# computed is not: where somebody was preempted, tokens were computed twice. And where requests had to wait for room, the
# same tokens took more steps.

# %% [markdown]
# ## 10. Looking back
#
# Seven short questions (about 15 minutes).
#
# - **tokens in the cache**: a prompt of 100 tokens, an answer of 20. How many tokens are in the KV cache at most?
# - **steps to the first token**: a budget of 512 tokens, 32 requests decode, nobody else joins or leaves. A prompt of
#   2000 tokens is admitted; the step that computes its first chunk is step 1. In which step does it get its first token?
# - **mean time in the system**: a server that keeps up finishes 2 requests a second, and has 30.42 of them inside on
#   average. How many seconds does a request take, to three digits?
# - **who is preempted**, **which idea**, **what a mean hides**, **swap or recompute**: see A to D below.

# %% [markdown]
# **A.** Why is the *latest* arrival preempted, and not the request that holds the most blocks?
#
# - (a) the latest has the smallest KV, so it is the cheapest to recompute;
# - (b) the earliest keeps its place and comes to its end, so no two requests can take the memory from each other for ever;
# - (c) the latest has no tokens yet that a user could have seen.
#
# **B.** A server decides every step who runs, and reserves the longest answer for each. Memory is full, and many wait.
# Which change lets more requests run?
#
# - (a) a larger token budget;
# - (b) blocks as tokens come;
# - (c) shortest remaining first.

# %% [markdown]
# **C.** In a run, mean TPOT is 25 ms and P99 ITL is 400 ms. Which is the likely reason?
#
# - (a) decode steps are slow, since the batch is large;
# - (b) requests wait long for admission;
# - (c) now and then a step also reads a long prompt, or a request is preempted.
#
# **D.** By your floors: Llama-3.1-8B on an H100, 32 others decoding with 1024 tokens each, PCIe 5. A request with 300
# known tokens was preempted. What is cheaper?
#
# - (a) to recompute: the step takes no longer for it;
# - (b) to swap: 300 tokens are few bytes;
# - (c) they cost the same.
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: where to look</summary>
#
# The tokens in the cache: is the last one fed back? The first token: the decodes come first in every step. The time is
# Little's law. A is in exercise 2, B in section 8, C in section 6, D in section 7; your functions can check D.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "tokens in the cache": None,  # a number
    "steps to the first token": None,  # a number
    "mean time in the system": None,  # a number, to three digits
    "who is preempted": None,  # "a", "b" or "c"
    "which idea": None,  # "a", "b" or "c"
    "what a mean hides": None,  # "a", "b" or "c"
    "swap or recompute": None,  # "a", "b" or "c"
}
### BEGIN SOLUTION
answers["tokens in the cache"] = 119
answers["steps to the first token"] = 5
answers["mean time in the system"] = 15.21
answers["who is preempted"] = "b"
answers["which idea"] = "b"
answers["what a mean hides"] = "c"
answers["swap or recompute"] = "a"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 6}
check("continuous_batching.reflection", answers)

# %% [markdown]
# ### In your own words (about 10 minutes)
#
# A team has replaced static batches by continuous batching with whole prompts in one step. Throughput has doubled, and
# users of a chat complain that answers "freeze" now and then. A colleague says: "Batching costs latency, that is the price.
# Halve `max_num_seqs`." Advise, in about 120 words.
#
# Four points, given by hand, one each:
#
# 1. which metric shows the freezing, and why TPOT or throughput does not;
# 2. two possible causes within the scheduler, and what in a record of the steps would tell them apart;
# 3. what halving `max_num_seqs` does to each of the two causes, and to TTFT;
# 4. what you would change instead, and what that costs.

# %% [markdown] nbgrader={"grade_id": "freezes", "grade": true, "solution": true, "points": 4}
# ### BEGIN SOLUTION
# Freezing is a long gap: P99 of the ITL. TPOT is a mean over an answer, so one gap of 400 ms among 200 of 25 ms hardly
# moves it; throughput does not see it at all.
#
# Two causes. A whole prompt rides in a step, and everybody in that step waits for it: the long steps are those with many
# prefill tokens. Or a request is preempted, waits and is recomputed: the gap is that request's alone, and the record shows
# the preemption, with KV memory full.
#
# Halving `max_num_seqs` leaves the prompts as long as they are: the freeze stays, and touches fewer. It does reduce
# preemptions, as fewer share the memory. Both ways requests queue longer, so TTFT rises and throughput falls.
#
# I would look first. Against prompts: chunks under a token budget, which bound each step; prompts then take more steps, so
# their TTFT rises somewhat, and small chunks read earlier KV again. Against preemption: more memory for KV or a higher
# watermark, which admits a little later.
# ### END SOLUTION
