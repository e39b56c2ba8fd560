"""Chooses what the model computes next, and turns each step's result into outputs.

One rule covers prefill, chunked prefill and decode: a running request computes the tokens that it
has and has not computed yet, as far as the step's token budget allows. When it has caught up, its
next token is sampled. Decodes come first, so prompts never hold them up. Prompts in progress
follow, then new requests, both by order: (priority, arrival).

Steps are dispatched ahead: `schedule` may be called again before `finish` was called for earlier
steps. A sampled token then counts in a request's length although it has not come back yet, and the
next step names it by its slot. If a request turns out to have ended, its rows in the steps in
flight are discarded.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from weft.errors import RequestError
from weft.models.interface import FINITE, Float32, StepInput, StepOutput
from weft.serving.engine.grammar.matcher import Matcher
from weft.serving.engine.protocol import Add, EngineStats, FinishReason, Move, TokenOutput
from weft.serving.engine.scheduler.block_manager import BlockManager, Slots
from weft.serving.engine.scheduler.counters import Counters
from weft.serving.engine.scheduler.prefix_wait import PrefixWait
from weft.serving.engine.scheduler.request import Request, token_logprob
from weft.serving.engine.scheduler.slot_table import SlotTable
from weft.serving.engine.scheduler.step_builder import (
    Chunk,
    Part,
    StepInFlight,
    build_step,
    take_scores,
)

ANSWER_BLOCKS = 8
"""Number of full blocks of an answer that go to the prefix cache together."""


class Scheduler:
    """Takes requests and returns steps; takes results and returns outputs. Runs in one thread.

    Args:
        kv: the blocks; nothing else may change them.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        prefix_caching: share blocks between prompts that start alike.
        worth_waiting: see `PrefixWait`.
        stages: number of pipeline stages of the model.
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
        self._stages = stages
        # A decode takes one token of the budget, so more slots than that are useless.
        self._slots = SlotTable(min(kv.max_num_seqs, max_num_batched_tokens))
        self._prefix_wait = PrefixWait(worth_waiting, kv.block_size)
        self._waiting: list[Request] = []  # by order
        self._prefilling: list[Request] = []  # by order
        self._live: dict[str, Request] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._moves: list[Move] = []
        self._counters = Counters()

    def schedule(self) -> StepInput | None:
        """Return the next step, or None when there is nothing to compute now."""
        decodes = self._take_decodes()
        chunks = self._take_chunks(self._budget - len(decodes))
        if not len(decodes) and not chunks:
            return None
        step = build_step(self._counters.submitted, decodes, chunks, self._slots, self.kv)
        self._in_flight.append(step)
        self._slots.submitted(self._counters.submitted, step.slots, step.sampled)
        self._counters.submitted += 1
        return step.batch

    def finish(self, result: StepOutput) -> list[TokenOutput]:
        """Take the result of the oldest step in flight; returns new tokens and ended requests."""
        step = self._in_flight.popleft()
        expected = step.batch.step
        assert result.step == expected, f"step {result.step} came back, not {expected}"
        self._counters.finish(result)
        self._slots.finished(step.slots, step.batch.context_len)

        if result.prompt_logprobs is not None:
            take_scores(step.scores, result.prompt_logprobs)
        outputs = self._take_tokens(step, result)
        if step.sums:
            outputs += self._take_sums(step.sums, result.pooled)
        if self._prefix_caching:
            self._cache_full_blocks(step)
        self._release()
        return outputs

    # Requests.

    def add(self, add: Add, matcher: Matcher | None = None) -> None:
        """Queue a request, with a matcher if it has a grammar.

        Raises:
            RequestError: the request can never run.
        """
        if add.request_id in self._live:
            raise RequestError(f"request id {add.request_id!r} is in use", param="request_id")
        request = Request(add, self._counters.requests, self._max_model_len, matcher)
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
        keys = len(request.known_keys)
        assert keys in (0, request.prompt_length // self.kv.block_size), "another block size"
        self._counters.requests += 1
        self._live[request.id] = request
        insort(self._waiting, request, key=_order)

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End these requests; unknown ones are ignored."""
        requests = [self._live[i] for i in request_ids if i in self._live]
        outputs = [self._end_early(request, "abort") for request in requests]
        self._release()
        return outputs

    def has(self, request_id: str) -> bool:
        """Return whether a request is live: it has not ended."""
        return request_id in self._live

    def cached_tokens(self, add: Add) -> int:
        """Return how many first tokens of a request's prompt are in the prefix cache now."""
        return len(self.kv.find_prefix(add.prompt.block_keys())) * self.kv.block_size

    @property
    def count(self) -> int:
        """Number of live requests."""
        return len(self._live)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the live requests."""
        return tuple(self._live)

    def stats(self) -> EngineStats:
        """Return a snapshot of requests, blocks and counts."""
        return self._counters.stats(
            running=self._slots.running,
            waiting=len(self._live) - self._slots.running,
            blocks_used=self.kv.total - self.kv.available,
            blocks=self.kv.total,
        )

    def take_moves(self) -> list[Move]:
        """Return which requests were admitted or preempted since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # Decodes.

    def _take_decodes(self) -> Slots:
        """Return slots that compute the token they sampled last, each with a block to write to.

        A request with a grammar decodes only when its last token is back, because its matcher
        needs that token to compute the next mask.

        With pipeline stages, a token is known when its step has left the last stage. A step that
        needed it earlier would hold up the first stage. So a request decodes again when its token
        is back, or after as many steps as there are stages. Each step takes an equal share of the
        requests, beginning with the longest waiting ones.
        """
        slots = self._slots
        ready = slots.decoding & (slots.length < slots.limit)
        if slots.matchers:
            constrained = list(slots.matchers)
            ready[constrained] &= slots.sampled_in[constrained] < self._counters.finished
        share = len(ready)
        if self._stages > 1:  # the shares of this many steps add up to all running requests
            submitted = self._counters.submitted
            running = int(np.count_nonzero(ready))
            share = max(1, (running + submitted % self._stages) // self._stages)
            back = max(submitted - self._stages + 1, self._counters.finished)
            ready &= slots.sampled_in < back
        full = slots.length > self.kv.num_blocks[: len(ready)] * self.kv.block_size
        decodes = self._longest_waiting(ready, share)
        growing = decodes[full[decodes]]
        if self.kv.can_append(growing):
            self.kv.append_block(growing)
            return decodes
        # Blocks are scarce. Look at all ready requests, because some of the chosen ones may have
        # to wait for a request that was not chosen.
        for request in sorted(slots.requests_in(np.flatnonzero(ready & full).tolist()), key=_order):
            # An earlier request in this loop may have preempted this one.
            slot = request.slot
            runs = slots.requests[slot] is request and slots.decoding[slot]
            if runs and not self._add_block(request):
                ready[slot] = False
        return self._longest_waiting(ready & slots.decoding, share)

    def _longest_waiting(self, ready: npt.NDArray[np.bool_], count: int) -> Slots:
        """Return at most `count` ready slots, in ascending order."""
        ready_slots = np.flatnonzero(ready)
        if len(ready_slots) <= count:
            return ready_slots
        by_wait = np.argsort(self._slots.sampled_in[ready_slots], kind="stable")
        return np.sort(ready_slots[by_wait[:count]])

    def _add_block(self, request: Request) -> bool:
        """Give a request one more block; returns False if it has to wait for one.

        If no block is available, the running request that is last in order is preempted, unless a
        retired request is about to free its blocks. A request only preempts requests after it in
        order. So the first request always makes progress, and all requests finish.
        """
        length = int(self._slots.length[request.slot])
        while not self.kv.can_allocate(request.slot, length):
            if self._slots.retired:
                return False
            last = max(self._slots.requests_in(range(len(self._slots.requests))), key=_order)
            if last is request:
                return False
            self._preempt(last)
        self.kv.allocate(request.slot, length)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's slot and blocks away; it waits for admission again.

        It then recomputes its tokens, most of which are often still in the prefix cache.
        """
        self._counters.preemptions += 1
        self._moves.append(Move(request.id, False, time.monotonic()))
        self._retire(request)
        self._release()

    # Prompts.

    def _take_chunks(self, budget: int) -> list[Chunk]:
        """Return known tokens to compute: of prompts in progress, then of new requests.

        Chunks of one prompt need no sampled token, so they follow each other without a gap, even
        through pipeline stages.
        """
        chunks = []
        for request in self._prefilling:
            if budget == 0:
                break
            chunks.append(self._next_chunk(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        while budget and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.pop(0)
            insort(self._prefilling, request, key=_order)
            chunks.append(self._next_chunk(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        if chunks:
            self._prefilling = [r for r in self._prefilling if r.computed < len(r)]
        return chunks

    def _next_chunk(self, request: Request, budget: int) -> Chunk:
        start = request.computed
        request.computed = min(len(request), start + budget)
        return Chunk(request, start, request.computed)

    def _admit(self, request: Request) -> bool:
        """Give a request a slot and the blocks of all its known tokens, if there are enough.

        One more block has to stay available for each running request, so that all of them make
        progress before the next preemption.
        """
        slot = self._slots.next_free
        if slot is None:
            return False
        size = self.kv.block_size
        prefix: list[int] = []
        keys: list[bytes] = []
        if self._prefix_caching:
            keys = request.keys(len(request) // size, size)
            reusable = keys[: request.reusable // size]
            prefix = self.kv.find_prefix(reusable)
            if self._prefix_wait.is_worth_it(reusable, len(prefix)):
                return False
        if not self.kv.can_allocate(slot, len(request), prefix, spare=self._slots.in_use):
            return False
        self.kv.allocate(slot, len(request), prefix)
        request.computed = len(prefix) * size
        self._slots.assign(request, cached_blocks=len(prefix))
        if len(keys) > len(prefix):
            self._prefix_wait.expect(request, len(keys))
        if self._prefix_caching:
            self._counters.prefix_lookup(request)
        now = time.monotonic()
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.prompt_length)
            request.queued = now - request.arrival
            self._counters.prompt_tokens += request.prompt_length
        self._moves.append(Move(request.id, True, now))
        return True

    def _cache_full_blocks(self, step: StepInFlight) -> None:
        """Offer full blocks to the prefix cache: of prompts at once, of answers several together.

        A block of an answer alone takes several times as long, because its data is cold.
        """
        for chunk in step.chunks:
            self._cache_blocks(chunk.request)
        slots = step.slots[: len(step.slots) - len(step.chunks)]
        new = self._slots.computed[slots] - self._slots.cached_blocks[slots] * self.kv.block_size
        due = slots[new >= ANSWER_BLOCKS * self.kv.block_size]
        for request in self._slots.requests_in(due.tolist()):
            self._cache_blocks(request)

    def _cache_blocks(self, request: Request) -> None:
        """Offer a running request's full blocks to the prefix cache."""
        size = self.kv.block_size
        first = int(self._slots.cached_blocks[request.slot])
        # Steps may have computed tokens of an aborted request that never came back to the host.
        end = min(int(self._slots.computed[request.slot]), len(request)) // size
        if end > first:
            keys = request.keys(end, size)[first:]
            self.kv.cache_blocks(request.slot, first, keys)
            self._slots.cached_blocks[request.slot] = end
            self._prefix_wait.computed(request, end)

    def _drop_from_prefix_cache(self, request: Request) -> None:
        """Remove a request's blocks from the prefix cache, and never offer them again."""
        self._prefix_wait.cancel(request)
        self.kv.evict(request.slot)
        self._slots.cached_blocks[request.slot] = self.kv.total

    # Results.

    def _take_tokens(self, step: StepInFlight, result: StepOutput) -> list[TokenOutput]:
        """Append each row's token to its request; returns an output for each live request."""
        outputs: list[TokenOutput] = []
        failed = 0
        not_finite = result.status != FINITE
        special = not_finite | step.reaches_limit | ~self._slots.routine[step.sampled]
        requests = map(self._slots.requests.__getitem__, step.sampled.tolist())
        tokens = result.token_ids.tolist()
        rows = zip(range(len(tokens)), requests, tokens, special.tolist(), strict=True)
        for row, request, token, is_special in rows:
            assert request is not None, "a slot is not released while a step names it"
            if not is_special and token not in request.end_token_ids:
                request.token_ids.append(token)
                outputs.append(
                    TokenOutput(request.id, [token], None, None, None, None, request.cached_tokens)
                )
            elif not request.ended:
                if not_finite[row]:
                    outputs.append(self._fail_not_finite(request))
                else:
                    outputs.append(self._take_special_token(request, row, token, result))
                failed += outputs[-1].finish_reason == "error"
        self._counters.generation_tokens += len(outputs) - failed
        return outputs

    def _take_special_token(
        self, request: Request, row: int, token: int, result: StepOutput
    ) -> TokenOutput:
        """Append a token that may be the first or last one, or has more to report than itself."""
        request.token_ids.append(token)
        reason: FinishReason | None = None
        stop_token_id = logprobs = None
        if token in request.end_token_ids:
            reason, stop_token_id = "stop", token
        elif len(request) == request.limit:
            reason = "length"
        elif request.matcher is not None:
            if (error := request.matcher.advance(token)) is not None:
                return self._end_early(request, "error", error, faulty_grammar=True)
            if request.matcher.ended:
                reason = "stop"
        if reason is not None:
            self._end(request)
        elif request.matcher is None and not request.wants_logprobs:
            self._slots.routine[request.slot] = request.slot not in self._slots.retired
        if (top := request.params.logprobs) is not None:
            assert result.logprobs is not None, "the runner returns requested log probabilities"
            logprobs = [token_logprob(result.logprobs, row, token, top)]
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        queued, request.queued = request.queued, None
        return TokenOutput(
            request.id,
            [token],
            reason,
            stop_token_id,
            logprobs,
            prompt_logprobs,
            request.cached_tokens,
            queued=queued,
        )

    def _take_sums(self, sums: list[Part], hidden: Float32) -> list[TokenOutput]:
        """Add sums of hidden states, [E, hidden], to their requests; returns finished embeddings.

        A request for an embedding has no output tokens. It ends when its prompt is computed.
        """
        outputs: list[TokenOutput] = []
        for part, own in zip(sums, hidden, strict=True):
            request = part.request
            if request.ended:
                continue
            if not np.isfinite(own).all():
                outputs.append(self._fail_not_finite(request))
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
        return outputs

    # Ends of requests.

    def _fail_not_finite(self, request: Request) -> TokenOutput:
        self._drop_from_prefix_cache(request)
        return self._end_early(request, "error", "the model's output is not finite")

    def _end_early(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        *,
        faulty_grammar: bool = False,
    ) -> TokenOutput:
        """End a request without another token; returns its last output."""
        self._end(request)
        return TokenOutput(
            request.id,
            [],
            finish_reason=reason,
            cached_tokens=max(request.cached_tokens, 0),
            error=error,
            faulty_grammar=faulty_grammar,
        )

    def _end(self, request: Request) -> None:
        """Send no further output for a request; `_release` frees what it holds."""
        request.ended = True
        del self._live[request.id]
        if request.slot < 0:
            self._waiting.remove(request)
        else:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Let a running request take part in no further step."""
        self._prefix_wait.cancel(request)
        self._slots.retire(request.slot)
        if request in self._prefilling:
            self._prefilling.remove(request)

    def _release(self) -> None:
        """Free slots and blocks of retired requests once no step in flight names them."""
        for request in self._slots.release():
            if self._prefix_caching:
                self._cache_blocks(request)
            self.kv.free(request.slot)
            request.slot = -1
            if not request.ended:  # it was preempted
                insort(self._waiting, request, key=_order)


_order = attrgetter("order")
