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
# # 02 Static batching
#
# A forward pass reads all of the model's weights, for one request or for thirty. So a server runs several requests
# together. The oldest way is the **static batch**: collect `batch_size` requests, run them together until *all* are
# done, send the answers back, take the next requests. Yu et al. (OSDI 2022) call it request-level scheduling: in their
# Fig. 3, a request that has ended at iteration 2 is computed in iterations 3 and 4 as well.
#
# In unit 00 one long answer beside eight short ones left 88 % of the slot-steps unused. "Inefficient" is not an
# explanation. In this unit you take the waste apart and count each piece.

# %% [markdown]
# ## Three wastes
#
# | waste | what happens | who pays | removed by |
# |---|---|---|---|
# | **held** slots | the batch ends with its longest answer. Whoever finished earlier keeps the slot, and gets its answer late (head-of-line blocking) | throughput, and the latency of short answers | letting requests leave after every step |
# | **padding** | prompts of unequal length are filled up to one rectangle | arithmetic and memory | batches of tokens without padding |
# | **locked out** | a free slot cannot be filled again, and a batch has to form first: arrivals queue | time to first token (TTFT) | letting requests join after every step |
#
# The first and the third go away with **continuous batching**, which decides after every step who runs. The second does
# not: Orca removes it by a second idea, selective batching.

# %% [markdown]
# ## What you build
#
# | | exercise | what it answers | points | minutes |
# |---|---|---|---|---|
# | 1 | `static_schedule` | Who runs when, and what is each cell of the rectangle? | 35 | 35 |
# | 2 | `waste` | How large is each waste? | 20 | 20 |
# | 3 | `continuous_bound` | How fast could any scheduler be? | 10 | 10 |
# | 4 | `fcfs_steps` | How fast is first come, first served? | 15 | 15 |
# | 5 | reflection | | 20 | 25 |

# %% tags=["export"]
import heapq
from collections.abc import Sequence

from servelab.batching import Batch, Request, Slot, require_lengths, to_steps
from servelab.checking import check

# %% [markdown]
# ## 1. The schedule of a static batch server
#
# **The clock.** Time is counted in steps. Step t runs from moment t to moment t + 1. A request with n output tokens takes
# n steps, and the first of them also reads the prompt. (A step that reads long prompts takes longer than the others. The
# clock does not see that; the cells will.)
#
# **The rule.** Requests are taken in the order of arrival, those that arrive together in the order of the list. A batch
# starts as soon as the server is free and `batch_size` requests wait, or all that are left if no more will arrive. A
# request with arrival t may run in step t. When the longest answer is done, the batch is finished, and the server may
# start the next one at that same moment.

# %% [markdown]
# ### The rectangle
#
# A batch is a rectangle of **cells**. A row is a slot. The columns on the left are for prompts, as many as the batch's
# longest prompt has tokens. They take no time of their own. Behind them comes one column a step. Each cell is of one
# kind:
#
# - **padding**: left of a prompt that is shorter than the longest. Prompts are padded on the left, so that all answers
#   start in the same column;
# - **useful**: one token of a prompt or of an answer;
# - **held**: a step after the request's own last token. The slot is computed, and the result is thrown away;
# - **empty**: every cell of a slot that nobody has. Only the last batch has such slots.
#
# From left to right a row is padding, useful, held. So four numbers describe it: a `Slot`.

# %% [markdown]
# ### The three classes
#
# | class | fields |
# |---|---|
# | `Request` | `arrival` in steps, `prompt` and `output` in tokens |
# | `Slot` | `request` (or None), then cells of its row: `padding`, `useful`, `held`, `empty`; each is 0 if not given |
# | `Batch` | `start` and `finish` as moments, `slots`: one `Slot` for each of the `batch_size` rows |
#
# They are frozen dataclasses in `servelab.batching`. A `Batch` also has `steps`, `columns` and `prompt_columns`, worked
# out from its fields. A request with `prompt=0` is allowed: its batch counts steps only, as unit 00 did.

# %% [markdown]
# ### A worked example
#
# `batch_size=2` and five requests:
#
# | request | arrival | prompt | output |
# |---|---|---|---|
# | A | 0 | 2 | 2 |
# | B | 0 | 4 | 5 |
# | C | 1 | 3 | 3 |
# | D | 7 | 1 | 1 |
# | E | 9 | 2 | 3 |
#
# A and B start at 0 and finish at 5, when B is done. C has waited since 1. It waits on, because a batch needs two. D
# arrives at 7: C and D run from 7 to 10. E is alone, and nobody will arrive after it, so it starts at 10.

# %% [markdown]
# The three rectangles; `p` padding, `u` useful, `h` held, `.` empty. The blank stands between prompt columns and steps.
#
# ```
#      0 to 5            7 to 10         10 to 13
#  A  ppuu uuhhh     C  uuu uuu      E  uu uuu
#  B  uuuu uuuuu     D  ppu uhh         .. ...
# ```
#
# The row of A is `Slot(A, padding=2, useful=4, held=3)`: 2 + 2 useful cells, and 9 cells in all.

# %% [markdown]
# ### Your task (about 35 minutes)
#
# Write `static_schedule`. Within a batch, which request gets which slot is up to you.
#
# <details><summary>Hint 1: who and when</summary>
#
# Who shares a batch does not depend on time at all: put the requests in order of arrival (a copy: the list belongs to
# the caller) and cut them into pieces. A piece is complete when its last member has arrived. It also has to wait until
# the server is free. The later of the two is the start. That holds for the last piece too, full or not.
#
# </details>
# <details><summary>Hint 2: how long</summary>
#
# A batch runs for as many steps as its longest answer has tokens; prompt columns add nothing. Remember its finish: before
# that moment the next batch cannot start. Return all batches in a list, in order of start. A batch size below 1 is refused
# before anything else, also when there are no requests.
#
# </details>
# <details><summary>Hint 3: the rows</summary>
#
# A row's padding is what its prompt lacks of the batch's longest prompt. What its answer lacks of the batch's longest is
# held. Useful are all of its own tokens. Then fill up with slots without a request, whose empty cells are as many as the
# rectangle has columns.
#
# </details>


# %% nbgrader={"grade_id": "static-schedule", "solution": true} tags=["export"]
def static_schedule(requests: Sequence[Request], batch_size: int) -> list[Batch]:
    """Serve requests in static batches, first come, first served. O(n log n) in the requests.

    Parameters
    ----------
    requests : sequence of Request
        In any order; those with equal arrivals are served in the order given. Not changed.
    batch_size : int
        Slots of a batch, at least 1.

    Returns
    -------
    list of Batch
        In order of start; each with ``batch_size`` slots. Empty if there are no requests.

    Raises
    ------
    ValueError
        If the batch size is below 1, with or without requests.
    """
    ### BEGIN SOLUTION
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} slots")
    queue = sorted(requests, key=lambda request: request.arrival)
    schedule, free = [], 0
    for first in range(0, len(queue), batch_size):
        members = queue[first : first + batch_size]
        prompts, steps = max(r.prompt for r in members), max(r.output for r in members)
        slots = [Slot(r, prompts - r.prompt, r.prompt + r.output, steps - r.output) for r in members]
        slots += [Slot(None, empty=prompts + steps)] * (batch_size - len(members))
        start = max(free, members[-1].arrival)
        free = start + steps
        schedule.append(Batch(start, free, slots))
    return schedule
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, as letters, as a picture, and as a table. In the picture, the start and the finish stand
# above a batch where there is room, and a dashed line ends its prompt columns. The x axis counts cells, not time: that the
# server is idle from 5 to 7 shows in the moments only, there and in the table.

# %%
from IPython.display import Markdown, display

from servelab.plots import slots as pictures

example = [Request(0, 2, 2), Request(0, 4, 5), Request(1, 3, 3), Request(7, 1, 1), Request(9, 2, 3)]
schedule = static_schedule(example, batch_size=2)
print(pictures.slot_lines(schedule))
display(pictures.gantt(schedule))
display(Markdown(pictures.gantt_text(schedule)))

# %% nbgrader={"grade_id": "static-schedule-check", "grade": true, "locked": true, "points": 35}
check("static_batching.static_schedule", static_schedule)

# %% [markdown]
# ### One long answer, eight short ones
#
# The batch of unit 00: 2000 output tokens in one slot, 20 in each of eight others. By hand: the rectangle has
# 9 * 2000 = 18,000 cells, and 2000 + 8 * 20 = 2,160 of them are useful: 12.0 %. The other 15,840 are held. Every short
# request gets its answer after 2000 steps, though its last token was there after 20: 1,980 steps, or a factor of 100.
#
# Now by your code.

# %%
q1_lengths = [2000] + [20] * 8
q1 = static_schedule([Request(0, 0, n) for n in q1_lengths], batch_size=9)
useful = sum(slot.useful for slot in q1[0].slots)
cells = sum(slot.cells for slot in q1[0].slots)
print(f"finish {q1[0].finish}; {useful:,} of {cells:,} cells are useful: {useful / cells:.1%}")
display(pictures.gantt(q1, labels=("useful", "held")))

# %% [markdown]
# ## 2. Counting the wastes
#
# Cells first: add up each kind over all slots of all batches. As every cell has one kind, the four sums add up to the
# area of the rectangles.
#
# The third waste is not a cell. A request that queues has no slot, so it is outside every rectangle. It is counted beside
# them, in **request-steps**: two requests that queue for three steps are six. There are two reasons to queue:
#
# - **locked out**: an earlier batch runs. Whether it has held cells or none, nobody may join;
# - **forming**: the server is free and waits for the batch to fill.
#
# Together they are all the steps from arrivals to starts.

# %% [markdown]
# ### A worked example
#
# The schedule of exercise 1. The server is free from 0, from 5 and from 10.
#
# | request | arrival | the server is free | start | locked out | forming |
# |---|---|---|---|---|---|
# | A, B | 0 | 0 | 0 | 0 | 0 |
# | C | 1 | 5 | 7 | 4 | 2 |
# | D | 7 | 5 | 7 | 0 | 0 |
# | E | 9 | 10 | 10 | 1 | 0 |
#
# C on a line of time:
#
# ```
#  moment    0    1    2    3    4    5    6    7         10
#            |  A and B run           |  idle   |  C and D  |
#                 |C: locked out      | forming |
# ```
#
# So 5 request-steps locked out and 2 forming. The cells: 26 useful, 4 padding, 5 held, 5 empty; together 40, which is
# 2 * 9 + 2 * 6 + 2 * 5.

# %% [markdown]
# ### Your task (about 20 minutes)
#
# Write `waste`. It gets a schedule as `static_schedule` returns it. The check brings its own schedules.
#
# <details><summary>Hint 1: cells</summary>
#
# The four counts stand in each `Slot` already, under the names of the keys. A slot without a request has cells, too.
#
# </details>
# <details><summary>Hint 2: locked out</summary>
#
# Go through the batches in order and remember when the one before was finished; before the first batch that is moment 0.
# A request is locked out from its arrival until then. If it arrives later than that, it is not locked out at all, which
# is 0 and not a negative number.
#
# </details>
# <details><summary>Hint 3: forming</summary>
#
# Forming begins when two things have happened: the request has arrived, and the server is free. It ends with the start of
# the batch.
#
# </details>


# %% nbgrader={"grade_id": "waste", "solution": true} tags=["export"]
def waste(schedule: Sequence[Batch]) -> dict[str, int]:
    """Count what a static batch server's cells were used for, and how long requests queued. O(slots).

    Parameters
    ----------
    schedule : sequence of Batch
        In order of start.

    Returns
    -------
    dict
        ``"useful"``, ``"padding"``, ``"held"`` and ``"empty"`` in cells, which add up to all cells;
        ``"locked_out"`` and ``"forming"`` in request-steps, which add up to all queueing. All 0 for an empty schedule.
    """
    found = dict.fromkeys(("useful", "padding", "held", "empty", "locked_out", "forming"), 0)
    ### BEGIN SOLUTION
    free = 0
    for batch in schedule:
        for slot in batch.slots:
            for label in ("useful", "padding", "held", "empty"):
                found[label] += getattr(slot, label)
            if slot.request:
                found["locked_out"] += max(0, free - slot.request.arrival)
                found["forming"] += batch.start - max(free, slot.request.arrival)
        free = batch.finish
    return found
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, written down by hand. Then four prompts of 64, 128, 512 and 2,048 tokens in one batch, each
# with an answer of one token; this batch comes from your `static_schedule`. By hand: 2,752 tokens in 4 * 2048 = 8,192
# prompt cells, so 5,440 cells or 66.4 % are padding.

# %%
a, b, c, d, e = (Request(*row) for row in ((0, 2, 2), (0, 4, 5), (1, 3, 3), (7, 1, 1), (9, 2, 3)))
by_hand = [
    Batch(0, 5, [Slot(a, padding=2, useful=4, held=3), Slot(b, useful=9)]),
    Batch(7, 10, [Slot(c, useful=6), Slot(d, padding=2, useful=2, held=2)]),
    Batch(10, 13, [Slot(e, useful=5), Slot(None, empty=5)]),
]
print(waste(by_hand))
prompts = static_schedule([Request(0, n, 1) for n in (64, 128, 512, 2048)], batch_size=4)
found = waste(prompts)
print(found)
print(f"padding: {found['padding'] / (4 * prompts[0].prompt_columns):.1%} of the prompt cells")
display(pictures.gantt(prompts, labels=("padding", "useful")))

# %% nbgrader={"grade_id": "waste-check", "grade": true, "locked": true, "points": 20}
check("static_batching.waste", waste)

# %% [markdown]
# ### Move the sliders
#
# Eleven requests, five steps apart, with prompts of 2 to 12 tokens; every fourth has a long answer, the others 6 tokens.
# Look at three things:
#
# - how `held` grows with the long answer while `padding` stays as it is, both in cells (the first table); in the second
#   table the share of `padding` falls, because the rectangles grow;
# - from which batch size on requests wait longer for a batch to form than for an earlier one to end, with a long answer
#   of 24;
# - what a batch size of 1 does to the cells, and what it does to the queue.
#
# The queue is not in the picture: read `locked out` and `forming` off the second table. Moments stand above the batches;
# below them the x axis counts cells.

# %%
from ipywidgets import IntSlider

from servelab.plots.explore import explore


def draw(batch_size: int, long_answer: int) -> None:
    requests = [Request(5 * i, 2 + 5 * i % 11, 6 if i % 4 else long_answer) for i in range(11)]
    made = static_schedule(requests, batch_size)
    display(pictures.gantt(made))
    display(Markdown(pictures.gantt_text(made)))
    display(Markdown(pictures.shares_text({f"batch_size={batch_size}": waste(made)})))


explore(
    draw,
    batch_size=IntSlider(4, 1, 11, continuous_update=False),
    long_answer=IntSlider(24, 6, 60, 6, continuous_update=False),
)

# %% [markdown]
# ### On a trace
#
# The first 512 requests of the course's synthetic chat trace arrive in about two minutes. A step takes 50 ms here, an
# assumption for the example.
#
# To use a trace of your own, give `read_trace` the path of a CSV in the public Azure format. Its header is
# `TIMESTAMP,ContextTokens,GeneratedTokens`. Rows that are not requests are skipped and reported.

# %%
from servelab.traces import read_trace

trace = read_trace("conv", max_requests=512)  # or a path, such as "~/my_trace.csv"
print(trace.report() or f"{trace.name}: {len(trace)} requests, no row skipped")
STEP_S = 0.05
arrived = to_steps(trace, STEP_S)
by_size = {size: static_schedule(arrived, size) for size in (1, 8, 32, 128, 256)}
display(Markdown(pictures.shares_text({f"batch_size={size}": waste(made) for size, made in by_size.items()})))
for size, made in by_size.items():
    busy = size * sum(batch.steps for batch in made)
    used = sum(request.output for request in arrived) / busy
    wait = sum(batch.start - s.request.arrival for batch in made for s in batch.slots if s.request) / len(arrived)
    print(f"batch_size={size:3}: {used:6.1%} of slot-steps useful, mean queueing {wait * STEP_S:7.1f} s")

# %% [markdown]
# **Larger batches waste more of their rectangle and still shorten the queue, up to a point.** From 8 to 256 slots the
# useful share of the slot-steps falls from 40.8 % to 23.7 %, because the longest of 256 answers is longer than the longest
# of 8. The mean wait falls from 672 s at 8 slots to 27 s at 128: more requests run at once. At 256 it is 30 s, and most of
# that is waiting for the batch to form. Here every step takes 50 ms; on a real card a step of a larger batch takes longer.
#
# **Cells are not seconds.** Most cells are padding, because these prompts have about seven times as many tokens as
# the answers. But all prompt columns of a batch are read in its first step, in parallel. A held cell is one slot for
# one step; a row's held cells come one after another. Which of the two costs more time depends on the card and the
# model.

# %% [markdown]
# ## 3. How fast could any scheduler be?
#
# Now let requests leave and join after every step: continuous batching. How much can that gain? Take all requests at
# moment 0 and count steps only. A request keeps its slot from its first step to its last.
#
# However clever the scheduler, two things hold. No answer is faster than its own steps. And a step gives at most one
# token a slot, so all the tokens need at least as many steps as their number divided by the slots, rounded up. The larger
# of the two is a **lower bound**. It is not a promise.

# %% [markdown]
# ### A worked example
#
# | lengths | slots | the longest | all tokens / slots | bound |
# |---|---|---|---|---|
# | 5, 1, 1 | 2 | 5 | 7 / 2, so 4 | 5 |
# | 3, 1, 2, 2 | 2 | 3 | 8 / 2 = 4 | 4 |
# | 3, 3, 3 | 2 | 3 | 9 / 2, so 5 | 5 |
#
# The last bound cannot be reached. As two of the three answers have to share a slot, 6 steps are the least:
#
# ```
#  step      0  1  2  3  4  5
#  slot 0    A  A  A  C  C  C
#  slot 1    B  B  B  .  .  .
# ```

# %% [markdown]
# ### Your task (about 10 minutes)
#
# Write `continuous_bound`. The first line of the body is given: it refuses misuse, and the check tests that it still does.
#
# <details><summary>Hint 1: two bounds</summary>
#
# Work out both as numbers of steps. Which of them is right if each alone may be too low? Misuse is refused by the line
# that is given; leave it where it is.
#
# </details>
# <details><summary>Hint 2: rounding up</summary>
#
# Four and a half steps do not exist. Integers can be divided with the result rounded up, without floating point: `//`
# rounds down, towards minus infinity, also for negative numbers.
#
# </details>


# %% nbgrader={"grade_id": "continuous-bound", "solution": true} tags=["export"]
def continuous_bound(lengths: Sequence[int], slots: int) -> int:
    """The larger of two lower bounds on the steps, with all requests at moment 0. O(n).

    They are the longest length, and all tokens over the slots, rounded up.

    Parameters
    ----------
    lengths : sequence of int
        Output tokens of each request, at least 1. Not changed.
    slots : int
        Requests that run at once, at least 1.

    Raises
    ------
    ValueError
        If there is no request, or a length or the number of slots is below 1.
    """
    require_lengths(lengths, slots)
    ### BEGIN SOLUTION
    return max(max(lengths), -(-sum(lengths) // slots))
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, the nine requests of unit 00 alone, and ten such batches one after the other.

# %%
for lengths, slots in (([5, 1, 1], 2), ([3, 1, 2, 2], 2), ([3, 3, 3], 2)):
    print(lengths, slots, "slots: at least", continuous_bound(lengths, slots))
print("1 x 2000 + 8 x 20, 9 slots: at least", continuous_bound(q1_lengths, 9))
print("ten such batches, 9 slots: at least", continuous_bound(q1_lengths * 10, 9))

# %% nbgrader={"grade_id": "continuous-bound-check", "grade": true, "locked": true, "points": 10}
check("static_batching.continuous_bound", continuous_bound)

# %% [markdown]
# ## 4. First come, first served
#
# A server does not know how long an answer will be, so it cannot look for the best order. The plain rule is **first come,
# first served** (FCFS): requests wait in the order given. Whenever a slot is free, the next one takes it, and stays until
# it is done. A slot whose request ends with step t works for another in step t + 1.

# %% [markdown]
# ### A worked example
#
# Lengths 4, 1, 2, 5 in two slots:
#
# ```
#  step      0  1  2  3  4  5  6  7
#  slot 0    A  A  A  A  .  .  .  .
#  slot 1    B  C  C  D  D  D  D  D
# ```
#
# D starts in step 3, because slot 1 is free then. It takes 8 steps in all. The bound is 6: 12 tokens in two slots. Longest
# first would need 6: D and B in one slot, A and C in the other. Static batches need 4 + 5 = 9.

# %% [markdown]
# ### Your task (about 15 minutes)
#
# Write `fcfs_steps`: the number of steps until *all* requests are done. All of them wait at moment 0. The first line is
# given again.
#
# <details><summary>Hint 1: what to remember</summary>
#
# Nothing but the moment at which each slot is free next; at first that is 0 for all of them. Who had it before does not
# matter. You need not go step by step. Misuse is refused by the line that is given.
#
# </details>
# <details><summary>Hint 2: nearly code</summary>
#
# Take the lengths in the order given, and leave the list as it is. The next request goes to the slot that is free first,
# and moves that slot's moment on by its length. At the end, the latest moment is the answer. The module `heapq` finds the
# smallest of many numbers in O(log slots), and can replace it in one call.
#
# </details>


# %% nbgrader={"grade_id": "fcfs-steps", "solution": true} tags=["export"]
def fcfs_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps until all requests are done, first come, first served, with all of them at moment 0. O(n log slots).

    Parameters
    ----------
    lengths : sequence of int
        Output tokens of each request, at least 1, in the order of the queue. Not changed.
    slots : int
        Requests that run at once, at least 1.

    Raises
    ------
    ValueError
        If there is no request, or a length or the number of slots is below 1.
    """
    require_lengths(lengths, slots)
    ### BEGIN SOLUTION
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
    ### END SOLUTION


# %% [markdown]
# Try it: the worked example, and three answers of equal length.

# %%
for lengths in ([4, 1, 2, 5], [3, 3, 3]):
    print(f"{lengths}, 2 slots: bound {continuous_bound(lengths, 2)}, FCFS {fcfs_steps(lengths, 2)} steps")

# %% nbgrader={"grade_id": "fcfs-steps-check", "grade": true, "locked": true, "points": 15}
check("static_batching.fcfs_steps", fcfs_steps)

# %% [markdown]
# ### Where continuous batching gains nothing, and where most
#
# Nine slots, all requests at moment 0. Static steps are the finish of your schedule's last batch.


# %%
def compare(name: str, lengths: Sequence[int], slots: int = 9) -> str:
    """A row of the table: steps of static batches, the bound, FCFS, and what FCFS gains."""
    static = static_schedule([Request(0, 0, n) for n in lengths], slots)[-1].finish
    fcfs = fcfs_steps(lengths, slots)
    return f"| {name} | {static:,} | {continuous_bound(lengths, slots):,} | {fcfs:,} | {static / fcfs:.2f} |"


rows = ["| requests | static | bound | FCFS | static / FCFS |", "|---|---|---|---|---|"]
rows += [
    compare("90 x 100", [100] * 90),
    compare("1 x 2000 + 8 x 20", q1_lengths),
    compare("800 x 20, then 1 x 2000", [20] * 800 + [2000]),
    compare("1 x 2000, then 800 x 20", [2000] + [20] * 800),
    compare("ten times 1 x 2000 + 8 x 20", q1_lengths * 10),
    compare("nine times 1 x 2000 + 8 x 20", q1_lengths * 9),
    compare("nine times 1 x 2000 + 8 x 1", ([2000] + [1] * 8) * 9),
    compare("chat trace, 512 requests", [request.output for request in arrived]),
]
display(Markdown("\n".join(rows)))

# %% [markdown]
# **Nothing.** With equal lengths a static batch has no held cells, so there is nothing to give away. And 1 x 2000 + 8
# x 20 alone still takes 2000 steps: nobody waits for the slots that become free. What is gained there does not show
# in the number of steps. The short answers go back after 20 steps, and eight slots are free for others from then on.
# A straggler at the very end of the queue, behind equal answers, leaves no gain either.
#
# **Most.** Put one straggler into each static batch and let all of them run side by side instead. With s slots, FCFS
# can come close to s times as fast (8.90 times with nine slots), and never further: while static batches run, each
# step gives at least one wanted token, and no scheduler gets more than s from a step.

# %% [markdown]
# **Ten batches gain less than nine.** Ten stragglers in nine slots: the tenth finds no free slot until moment 2060,
# and from 2440 on it runs alone: eight slots have no work left. FCFS needs 4,060 steps, and 59.1 % of its slot-steps
# are useful (21,600 of 36,540). The bound, 2,400, spreads the work evenly. No order reaches it here: with ten
# stragglers in nine slots, two must share one.
#
# With all requests at moment 0, FCFS is never slower than static batches: at the end of each static batch, FCFS has
# finished at least the same requests. What a larger batch does to the length of a step is not in this count.

# %% [markdown]
# Move the sliders: one straggler in each batch, eight short answers of 20. The last lines have the gain for 1 to 20
# batches. With stragglers of 2000 tokens, at how many batches does it drop, and why there? Where does it drop next? What
# becomes of the drop when the stragglers are shorter? Moments that find no room above the picture stand in the table.


# %%
def gain(longest: int, batches: int) -> float:
    """Static steps over FCFS steps, for so many batches of one straggler and eight short answers."""
    mixed = ([longest] + [20] * 8) * batches
    return static_schedule([Request(0, 0, n) for n in mixed], 9)[-1].finish / fcfs_steps(mixed, 9)


def stragglers(longest: int, batches: int) -> None:
    mixed = ([longest] + [20] * 8) * batches
    display(Markdown("\n".join([*rows[:2], compare(f"{batches} x (1 x {longest} + 8 x 20)", mixed)])))
    made = static_schedule([Request(0, 0, n) for n in mixed], 9)
    display(pictures.gantt(made, labels=("useful", "held")))
    display(Markdown(pictures.gantt_text(made)))
    for first in (1, 11):
        numbers = range(first, first + 10)
        print("batches      ", *(f"{number:5}" for number in numbers))
        print("static / FCFS", *(f"{gain(longest, number):5.2f}" for number in numbers))


explore(
    stragglers,
    longest=IntSlider(2000, 20, 2000, 20, continuous_update=False),
    batches=IntSlider(8, 1, 20, continuous_update=False),
)

# %% [markdown]
# ## 5. Looking back
#
# Seven short questions (about 15 minutes).
#
# - **slot-steps given back**: 1 x 2000 + 8 x 20 in nine slots. How many slot-steps can continuous batching give to other
#   requests while these nine run?
# - **Q1 alone**: and if there are no others: in how many steps are these nine done?
# - **padding share**: prompts of 100, 100, 100 and 1000 tokens share a static batch of four. Which share of the prompt
#   cells is padding, to three digits?
# - **by hand**: lengths 7, 1, 1, 1, 1, 1, 8, in this order, on four slots. How many steps does FCFS take?
# - **gains nothing**, **gains most**: see A and B below.
# - **which waste**: see C below.

# %% [markdown]
# **A.** Nine slots, all requests at moment 0. For which of these does FCFS need as many steps as static batches?
#
# - (a) 90 requests of 100 tokens;
# - (b) ten times 1 x 2000 + 8 x 20;
# - (c) one of 2000 tokens, then 800 of 20.
#
# **B.** How many times as fast as static batches can FCFS be, with s slots and lengths of your choice?
#
# - (a) at most twice;
# - (b) any number of times, if the straggler is long enough;
# - (c) nearly s times, never more.

# %% [markdown]
# **C.** There are 500 requests, each with a prompt of 500 tokens and an answer of 50. They arrive one at a time, 10
# steps apart. Batches have 16 slots. Which of these counts of `waste` is the largest: `"padding"`, `"held"`,
# `"locked_out"` or `"forming"`?
#
# In the cell, replace each `None` and delete the line that raises.
#
# <details><summary>Hint 1: how to find them</summary>
#
# All but B can be worked out on paper, and your functions can check them. For B, look at the table of exercise 4 and at
# the sentence about most.
#
# </details>

# %% nbgrader={"grade_id": "reflection", "solution": true} tags=["export"]
answers = {
    "slot-steps given back": None,  # a number
    "Q1 alone": None,  # a number
    "padding share": None,  # a number between 0 and 1, to three digits
    "by hand": None,  # a number
    "gains nothing": None,  # "a", "b" or "c"
    "gains most": None,  # "a", "b" or "c"
    "which waste": None,  # "padding", "held", "locked_out" or "forming"
}
### BEGIN SOLUTION
answers["slot-steps given back"] = 15_840
answers["Q1 alone"] = 2000
answers["padding share"] = 0.675
answers["by hand"] = 9
answers["gains nothing"] = "a"
answers["gains most"] = "c"
answers["which waste"] = "forming"
### END SOLUTION

# %%
for question, answer in answers.items():
    print(f"{question}: {answer}")

# %% nbgrader={"grade_id": "reflection-check", "grade": true, "locked": true, "points": 14}
check("static_batching.reflection", answers)

# %% [markdown]
# ### In your own words (about 10 minutes)
#
# A service classifies texts: prompts of 64 to 2,048 tokens, and every answer is exactly one token. It runs static batches
# of 32, and requests arrive one at a time. A colleague says: "Everybody says that static batching wastes 88 %. With
# continuous batching we will be eight times as fast." Advise, in about 100 words.
#
# Three points, given by hand, two each:
#
# 1. which wastes this service has and which it has not, with the reason;
# 2. what admission at every step would change for it, and what it would not;
# 3. what would remove the rest, and where the 88 % come from.

# %% [markdown] nbgrader={"grade_id": "classifier", "grade": true, "solution": true, "points": 6}
# ### BEGIN SOLUTION
# With answers of one token all requests of a batch finish after one step. No cell is held, so nothing of the 88 % is
# here: that number is one answer of 2000 tokens beside eight of 20. Nor is anybody locked out for long, as a batch runs
# for one step.
#
# The service has two wastes. Requests wait for the batch of 32 to form. Admission at every step, with whoever is there,
# removes that, and so would starting a batch that is not full. It improves latency; it makes a full batch no faster.
#
# The other is padding, up to two thirds of the prompt cells for lengths such as 64, 128, 512 and 2,048. Scheduling does
# not remove it. A flat batch of tokens (selective batching) does; batches of similar lengths reduce it.
# ### END SOLUTION
