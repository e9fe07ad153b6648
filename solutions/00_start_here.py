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
# # 00 Start here
#
# A language model is trained once and served for years. Serving is where the GPU hours go, and it is decided by a few
# mechanisms: how memory for the KV cache is handed out, which requests share a forward pass, and how one model is spread
# over several GPUs. In this course you write those mechanisms yourself, in notebooks, and each piece is checked as you
# go.
#
# You need Python and some PyTorch. You do not need a GPU.

# %% [markdown]
# ## How a unit works
#
# Each exercise has the same five parts:
#
# 1. **text**: why it matters, how it works, a worked example with small numbers, and hints, folded away;
# 2. **a cell to write in**: signature and docstring are given; replace `raise NotImplementedError()`;
# 3. **a try-it cell**: runs your code on something small; change it as you like;
# 4. **a check cell**: `check(...)` runs your code on many cases and says which hold;
# 5. sometimes **an explore cell**: a slider over a picture that your own code draws.
#
# Run a cell with Shift+Enter. You can go on before a check passes. Where an exercise builds on
# an earlier one, it says so.

# %% [markdown]
# ## What a check tells you
#
# A check looks at several **cases**, each on several inputs. For each case it says whether it held. For the first that
# did not, you see the smallest input that it failed on, what was expected, what came, and the number of the hint that is
# about it. The cell then ends in
# `CheckFailed`, so that *Restart and run all* and nbgrader's *Validate* button agree with what you read.
#
# A case is worth a share of the exercise's points; the points of a unit sum to 100. In a shell, `servelab progress` shows
# where you stand, `servelab check 00` runs a whole unit's checks, and `servelab restore 00` repairs a notebook that got
# damaged: your answers stay, and the damaged file is kept too.

# %% [markdown]
# ## This machine

# %% tags=["export"]
from servelab.checking import check
from servelab.doctor import machine

# %%
for name, value in machine().items():
    print(f"{name:>12}  {value or 'none: the course runs on the CPU'}")

# %% [markdown]
# ## 1. Warm-up: what is a slot doing?
#
# The oldest way to serve several requests at once is the **static batch**: collect `batch_size` requests, run them
# together until *all* are done, return the answers, take the next ones. One forward pass is one **step**, and it gives
# each unfinished request one more token. A request with n output tokens takes n steps, the first of which also reads the
# prompt.
#
# A batch has `batch_size` **slots**. A slot whose request finished early stays occupied until the longest one is done:
# the GPU computes for it, and the result is thrown away.

# %% [markdown]
# ### A worked example
#
# Three requests with 1, 2 and 4 output tokens, `batch_size=2`. The first two form a batch, the third runs alone in the
# next one, beside an empty slot.
#
# | step | slot 0 | slot 1 |
# |---|---|---|
# | 1 | request 0, token 1 | request 1, token 1 |
# | 2 | *held* | request 1, token 2 |
# | 3 | request 2, token 1 | *empty* |
# | 4 | request 2, token 2 | *empty* |
# | 5 | request 2, token 3 | *empty* |
# | 6 | request 2, token 4 | *empty* |
#
# Six steps of two slots are 12 slot-steps, and 7 of them give a token that somebody asked for. The **slot utilisation** is
# 7/12, about 58 %.

# %% [markdown]
# ### Your task (about 10 minutes)
#
# Write `slot_utilisation(lengths, batch_size)`: the share of all slot-steps that give a wanted token, when the requests
# are served in the given order in static batches.
#
# <details><summary>Hint 1: one batch</summary>
#
# A batch that holds the lengths 3 and 1 runs for 3 steps. How many slot-steps is that, and how many of them are useful?
# Work on what you are given without changing it.
#
# </details>
# <details><summary>Hint 2: many batches</summary>
#
# Cut the list into pieces of `batch_size`. Each piece lasts as long as its largest element. The last piece may be
# shorter, but its batch has as many slots as every other: the empty ones count.
#
# </details>
# <details><summary>Hint 3: nearly code</summary>
#
# Look for misuse first: no lengths at all, a batch size below 1, a length below 1. Then step through the start positions
# with `range`'s third argument, take a slice at each, add up the slices' maxima, and multiply the sum by the number of
# slots. Divide the total length by that.
#
# </details>


# %% nbgrader={"grade_id": "slot-utilisation", "solution": true} tags=["export"]
def slot_utilisation(lengths: list[int], batch_size: int) -> float:
    """The share of a static batch server's slot-steps that give a wanted token.

    Parameters
    ----------
    lengths : list of int
        Output tokens of each request, in the order in which they are served; each at least 1. Not changed.
    batch_size : int
        Slots of a batch, at least 1.

    Returns
    -------
    float
        Useful slot-steps divided by all slot-steps, in (0, 1].

    Raises
    ------
    ValueError
        If there is no request, or a length or the batch size is below 1.
    """
    ### BEGIN SOLUTION
    if not lengths or min([batch_size, *lengths]) < 1:
        raise ValueError("every batch needs a slot, and every request a token")
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return sum(lengths) / (batch_size * sum(max(batch) for batch in batches))
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, then one long answer beside eight short ones.

# %%
print(f"worked example: {slot_utilisation([1, 2, 4], batch_size=2):.4f}")
print(f"1 x 2000 + 8 x 20 tokens, 9 slots: {slot_utilisation([2000] + [20] * 8, batch_size=9):.1%}")

# %% nbgrader={"grade_id": "slot-utilisation-check", "grade": true, "locked": true, "points": 85}
check("start_here.slot_utilisation", slot_utilisation)

# %% [markdown]
# One long answer beside eight short ones leaves 88 % of the slot-steps unused. This number comes back: unit by unit, the
# course removes the reasons for it.

# %% [markdown]
# ## 2. Reflection (about 5 minutes)
#
# Take the batch of one request with 2000 output tokens and eight with 20, in 9 slots. Three questions:
#
# - **steps in a slot after the answer is done**: for how many steps does the slot of a *short* request stay held after
#   that request has finished?
# - **what raises utilisation**: many such requests are waiting, and you may change one thing. (a) give each batch 18
#   slots; (b) put requests of similar length into the same batch; (c) buy a GPU that is twice as fast.
# - **utilisation of ten such batches**: the same nine requests arrive ten times, one batch after the other. A number
#   between 0 and 1.
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: which picture to draw</summary>
#
# Draw the batch as a rectangle, 9 slots wide and as many steps long as it runs, and shade the useful cells.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "steps in a slot after the answer is done": None,  # a number
    "what raises utilisation": None,  # "a", "b" or "c"
    "utilisation of ten such batches": None,  # a number
}
### BEGIN SOLUTION
answers["steps in a slot after the answer is done"] = 1980
answers["what raises utilisation"] = "b"
answers["utilisation of ten such batches"] = 0.12
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 15}
check("start_here.reflection", answers)

# %% [markdown]
# ## A map of the course
#
# | unit | you write | the question behind it |
# |---|---|---|
# | 00 start here | `slot_utilisation` | what does a static batch waste? |
# | 01 memory | bytes of KV cache and weights, per model, card and layout; floors of a step's time | what fits on a GPU, and what bounds its speed? |
# | 02 static batching | the schedule of static batches, their wastes, the bound and the FCFS steps of continuous batching | what exactly is wasted, and what can be won back? |
# | 03 paged KV | allocator, block table, copy-on-write, prefix cache, paged attention | how is KV memory handed out so that nearly all of it holds tokens? |
# | 04 continuous batching | the scheduler: FCFS, preemption, policies, chunked prefill; the flat batch; latency metrics | who runs in the next step, and what does it cost whom? |
# | 05 collectives | ring, tree and naive all-reduce, all-to-all, their costs, a fit of alpha and beta | how do ranks add up what they have, and what does that cost? |
# | 06 tensor parallel | column- and row-parallel layers, attention, vocabulary and sequence over ranks; what they send | what does it cost to spread one layer over several GPUs, and when do more GPUs lose? |
# | 11 capstone | an engine out of your own parts; a model over ranks; a prefix cache; an endpoint that others can call | does every way of serving give the same tokens, and which is the fastest? |
#
# Open the next unit from the file browser on the left.
