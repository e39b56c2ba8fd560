"""Stages: hidden states arrive in order, and a step's tokens arrive before a step names them."""

from __future__ import annotations

from support.split import running
from support.stages import STAGES, STEPS, be_stage, schedule, token_of


def test_what_stages_send_each_other_arrives_in_time_and_in_order() -> None:
    with running(STAGES, be_stage) as pipes:
        (first, waiting, _), (_, _, waits), (last, _, _) = (pipe.recv() for pipe in pipes)
    newest: dict[int, int] = {}
    for step, (named, chosen) in enumerate(schedule()):
        assert first[step] == [newest[slot] for slot in named]
        newest |= {slot: token_of(step, slot) for slot in chosen}
    assert last == [[step + STAGES - 1.0] for step in range(STEPS)]
    assert waiting <= STAGES + 2
    assert waits >= STEPS
