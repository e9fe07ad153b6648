"""Named answers to `continuous_batching.chunked_scheduler`."""

import heapq
from bisect import insort

import numpy as np

from servelab.answers import right, wrong
from servelab.kv import OutOfBlocks
from servelab.serving import Sequence, StepPlan

TIMES = "the times of a served trace"


@right("lists, victims chosen before anything is planned, all blocks of a prompt at admission, NumPy's numbers")
def sorted_lists(reference):
    class Answer:
        def __init__(self, config, kv, key=lambda seq: 0):
            self.config, self.kv, self.key, self.jobs, self.active, self.tickets = config, kv, key, {}, [], 0
            self.queue = []

        def add(self, request):
            most = request.prompt_tokens + request.max_tokens - 1
            if request.id in self.jobs or self.kv.blocks_for(most) > self.kv.num_blocks:
                raise ValueError(request)
            self.tickets += 1
            self.jobs[request.id] = self.tickets, Sequence(request)
            insort(self.queue, request.id, key=self.rank)

        def abort(self, id):
            if id not in self.jobs:
                return
            if id in self.active:
                self.active.remove(id)
                self.kv.release(id)
            else:
                self.queue.remove(id)
            del self.jobs[id]

        def rank(self, id):
            return self.key(self.jobs[id][1]), self.jobs[id][0]

        def blocks(self, id):
            return self.kv.blocks_for(self.jobs[id][1].num_tokens)

        def schedule(self):
            kept, victims = sorted(self.active, key=self.rank), []
            while sum(map(self.blocks, kept)) > self.kv.num_blocks:
                victims.append(kept.pop())
                self.kv.release(victims[-1])
                self.jobs[victims[-1]][1].num_computed = 0
                insort(self.queue, victims[-1], key=self.rank)
            self.active = sorted(kept, key=lambda id: self.jobs[id][1].missing)
            self.counts = {}
            for id in self.active:
                self.take(id)
            if not victims:
                self.join()
            return StepPlan(self.counts, tuple(victims))

        def take(self, id):
            seq = self.jobs[id][1]
            self.kv.reserve(id, seq.num_tokens)
            self.counts[id] = np.int32(min(seq.missing, self.left))

        @property
        def left(self):
            return self.config.max_num_batched_tokens - sum(self.counts.values())

        def join(self):
            while self.queue and self.left and len(self.active) < self.config.max_num_seqs:
                spare = self.config.watermark_blocks if self.active else 0
                if self.blocks(self.queue[0]) + spare > self.kv.num_free:
                    return
                self.active.append(self.queue.pop(0))
                self.take(self.active[-1])

        def finish_step(self, plan, outputs):
            done = []
            for id in plan.scheduled.keys() & set(self.active):
                seq = self.jobs[id][1]
                seq.num_computed += plan.scheduled[id]
                if seq.missing:
                    continue
                seq.outputs.append(outputs[id])
                if outputs[id] == self.config.eos_token_id or len(seq.outputs) == seq.request.max_tokens:
                    done.append(id)
                    self.abort(id)
            return done

    return Answer


@right("one unfinished prompt in a slot of its own, beside the decodes; takes the tokens out of outputs")
def one_unfinished(reference):
    class Answer:
        def __init__(self, config, kv, key=None):
            self.config, self.kv, self.key = config, kv, key or (lambda seq: 0)
            self.all, self.heap, self.decoding, self.prefill, self.number = {}, [], {}, None, 0

        def add(self, request):
            if request.id in self.all:
                raise ValueError("known")
            if self.kv.blocks_for(request.prompt_tokens + request.max_tokens - 1) > self.kv.num_blocks:
                raise ValueError("too large")
            seq, self.number = Sequence(request), self.number + 1
            seq.number = self.number
            self.all[request.id] = seq
            self.wait(seq)

        def wait(self, seq):
            heapq.heappush(self.heap, (self.key(seq), seq.number, seq))

        def abort(self, id):
            if self.all.pop(id, None):
                self.leave(id)

        def leave(self, id):
            self.decoding.pop(id, None)
            if self.prefill and self.prefill.id == id:
                self.prefill = None
            self.kv.release(id)

        def runs(self):
            return [*self.decoding.values(), *([self.prefill] if self.prefill else [])]

        def room(self, seq, tokens):
            """Make room by preempting others; whether the sequence is still there then."""
            while seq in self.runs():
                try:
                    self.kv.reserve(seq.id, tokens)
                    return True
                except OutOfBlocks:
                    victim = max(self.runs(), key=lambda s: (self.key(s), s.number))
                    self.leave(victim.id)
                    victim.num_computed = 0
                    self.plan.scheduled.pop(victim.id, None)
                    self.plan.preempted.append(victim.id)
                    self.wait(victim)
            return False

        def left(self):
            return self.config.max_num_batched_tokens - self.plan.num_tokens

        def chunk(self, seq):
            n = min(seq.missing, self.left())
            while self.room(seq, seq.num_computed + n):  # preempting others may have made more of the budget free
                if n == min(seq.missing, self.left()):
                    self.plan.scheduled[seq.id] = n
                    return
                n = min(seq.missing, self.left())

        def schedule(self):
            self.plan = StepPlan()
            for seq in list(self.decoding.values()):
                if self.room(seq, seq.num_tokens):
                    self.plan.scheduled[seq.id] = 1
            if self.prefill:
                self.chunk(self.prefill)
                self.settle()
            while not self.plan.preempted and self.left() and len(self.runs()) < self.config.max_num_seqs:
                while self.heap and self.all.get(self.heap[0][2].id) is not self.heap[0][2]:
                    heapq.heappop(self.heap)
                need = self.config.watermark_blocks if self.runs() else 0
                if not self.heap or self.kv.blocks_for(self.heap[0][2].num_tokens) + need > self.kv.num_free:
                    break
                seq = heapq.heappop(self.heap)[2]
                self.prefill = seq
                self.chunk(seq)
                self.settle()
            return self.plan

        def settle(self):
            """A prompt that this step finishes is one of the decodes from here on."""
            seq = self.prefill
            if seq and self.plan.scheduled[seq.id] == seq.missing:
                self.prefill, self.decoding[seq.id] = None, seq

        def finish_step(self, plan, outputs):
            ended = []
            for seq in self.runs():
                if seq.id not in plan.scheduled:
                    continue
                seq.num_computed += plan.scheduled[seq.id]
                if seq.id in outputs:
                    seq.outputs.append(outputs.pop(seq.id))
                    if self.config.eos_token_id == seq.outputs[-1] or seq.request.max_tokens <= len(seq.outputs):
                        ended.append(seq.id)
            for id in ended:
                self.abort(id)
            return tuple(ended)

    return Answer


@right("urgent requests take the slots of others, and a victim may come back at once")
def for_a_slot(reference):
    class Answer(reference.ChunkedScheduler):
        def schedule(self):
            plan, head, self.left = StepPlan(), self._head(), 0
            if head and len(self.running) == self.config.max_num_seqs and self.key(head) < self.key(self._victim()):
                self._preempt(self._victim(), plan)
            rest = super().schedule()
            if rest.preempted and all(rest.scheduled[seq.id] == seq.missing for seq in self.running.values()):
                self._admit(rest)
            return StepPlan(rest.scheduled, [*plan.preempted, *rest.preempted])

    return Answer


@wrong("a chunk is counted when it is planned and when it is finished", case="a prompt in chunks")
def counted_twice(reference):
    class Answer(reference.ChunkedScheduler):
        def _schedule(self, seq, n, plan):
            super()._schedule(seq, n, plan)
            seq.num_computed += n if n < seq.missing else 0

    return Answer


@wrong("after its first chunk a prompt gets one token a step", case="a prompt in chunks")
def one_token(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            return min(super()._chunk(seq), 1 if seq.num_computed else seq.missing)

    return Answer


@wrong("whole prompts only: one larger than the budget waits for ever", case="a prompt in chunks")
def whole_prompts(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            return seq.missing if seq.missing <= self.left else 0

    return Answer


@wrong("never ends a chunk: what is computed is not counted", case="a prompt in chunks")
def not_counted(reference):
    class Answer(reference.ChunkedScheduler):
        def finish_step(self, plan, outputs):
            done = {id: n for id, n in plan.scheduled.items() if id in outputs}
            return super().finish_step(StepPlan(done, plan.preempted), outputs)

    return Answer


@wrong("takes a token of the answer from every chunk", case="a token only after the last chunk")
def token_from_each_chunk(reference):
    class Answer(reference.ChunkedScheduler):
        def finish_step(self, plan, outputs):
            return super().finish_step(plan, dict.fromkeys(plan.scheduled, -1) | outputs)

    return Answer


@wrong("each chunk counts towards max_tokens", case="a token only after the last chunk")
def chunks_count(reference):
    class Answer(reference.ChunkedScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.steps = {}

        def finish_step(self, plan, outputs):
            ended = super().finish_step(plan, outputs)
            for id in plan.scheduled:
                self.steps[id] = self.steps.get(id, 0) + 1
                if id in self.running and self.steps[id] == self.running[id].request.max_tokens:
                    ended.append(id)
                    self.abort(id)
            return ended

    return Answer


@wrong("the budget is for prompts, decodes come on top", case="fills the budget")
def decodes_are_free(reference):
    class Answer(reference.ChunkedScheduler):
        def _schedule(self, seq, n, plan):
            super()._schedule(seq, n, plan)
            self.left += seq.missing == 1

    return Answer


@wrong("a chunk as large as the budget, whatever is left of it", case="fills the budget")
def whole_budget(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            return min(seq.missing, self.config.max_num_batched_tokens) if self.left > 0 else 0

    return Answer


@wrong("cuts a prompt only if it could never fit, else waits for a step with room", case="fills the budget")
def cuts_only_the_large(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            n = super()._chunk(seq)
            small = seq.num_computed == 0 and seq.missing <= self.config.max_num_batched_tokens - len(self.running)
            return n if n == seq.missing or not small else 0

    return Answer


@wrong("chunks of a fixed size", case="fills the budget")
def fixed_size(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            return min(super()._chunk(seq), -(-self.config.max_num_batched_tokens // 2))

    return Answer


@wrong("chunks of whole blocks, the rest of the budget is left", case="fills the budget")
def whole_blocks(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            n = super()._chunk(seq)
            whole = n // self.kv.block_size * self.kv.block_size
            return n if n == seq.missing or not whole else whole

    return Answer


@wrong("one new request a step", case="fills the budget")
def one_a_step(reference):
    class Answer(reference.ChunkedScheduler):
        def _admit(self, plan):
            most, self.config = (
                self.config,
                type(self.config)(
                    min(len(self.running) + 1, self.config.max_num_seqs),
                    self.config.max_num_batched_tokens,
                    self.config.watermark_blocks,
                    self.config.eos_token_id,
                ),
            )
            super()._admit(plan)
            self.config = most

    return Answer


@wrong("nobody joins beside the last chunk of a prompt", case="fills the budget")
def alone(reference):
    class Answer(reference.ChunkedScheduler):
        def _admit(self, plan):
            if all(self.running[id].missing == 1 for id in plan.scheduled):
                super()._admit(plan)

    return Answer


@wrong("the prompt first, the decodes get what is left", case="decodes are never held up")
def prefill_first(reference):
    class Answer(reference.ChunkedScheduler):
        def schedule(self):
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].missing == 1))
            return super().schedule()

    return Answer


@wrong("a prompt has the step for itself, the decodes pause", case="decodes are never held up")
def steps_of_their_own(reference):
    class Answer(reference.ChunkedScheduler):
        def schedule(self):
            decodes = {id: seq for id, seq in self.running.items() if seq.missing == 1}
            if len(decodes) == len(self.running):
                return super().schedule()
            self.running = {id: seq for id, seq in self.running.items() if id not in decodes}
            plan = super().schedule()
            self.running = decodes | self.running
            return plan

    return Answer


@wrong("half of the budget is for decodes, needed or not", case="fills the budget")
def half_for_decodes(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            spare = self.config.max_num_batched_tokens // 2
            return min(super()._chunk(seq), seq.missing if seq.missing == 1 else max(1, self.left - spare))

    return Answer


@wrong("a more urgent prompt cuts in before the unfinished one", case="the unfinished prompt before new ones")
def cuts_in(reference):
    class Answer(reference.ChunkedScheduler):
        def schedule(self):
            head = self._head()
            aside = [s for s in self.running.values() if s.missing > 1 and head and self.key(head) < self.key(s)]
            self.running = {id: seq for id, seq in self.running.items() if seq not in aside}
            plan = super().schedule()
            for seq in aside:
                self.running[seq.id] = seq
                n = self._chunk(seq)
                if n and self._make_room(seq, n, plan):
                    self._schedule(seq, n, plan)
            return plan

    return Answer


@wrong("new prompts before the unfinished one", case="the unfinished prompt before new ones")
def new_first(reference):
    class Answer(reference.ChunkedScheduler):
        def schedule(self):
            aside = [s for s in self.running.values() if s.missing > 1]
            self.running = {id: seq for id, seq in self.running.items() if seq not in aside}
            plan = super().schedule()
            for seq in aside:
                self.running[seq.id] = seq
                n = self._chunk(seq)
                if n and self._make_room(seq, n, plan):
                    self._schedule(seq, n, plan)
            return plan

    return Answer


@wrong("two prompts at a time, half of the budget each", case="fills the budget")
def two_at_a_time(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            n = super()._chunk(seq)
            return max(1, n // 2) if len(self.sequences) > len(self.running) + 1 and n > 1 else n

    return Answer


@wrong("first come, first served, whatever the key", case="in the order of the key")
def ignores_the_key(reference):
    class Answer(reference.ChunkedScheduler):
        def __init__(self, config, kv, key=None):
            super().__init__(config, kv)

    return Answer


@wrong("refuses a prompt larger than the budget", case="refuses only what memory cannot hold")
def refuses_large_prompts(reference):
    class Answer(reference.ChunkedScheduler):
        def _largest_step(self, request):
            return request.prompt_tokens

    return Answer


@wrong("refuses a prompt of more than four chunks", case="refuses only what memory cannot hold")
def refuses_many_chunks(reference):
    class Answer(reference.ChunkedScheduler):
        def _largest_step(self, request):
            return -(-request.prompt_tokens // 4)

    return Answer


@wrong("refuses what could not be computed again in one step", case="refuses only what memory cannot hold")
def refuses_large_steps(reference):
    class Answer(reference.ChunkedScheduler):
        def _largest_step(self, request):
            return request.prompt_tokens + request.max_tokens - 1

    return Answer


@wrong("refuses nothing: what never fits waits for ever", case="refuses only what memory cannot hold")
def refuses_nothing(reference):
    class Answer(reference.ChunkedScheduler):
        def _most_tokens(self, request):
            return 1

    return Answer


@wrong("remembers the unfinished prompt apart, also when it was aborted", case="forgets what is aborted")
def remembers_the_aborted(reference):
    class Answer(reference.ChunkedScheduler):
        unfinished = None

        def _schedule(self, seq, n, plan):
            super()._schedule(seq, n, plan)
            if n < seq.missing:
                self.unfinished = seq
            elif seq is self.unfinished:
                self.unfinished = None

        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.unfinished = None if seq is self.unfinished else self.unfinished

        def _admit(self, plan):
            if self.unfinished is None:
                super()._admit(plan)

    return Answer


@wrong("an id that comes again goes on where the aborted one stopped", case="forgets what is aborted")
def goes_on_by_id(reference):
    class Answer(reference.ChunkedScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.progress = {}

        def finish_step(self, plan, outputs):
            for id, n in plan.scheduled.items():
                if id in self.running and id not in outputs:
                    self.progress[id] = self.running[id].num_computed + n
                else:
                    self.progress.pop(id, None)
            return super().finish_step(plan, outputs)

        def _preempt(self, seq, plan):
            self.progress.pop(seq.id, None)
            super()._preempt(seq, plan)

        def _enqueue(self, seq):
            seq.num_computed = min(self.progress.get(seq.id, 0), seq.num_tokens - 1)
            super()._enqueue(seq)

    return Answer


@wrong("an abort in the middle of a prompt keeps its blocks", case="forgets what is aborted")
def keeps_blocks(reference):
    class Answer(reference.ChunkedScheduler):
        def abort(self, id):
            if id in self.running and self.running[id].missing > 1 and not self.running[id].outputs:
                del self.sequences[id], self.running[id]
            else:
                super().abort(id)

    return Answer


@wrong("looks at the queue when something came or ended, not after an abort", case="forgets what is aborted")
def unnoticed(reference):
    class Answer(reference.ChunkedScheduler):
        dirty = True

        def add(self, request):
            super().add(request)
            self.dirty = True

        def schedule(self):
            plan = super().schedule()
            self.dirty |= bool(plan.preempted)
            return plan

        def _admit(self, plan):
            if self.dirty:
                super()._admit(plan)
                self.dirty = any(n > 1 for n in plan.scheduled.values())

        def finish_step(self, plan, outputs):
            ended = super().finish_step(plan, outputs)
            self.dirty |= bool(ended)
            return ended

    return Answer


@wrong("admits when the first chunk fits", case="all known tokens must fit")
def first_chunk_fits(reference):
    class Answer(reference.ChunkedScheduler):
        def _admit(self, plan):
            blocks_for, kv = self.kv.blocks_for, self.kv
            kv.blocks_for = lambda n: blocks_for(min(n, self.left))
            super()._admit(plan)
            kv.blocks_for = blocks_for

    return Answer


@wrong("admits again when the prompt fits, the answer so far does not count", case="begins again after a preemption")
def answer_does_not_count(reference):
    class Answer(reference.ChunkedScheduler):
        def _admit(self, plan):
            head, blocks_for = self._head(), self.kv.blocks_for
            answer = len(head.outputs) if head else 0
            self.kv.blocks_for = lambda n: blocks_for(n - answer if n == head.num_tokens else n)
            super()._admit(plan)
            self.kv.blocks_for = blocks_for

    return Answer


@wrong("the watermark is for whole prompts only", case="all known tokens must fit")
def no_watermark(reference):
    class Answer(reference.ChunkedScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            limits = config.max_num_seqs, config.max_num_batched_tokens
            super().__init__(type(config)(*limits, eos_token_id=config.eos_token_id), kv, key)

    return Answer


@wrong("goes on after a preemption where it was", case="begins again after a preemption")
def goes_on(reference):
    class Answer(reference.ChunkedScheduler):
        def _preempt(self, seq, plan):
            computed = seq.num_computed
            super()._preempt(seq, plan)
            seq.num_computed = computed

    return Answer


@wrong("loses its answer with its blocks", case="begins again after a preemption")
def loses_the_answer(reference):
    class Answer(reference.ChunkedScheduler):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            seq.outputs.clear()

    return Answer


@wrong("computes the prompt again, the answer not", case="begins again after a preemption")
def prompt_only(reference):
    class Answer(reference.ChunkedScheduler):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            seq.num_computed = len(seq.outputs)

    return Answer


@wrong("a victim's tokens are lost for the step", case="a victim's tokens go back to the budget")
def refund_lost(reference):
    class Answer(reference.ChunkedScheduler):
        def _preempt(self, seq, plan):
            left = self.left
            super()._preempt(seq, plan)
            self.left = left

    return Answer


@wrong("takes the number of plans for the time: who arrived at 3 s has to wait for the third", case=TIMES)
def plans_for_seconds(reference):
    class Answer(reference.ChunkedScheduler):
        number = -1

        def schedule(self):
            self.number += 1
            return super().schedule()

        def _head(self):
            seq = super()._head()
            return seq if seq and seq.request.arrival <= self.number else None

    return Answer


@wrong("the end of a prompt has a step of its own", case=TIMES)
def last_token_later(reference):
    class Answer(reference.ChunkedScheduler):
        def _chunk(self, seq):
            n = super()._chunk(seq)
            return n - 1 if n == seq.missing > 1 else n

    return Answer


@wrong("loses who is preempted for the second time", case="long runs")
def loses_the_second(reference):
    class Answer(reference.ChunkedScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.victims = set()

        def _preempt(self, seq, plan):
            self.lost = seq in self.victims
            self.victims.add(seq)
            super()._preempt(seq, plan)
            self.lost = False

        def _requeue(self, seq):
            if not getattr(self, "lost", False):
                super()._requeue(seq)

    return Answer


@wrong("a queue of a thousand, the rest is forgotten", case="10,000 requests")
def bounded_queue(reference):
    class Answer(reference.ChunkedScheduler):
        def _requeue(self, seq):
            if len(self.waiting) < 1000:
                super()._requeue(seq)

    return Answer
