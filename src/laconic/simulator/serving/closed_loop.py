"""A replayed serving benchmark: each client sends its next request when the answer to the last one is complete.

All clients send their first request at once, and the queue of these is part of the mean over the benchmark; later
requests arrive as answers end. The workers run passes, one after the other:

    prompts wait and there is a place   a pass over the prompts that arrived first, as many as fit into one pass
    else                                one new token for every sequence that runs

Some frameworks let prompts wait for further prompts while sequences run, for a number of decode passes or until a pass
is full. Before a prompt can be part of a pass, the host handles the request (HTTP, tokens), one request after the
other. A framework may look for new requests only every few passes; a worker without sequences looks all the time.

Frameworks that mix prefill and decode also give running sequences a token in passes over prompts; the attention of
these sequences is added to the pass.
Passes between two arrivals or ends are alike, so they are counted and not run one by one.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from laconic.simulator.serving.load import Load

_GRID = 1.25
"""The ratio of neighbouring sizes at which pass times are computed; between them, times are interpolated."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The times of passes on one group of GPUs, host included."""

    prompt_s: Callable[[float], float]
    """The time of a prefill pass, by its number of tokens."""
    output_s: Callable[[float], float]
    """The time per token in decode passes, by the number of sequences."""
    mixed_sequence_s: float
    """The time that a running sequence adds to a pass over prompts."""
    tokens_per_pass: int
    """The most prompt tokens in a pass; longer prompts take several passes."""
    mixes: bool
    """Whether passes over prompts give running sequences a token."""
    accepted: float = 1.0
    """The tokens that a running sequence gets from one pass."""
    handling_s: Callable[[float], float] = lambda tokens: 0.0
    """The time of the host for a request before its first pass, by the tokens of its prompt."""
    poll_passes: int = 1
    """The number of decode passes between two checks for new requests."""
    batch_wait_passes: int = 0
    """The most decode passes that prompts wait for further prompts, while sequences run."""
    batch_wait_tokens: float = 0.0
    """Prompts do not wait any longer once the next pass has this many tokens."""


@dataclass(frozen=True)
class Replayed:
    """Means over all requests."""

    first_s: float
    """From a request until the end of the pass that has its prompt."""
    token_s: float
    """Per output token after the first; a pass for one sequence where answers have no second token."""


@dataclass(frozen=True)
class _Request:
    sent_s: float
    ready_s: float
    """When the host has handled it."""
    input_tokens: float
    output_tokens: float


def replay(clients: int, load: Load, places: int, passes: Passes) -> Replayed:
    """The benchmark on one group of GPUs that serves `clients` and holds up to `places` sequences at once."""
    run = _Run(clients, load, places, passes)
    while run.unanswered:
        run.advance()
    token_s = statistics.fmean(run.token_s) if run.token_s else passes.output_s(1.0)
    return Replayed(statistics.fmean(run.first_s), token_s)


class _Run:
    """The state of the benchmark; `_tokens` counts what a sequence that runs since the start would have been given."""

    def __init__(self, clients: int, load: Load, places: int, passes: Passes) -> None:
        # The same requests in every run: differences come from what is compared.
        self._random = random.Random(0)
        self._load, self._places, self._passes = load, places, passes
        self._prompt_s, self._output_s = interpolated(passes.prompt_s), interpolated(passes.output_s)
        self.unanswered = clients * load.requests_per_client
        self._unsent = self.unanswered
        self._now_s = self._tokens = 0.0
        self._host_free_s = 0.0
        self._poll_at = 0.0
        """The count of `_tokens` at which the framework looks for new requests."""
        self._gathering_since: float | None = None
        """The count of `_tokens` at which a prompt began to wait for further prompts."""
        self._waiting: deque[_Request] = deque()
        self._running: list[tuple[float, int, float, float]] = []
        """The count of `_tokens` at which it ends; the request's number; its first token's time; its further tokens."""
        self.first_s: list[float] = []
        self.token_s: list[float] = []
        for _ in range(clients):
            self._send()

    def advance(self) -> None:
        """Run the next pass over prompts, or all passes until an answer ends."""
        wanted = bool(self._waiting) and len(self._running) < self._places
        if wanted and not self._running:
            self._now_s = max(self._now_s, self._waiting[0].ready_s)
            self._poll_at = self._tokens
        if wanted and self._tokens >= self._poll_at and self._waiting[0].ready_s <= self._now_s:
            wait = self._passes_to_wait()
            if wait > 0:
                self._write_tokens(until_poll=False, at_most=wait)
            else:
                self._read_prompts()
                self._gathering_since = None
            self._poll_at = self._tokens
        else:
            self._write_tokens(until_poll=wanted)
        while self._running and self._running[0][0] <= self._tokens + 1e-9:
            _, _, since_s, more = heapq.heappop(self._running)
            if more > 0:
                self.token_s.append((self._now_s - since_s) / more)
            self.unanswered -= 1
            if self._unsent:
                self._send()

    def _passes_to_wait(self) -> float:
        """Decode passes that prompts still wait for further prompts."""
        passes = self._passes
        if not passes.batch_wait_passes or not self._running:
            return 0.0
        ready = sum(request.input_tokens for request in self._waiting if request.ready_s <= self._now_s)
        if ready + len(self._running) >= passes.batch_wait_tokens:
            return 0.0
        if self._gathering_since is None:
            self._gathering_since = self._tokens
        return self._gathering_since + passes.batch_wait_passes - self._tokens

    def _write_tokens(self, *, until_poll: bool, at_most: float = math.inf) -> None:
        """Decode passes until an answer ends; with `until_poll` at most until the check that finds the next request."""
        every = self._passes.poll_passes
        output_s = self._output_s(float(len(self._running)))
        number = min(at_most, max(0.0, self._running[0][0] - self._tokens))
        if self._poll_at <= self._tokens:
            self._poll_at += every * (math.floor((self._tokens - self._poll_at) / every) + 1)
        if until_poll:
            poll_s = self._now_s + (self._poll_at - self._tokens) * output_s
            missed = math.ceil(max(0.0, self._waiting[0].ready_s - poll_s) / (every * output_s) - 1e-9)
            self._poll_at += every * missed
            number = min(number, self._poll_at - self._tokens)
        self._now_s += number * output_s
        self._tokens += number

    def _send(self) -> None:
        self._unsent -= 1
        load = self._load
        tokens = self._drawn(load.input_tokens)
        self._host_free_s = max(self._host_free_s, self._now_s) + self._passes.handling_s(tokens)
        self._waiting.append(
            _Request(self._now_s, self._host_free_s, tokens, max(1.0, self._drawn(load.output_tokens)))
        )

    def _drawn(self, most: int) -> float:
        return most * (1 - (1 - self._load.shortest) * self._random.random())

    def _read_prompts(self) -> None:
        passes, running = self._passes, len(self._running)
        batch, tokens = [], 0.0
        while self._waiting and running + len(batch) < self._places and self._waiting[0].ready_s <= self._now_s:
            if batch and tokens + self._waiting[0].input_tokens > passes.tokens_per_pass:
                break
            batch.append(self._waiting.popleft())
            tokens += batch[-1].input_tokens
        self._now_s += self._prompt_s(tokens)
        if passes.mixes:
            number = math.ceil(tokens / passes.tokens_per_pass)
            self._now_s += number * running * passes.mixed_sequence_s
            self._tokens += number * passes.accepted
        for request in batch:
            self.first_s.append(self._now_s - request.sent_s)
            more = request.output_tokens - 1
            heapq.heappush(self._running, (self._tokens + more, len(self.first_s), self._now_s, more))


def interpolated(exact: Callable[[float], float]) -> Callable[[float], float]:
    """The function, computed only at the sizes 1, _GRID, _GRID^2, ... and interpolated linearly between them."""
    known: dict[int, float] = {}

    def at(power: int) -> float:
        if power not in known:
            known[power] = exact(_GRID**power)
        return known[power]

    def found(size: float) -> float:
        power = math.floor(math.log(max(1.0, size)) / math.log(_GRID))
        low, high = _GRID**power, _GRID ** (power + 1)
        return at(power) + (at(power + 1) - at(power)) * (max(1.0, size) - low) / (high - low)

    return found
