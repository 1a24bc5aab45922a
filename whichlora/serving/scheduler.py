"""What users of a serving engine wait: its scheduler's rules, step by step, with timed steps.

Requests arrive, wait for room in the pool, have their prompts read in chunks, and then get a token
with every step. Steps between two events are alike but for their context, and taken at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from whichlora.serving.step_time import Step
from whichlora.spec.run import USUAL_SPREAD

PERCENTILES = (50, 90, 99)
# Requests of each client, as many as `vllm bench serve` is usually asked for; fewer of many.
_MOST_EACH, _LEAST_EACH, _CLOSED_REQUESTS = 10, 4, 640
MOST_CLIENTS = 10_000  # four requests of each take seconds to simulate
_OPEN_REQUESTS, _TURNS = 400, 4  # at a rate: requests, and at least so many of each place
_WARM_SHARE = 0.25
_QUEUED_SHARE = 0.05  # of all requests that wait at the last arrival: the queue grows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How an engine chooses what a step does.

    Args:
        max_num_seqs: sequences that run at once.
        max_step_tokens: of prompts and answers in one step.
        mixes: whether prompts and answers share a step; else prompts go first, alone.
        whole_prompts: whether a prompt is read in one step, however long it is.
        pool_tokens: that the pool holds.
        reserved_tokens: of each answer, for which room is kept before one more request begins.
        keeps_blocks: what a sequence that was put back has read is there again until others took
            its blocks.
        front_s: from a client to the scheduler, and from a step to the client.
        plans_ahead: whether a step is planned when the one before it begins.
        chunk_share: of the time of a step that reads a prompt alone, after which the next chunk of
            it begins, as the first stage of a pipeline is free then.
        accepted: tokens that a step gives a sequence in the mean, drafts among them.
    """

    max_num_seqs: int
    max_step_tokens: int
    mixes: bool
    whole_prompts: bool = False
    pool_tokens: int
    reserved_tokens: int = 0
    keeps_blocks: bool = False
    front_s: float = 0.0
    plans_ahead: bool = False
    chunk_share: float = 1.0
    accepted: float = 1.0

    def steps(self, tokens: int) -> int:
        """That give a sequence so many tokens."""
        return math.ceil(tokens / self.accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for.

    Args:
        prompt_len, new_tokens: of each request; `cached_prompt` of the prompt is in the pool.
        concurrency: clients that begin at once, and send the next request when one is answered.
        requests_per_s: that arrive by chance instead; None for the former.
        spread: lengths are up to this share more or less.
    """

    prompt_len: int
    new_tokens: int
    cached_prompt: int = 0
    concurrency: int = 1
    requests_per_s: float | None = None
    spread: float = USUAL_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What requests waited, and what was answered.

    Args:
        ttft_s: to the first token, of each request; `tpot_s` for each further one.
        output_tokens_per_s, requests_per_s: of the server.
        queue_grows: more requests arrive than are answered.
    """

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    output_tokens_per_s: float
    requests_per_s: float
    queue_grows: bool = False

    def slower(self, factor: float, front_s: float = 0.0) -> Waits:
        """The same where every step takes `factor` times as long, and no one else sets the pace.

        Args:
            front_s: of each first wait, what is no step.
        """
        return replace(
            self,
            ttft_s=[front_s + factor * (value - front_s) for value in self.ttft_s],
            tpot_s=[factor * value for value in self.tpot_s],
            output_tokens_per_s=self.output_tokens_per_s / factor,
            requests_per_s=self.requests_per_s / factor,
        )


@dataclass(slots=True, eq=False)
class _Request:
    """One request; one that was put back has read its own answer as its prompt.

    Args:
        read: tokens of the prompt whose keys are there.
        first_s: when its first token came; below 0 before.
        began_at, ends_at: the steps of its first and its last token.
        made: tokens of its answer before it was put back.
        taken: tokens that the pool had given out until then; below 0 before.
    """

    arrived_s: float
    prompt: int
    cached: int
    output: int
    read: int = 0
    first_s: float = -1.0
    began_at: int = 0
    ends_at: int = 0
    made: int = 0
    taken: float = -1

    def waits(self, now_s: float) -> tuple[float, float]:
        """Seconds to its first token, and for each further one, its last being there now."""
        further = max(1, self.made + self.output - 1)
        return self.first_s - self.arrived_s, (now_s - self.first_s) / further


@dataclass(slots=True)
class _Server:
    """The state of an engine between two steps.

    Args:
        began_s: when the last step began; `now_s` when it ended.
        used_tokens: of the pool; `taken_tokens` is what it has given out in all.
    """

    rules: Rules
    seconds: Callable[[Step], float]
    now_s: float = 0.0
    began_s: float = 0.0
    num_steps: int = 0
    made: float = 0
    used_tokens: float = 0
    taken_tokens: float = 0
    cached_tokens: float = 0
    waiting: deque[_Request] = field(default_factory=deque)
    reading: list[_Request] = field(default_factory=list)
    decoding: list[tuple[int, int, _Request]] = field(default_factory=list)  # a heap
    order: itertools.count[int] = field(default_factory=itertools.count)

    def receive(self, arriving: deque[_Request]) -> float:
        """Take those that the next step can see; when one more can be seen."""
        if self.is_idle and not self.waiting and arriving:
            self.now_s = max(self.now_s, arriving[0].arrived_s + self.rules.front_s)
        ahead = self.rules.plans_ahead and not self.is_idle
        planned_s = self.began_s if ahead else self.now_s
        while arriving and arriving[0].arrived_s + self.rules.front_s <= planned_s:
            self.waiting.append(arriving.popleft())
        return arriving[0].arrived_s + self.rules.front_s if arriving else math.inf

    def admit(self) -> None:
        """Begin those that there is room for, and for one more token of each that runs."""
        while self.waiting:
            request = self.waiting[0]
            busy = len(self.reading) + len(self.decoding)
            if busy >= self.rules.max_num_seqs:
                return
            needed = self.used_tokens + request.prompt + busy + 1
            if busy and needed + self._reserved(request) > self.rules.pool_tokens:
                return
            self.waiting.popleft()
            request.read = request.cached
            if request.taken >= 0 and self.rules.keeps_blocks:
                lost = math.ceil(self.taken_tokens - request.taken)
                request.read = max(request.read, request.prompt - max(1, lost))
            self._take(request.prompt)
            self.reading.append(request)

    def _reserved(self, request: _Request) -> float:
        """Tokens that running answers and that of `request` will still take, as far as counted.

        Source: SGLang 0.5.23 srt/managers/schedule_policy.py `PrefillAdder`, of requests that end
        at a known length.
        """
        most = self.rules.reserved_tokens
        if not most:
            return 0
        accepted = self.rules.accepted
        running = (accepted * (ends_at - self.num_steps) for ends_at, _, _ in self.decoding)
        begun = (each.output for each in (*self.reading, request))
        return sum(min(left, most) for left in itertools.chain(running, begun))

    def _take(self, num_tokens: float) -> None:
        self.used_tokens += num_tokens
        self.taken_tokens += num_tokens

    @property
    def is_idle(self) -> bool:
        return not (self.reading or self.decoding)

    def step(self, until_s: float) -> list[_Request]:
        """Do the next steps, until one sees an arrival at `until_s`; those whose answer is done."""
        self.began_s = self.now_s
        done = self._read_prompts() if self.reading else self._decode(until_s)
        if self.used_tokens + len(self.decoding) > self.rules.pool_tokens:
            self._make_room()
        return done

    def _read_prompts(self) -> list[_Request]:
        decoding = len(self.decoding) if self.rules.mixes else 0
        room = max(1, self.rules.max_step_tokens - decoding)
        first = self.reading[0]
        chunks = (first.prompt - first.read - 1) // room  # whole steps before its last one
        if chunks > 1 and not self.rules.whole_prompts:
            return self._read_chunks(first, room, decoding, chunks)
        tokens, pairs, finished = 0, 0.0, []
        for request in self.reading:
            unread = request.prompt - request.read
            fits = unread if self.rules.whole_prompts else min(unread, room - tokens)
            if fits <= 0 or (tokens and tokens + fits > room):
                break
            pairs += fits * (request.read + (fits + 1) / 2)
            tokens, request.read = tokens + fits, request.read + fits
            if request.read == request.prompt:
                finished.append(request)
        cached_tokens = self.cached_tokens if decoding else 0
        step_s = self.seconds(
            Step(decoding, cached_tokens, decoding + len(finished), tokens, pairs)
        )
        self.now_s += step_s if decoding or finished else self.rules.chunk_share * step_s
        done = self._advance(1) if decoding else []
        for request in finished:
            self.reading.remove(request)
            done += self._begin(request)
        return done

    def _read_chunks(
        self, request: _Request, room: int, decoding: int, chunks: int
    ) -> list[_Request]:
        """Steps that a long prompt fills, until an answer ends or the pool is full."""
        if decoding:
            free = self.rules.pool_tokens - self.used_tokens
            ends = self.decoding[0][0] - self.num_steps
            chunks = min(chunks, ends, max(1, int(free // (decoding * self.rules.accepted))))
        before = request.read + (chunks - 1) * room / 2  # of the middle one
        grown = decoding * self.rules.accepted * (chunks - 1) / 2
        cached_tokens = self.cached_tokens + grown if decoding else 0
        step_s = self.seconds(
            Step(decoding, cached_tokens, decoding, room, room * (before + (room + 1) / 2))
        )
        self.now_s += chunks * step_s * (1.0 if decoding else self.rules.chunk_share)
        request.read += chunks * room
        return self._advance(chunks) if decoding else []

    def _begin(self, request: _Request) -> list[_Request]:
        """The first token, and the last one where there is no other."""
        if request.first_s < 0:
            request.first_s = self.now_s
        self.made += 1
        self._take(1)
        if request.output <= 1:
            self.used_tokens -= request.prompt + 1
            return [request]
        request.began_at = self.num_steps
        request.ends_at = self.num_steps + self.rules.steps(request.output - 1)
        self.cached_tokens += request.prompt + 1
        heapq.heappush(self.decoding, (request.ends_at, next(self.order), request))
        return []

    def _decode(self, until_s: float) -> list[_Request]:
        running = len(self.decoding)
        steps = self.decoding[0][0] - self.num_steps
        room = self.rules.pool_tokens - self.used_tokens
        if running > 1:
            steps = min(steps, max(1, int(room // (running * self.rules.accepted))))
        step_s = self._step_s(running, steps)
        ahead = int(self.rules.plans_ahead)
        if self.now_s + (steps - ahead) * step_s > until_s:
            steps = max(1, min(steps, ahead - int(-(until_s - self.now_s) // step_s)))
            step_s = self._step_s(running, steps)
        self.now_s += steps * step_s
        self.began_s = self.now_s - step_s
        return self._advance(steps)

    def _step_s(self, running: int, steps: int) -> float:
        """Of the middle one of `steps`."""
        cached = self.cached_tokens + running * self.rules.accepted * (steps - 1) / 2
        return self.seconds(Step(running, cached, running))

    def _advance(self, steps: int) -> list[_Request]:
        tokens = steps * len(self.decoding) * self.rules.accepted
        self.num_steps += steps
        self.made += tokens
        self.cached_tokens += tokens
        self._take(tokens)
        done = []
        while self.decoding and self.decoding[0][0] <= self.num_steps:
            request = heapq.heappop(self.decoding)[2]
            self.made -= self._answered(request) - request.output  # drafts beyond its end
            self._leave(request)
            done.append(request)
        return done

    def _leave(self, request: _Request) -> None:
        context = request.prompt + self._answered(request)
        self.cached_tokens -= context
        self.used_tokens -= context

    def _answered(self, request: _Request) -> float:
        """Tokens of its answer, since it was last begun."""
        return 1 + (self.num_steps - request.began_at) * self.rules.accepted

    def _make_room(self) -> None:
        """Put the latest sequence back where the pool is full: it is read anew.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py `_preempt_request`.
        """
        while len(self.decoding) > 1 and (
            self.used_tokens + len(self.decoding) > self.rules.pool_tokens
        ):
            entry = max(self.decoding, key=itemgetter(1))
            self.decoding.remove(entry)
            heapq.heapify(self.decoding)
            request = entry[2]
            self._leave(request)
            made = min(request.output - 1, round(self._answered(request)))
            request.prompt, request.output = request.prompt + made, request.output - made
            request.made += made
            request.taken = self.taken_tokens
            self.waiting.appendleft(request)


def simulate(rules: Rules, load: Load, seconds: Callable[[Step], float]) -> Waits:
    """Waits of the requests of `load` under `rules`, each step taking `seconds`.

    A concurrency is what `vllm bench serve --max-concurrency` measures, from the first request to
    the last answer. At a rate, arrivals are a Poisson process with a fixed seed, the first quarter
    of the answers is left out, and as many are answered as arrive, or as `steady_token_s` allows.

    Kind: estimate. Source: vLLM 0.33.0 v1/core/sched/scheduler.py `Scheduler.schedule`; SGLang
    0.5.23 srt/managers/schedule_policy.py `PrefillAdder`.
    """
    server = _Server(rules, seconds)
    if load.requests_per_s is None:
        return _closed(server, load)
    return _open(server, load, load.requests_per_s)


def _places(rules: Rules, load: Load) -> int:
    """Requests of `load` that run at once."""
    length = load.prompt_len + load.new_tokens
    return max(1, min(rules.max_num_seqs, rules.pool_tokens // length))


def steady_token_s(rules: Rules, load: Load, seconds: Callable[[Step], float]) -> float:
    """Seconds for each token of the answers of a concurrency, once requests come one by one.

    While a sequence is answered, every other one that runs has its prompt read once. A hundred
    times as fast as `simulate`, which knows the waits of each request, too.

    Kind: estimate. Source: as of `simulate`.
    """
    prompt, answer = load.prompt_len - load.cached_prompt, load.new_tokens
    running = max(1, min(load.concurrency, _places(rules, load)))
    cached = load.prompt_len + answer / 2  # tokens of a sequence, on average
    others = running - 1 if rules.mixes else 0
    room = prompt if rules.whole_prompts else max(1, rules.max_step_tokens - others)
    chunks = -(-prompt // room)
    decoded = (answer - 1) / rules.accepted  # steps of an answer behind its first token
    others = min(others, int(decoded) // chunks)  # the rest waits to be read
    chunk = prompt / chunks
    before = load.cached_prompt + (prompt - chunk) / 2  # of the middle one
    pairs = chunk * (before + (chunk + 1) / 2)
    steps = chunks if others else 1 + (chunks - 1) * rules.chunk_share
    read_s = steps * seconds(Step(others, others * cached, others + 1, round(chunk), pairs))
    alone = max(0, decoded - (running - 1) * chunks) if rules.mixes else decoded
    round_s = running * read_s + alone * seconds(Step(running, running * cached, running))
    return round_s / (running * answer)


def _requests(load: Load, number: int) -> list[_Request]:
    """`number` of them, whose lengths are spread evenly by chance, with a fixed seed."""
    chance = random.Random(0)

    def near(mean: int) -> int:
        return max(1, round(mean * chance.uniform(1 - load.spread, 1 + load.spread)))

    return [
        _Request(
            0.0,
            max(load.cached_prompt + 1, near(load.prompt_len)),
            load.cached_prompt,
            near(load.new_tokens),
        )
        for _ in range(number)
    ]


def _closed(server: _Server, load: Load) -> Waits:
    each = min(_MOST_EACH, max(_LEAST_EACH, _CLOSED_REQUESTS // load.concurrency))
    coming = deque(_requests(load, each * load.concurrency))
    waits: list[tuple[float, float]] = []
    arriving = deque(coming.popleft() for _ in range(load.concurrency))
    while arriving or server.waiting or not server.is_idle:
        next_s = server.receive(arriving)
        server.admit()
        for request in server.step(next_s):
            waits.append(request.waits(server.now_s))
            if coming:
                following = coming.popleft()
                following.arrived_s = server.now_s
                arriving.append(following)
    return Waits(
        ttft_s=[first for first, _ in waits],
        tpot_s=[further for _, further in waits],
        output_tokens_per_s=server.made / server.now_s,
        requests_per_s=len(waits) / server.now_s,
    )


def _open(server: _Server, load: Load, rate: float) -> Waits:
    def answered_per_s(running: int) -> float:
        """By so many at once."""
        of_many = replace(load, concurrency=running)
        return 1 / (load.new_tokens * steady_token_s(server.rules, of_many, server.seconds))

    running, most = 1, _places(server.rules, load)
    while running < most and answered_per_s(running) < rate:
        running = min(most, 2 * running)
    capacity = answered_per_s(running)
    number = max(_OPEN_REQUESTS, _TURNS * running)  # the server is to be full for most of them
    chance = random.Random(0)
    arriving = deque(_requests(load, number))
    now_s = 0.0
    for request in arriving:
        now_s += chance.expovariate(rate)
        request.arrived_s = now_s
    num_warm = int(_WARM_SHARE * number)
    num_waiting, num_done = 0, 0
    waits: list[tuple[float, float]] = []
    while num_done < number:
        before = len(arriving)
        next_s = server.receive(arriving)
        num_waiting = len(server.waiting) if len(arriving) < before else num_waiting
        server.admit()
        for request in server.step(next_s):
            num_done += 1
            if num_done > num_warm:
                waits.append(request.waits(server.now_s))
    # while as many are answered as arrive; the last ones are alone, and answered faster
    at_most = min(rate, capacity)
    return Waits(
        ttft_s=[first for first, _ in waits],
        tpot_s=[further for _, further in waits],
        output_tokens_per_s=at_most * load.new_tokens,
        requests_per_s=at_most,
        queue_grows=rate > capacity or num_waiting > _QUEUED_SHARE * number,
    )


def percentile(values: Sequence[float], share: int) -> float:
    """The least of `values` that `share` percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-share * len(ordered) // 100) - 1))]
