"""Stages that send each other hidden states and tokens, in a process each, by a fixed schedule."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from torch.distributed import destroy_process_group

from support.split import take_port
from weft.models.spec.layout import Layout
from weft.models.torch.group import make_groups, meet

STAGES, SLOTS, STEPS, WIDTH = 3, 5, 60, 8


def schedule() -> list[tuple[list[int], list[int]]]:
    """Of each step: slots whose newest token it names, and slots that it samples."""
    generator = torch.Generator().manual_seed(0)
    steps = []
    sampled: set[int] = set()
    for step in range(STEPS):
        chosen = (torch.rand(SLOTS, generator=generator) < 0.4).nonzero().flatten().tolist()
        # For a while nothing is named: what is sent back must not pile up.
        named = [slot for slot in chosen if slot in sampled and not 20 <= step < 40]
        steps.append((named, chosen))
        sampled |= set(chosen)
    return steps


def token_of(step: int, slot: int) -> int:
    return 100 * step + slot


def be_stage(rank: int, pipe: Connection) -> None:
    """A process: run the schedule, and send what has arrived."""
    torch.set_num_threads(1)
    meet(rank, STAGES, lambda own: take_port(own, pipe), timeout=60)
    counted: list[bool] = []
    stages = make_groups(Layout(rank=rank, pp=STAGES), counted.append).pipe
    newest = torch.full((SLOTS,), -1)
    known, waiting = [], 0
    for step, (named, chosen) in enumerate(schedule()):
        if stages.is_first:
            for slots, tokens in stages.receive_tokens(torch.tensor(named, dtype=torch.int64)):
                newest[slots] = tokens
            known.append(newest[named].tolist())
            stages.expect_tokens(torch.tensor(chosen, dtype=torch.int64))
            waiting = max(waiting, len(stages._expected))
            hidden = torch.full((step + 1, WIDTH), float(step))
        else:
            hidden = stages.receive(step + 1, WIDTH, torch.float32) + 1
        if not stages.is_last:
            stages.send(hidden)
            continue
        known.append(hidden.unique().tolist())
        if chosen:
            stages.send_back(torch.tensor([token_of(step, slot) for slot in chosen]))
    assert stages.waited > 0.0
    pipe.send((known, waiting, len(counted)))
    stages.close()
    destroy_process_group()
