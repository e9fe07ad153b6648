"""Named answers to `Scheduler`: mistakes seen in public courses and systems, and right ones built differently."""

from collections import UserDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from servelab.answers import right, wrong
from servelab.exercises.continuous_batching import scheduler as cases
from servelab.kv import OutOfBlocks
from servelab.serving import Sequence, StepPlan


def _base(change):
    return lambda reference: change(reference.Scheduler)


@right("queues as plain lists, states as dictionaries, written from scratch; takes the tokens out of outputs")
def from_scratch(reference):
    class Answer:
        def __init__(self, config, kv):
            self.limits, self.memory, self.jobs, self.line, self.table = config, kv, {}, [], []

        def add(self, request):
            most = request.prompt_tokens + request.max_tokens - 1
            budget, room = self.limits.max_num_batched_tokens, self.memory.num_blocks * self.memory.block_size
            if request.id in self.jobs or request.prompt_tokens > budget or most > room:
                raise ValueError(request.id)
            self.jobs[request.id] = {"request": request, "most": most, "answer": 0}
            self.line.append(request.id)

        def abort(self, id):
            if id in self.jobs:
                del self.jobs[id]
                self.memory.release(id)
                self.line = [other for other in self.line if other != id]
                self.table = [other for other in self.table if other != id]

        def schedule(self):
            plan, spent = {}, len(self.table)
            for id in self.table:
                plan[id] = 1
            while self.line and len(self.table) < self.limits.max_num_seqs:
                job = self.jobs[self.line[0]]
                prompt = job["request"].prompt_tokens
                blocks = self.memory.blocks_for(job["most"])
                if spent + prompt > self.limits.max_num_batched_tokens or blocks > self.memory.num_free:
                    break
                self.memory.reserve(self.line[0], job["most"])
                plan[self.line[0]] = prompt
                spent += prompt
                self.table.append(self.line.pop(0))
            return StepPlan(plan, [])

        def finish_step(self, plan, outputs):
            done = []
            while outputs:
                id, token = outputs.popitem()
                if id in self.table:
                    job = self.jobs[id]
                    job["answer"] += 1
                    if job["answer"] == job["request"].max_tokens or token == self.limits.eos_token_id:
                        done.append(id)
            for id in done:
                self.abort(id)
            return done

    return Answer


@right("NumPy integers, another order, a mapping of its own, tuples")
def numpy_plan(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            plan = super().schedule()
            turned = UserDict({id: np.int32(n) for id, n in reversed(plan.scheduled.items())})
            return SimpleNamespace(scheduled=turned, preempted=())

        def finish_step(self, plan, outputs):
            return tuple(reversed(super().finish_step(plan, outputs)))

    return Answer


@right("retires at the start of the next plan")
def retires_later(reference):
    class Answer(reference.Scheduler):
        def __init__(self, config, kv):
            super().__init__(config, kv)
            self.gone = []

        def abort(self, id):
            if self.gone and id in self.gone:
                self.gone.remove(id)
                self.kv.release(id)
            super().abort(id)

        def add(self, request):
            if request.id in self.gone:
                self.abort(request.id)
            super().add(request)

        def schedule(self):
            for id in list(self.gone):
                self.abort(id)
            return super().schedule()

        def finish_step(self, plan, outputs):
            for id in plan.scheduled.keys() & self.running.keys():
                seq = self.running[id]
                seq.num_computed += plan.scheduled[id]
                seq.outputs.append(outputs[id])
                if outputs[id] == self.config.eos_token_id or len(seq.outputs) == seq.request.max_tokens:
                    self.gone.append(id)
                    del self.running[id], self.sequences[id]
            return list(self.gone)

    return Answer


@wrong("a prompt one token at a time", case=cases.PLANS)
def piecemeal(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            plan = super().schedule()
            return StepPlan(dict.fromkeys(plan.scheduled, 1))

    return Answer


@wrong("everything computed again in every step", case=cases.PLANS)
def again(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            plan = super().schedule()
            return StepPlan({id: self.running[id].num_tokens for id in plan.scheduled})

    return Answer


@wrong("a dictionary instead of a StepPlan", case=cases.PLANS)
def bare(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            return super().schedule().scheduled

    return Answer


@wrong("only the new ones are planned", case=cases.PLANS)
def only_new(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            before = set(self.running)
            plan = super().schedule()
            return StepPlan({id: n for id, n in plan.scheduled.items() if id not in before})

    return Answer


@wrong("static: nobody joins while anyone runs", case=cases.JOINS)
def static(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            return StepPlan(dict.fromkeys(self.running, 1)) if self.running else super().schedule()

    return Answer


def _admits(change):
    """An answer whose loop of admissions is changed: ``change(self, plan, left)`` for as long as it says so."""

    def make(reference):
        class Answer(reference.Scheduler):
            def schedule(self):
                plan = StepPlan(dict.fromkeys(self.running, 1))
                while change(self, plan, self.config.max_num_batched_tokens - plan.num_tokens):
                    pass
                return plan

            def admit(self, seq, plan):
                self.kv.reserve(seq.id, self._most_tokens(seq.request))
                self._dequeue()
                self.running[seq.id] = seq
                plan.scheduled[seq.id] = seq.missing

            def seat(self):
                return self._head() if len(self.running) < self.config.max_num_seqs else None

            def room(self, seq):
                return self.kv.blocks_for(self._most_tokens(seq.request)) <= self.kv.num_free

        return Answer

    return make


@wrong("admits one request a step", case=cases.JOINS)
@_admits
def one_a_step(self, plan, left):
    seq = self.seat()
    if seq and seq.missing <= left and self.room(seq):
        self.admit(seq, plan)


@wrong("waits until all slots are free again", case=cases.JOINS)
def batches(reference):
    class Answer(reference.Scheduler):
        open = True

        def schedule(self):
            self.open = self.open or not self.running
            plan = super().schedule() if self.open else StepPlan(dict.fromkeys(self.running, 1))
            self.open = self.open and len(self.running) < self.config.max_num_seqs
            return plan

    return Answer


def _ends(over):
    """An answer that ends a request when ``over(self, seq, token)`` says so."""

    def make(reference):
        class Answer(reference.Scheduler):
            def finish_step(self, plan, outputs):
                finished = []
                for id, n in plan.scheduled.items():
                    if id in self.running:
                        seq = self.running[id]
                        seq.num_computed += n
                        seq.outputs.append(outputs[id])
                        if over(self, seq, outputs[id]):
                            finished.append(id)
                            self.abort(id)
                return finished

        return Answer

    return make


@wrong("EOS ignored", case=cases.ENDS)
@_ends
def no_eos(self, seq, token):
    return len(seq.outputs) == seq.request.max_tokens


@wrong("EOS is always token 2", case=cases.ENDS)
@_ends
def eos_is_two(self, seq, token):
    return token == 2 or len(seq.outputs) == seq.request.max_tokens


@wrong("an EOS that comes first is not seen", case=cases.ENDS)
@_ends
def not_the_first(self, seq, token):
    seen = token == self.config.eos_token_id and len(seq.outputs) > 1
    return seen or len(seq.outputs) == seq.request.max_tokens


@wrong("one token more than max_tokens", case=cases.ENDS)
@_ends
def one_more(self, seq, token):
    return token == self.config.eos_token_id or len(seq.outputs) > seq.request.max_tokens


@wrong("one token less than max_tokens", case=cases.ENDS)
@_ends
def one_less(self, seq, token):
    return token == self.config.eos_token_id or len(seq.outputs) >= max(1, seq.request.max_tokens - 1)


@wrong("max_tokens counts the prompt", case=cases.ENDS)
@_ends
def counts_prompt(self, seq, token):
    return token == self.config.eos_token_id or seq.num_tokens >= seq.request.max_tokens


@wrong("max_tokens not seen", case=cases.ENDS)
@_ends
def no_limit(self, seq, token):
    return token == self.config.eos_token_id


@wrong("token 0 taken for no token", case=cases.ENDS)
def falsy(reference):
    class Answer(reference.Scheduler):
        def finish_step(self, plan, outputs):
            return super().finish_step(plan, {id: token for id, token in outputs.items() if token})

    return Answer


@wrong("finished, but not returned", case=cases.ENDS)
def silent(reference):
    class Answer(reference.Scheduler):
        def finish_step(self, plan, outputs):
            super().finish_step(plan, outputs)

    return Answer


@wrong("max_num_seqs ignored", case=cases.SEATS)
@_admits
def no_seats(self, plan, left):
    seq = self._head()
    if seq and seq.missing <= left and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("one more than max_num_seqs", case=cases.SEATS)
@_admits
def one_too_many(self, plan, left):
    seq = self._head() if len(self.running) <= self.config.max_num_seqs else None
    if seq and seq.missing <= left and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("max_num_seqs holds for the new ones only", case=cases.SEATS)
@_admits
def seats_of_the_new(self, plan, left):
    new = sum(seq.num_computed == 0 for seq in self.running.values())
    seq = self._head() if new < self.config.max_num_seqs else None
    if seq and seq.missing <= left and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("the budget ignored", case=cases.BUDGET)
@_admits
def no_budget(self, plan, left):
    seq = self.seat()
    if seq and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("the budget holds for each prompt alone", case=cases.BUDGET)
@_admits
def budget_of_each(self, plan, left):
    seq = self.seat()
    if seq and seq.missing <= self.config.max_num_batched_tokens and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("the running cost nothing", case=cases.BUDGET)
@_admits
def running_for_free(self, plan, left):
    seq, free = self.seat(), sum(not seq.missing - 1 for seq in self.running.values() if seq.num_computed)
    if seq and seq.missing <= left + free and self.room(seq):
        self.admit(seq, plan)
        return True


@wrong("the last token of the budget left unused", case=cases.BUDGET)
@_admits
def one_left(self, plan, left):
    seq = self.seat()
    if seq and seq.missing < left and self.room(seq):
        self.admit(seq, plan)
        return True


def _by(key):
    """An answer that serves in the order of a key."""

    def make(reference):
        class Answer(reference.Scheduler):
            def _enqueue(self, seq):
                super()._enqueue(seq)
                self.waiting = type(self.waiting)(sorted(self.waiting, key=key))

        return Answer

    return make


@wrong("in the order of the ids", case=cases.ORDER)
@_by
def by_id(seq):
    return seq.id


@wrong("the shortest prompt first", case=cases.ORDER)
@_by
def shortest(seq):
    return seq.request.prompt_tokens


@wrong("the latest first", case=cases.ORDER)
@_by
def latest(seq):
    return -seq.request.arrival


def _overtakes(reasons):
    """An answer that goes on with those behind when the head is blocked for one of the reasons."""

    def make(reference):
        class Answer(reference.Scheduler):
            def schedule(self):
                plan = StepPlan(dict.fromkeys(self.running, 1))
                for seq in list(self.waiting):
                    left = self.config.max_num_batched_tokens - plan.num_tokens
                    most = self._most_tokens(seq.request)
                    short = {"budget": seq.missing > left, "kv": self.kv.blocks_for(most) > self.kv.num_free}
                    if self.sequences.get(seq.id) is not seq:
                        continue
                    if len(self.running) == self.config.max_num_seqs or any(
                        short[reason] for reason in short if reason not in reasons
                    ):
                        break
                    if not any(short.values()):
                        self.kv.reserve(seq.id, most)
                        self.waiting.remove(seq)
                        self.running[seq.id] = seq
                        plan.scheduled[seq.id] = seq.missing
                return plan

        return Answer

    return make


overtakes_budget = wrong("a head that no step has room for is overtaken", case=cases.ORDER)(_overtakes(["budget"]))
overtakes_kv = wrong("a head without KV is overtaken", case=cases.ORDER)(_overtakes(["kv"]))


def _most(tokens):
    """An answer that counts the tokens of a whole answer differently."""

    def make(reference):
        class Answer(reference.Scheduler):
            def _most_tokens(self, request):
                return tokens(request)

        return Answer

    return make


@wrong("room for the prompt only", case=cases.ROOM)
@_most
def prompt_only(request):
    return request.prompt_tokens


@wrong("room for the last token, too, which is never fed back", case=cases.ROOM)
@_most
def last_token(request):
    return request.prompt_tokens + request.max_tokens


@wrong("room for the answer without the prompt", case=cases.ROOM)
@_most
def answer_only(request):
    return request.max_tokens


@wrong("nothing reserved at all", case=cases.ROOM)
@_admits
def no_kv(self, plan, left):
    seq = self.seat()
    if seq and seq.missing <= left:
        self._dequeue()
        self.running[seq.id] = seq
        plan.scheduled[seq.id] = seq.missing
        return True


@wrong("runs out of blocks with an exception", case=cases.ROOM)
@_admits
def raises(self, plan, left):
    seq = self.seat()
    if seq and seq.missing <= left:
        self.admit(seq, plan)
        return True


@wrong("a head without room goes to the end of the queue, for ever", case=cases.ROOM)
@_base
def goes_round(base):
    class Answer(base):
        def schedule(self):
            plan = super().schedule()
            while len(self.running) < self.config.max_num_seqs and (seq := self._head()):
                self._dequeue()
                try:
                    self.kv.reserve(seq.id, self._most_tokens(seq.request))
                    break
                except OutOfBlocks:
                    self._enqueue(seq)
            return plan

    return Answer


@wrong("reserves as tokens come, admits for the whole answer", case=cases.ROOM)
def as_they_come(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            plan = StepPlan()
            for id, seq in self.running.items():
                self.kv.reserve(id, seq.num_tokens)
                plan.scheduled[id] = 1
            promised = sum(self.kv.blocks_for(self._most_tokens(seq.request)) for seq in self.running.values())
            while (seq := self._head()) and len(self.running) < self.config.max_num_seqs:
                promised += self.kv.blocks_for(self._most_tokens(seq.request))
                left = self.config.max_num_batched_tokens - plan.num_tokens
                if promised > self.kv.num_blocks or seq.missing > left:
                    break
                self._dequeue()
                self.kv.reserve(seq.id, seq.num_tokens)
                self.running[seq.id] = seq
                plan.scheduled[seq.id] = seq.missing
            return plan

    return Answer


@wrong("blocks of the finished never freed", case=cases.FREES)
def leak(reference):
    class Answer(reference.Scheduler):
        def finish_step(self, plan, outputs):
            release, self.kv.release = self.kv.release, lambda id: None
            finished = super().finish_step(plan, outputs)
            self.kv.release = release
            return finished

    return Answer


@wrong("blocks freed one step too late", case=cases.FREES)
def too_late(reference):
    class Answer(reference.Scheduler):
        late = ()

        def schedule(self):
            plan = super().schedule()
            for id in self.late:
                self.kv.release(id)
            self.late = ()
            return plan

        def finish_step(self, plan, outputs):
            release, self.kv.release = self.kv.release, lambda id: None
            self.late = super().finish_step(plan, outputs)
            self.kv.release = release
            return self.late

    return Answer


def _adds(refused):
    """An answer that refuses what ``refused(self, request)`` says."""

    def make(reference):
        class Answer(reference.Scheduler):
            def add(self, request):
                if refused(self, request):
                    raise ValueError(request.id)
                self.sequences[request.id] = Sequence(request)
                self._enqueue(self.sequences[request.id])

        return Answer

    return make


def _too_large(self, request):
    return self.kv.blocks_for(self._most_tokens(request)) > self.kv.num_blocks


def _too_long(self, request):
    return request.prompt_tokens > self.config.max_num_batched_tokens


# vllm#35541: a request larger than the memory waits for ever, and everybody behind it
@wrong("larger than the memory accepted", case=cases.REFUSES)
@_adds
def accepts_large(self, request):
    return request.id in self.sequences or _too_long(self, request)


# tenstorrent/vllm#436: a prompt larger than the budget, without chunks
@wrong("a prompt larger than the budget accepted", case=cases.REFUSES)
@_adds
def accepts_long(self, request):
    return request.id in self.sequences or _too_large(self, request)


@wrong("a prompt as large as the budget refused", case=cases.REFUSES)
@_adds
def refuses_full_step(self, request):
    too_long = request.prompt_tokens >= self.config.max_num_batched_tokens
    return request.id in self.sequences or _too_large(self, request) or too_long


@wrong("a request as large as the memory refused", case=cases.REFUSES)
@_adds
def refuses_full_memory(self, request):
    too_large = self.kv.blocks_for(self._most_tokens(request)) >= self.kv.num_blocks
    return request.id in self.sequences or too_large or _too_long(self, request)


@wrong("the last token counted when requests are refused", case=cases.REFUSES)
@_adds
def counts_last(self, request):
    tokens = request.prompt_tokens + request.max_tokens
    too_large = tokens > self.kv.num_blocks * self.kv.block_size
    return request.id in self.sequences or too_large or _too_long(self, request)


@wrong("only the prompt counted when requests are refused", case=cases.REFUSES)
@_adds
def counts_prompt_only(self, request):
    too_large = self.kv.blocks_for(request.prompt_tokens) > self.kv.num_blocks
    return request.id in self.sequences or too_large or _too_long(self, request)


@wrong("refused when there is no room now", case=cases.REFUSES)
@_adds
def no_room_now(self, request):
    too_large = self.kv.blocks_for(self._most_tokens(request)) > self.kv.num_free
    return request.id in self.sequences or too_large or _too_long(self, request)


@wrong("a second request of one id accepted", case=cases.REFUSES)
@_adds
def duplicates(self, request):
    return _too_large(self, request) or _too_long(self, request)


@wrong("an id looked for among the running only", case=cases.REFUSES)
@_adds
def running_only(self, request):
    return request.id in self.running or _too_large(self, request) or _too_long(self, request)


@wrong("an id may never come again", case=cases.FREES)
def never_again(reference):
    class Answer(reference.Scheduler):
        def __init__(self, config, kv):
            super().__init__(config, kv)
            self.seen = set()

        def add(self, request):
            if request.id in self.seen:
                raise ValueError(request.id)
            super().add(request)
            self.seen.add(request.id)

    return Answer


@wrong("a refused request is there all the same", case=cases.REFUSES)
def half_added(reference):
    class Answer(reference.Scheduler):
        def add(self, request):
            if request.id in self.sequences:
                raise ValueError(request.id)
            self.sequences[request.id] = Sequence(request)
            self._enqueue(self.sequences[request.id])
            if _too_large(self, request) or _too_long(self, request):
                raise ValueError(request.id)

    return Answer


@wrong("refuses with an assertion", case=cases.REFUSES)
def asserts(reference):
    class Answer(reference.Scheduler):
        def add(self, request):
            try:
                super().add(request)
            except ValueError as error:
                raise AssertionError from error

    return Answer


@wrong("a waiting one is not aborted", case=cases.ABORTS)
@_base
def not_waiting(base):
    class Answer(base):
        def abort(self, id):
            if id in self.running:
                super().abort(id)

    return Answer


@wrong("a running one is not aborted", case=cases.ABORTS)
@_base
def not_running(base):
    class Answer(base):
        finishing = False

        def abort(self, id):
            if self.finishing or id not in self.running:
                super().abort(id)

        def finish_step(self, plan, outputs):
            self.finishing = True
            finished = super().finish_step(plan, outputs)
            self.finishing = False
            return finished

    return Answer


@wrong("the aborted keeps its blocks", case=cases.ABORTS)
@_base
def keeps_blocks(base):
    class Answer(base):
        finishing = False

        def abort(self, id):
            if self.finishing:
                return super().abort(id)
            self.sequences.pop(id, None), self.running.pop(id, None)

        def finish_step(self, plan, outputs):
            self.finishing = True
            finished = super().finish_step(plan, outputs)
            self.finishing = False
            return finished

    return Answer


@wrong("an unknown id raises", case=cases.ABORTS)
@_base
def raises_for_unknown(base):
    class Answer(base):
        def abort(self, id):
            if self.sequences[id] and self.running.pop(id, None):
                self.kv.release(id)
            del self.sequences[id]

    return Answer


@wrong("an id that has finished raises", case=cases.ABORTS)
@_base
def raises_for_finished(base):
    class Answer(base):
        done = ()

        def abort(self, id):
            if id in self.done:
                raise ValueError(f"{id} has finished")
            super().abort(id)

        def finish_step(self, plan, outputs):
            finished = super().finish_step(plan, outputs)
            self.done = {*self.done, *finished}
            return finished

        def add(self, request):
            super().add(request)
            self.done = {*self.done} - {request.id}

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


@wrong("aborted while the step runs: finished all the same", case=cases.ABORTS)
@_base
def still_delivers(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            gone = [id for id in plan.scheduled if id not in self.running]
            return super().finish_step(plan, outputs) + gone

    return Answer


@wrong("the token of an aborted request goes to the next one of that id", case=cases.ABORTS)
@_base
def wrong_owner(base):
    class Answer(base):
        def finish_step(self, plan, outputs):
            for id in plan.scheduled:
                if id in self.sequences and id not in self.running:
                    self.sequences[id].outputs.append(outputs[id])
            return super().finish_step(plan, outputs)

    return Answer


@wrong("the aborted is told by its id: a new one of that id takes its place", case=cases.ABORTS)
@_base
def by_name(base):
    class Answer(base):
        def _head(self):
            while self.waiting and self.waiting[0].id not in self.sequences:
                self._dequeue()
            return self.sequences[self.waiting[0].id] if self.waiting else None

    return Answer


@wrong("a slot is given back twice", case=cases.ABORTS)
@_base
def two_release_points(base):
    class Answer(base):
        taken = 0

        def abort(self, id):
            self.taken -= id in self.running
            super().abort(id)

        def schedule(self):
            plan = StepPlan(dict.fromkeys(self.running, 1))
            while (seq := self._head()) and self.taken < self.config.max_num_seqs:
                try:
                    if seq.missing > self.config.max_num_batched_tokens - plan.num_tokens:
                        break
                    self.kv.reserve(seq.id, self._most_tokens(seq.request))
                except OutOfBlocks:
                    break
                self._dequeue()
                self.running[seq.id] = seq
                plan.scheduled[seq.id] = seq.missing
                self.taken += 1
            return plan

        def finish_step(self, plan, outputs):
            self.taken -= sum(id not in self.running for id in plan.scheduled)
            return super().finish_step(plan, outputs)

    return Answer


@wrong("takes the number of plans for the time: who arrived at 3 s has to wait for the third", case=cases.TIMES)
def plans_for_seconds(reference):
    class Answer(reference.Scheduler):
        number = -1

        def schedule(self):
            self.number += 1
            return super().schedule()

        def _head(self):
            seq = super()._head()
            return seq if seq and seq.request.arrival <= self.number else None

    return Answer


@wrong("who has finished takes part in one more step", case=cases.TIMES)
def stays_in_the_batch(reference):
    class Answer(reference.Scheduler):
        late = ()

        def schedule(self):
            plan = super().schedule()
            return StepPlan(plan.scheduled | dict.fromkeys(self.late, 1))

        def finish_step(self, plan, outputs):
            self.late = super().finish_step(plan, outputs)
            return self.late

    return Answer


@wrong("a slot is given back one step too late", case=cases.TIMES)
def late_slot(reference):
    class Answer(reference.Scheduler):
        late = ()

        def schedule(self):
            seats = self.config.max_num_seqs - len(self.late)
            self.late = ()
            if len(self.running) >= seats:
                return StepPlan(dict.fromkeys(self.running, 1))
            most, self.config = self.config, replace(self.config, max_num_seqs=seats)
            plan, self.config = super().schedule(), most
            return plan

        def finish_step(self, plan, outputs):
            self.late = super().finish_step(plan, outputs)
            return self.late

    return Answer


@wrong("gathers: one alone joins only when nobody runs", case=cases.TIMES)
def gathers(reference):
    class Answer(reference.Scheduler):
        def schedule(self):
            waiting = sum(self.sequences.get(seq.id) is seq for seq in self.waiting)
            return StepPlan(dict.fromkeys(self.running, 1)) if self.running and waiting < 2 else super().schedule()

    return Answer


@wrong("after ten requests a slot is lost", case=cases.LONG)
def slow_leak(reference):
    class Answer(reference.Scheduler):
        finished = 0

        def finish_step(self, plan, outputs):
            done = super().finish_step(plan, outputs)
            self.finished += len(done)
            return done

        def schedule(self):
            seats = self.config.max_num_seqs
            if len(self.running) < seats - self.finished // 10:
                return super().schedule()
            return StepPlan(dict.fromkeys(self.running, 1))

    return Answer


@wrong("the tenth to come is forgotten", case=cases.LONG)
def forgets(reference):
    class Answer(reference.Scheduler):
        count = 0

        def _enqueue(self, seq):
            self.count += 1
            if self.count % 10:
                super()._enqueue(seq)

    return Answer
