"""Named answers to `continuous_batching.policies`."""

import heapq
from fractions import Fraction

import numpy as np

from servelab.answers import right, wrong
from servelab.serving import Sequence, StepPlan


def keys(reference):
    """The reference's own keys."""
    return reference.by_priority, reference.shortest_remaining, reference.aged


def with_keys(reference, *, by_priority=None, shortest_remaining=None, aged=None):
    """The reference's answers with some keys replaced."""
    own = by_priority, shortest_remaining, aged
    return reference.PolicyScheduler, *(mine or theirs for mine, theirs in zip(own, keys(reference), strict=True))


class Base:
    """What two schedulers written from scratch have in common: requests by id, and the end of a step."""

    def __init__(self, config, kv, key=lambda seq: 0):
        self.config, self.kv, self.key = config, kv, key
        self.jobs, self.active, self.tickets = {}, [], 0

    def add(self, request):
        most = request.prompt_tokens + request.max_tokens - 1
        room = self.kv.num_blocks * self.kv.block_size
        if request.id in self.jobs or most > min(room, self.config.max_num_batched_tokens):
            raise ValueError(request)
        self.tickets += 1
        self.jobs[request.id] = self.tickets, Sequence(request)

    def rank(self, id):
        ticket, seq = self.jobs[id]
        return self.key(seq), ticket

    def abort(self, id):
        self.jobs.pop(id, None)
        if id in self.active:
            self.active.remove(id)
            self.kv.release(id)

    def drop(self, id):
        self.active.remove(id)
        self.kv.release(id)
        self.jobs[id][1].num_computed = 0

    def blocks(self, id):
        return self.kv.blocks_for(self.jobs[id][1].num_tokens)

    def finish_step(self, plan, outputs):
        done = set()
        for id in set(plan.scheduled).intersection(self.active):
            seq = self.jobs[id][1]
            seq.num_computed = seq.num_tokens
            seq.outputs += [outputs[id]]
            if seq.outputs[-1] == self.config.eos_token_id or len(seq.outputs) >= seq.request.max_tokens:
                done.add(id)
        for id in done:
            self.abort(id)
        return done


@right("a list sorted at every step, the victims chosen before anything is planned, NumPy's numbers")
def sorted_lists(reference):
    class Answer(Base):
        def schedule(self):
            kept, victims = sorted(self.active, key=self.rank), []
            while sum(map(self.blocks, kept)) > self.kv.num_blocks:
                victims.append(kept.pop())
                self.drop(victims[-1])
            plan = {}
            for id in kept:
                self.take(plan, id)
            if not victims:
                self.join(plan)
            return StepPlan(plan, tuple(victims))

        def join(self, plan):
            for id in sorted(self.jobs.keys() - set(self.active), key=self.rank):
                spare = self.config.watermark_blocks if self.active else 0
                full = len(self.active) == self.config.max_num_seqs or self.blocks(id) + spare > self.kv.num_free
                if full or sum(plan.values()) + self.jobs[id][1].missing > self.config.max_num_batched_tokens:
                    return
                self.active.append(id)
                self.take(plan, id)

        def take(self, plan, id):
            seq = self.jobs[id][1]
            self.kv.reserve(id, seq.num_tokens)
            plan[id] = np.int64(seq.missing)

    def by_priority(seq):
        return np.float32(seq.request.priority)

    def shortest_remaining(seq):
        return -(len(seq.outputs) - seq.request.max_tokens) / 1000

    class Aged:
        def __init__(self, rate):
            self.rate = Fraction(rate)

        def __call__(self, seq):
            return Fraction(seq.request.priority) - self.rate * (1000 - Fraction(seq.request.arrival))

    return Answer, by_priority, shortest_remaining, Aged


@right("chooses anew at every step, so the urgent take the slots of the others")
def best_of_all(reference):
    class Answer(Base):
        def schedule(self):
            chosen, counts, no_more = [], {}, False
            for id in sorted(self.jobs, key=self.rank):
                fits = self.fits(chosen, counts, id)
                if id in self.active and not fits:
                    break
                no_more = no_more or not fits
                if id in self.active or not no_more:
                    chosen.append(id)
                    counts[id] = self.missing(id)
            victims = [id for id in self.active if id not in chosen]
            for id in victims:
                self.drop(id)
            for id in chosen:
                self.kv.reserve(id, self.jobs[id][1].num_tokens)
            self.active = chosen
            return StepPlan(counts, victims)

        def missing(self, id):
            return self.jobs[id][1].missing if id in self.active else self.jobs[id][1].num_tokens

        def fits(self, chosen, counts, id):
            spare = 0 if id in self.active or not chosen else self.config.watermark_blocks
            blocks = sum(map(self.blocks, [*chosen, id])) + spare
            tokens = sum(counts.values()) + self.missing(id)
            within = len(chosen) < self.config.max_num_seqs and tokens <= self.config.max_num_batched_tokens
            return within and blocks <= self.kv.num_blocks

    return Answer, *keys(reference)


@right("preempts for a slot, one a step, and admits in the step after")
def for_a_slot(reference):
    class Answer(reference.PolicyScheduler):
        def schedule(self):
            plan, head, self.left = StepPlan(), self._head(), 0
            if head and len(self.running) == self.config.max_num_seqs and self.key(head) < self.key(self._victim()):
                self._preempt(self._victim(), plan)
            rest = super().schedule()
            return StepPlan(rest.scheduled, [*plan.preempted, *rest.preempted])

        def _admit(self, plan):
            if len(plan.scheduled) == len(self.running):
                super()._admit(plan)

    return Answer, *keys(reference)


@wrong("the largest priority first", case="urgent requests first")
def largest_priority(reference):
    return with_keys(reference, by_priority=lambda seq: -seq.request.priority)


@wrong("the size of a priority, not its sign", case="urgent requests first")
def size_of_priority(reference):
    return with_keys(reference, by_priority=lambda seq: abs(seq.request.priority))


@wrong("urgent or not, and nothing between", case="urgent requests first")
def two_classes(reference):
    return with_keys(reference, by_priority=lambda seq: seq.request.priority > 1)


@wrong("shortest by max_tokens, what is generated does not count", case="the fewest tokens to come first")
def max_tokens_only(reference):
    return with_keys(reference, shortest_remaining=lambda seq: seq.request.max_tokens)


@wrong("shortest by the prompt", case="the fewest tokens to come first")
def shortest_prompt(reference):
    return with_keys(reference, shortest_remaining=lambda seq: seq.request.prompt_tokens)


@wrong("shortest by all tokens to compute, the prompt's too", case="the fewest tokens to come first")
def all_work(reference):
    return with_keys(reference, shortest_remaining=lambda seq: seq.missing + seq.request.max_tokens - len(seq.outputs))


@wrong("longest remaining first", case="the fewest tokens to come first")
def longest_remaining(reference):
    return with_keys(reference, shortest_remaining=lambda seq: len(seq.outputs) - seq.request.max_tokens)


@wrong("tokens generated so far", case="the fewest tokens to come first")
def generated(reference):
    return with_keys(reference, shortest_remaining=lambda seq: len(seq.outputs))


def wrong_age(reference, key):
    """The reference with another key of sequence and rate for ageing."""
    return with_keys(reference, aged=lambda rate: lambda seq: key(seq.request, rate))


@wrong("ageing with the wrong sign: who has waited longest comes last", case="each second of waiting counts")
def wrong_sign(reference):
    return wrong_age(reference, lambda r, rate: r.priority - rate * r.arrival)


@wrong("ageing that forgets the priority", case="each second of waiting counts")
def only_arrival(reference):
    return wrong_age(reference, lambda r, rate: rate * r.arrival)


@wrong("ageing that forgets the rate", case="each second of waiting counts")
def no_rate(reference):
    return wrong_age(reference, lambda r, rate: r.priority + r.arrival)


@wrong("ageing by the square of the time", case="each second of waiting counts")
def squared(reference):
    return wrong_age(reference, lambda r, rate: r.priority + (rate * r.arrival) ** 2)


@wrong("ageing by the logarithm of the time", case="each second of waiting counts")
def logarithm(reference):
    return wrong_age(reference, lambda r, rate: r.priority + float(np.log1p(rate * r.arrival)))


@wrong("ageing in whole steps", case="each second of waiting counts")
def in_steps(reference):
    return wrong_age(reference, lambda r, rate: r.priority + int(rate * r.arrival))


@wrong("ageing that stops: late arrivals are all alike, and starve again", case="each second of waiting counts")
def capped(reference):
    return wrong_age(reference, lambda r, rate: r.priority + min(rate * r.arrival, 50))


@wrong("ageing divided by the rate", case="each second of waiting counts")
def divided(reference):
    return wrong_age(reference, lambda r, rate: r.priority + r.arrival / (rate or 1))


@wrong("no ageing at all: the patient starve", case="ageing bounds the wait")
def no_ageing(reference):
    return wrong_age(reference, lambda r, rate: r.priority)


def replaced(reference, scheduler_class):
    return scheduler_class, *keys(reference)


@wrong("first come, first served, whatever the key", case="the smallest key is admitted first")
def ignores_the_key(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key=None):
            super().__init__(config, kv)

    return replaced(reference, Answer)


@wrong("the largest key first", case="the smallest key is admitted first")
def upside_down(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, lambda seq: -key(seq))

    return replaced(reference, Answer)


@wrong("sorts once, whoever comes later joins at the end", case="the smallest key is admitted first")
def sorts_once(reference):
    class Answer(reference.PolicyScheduler):
        def _rank(self, seq):
            return (bool(self.running), seq.place) if self.running else super()._rank(seq)

        def _victim(self):
            return max(self.running.values(), key=super()._rank)

    return replaced(reference, Answer)


@wrong("does without no key", case="the smallest key is admitted first")
def key_needed(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key):
            super().__init__(config, kv, key)

    return replaced(reference, Answer)


@wrong("of equals the last comes first", case="equal keys in order of arrival")
def last_of_equals(reference):
    class Answer(reference.PolicyScheduler):
        def _rank(self, seq):
            return self.key(seq), -seq.place

    return replaced(reference, Answer)


@wrong("of equals the smallest id comes first", case="equal keys in order of arrival")
def by_id(reference):
    class Answer(reference.PolicyScheduler):
        def _rank(self, seq):
            return self.key(seq), seq.id

    return replaced(reference, Answer)


@wrong("of equals the first that came is preempted", case="equal keys in order of arrival")
def first_of_equals_preempted(reference):
    class Answer(reference.PolicyScheduler):
        def _victim(self):
            return max(self.running.values(), key=lambda seq: (self.key(seq), -seq.place))

    return replaced(reference, Answer)


@wrong("of equals the last that was admitted is preempted", case="equal keys in order of arrival")
def last_admitted_of_equals(reference):
    class Answer(reference.PolicyScheduler):
        def _victim(self):
            return max(reversed(self.running.values()), key=self.key)

    return replaced(reference, Answer)


@wrong("a victim comes back as the last of its equals", case="equal keys in order of arrival")
def new_number(reference):
    class Answer(reference.PolicyScheduler):
        def _requeue(self, seq):
            seq.place = next(self.count)
            super()._requeue(seq)

    return replaced(reference, Answer)


@wrong("the class as it is given: the head is who came first", case="nobody overtakes the head")
def as_given(reference):
    class Answer(reference.PagedScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv)
            self.key = key

    return replaced(reference, Answer)


@wrong("who fits overtakes a more urgent request that does not", case="nobody overtakes the head")
def overtakes(reference):
    class Answer(reference.PolicyScheduler):
        def _admit(self, plan):
            aside = []
            while head := self._head():
                super()._admit(plan)
                if self._head() is head:
                    aside.append(heapq.heappop(self.waiting))
            for entry in aside:
                heapq.heappush(self.waiting, entry)

    return replaced(reference, Answer)


@wrong("the smallest key is preempted", case="the largest key is preempted first")
def smallest_victim(reference):
    class Answer(reference.PolicyScheduler):
        def _victim(self):
            return min(self.running.values(), key=self._rank)

    return replaced(reference, Answer)


@wrong("the last that was admitted is preempted, whatever its key", case="the largest key is preempted first")
def last_admitted(reference):
    class Answer(reference.PolicyScheduler):
        def _victim(self):
            return next(reversed(self.running.values()))

    return replaced(reference, Answer)


@wrong("the request that finds no block is preempted", case="the largest key is preempted first")
def preempts_itself(reference):
    class Answer(reference.PolicyScheduler):
        def _make_room(self, seq, n, plan):
            self.needy = seq
            return super()._make_room(seq, n, plan)

        def _victim(self):
            return self.needy

    return replaced(reference, Answer)


@wrong("never preempts a request that the step has planned already", case="the largest key is preempted first")
def planned_are_safe(reference):
    class Answer(reference.PolicyScheduler):
        def _make_room(self, seq, n, plan):
            self.planned = plan.scheduled
            return super()._make_room(seq, n, plan)

        def _victim(self):
            return max((s for s in self.running.values() if s.id not in self.planned), key=self._rank)

    return replaced(reference, Answer)


@wrong("keys as they were when the request was added", case="keys as they are now")
def frozen_keys(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.keys = {}

        def _enqueue(self, seq):
            self.keys[seq.id] = self.key(seq)
            super()._enqueue(seq)

        def _rank(self, seq):
            return self.keys[seq.id], seq.place

    return replaced(reference, Answer)


@wrong("a victim goes to the front of the queue", case="a victim waits by its key")
def to_the_front(reference):
    class Answer(reference.PolicyScheduler):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.waiting = [entry for entry in self.waiting if entry[-1] is not seq]
            heapq.heapify(self.waiting)
            heapq.heappush(self.waiting, (float("-inf"), seq.place, seq))

    return replaced(reference, Answer)


@wrong("a victim goes to the end of the queue", case="a victim waits by its key")
def to_the_end(reference):
    class Answer(reference.PolicyScheduler):
        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.waiting = [entry for entry in self.waiting if entry[-1] is not seq]
            heapq.heapify(self.waiting)
            heapq.heappush(self.waiting, (float("inf"), seq.place, seq))

    return replaced(reference, Answer)


@wrong("a victim earlier in the list makes the loop skip one", case="the others go on beside a victim")
def skips_one(reference):
    class Answer(reference.PolicyScheduler):
        def schedule(self):
            self.skip, plan = False, super().schedule()
            return plan

        def _make_room(self, seq, n, plan):
            if self.skip:
                self.skip = False
                return False
            before = len(plan.preempted)
            made = super()._make_room(seq, n, plan)
            self.skip = made and len(plan.preempted) > before
            return made

    return replaced(reference, Answer)


@wrong("a request that preempts itself ends the loop", case="the others go on beside a victim")
def ends_the_loop(reference):
    class Answer(reference.PolicyScheduler):
        def _make_room(self, seq, n, plan):
            return not self.over and super()._make_room(seq, n, plan)

        def _preempt(self, seq, plan):
            super()._preempt(seq, plan)
            self.over = self.over or seq.id not in plan.scheduled

        def schedule(self):
            self.over = False
            return super().schedule()

    return replaced(reference, Answer)


@wrong("a victim stays in the plan", case="the largest key is preempted first")
def stays_planned(reference):
    class Answer(reference.PolicyScheduler):
        def _preempt(self, seq, plan):
            planned = plan.scheduled.get(seq.id)
            super()._preempt(seq, plan)
            if planned:
                plan.scheduled[seq.id] = planned

    return replaced(reference, Answer)


@wrong("admits who was aborted", case="forgets what is aborted")
def admits_aborted(reference):
    class Answer(reference.PolicyScheduler):
        def _head(self):
            return self.waiting[0][-1] if self.waiting else None

    return replaced(reference, Answer)


@wrong("takes a request for an aborted one of the same id", case="forgets what is aborted")
def by_id_alone(reference):
    class Answer(reference.PolicyScheduler):
        def _head(self):
            while self.waiting and self.waiting[0][-1].id not in self.sequences:
                self._dequeue()
            return self.sequences[self.waiting[0][-1].id] if self.waiting else None

    return replaced(reference, Answer)


@wrong("numbers by the requests known so far, so that numbers repeat", case="forgets what is aborted")
def repeated_numbers(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.seen = {}

        def _enqueue(self, seq):
            self.seen[seq.id] = seq.place = len(self.seen)
            self._requeue(seq)

    return replaced(reference, Answer)


@wrong("looks at the queue when something came or ended, not after an abort", case="forgets what is aborted")
def unnoticed(reference):
    class Answer(reference.PolicyScheduler):
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

    return replaced(reference, Answer)


@wrong("loses who is preempted for the second time", case="long runs")
def loses_the_second(reference):
    class Answer(reference.PolicyScheduler):
        def __init__(self, config, kv, key=lambda seq: 0):
            super().__init__(config, kv, key)
            self.back = set()

        def _requeue(self, seq):
            if self.running and seq.outputs and seq in self.back:
                return
            if seq.outputs:
                self.back.add(seq)
            super()._requeue(seq)

    return replaced(reference, Answer)
