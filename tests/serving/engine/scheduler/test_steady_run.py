"""Many decode steps at once leave the scheduler as the single steps would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.models.interface import StepInput, StepOutput
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.scheduler.steady_run import advance, steady_steps

BUDGET = 64
MOST = 50


class Run:
    """A scheduler with two steps in flight, whose model samples token 0 only."""

    def __init__(self, prompts: list[int], answers: list[int], num_blocks: int) -> None:
        self.kv = BlockManager(num_blocks, 4, 8, 256)
        self.scheduler = Scheduler(self.kv, max_num_batched_tokens=BUDGET, max_model_len=256)
        self.flight: list[StepInput | None] = []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            self.scheduler.add(
                Add(
                    str(number),
                    pack_prompt([number + 1] * prompt, 4),
                    SamplingParams(max_tokens=answer, seed=0),
                    (),
                )
            )
        self.fill()

    def fill(self) -> None:
        while len(self.flight) < 2:
            self.flight.append(self.scheduler.schedule())

    def step(self) -> None:
        batch = self.flight.pop(0)
        if batch is not None:
            zeros = np.zeros(len(batch.sample_slot), np.int32)
            self.scheduler.finish(StepOutput(batch.step, zeros, zeros))
        self.fill()

    def state(self) -> list[object]:
        """All that decides the next steps."""
        table = self.scheduler._slots
        return [
            *(table.length.tolist(), table.computed.tolist(), table.steps_in_flight.tolist()),
            *(table.decoding.tolist(), table.sampled_in.tolist(), self.kv.num_blocks.tolist()),
            [request and len(request) for request in table.requests],
            self.scheduler.stats(),
            [batch and (batch.step, batch.positions.tolist()) for batch in self.flight],
        ]


requests = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8)


@given(requests, st.integers(40, 200), st.integers(0, 30), st.integers(1, MOST))
def test_a_run_leaves_the_state_of_single_steps(
    sizes: list[tuple[int, int]], num_blocks: int, before: int, most: int
) -> None:
    prompts, answers = zip(*sizes, strict=True)
    ahead, single = (Run(prompts, answers, num_blocks) for _ in range(2))
    for _ in range(before):
        ahead.step()
        single.step()
    steps = steady_steps(ahead.scheduler, most)
    assume(steps)
    assert steps <= most
    names = advance(ahead.scheduler, steps)
    ahead.flight = []
    ahead.fill()
    for _ in range(steps):
        single.step()
    assert ahead.state() == single.state()
    assert sorted(names) == sorted(
        request.id for request in single.scheduler._slots.requests if request
    )
    for _ in range(150):
        assert ahead.state()[:-1] == single.state()[:-1]
        ahead.step()
        single.step()
    ahead.kv.check()
    assert ahead.scheduler.count == single.scheduler.count


@pytest.mark.parametrize(
    ("answers", "num_blocks", "before", "steps"),
    [
        ([30], 200, 0, 0),  # the prompt is in flight
        ([30], 200, 1, 27),  # one token is back, and two are in flight
        ([30], 200, 2, 26),
        ([30, 9], 200, 2, 5),
        ([30], 200, 28, 0),  # the last token is in flight
        ([30], 14, 2, 26),
    ],
)
def test_a_run_ends_before_a_request_does(
    answers: list[int], num_blocks: int, before: int, steps: int
) -> None:
    run = Run([20] * len(answers), answers, num_blocks)
    for _ in range(before):
        run.step()
    assert steady_steps(run.scheduler, MOST) == steps


def test_no_run_begins_if_blocks_would_not_suffice() -> None:
    run = Run([20, 20], [36, 36], 16)  # two times 5 blocks at first, and 14 each in the end
    for _ in range(3):
        run.step()
    assert steady_steps(run.scheduler, MOST) == 0
    assert steady_steps(run.scheduler, 4) == 4
