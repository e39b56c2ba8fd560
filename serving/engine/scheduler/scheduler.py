"""What the model computes next, and what became of it.

One rule covers prefill, chunked prefill and decode: each running request
computes the tokens it has and has not computed, as far as the step's token
budget goes; when it has caught up, its next token is sampled. Requests that
sample in every step (decodes) come first, so prompts never hold them up;
prompts under way follow, then new requests, by rank: (priority, arrival).

Steps are dispatched ahead: `schedule` may be called again before `finish` has
been called for the step before. A sampled token is then counted in a request's
length although the host does not know it yet, and the next step names it by
its slot. When a request turns out to have ended, its rows in the steps under
way are thrown away.

A model in stages has a step under way in each of them, and what a step samples is
known when it has left the last one. So its requests decode again as many steps later
as there are stages, or once it is back: a step between them that needed the token would
hold up the first stage. The steps between are of other requests, which take turns: a
step takes those that have waited longest, so many that all come once in that many
steps. Chunks of a prompt need no token, and follow each other without a gap.

A slot and its blocks are released only when no step under way names the slot:
nothing that a step could still write is ever handed out. A request that has
to go (ended or preempted) is `leaving` until then.

Blocks: a request is admitted with the blocks of all its known tokens, and only
if one more stays free for each running request; after that, it takes one
whenever it needs one. When there is none, the running request of the highest
rank is preempted, unless one is already leaving: it waits for admission again
and then recomputes its tokens (most of which are often still in the prefix
cache). A request only preempts requests ranked after it, so the first one
always gets on, and all requests finish.

Prompts that start alike and come together are computed once: the first is
admitted, and those that would find a long part of it in the prefix cache wait
until it is there.

A request for an embedding has no output: it ends when its prompt is computed. Of its hidden
states, each step gives the sum over a chunk.

A request that a grammar guides may have only some tokens, which ones depends on all before. So
it decodes again only when the token before is back; the steps between are of the others.

Per slot, state lives in NumPy arrays: a step of decodes takes no Python per
request to schedule.
"""

from __future__ import annotations

import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from weft.errors import RequestError
from weft.models.interface import FINITE, Float32, Int32, StepInput, StepOutput
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.protocol import (
    Add,
    EngineStats,
    FinishReason,
    Move,
    TokenLogprob,
    TokenOutput,
)
from weft.serving.engine.scheduler.block_manager import BlockManager, Slots, block_keys, new_prefix_hash
from weft.serving.engine.scheduler.request import Request, token_logprob
from weft.serving.engine.scheduler.step_builder import Chunk, Flight, Part, build_step, take_scores


class Scheduler:
    """Requests in, steps out; results of steps in, tokens out. Runs in one thread.

    Args:
        kv: the blocks; nothing else may change them.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: most tokens of one request.
        prefix_caching: whether blocks are shared between prompts that start alike.
        worth_waiting: tokens; a request is not admitted while a running one computes so many of
            its first tokens, because it will find them in the prefix cache.
        stages: of the model.
    """

    def __init__(
        self,
        kv: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        worth_waiting: int = 512,
        stages: int = 1,
    ) -> None:
        self.kv = kv
        self._budget = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._prefix_caching = prefix_caching
        self._worth_waiting = worth_waiting
        self._stages = stages

        # A decode takes one token of the budget, so no more slots than that.
        num_slots = min(kv.max_num_seqs, max_num_batched_tokens)
        self._free_slots = list(reversed(range(num_slots)))
        self._running: list[Request | None] = [None] * num_slots  # by slot
        self._leaving: set[int] = set()  # slots
        self._prefilling: list[Request] = []  # by rank
        self._waiting: list[Request] = []  # by rank
        self._live: dict[str, Request] = {}
        self._coming: dict[bytes, Request] = {}  # keys of blocks, and who computes them
        self._flights: deque[Flight] = deque()
        self._guides: dict[int, GrammarMatcher] = {}  # by slot
        self._moves: list[Move] = []

        # By slot. `length` counts tokens that are under way, `done` only those computed.
        self._length = np.zeros(num_slots, np.int32)
        self._prompt_length = np.zeros(num_slots, np.int32)
        self._limit = np.zeros(num_slots, np.int32)
        self._done = np.zeros(num_slots, np.int32)
        self._registered = np.zeros(num_slots, np.int32)
        self._steps_under_way = np.zeros(num_slots, np.int32)
        self._decoding = np.zeros(num_slots, np.bool_)
        self._sampled_in = np.zeros(num_slots, np.int64)  # the last step

        self._order = 0
        self._steps = 0
        self._finished_steps = 0
        self._step_seconds = 0.0
        self._preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # Requests.

    def add(self, add: Add, guide: GrammarMatcher | None = None) -> None:
        """Queue a request, with a guide if it has a grammar.

        Raises:
            RequestError: it can never run.
        """
        if add.request_id in self._live:
            raise RequestError(f"request id {add.request_id!r} is in use", param="request_id")
        request = Request(add, self._order, self._max_model_len, guide)
        if not 0 < len(request) < request.limit:
            raise RequestError(
                f"the prompt has {len(request)} tokens; it must have at least 1, and with the "
                f"output at most {self._max_model_len}",
                param="prompt",
            )
        # The last token is sampled but never computed.
        need = self.kv.blocks_for(request.limit - 1)
        if need > self.kv.total:
            raise RequestError(
                f"the request may take {need} blocks of the KV cache, which has {self.kv.total}; "
                "lower max_tokens or raise --kv-cache-memory",
                param="max_tokens",
            )
        self._order += 1
        self._live[request.id] = request
        insort(self._waiting, request, key=_rank)

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End these requests; unknown ones are ignored."""
        requests = [self._live[i] for i in request_ids if i in self._live]
        outputs = self._end_all(requests, "abort")
        self._release()
        return outputs

    def has(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._live

    def cached(self, token_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens the prefix cache has now."""
        if not self._prefix_caching:
            return 0
        keys = block_keys(new_prefix_hash(), array("i", token_ids), self.kv.block_size)
        return len(self.kv.find_prefix(keys)) * self.kv.block_size

    @property
    def count(self) -> int:
        """How many have not ended."""
        return len(self._live)

    @property
    def live(self) -> tuple[str, ...]:
        """Requests that have not ended."""
        return tuple(self._live)

    def stats(self) -> EngineStats:
        """How things stand."""
        running = len(self._running) - len(self._free_slots) - len(self._leaving)
        return EngineStats(
            running=running,
            waiting=len(self._live) - running,
            kv_blocks_used=self.kv.total - self.kv.available,
            kv_blocks_total=self.kv.total,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            steps=self._finished_steps,
            step_seconds=self._step_seconds,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def take_moves(self) -> list[Move]:
        """Which requests were admitted or preempted since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # A step: what to compute.

    def schedule(self) -> StepInput | None:
        """The next step, or None when there is nothing to compute now."""
        decodes = self._take_decodes()
        chunks = self._take_chunks(self._budget - len(decodes))
        if not len(decodes) and not chunks:
            return None
        flight = build_step(
            self._steps,
            decodes,
            chunks,
            self._length,
            self._prompt_length,
            self.kv,
            self._guides,
        )
        self._flights.append(flight)
        self._steps += 1

        slots = flight.batch.slot
        self._steps_under_way[slots] += 1
        sampled = flight.batch.sample_slot
        self._length[sampled] += 1
        self._decoding[sampled] = True
        self._sampled_in[sampled] = flight.batch.step
        return flight.batch

    def _take_decodes(self) -> Slots:
        """Slots that compute the token they sampled last, each with a block to write it to."""
        ready = self._decoding & (self._length < self._limit)
        if self._guides:
            guided = list(self._guides)
            ready[guided] &= self._sampled_in[guided] < self._finished_steps
        share = len(ready)
        if self._stages > 1:  # in so many steps, shares add up to all that run
            running = int(np.count_nonzero(ready))
            share = max(1, (running + self._steps % self._stages) // self._stages)
            ready &= self._sampled_in < max(self._steps - self._stages + 1, self._finished_steps)
        num_blocks = self.kv.num_blocks[: len(ready)]
        short = self._length > num_blocks * self.kv.block_size
        slots = self._longest_waiting(ready, share)
        if self.kv.can_append(slots[short[slots]]):
            self.kv.append_block(slots[short[slots]])
            return slots
        # All that are ready, for those whose turn it is may have to wait for one whose is not.
        for request in sorted(self._at(np.flatnonzero(ready & short).tolist()), key=_rank):
            # A request earlier in this loop may have preempted this one.
            here = self._running[request.slot] is request and self._decoding[request.slot]
            if here and not self._grow(request):
                ready[request.slot] = False
        return self._longest_waiting(ready & self._decoding, share)

    def _longest_waiting(self, ready: npt.NDArray[np.bool_], most: int) -> Slots:
        """At most so many of the slots that are ready, in order of their numbers."""
        slots = np.flatnonzero(ready)
        if len(slots) <= most:
            return slots
        turn = np.argsort(self._sampled_in[slots], kind="stable")
        return np.sort(slots[turn[:most]])

    def _grow(self, request: Request) -> bool:
        """One more block for a request, if need be from one that is ranked after it."""
        length = int(self._length[request.slot])
        while not self.kv.can_allocate(request.slot, length):
            # What is leaving brings blocks back soon: wait for it before taking more away.
            if self._leaving:
                return False
            staying = set(range(len(self._running))) - self._leaving
            last = max(self._at(staying), key=_rank)
            if last is request:
                return False
            self._preemptions += 1
            self._moves.append(Move(last.id, False, time.monotonic()))
            self._leave(last)
            self._release()
        self.kv.allocate(request.slot, length)
        return True

    def _take_chunks(self, budget: int) -> list[Chunk]:
        """Known tokens to compute: of prompts under way, then of newly admitted requests."""
        chunks = []
        for request in self._prefilling:
            if budget == 0:
                break
            chunks.append(self._advance(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        while budget and self._waiting and self._free_slots and self._admit(self._waiting[0]):
            request = self._waiting.pop(0)
            insort(self._prefilling, request, key=_rank)
            chunks.append(self._advance(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        self._prefilling = [r for r in self._prefilling if r.computed < len(r)]
        return chunks

    def _advance(self, request: Request, budget: int) -> Chunk:
        start = request.computed
        request.computed = min(len(request), start + budget)
        return Chunk(request, start, request.computed)

    def _admit(self, request: Request) -> bool:
        """Give the request a slot and the blocks of all its known tokens, if there are enough."""
        size = self.kv.block_size
        prefix: list[int] = []
        keys: list[bytes] = []
        if self._prefix_caching:
            keys = request.keys(len(request) // size, size)
            reusable = keys[: request.reusable // size]
            prefix = self.kv.find_prefix(reusable)
            coming = takewhile(self._coming.__contains__, reusable[len(prefix) :])
            if sum(size for _ in coming) >= self._worth_waiting:
                return False
        slot = self._free_slots[-1]
        # With a block to spare for each request, all get on before the next preemption.
        spare = len(self._running) - len(self._free_slots)
        if not self.kv.can_allocate(slot, len(request), prefix, spare=spare):
            return False
        self.kv.allocate(slot, len(request), prefix)
        self._free_slots.pop()
        self._running[slot] = request
        self._coming |= dict.fromkeys(keys[len(prefix) :], request)
        request.slot = slot
        request.computed = len(prefix) * size
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.prompt_length)
            request.queued = time.monotonic() - request.arrival
            self._prompt_tokens += request.prompt_length
        if self._prefix_caching:
            self._prefix_queries += len(request)
            self._prefix_hits += request.computed
        self._length[slot] = len(request)
        self._prompt_length[slot] = request.prompt_length
        self._limit[slot] = request.limit
        self._done[slot] = request.computed
        self._registered[slot] = len(prefix)
        self._decoding[slot] = False
        if request.guide is not None:
            self._guides[slot] = request.guide
        self._moves.append(Move(request.id, True, time.monotonic()))
        return True

    # A step: what came of it.

    def finish(self, result: StepOutput) -> list[TokenOutput]:
        """Take in the result of the oldest step under way; new tokens and ends of requests."""
        flight = self._flights.popleft()
        batch = flight.batch
        assert result.step == batch.step, f"step {result.step} came back, not {batch.step}"
        self._finished_steps += 1
        self._step_seconds += result.seconds
        self._done[batch.slot] = batch.context_len
        self._steps_under_way[batch.slot] -= 1

        if result.prompt_logprobs is not None:
            take_scores(flight.scores, result.prompt_logprobs)
        outputs = self._take_tokens(batch.sample_slot, result)
        outputs += self._take_sums(flight.sums, result.pooled)
        if self._prefix_caching:
            self._register(batch.slot)
        self._release()
        return outputs

    def _take_tokens(self, slots: Int32, result: StepOutput) -> list[TokenOutput]:
        """Append each row's token to its request, which may have ended with it, and say so."""
        outputs: list[TokenOutput] = []
        broken: list[Request] = []
        misled: list[tuple[Request, str]] = []
        running = self._running
        faulty = frozenset(np.flatnonzero(result.status != FINITE).tolist())
        rows = zip(slots.tolist(), result.token_ids.tolist(), strict=True)
        for row, (slot, token) in enumerate(rows):
            request = running[slot]
            assert request is not None, "a slot is not released while a step names it"
            if request.ended:
                continue
            if faulty and row in faulty:
                self._distrust(slot)
                broken.append(request)
                continue
            token_ids = request.token_ids
            token_ids.append(token)
            reason: FinishReason | None = None
            stop_token_id = logprobs = prompt_logprobs = None
            if token in request.end_token_ids:
                reason, stop_token_id = "stop", token
                self._end(request)
            elif len(token_ids) == request.limit:
                reason = "length"
                self._end(request)
            elif request.guide is not None:
                if (error := request.guide.advance(token)) is not None:
                    misled.append((request, error))
                    continue
                if request.guide.ended:
                    reason = "stop"
                    self._end(request)
            if request.wants_logprobs:
                logprobs, prompt_logprobs = _take_logprobs(request, row, token, result)
            queued, request.queued = request.queued, None
            outputs.append(
                TokenOutput(
                    request.id,
                    [token],
                    reason,
                    stop_token_id,
                    logprobs,
                    prompt_logprobs,
                    request.cached_tokens,
                    queued=queued,
                )
            )
        self._generation_tokens += len(outputs)
        outputs += self._end_all(broken, "error", _NOT_FINITE)
        for request, error in misled:
            outputs += self._end_all([request], "error", error, faulty_grammar=True)
        return outputs

    def _take_sums(self, sums: list[Part], hidden: Float32) -> list[TokenOutput]:
        """Add hidden states, [E, hidden], to those of their requests; those that have all end."""
        outputs: list[TokenOutput] = []
        broken: list[Request] = []
        for part, own in zip(sums, hidden, strict=True):
            request = part.request
            if request.ended:
                continue
            if not np.isfinite(own).all():
                self._distrust(request.slot)
                broken.append(request)
                continue
            request.hidden_sum += own
            if part.stop == request.prompt_length:
                self._end(request)
                outputs.append(
                    TokenOutput(
                        request.id,
                        [],
                        "stop",
                        cached_tokens=request.cached_tokens,
                        queued=request.queued,
                        embedding=request.embedding,
                    )
                )
        return outputs + self._end_all(broken, "error", _NOT_FINITE)

    def _distrust(self, slot: int) -> None:
        """Offer the blocks of a slot to the prefix cache no more."""
        self.kv.evict(slot)
        self._registered[slot] = self.kv.total

    def _register(self, slots: Int32) -> None:
        """Offer blocks that are now full to the prefix cache."""
        size = self.kv.block_size
        done, registered = self._done[slots], self._registered[slots]
        full = np.flatnonzero(done >= (registered + 1) * size)
        rows = zip(
            slots[full].tolist(), done[full].tolist(), registered[full].tolist(), strict=True
        )
        for slot, computed, first in rows:
            request = self._running[slot]
            assert request is not None
            # Of an aborted request, tokens may be computed that the host never saw.
            known = min(computed, len(request)) // size
            keys = request.keys(known, size)
            self.kv.cache_blocks(slot, first, keys[first:])
            for key in keys[first:]:
                self._coming.pop(key, None)
            self._registered[slot] = max(known, first)

    # Coming to an end.

    def _end_all(
        self,
        requests: list[Request],
        reason: FinishReason,
        error: str | None = None,
        *,
        faulty_grammar: bool = False,
    ) -> list[TokenOutput]:
        for request in requests:
            self._end(request)
        return [
            TokenOutput(
                r.id,
                [],
                finish_reason=reason,
                cached_tokens=max(r.cached_tokens, 0),
                error=error,
                faulty_grammar=faulty_grammar,
            )
            for r in requests
        ]

    def _end(self, request: Request) -> None:
        """Nothing more is told about the request; `_release` frees what it holds."""
        request.ended = True
        del self._live[request.id]
        if request.slot < 0:
            self._waiting.remove(request)
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """Take no more steps; `_release` takes the slot once the last one is back."""
        for key in request.known_keys:
            if self._coming.get(key) is request:
                del self._coming[key]
        self._leaving.add(request.slot)
        self._decoding[request.slot] = False
        if request in self._prefilling:
            self._prefilling.remove(request)

    def _release(self) -> None:
        """Free slots and blocks that are being left and that no step under way names."""
        for slot in [slot for slot in self._leaving if self._steps_under_way[slot] == 0]:
            request = self._running[slot]
            assert request is not None
            self.kv.free(slot)
            self._leaving.remove(slot)
            self._running[slot] = None
            self._guides.pop(slot, None)
            self._free_slots.append(slot)
            request.slot = -1
            if not request.ended:  # it was preempted
                insort(self._waiting, request, key=_rank)

    def _at(self, slots: Iterable[int]) -> list[Request]:
        """The requests in these slots."""
        return [request for slot in slots if (request := self._running[slot]) is not None]


def _take_logprobs(
    request: Request, row: int, token: int, result: StepOutput
) -> tuple[list[TokenLogprob] | None, list[TokenLogprob] | None]:
    """Of the token, and of the prompt with the first one: what was asked for."""
    logprobs = None
    if (top := request.params.logprobs) is not None:
        assert result.logprobs is not None, "the runner returns what was asked for"
        logprobs = [token_logprob(result.logprobs, row, token, top)]
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return logprobs, prompt_logprobs


_rank = attrgetter("rank")
_NOT_FINITE = "the model's output is not finite"
