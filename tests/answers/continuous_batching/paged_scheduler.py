"""Named answers to `PagedScheduler`: mistakes seen in public courses and systems, and right ones built differently."""

from collections import UserDict
from types import SimpleNamespace

import numpy as np

from servelab.answers import right, wrong
from servelab.exercises.continuous_batching import paged_scheduler as cases
from servelab.kv import OutOfBlocks
from servelab.serving import Sequence, StepPlan


def _base(change):
    return lambda reference: change(reference.PagedScheduler)


class _Job:
    """A request of the answer below: its length so far, and whether its KV is there."""

    def __init__(self, request):
        self.request, self.length, self.cached = request, request.prompt_tokens, 0


@right("one list in order of arrival, who keeps blocks worked out before anything is taken")
def from_scratch(reference):
    class Answer:
        def __init__(self, config, kv):
            self.config, self.kv, self.jobs, self.run = config, kv, [], 0  # the first self.run jobs run

        def add(self, request):
            most = request.prompt_tokens + request.max_tokens - 1
            full = self.kv.num_blocks * self.kv.block_size
            if most > min(full, self.config.max_num_batched_tokens) or self._find(request.id) is not None:
                raise ValueError("refused")
            self.jobs.append(_Job(request))

        def _find(self, id):
            return next((place for place, job in enumerate(self.jobs) if job.request.id == id), None)

        def abort(self, id):
            place = self._find(id)
            if place is not None:
                self.run -= place < self.run
                del self.jobs[place]
                self.kv.release(id)

        def schedule(self):
            need = [self.kv.blocks_for(job.length) for job in self.jobs[: self.run]]
            stay = len(need)
            while sum(need[:stay]) > self.kv.num_blocks:
                stay -= 1
            victims = self.jobs[stay : self.run]
            for job in victims:
                self.kv.release(job.request.id)
                job.cached = 0
            self.run = stay
            plan = {job.request.id: job.length - job.cached for job in self.jobs[: self.run]}
            while not victims and self.run < min(len(self.jobs), self.config.max_num_seqs):
                job = self.jobs[self.run]
                blocks = sum(need) + self.kv.blocks_for(job.length)
                spare = self.config.watermark_blocks if self.run else 0
                tokens = sum(plan.values()) + job.length
                if blocks + spare > self.kv.num_blocks or tokens > self.config.max_num_batched_tokens:
                    break
                need.append(self.kv.blocks_for(job.length))
                plan[job.request.id] = job.length
                self.run += 1
            for job in self.jobs[: self.run]:
                self.kv.reserve(job.request.id, job.length)
            return StepPlan(plan, [job.request.id for job in victims])

        def finish_step(self, plan, outputs):
            done = []
            for job in self.jobs[: self.run]:
                if job.request.id in plan.scheduled:
                    job.cached, job.length = job.length, job.length + 1
                    answer = job.length - job.request.prompt_tokens
                    if answer == job.request.max_tokens or outputs[job.request.id] == self.config.eos_token_id:
                        done.append(job.request.id)
            for id in done:
                self.abort(id)
            return done

    return Answer


@right("takes the next block after the step, advances when it plans")
def in_advance(reference):
    class Answer(reference.PagedScheduler):
        def schedule(self):
            plan = super().schedule()
            for id, n in plan.scheduled.items():
                self.running[id].num_computed += n
            return plan

        def finish_step(self, plan, outputs):
            for id in plan.scheduled:
                if id in self.running:
                    self.running[id].num_computed -= plan.scheduled[id]
            finished = super().finish_step(plan, outputs)
            for id, seq in self.running.items():
                try:
                    self.kv.reserve(id, seq.num_tokens)
                except OutOfBlocks:
                    break
            return finished

    return Answer


@right("admits in a step that preempted, too; NumPy integers, another order, a mapping of its own")
def admits_always(reference):
    class Answer(reference.PagedScheduler):
        def schedule(self):
            plan = super().schedule()
            if plan.preempted:
                self._admit(plan)
            turned = UserDict({id: np.int64(n) for id, n in reversed(plan.scheduled.items())})
            return SimpleNamespace(scheduled=turned, preempted=tuple(reversed(plan.preempted)))

    return Answer


@wrong("nobody joins while anyone runs", case=cases.SERVES)
@_base
def static(base):
    class Answer(base):
        def _admit(self, plan):
            if not self.running:
                super()._admit(plan)

    return Answer


@wrong("EOS forgotten when it was written anew", case=cases.SERVES)
@_base
def no_eos(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            return super().finish_step(plan, dict.fromkeys(outputs, -1))

    return Answer


@wrong("the first scheduler once more", case=cases.ADMITS)
def whole_answer(reference):
    return reference.Scheduler


def _admits(check):
    """An answer whose admission asks ``check(self, seq, blocks)`` for room, and goes on behind a head without."""

    def make(reference):
        class Answer(reference.PagedScheduler):
            behind = False

            def _admit(self, plan):
                for seq in list(self.waiting):
                    if self.sequences.get(seq.id) is not seq:
                        continue
                    if len(self.running) == self.config.max_num_seqs or not self._chunk(seq):
                        break
                    blocks = self.kv.blocks_for(seq.num_tokens)
                    if check(self, seq, blocks) and blocks <= self.kv.num_free:
                        self.waiting.remove(seq)
                        self.kv.reserve(seq.id, seq.num_tokens)
                        self.running[seq.id] = seq
                        self._schedule(seq, seq.missing, plan)
                    elif not self.behind:
                        break

        return Answer

    return make


def _watermark(self):
    return self.config.watermark_blocks if self.running else 0


@wrong("admits for the whole answer, takes blocks as tokens come", case=cases.ADMITS)
@_admits
def admits_whole(self, seq, blocks):
    return self.kv.blocks_for(self._most_tokens(seq.request)) + _watermark(self) <= self.kv.num_free


@wrong("a head without KV is overtaken", case=cases.ADMITS)
def overtaken(reference):
    made = _admits(lambda self, seq, blocks: blocks + _watermark(self) <= self.kv.num_free)(reference)
    made.behind = True
    return made


@wrong("one block more must be free", case=cases.ADMITS)
@_admits
def one_more_free(self, seq, blocks):
    return blocks + 1 + _watermark(self) <= self.kv.num_free


@wrong("room for one token more than there are", case=cases.TAKES)
@_base
def one_ahead(base):
    class Answer(base):
        def schedule(self):
            plan = super().schedule()
            for id in plan.scheduled:
                if self.kv.num_free:
                    self.kv.reserve(id, self.running[id].num_tokens + 1)
            return plan

    return Answer


@wrong("writes past its last block", case=cases.TAKES)
@_base
def no_growth(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            return True

    return Answer


@wrong("a block for each token", case=cases.TAKES)
@_base
def block_a_token(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            if super()._make_room(seq, n, plan):
                if self.kv.num_free:
                    self.kv.reserve(seq.id, len(self.kv.blocks(seq.id)) * self.kv.block_size + 1)
                return True
            return False

    return Answer


@wrong("the block one step too late", case=cases.TAKES)
@_base
def late(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            return super()._make_room(seq, n - 1, plan)

    return Answer


def _victim(choose):
    """An answer that preempts whom ``choose`` takes out of the list of the running."""

    def make(reference):
        class Answer(reference.PagedScheduler):
            def _victim(self):
                return choose(list(self.running.values()))

        return Answer

    return make


@wrong("the oldest preempted", case=cases.PREEMPTS)
@_victim
def oldest(running):
    return running[0]


@wrong("the longest preempted", case=cases.PREEMPTS)
@_victim
def longest(running):
    return max(running, key=lambda seq: seq.num_tokens)


@wrong("the last but one preempted", case=cases.PREEMPTS)
@_victim
def last_but_one(running):
    return running[-2:][0]


@wrong("whoever finds no block preempts itself", case=cases.PREEMPTS)
@_base
def itself(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            self.short = seq
            return super()._make_room(seq, n, plan)

        def _victim(self):
            return self.short

    return Answer


@wrong("whoever finds no block waits, and nobody is preempted", case=cases.PREEMPTS)
@_base
def stalls(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            try:
                self.kv.reserve(seq.id, seq.num_tokens)
            except OutOfBlocks:
                return False
            return True

    return Answer


@wrong("out of blocks with an exception", case=cases.PREEMPTS)
@_base
def raises(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            self.kv.reserve(seq.id, seq.num_tokens)
            return True

    return Answer


@wrong("all others preempted", case=cases.PREEMPTS)
@_base
def all_others(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            try:
                self.kv.reserve(seq.id, seq.num_tokens)
            except OutOfBlocks:
                for other in reversed(list(self.running.values())):
                    if other is not seq:
                        self._preempt(other, plan)
            return super()._make_room(seq, n, plan)

    return Answer


@wrong("the preempted stays among the running and is chosen for ever", case=cases.PREEMPTS)
@_base
def chosen_for_ever(base):
    class Answer(base):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.running[seq.id] = seq

    return Answer


@wrong("the preempted keeps its blocks", case=cases.PREEMPTS)
@_base
def keeps_blocks(base):
    class Answer(base):
        def _preempt(self, seq, plan):
            taken = len(self.kv.blocks(seq.id))
            super()._preempt(seq, plan)
            if taken > 1:
                self.kv.reserve(seq.id, 1)

    return Answer


@wrong("the preempted is not named in the plan", case=cases.PREEMPTS)
@_base
def not_named(base):
    class Answer(base):
        def schedule(self):
            plan = super().schedule()
            return StepPlan(plan.scheduled)

    return Answer


@wrong("the preempted stays in the plan", case=cases.PREEMPTS)
@_base
def stays(base):
    class Answer(base):
        def schedule(self):
            before = dict(self.running)
            plan = super().schedule()
            plan.scheduled |= {id: 1 for id in plan.preempted if id in before}
            return plan

    return Answer


@wrong("the preempted loses its answer", case=cases.RESUMES)
@_base
def loses_answer(base):
    class Answer(base):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            seq.outputs.clear()

    return Answer


@wrong("only the prompt computed again", case=cases.RESUMES)
@_base
def prompt_only(base):
    class Answer(base):
        def _admit(self, plan):
            super()._admit(plan)
            for id, n in plan.scheduled.items():
                plan.scheduled[id] = min(n, self.running[id].request.prompt_tokens)

    return Answer


@wrong("the lost tokens taken for computed", case=cases.RESUMES)
@_base
def not_lost(base):
    class Answer(base):
        def _preempt(self, seq, plan):
            computed = seq.num_computed
            super()._preempt(seq, plan)
            seq.num_computed = computed

    return Answer


@wrong("the last token taken for computed", case=cases.RESUMES)
@_base
def last_token(base):
    class Answer(base):
        def _schedule(self, seq, n, plan):
            super()._schedule(seq, n - bool(seq.outputs and n > 1), plan)

    return Answer


@wrong("max_tokens counted anew", case=cases.RESUMES)
@_base
def counted_anew(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            for id, n in plan.scheduled.items():
                if n > 1 and id in self.running and self.running[id].outputs:
                    seq = self.running[id]
                    grown = vars(seq.request) | {"prompt_tokens": seq.num_tokens}
                    seq.request, seq.outputs = type(seq.request)(**grown), []
            return super().finish_step(plan, outputs)

    return Answer


@wrong("a step that computes again gives no token", case=cases.RESUMES)
@_base
def no_token(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            again = {id for id, n in plan.scheduled.items() if n > 1 and id in self.running}
            again = {id for id in again if self.running[id].outputs}
            for id in again:
                self.running[id].num_computed += plan.scheduled.pop(id)
            return super().finish_step(plan, outputs)

    return Answer


# vLLM pull request 21809: re-admitted when the first piece fits, preempted again at once
@wrong("re-admitted when its prompt fits", case=cases.RESUMES)
@_base
def first_piece(base):
    class Answer(base):
        def _admit(self, plan):
            while (seq := self._head()) and len(self.running) < self.config.max_num_seqs:
                if not self._chunk(seq) or self.kv.blocks_for(seq.request.prompt_tokens) > self.kv.num_free:
                    break
                self._dequeue()
                self.running[seq.id] = seq
                if self._make_room(seq, seq.missing, plan):
                    self._schedule(seq, seq.missing, plan)
                else:
                    break

    return Answer


@wrong("the preempted is lost", case=cases.RESUMES)
@_base
def lost(base):
    class Answer(base):
        def _requeue(self, seq):
            del self.sequences[seq.id]

    return Answer


@wrong("behind all that wait", case=cases.FRONT)
@_base
def behind(base):
    class Answer(base):
        def _requeue(self, seq):
            self.waiting.append(seq)

    return Answer


@wrong("behind the head", case=cases.FRONT)
@_base
def second(base):
    class Answer(base):
        def _requeue(self, seq):
            self.waiting.insert(1, seq)

    return Answer


@wrong("several preempted, in front in the wrong order", case=cases.FRONT)
@_base
def turned(base):
    class Answer(base):
        def schedule(self):
            plan = super().schedule()
            front = [self.waiting.popleft() for _ in plan.preempted]
            self.waiting.extendleft(front)
            return plan

    return Answer


@wrong("new ones run while a preempted one waits", case=cases.FRONT)
@_base
def new_first(base):
    class Answer(base):
        def _admit(self, plan):
            lost = [seq for seq in self.waiting if seq.outputs]
            new = [seq for seq in self.waiting if not seq.outputs]
            self.waiting = type(self.waiting)(new + lost)
            super()._admit(plan)

    return Answer


@wrong("max_num_seqs ignored", case=cases.LIMITS)
@_base
def no_seats(base):
    class Answer(base):
        def _admit(self, plan):
            config, self.config = self.config, SimpleNamespace(**vars(self.config) | {"max_num_seqs": 99})
            super()._admit(plan)
            self.config = config

    return Answer


@wrong("what is computed again does not count", case=cases.LIMITS)
@_base
def again_for_free(base):
    class Answer(base):
        def _chunk(self, seq):
            return seq.missing if seq.outputs else super()._chunk(seq)

    return Answer


@wrong("the running cost nothing", case=cases.LIMITS)
@_base
def running_for_free(base):
    class Answer(base):
        def _admit(self, plan):
            self.left = self.config.max_num_batched_tokens
            super()._admit(plan)

    return Answer


@wrong("the preempted keeps its slot", case=cases.LIMITS)
@_base
def keeps_slot(base):
    class Answer(base):
        lost = 0

        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.lost += 1

        def _admit(self, plan):
            free = self.config.max_num_seqs - self.lost
            if len(self.running) < max(1, free):
                super()._admit(plan)

    return Answer


@wrong("the watermark ignored", case=cases.WATERMARK)
@_admits
def no_watermark(self, seq, blocks):
    return True


@wrong("the watermark held although nothing runs", case=cases.WATERMARK)
@_admits
def never_starts(self, seq, blocks):
    return blocks + self.config.watermark_blocks <= self.kv.num_free


@wrong("the watermark ignored for the whole step when nothing ran before it", case=cases.WATERMARK)
@_base
def whole_step(base):
    class Answer(base):
        def _admit(self, plan):
            config = self.config
            if not self.running:
                self.config = SimpleNamespace(**vars(config) | {"watermark_blocks": 0})
            super()._admit(plan)
            self.config = config

    return Answer


@wrong("one block more than the watermark left free", case=cases.WATERMARK)
@_admits
def more_than_it(self, seq, blocks):
    return blocks + _watermark(self) < self.kv.num_free or not self.config.watermark_blocks or not self.running


@wrong("the watermark ignored for the preempted", case=cases.WATERMARK)
@_admits
def not_for_preempted(self, seq, blocks):
    return bool(seq.outputs) or blocks + _watermark(self) <= self.kv.num_free


@wrong("the running keep the watermark, too", case=cases.WATERMARK)
@_base
def running_keep_it(base):
    class Answer(base):
        def _make_room(self, seq, n, plan):
            grows = self.kv.blocks_for(seq.num_tokens) > len(self.kv.blocks(seq.id))
            while grows and len(self.running) > 1 and self.kv.num_free <= self.config.watermark_blocks:
                if not self.config.watermark_blocks:
                    break
                self._preempt(self._victim(), plan)
            return seq.id in self.running and super()._make_room(seq, n, plan)

    return Answer


def _adds(refused):
    """An answer that refuses what ``refused(self, request)`` says."""

    def make(reference):
        class Answer(reference.PagedScheduler):
            def add(self, request):
                if request.id in self.sequences or refused(self, request, request.prompt_tokens + request.max_tokens):
                    raise ValueError(request.id)
                self.sequences[request.id] = Sequence(request)
                self._enqueue(self.sequences[request.id])

        return Answer

    return make


# preempted with a long answer, it fits into no step and blocks the queue for ever
@wrong("only the prompt held against the budget", case=cases.REFUSES)
@_adds
def prompt_against_budget(self, request, tokens):
    large = self.kv.blocks_for(tokens - 1) > self.kv.num_blocks
    return large or request.prompt_tokens > self.config.max_num_batched_tokens


@wrong("the last token held against the budget, too", case=cases.REFUSES)
@_adds
def last_against_budget(self, request, tokens):
    return self.kv.blocks_for(tokens - 1) > self.kv.num_blocks or tokens > self.config.max_num_batched_tokens


@wrong("only the prompt held against the memory", case=cases.REFUSES)
@_adds
def prompt_against_memory(self, request, tokens):
    large = self.kv.blocks_for(request.prompt_tokens) > self.kv.num_blocks
    return large or tokens - 1 > self.config.max_num_batched_tokens


@wrong("the last token held against the memory, too", case=cases.REFUSES)
@_adds
def last_against_memory(self, request, tokens):
    return self.kv.blocks_for(tokens) > self.kv.num_blocks or tokens - 1 > self.config.max_num_batched_tokens


@wrong("the id of a preempted request accepted again", case=cases.REFUSES)
@_base
def preempted_again(base):
    class Answer(base):
        def add(self, request):
            if request.id in self.sequences and self.sequences[request.id].outputs and request.id not in self.running:
                del self.sequences[request.id]
            super().add(request)

    return Answer


@wrong("a preempted one is not aborted", case=cases.ABORTS)
@_base
def not_preempted(base):
    class Answer(base):
        def abort(self, id):
            if id in self.running or (id in self.sequences and not self.sequences[id].outputs):
                super().abort(id)

    return Answer


@wrong("an aborted one that was preempted comes back", case=cases.ABORTS)
@_base
def comes_back(base):
    class Answer(base):
        def __init__(self, config, kv):
            super().__init__(config, kv)
            self.lost = {}

        def _requeue(self, seq):
            super()._requeue(seq)
            self.lost[seq.id] = seq

        def abort(self, id):
            super().abort(id)
            if id in self.lost and id not in self.running:
                self.sequences[id] = self.lost.pop(id)

    return Answer


@wrong("abort of one that runs leaves its blocks", case=cases.ABORTS)
@_base
def leaves_blocks(base):
    class Answer(base):
        finishing = False

        def abort(self, id):
            if self.finishing or id not in self.running:
                return super().abort(id)
            del self.sequences[id], self.running[id]

        def finish_step(self, plan, outputs):
            self.finishing = True
            finished = super().finish_step(plan, outputs)
            self.finishing = False
            return finished

    return Answer


@wrong("looks at the queue when something came or ended, not after an abort", case=cases.ABORTS)
@_base
def unnoticed(base):
    class Answer(base):
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


@wrong("preempts when the step ends, before somebody may leave", case=cases.ABORTS)
@_base
def too_early(base):
    class Answer(base):
        def __init__(self, config, kv):
            super().__init__(config, kv)
            self.early = StepPlan()

        def finish_step(self, plan, outputs):
            finished = super().finish_step(plan, outputs)
            for seq in list(self.running.values()):
                self._make_room(seq, seq.missing, self.early)
            return finished

        def schedule(self):
            early, self.early = self.early, StepPlan()
            plan = super().schedule()
            plan.preempted[:0] = [id for id in early.preempted if id in self.sequences]
            return plan

    return Answer


@wrong("aborted while the step runs: finish_step raises", case=cases.ABORTS)
@_base
def crashes(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            for id in plan.scheduled:
                self.running[id].num_tokens  # noqa: B018
            return super().finish_step(plan, outputs)

    return Answer


@wrong("the third preemption loses the request", case=cases.LONG)
@_base
def third(base):
    class Answer(base):
        count = 0

        def _requeue(self, seq):
            self.count += 1
            if self.count == 3:
                del self.sequences[seq.id]
            super()._requeue(seq)

    return Answer


@wrong("after ten requests a slot is lost", case=cases.LONG)
@_base
def slow_leak(base):
    class Answer(base):
        finished = 0

        def finish_step(self, plan, outputs):
            done = super().finish_step(plan, outputs)
            self.finished += len(done)
            return done

        def _admit(self, plan):
            if len(self.running) < self.config.max_num_seqs - self.finished // 10:
                super()._admit(plan)

    return Answer
