"""Trains the two demo models from nothing, on a CPU, in about an hour and a half each.

    python -m train_demo.train --model dense --minutes 90 --out models/bundled/weft-demo

Data: chats made by `tasks.py`; step k of seed s always sees the same chats, so
a resumed run continues the stream where it stopped. Loss: on the assistant's
tokens only. Optimizer: Muon for the matrices inside the layers, AdamW for the
rest. Schedule: warm-up, constant, then linear decay to zero over the last
three fifths (WSD). Progress is counted in steps with --steps (two runs agree bit by
bit) or in time with --minutes (they do not: the decay follows the clock).

Every checkpoint is exported as well, so a model can be tried while it trains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from train_demo.export import export, load_exported, score
from train_demo.network import Network, Shape
from train_demo.vocabulary import CONTEXT, PAD, encode, token_id, train_tokenizer
from weft.models.bundled.tasks import (
    TASKS,
    Chat,
    assistant,
    held_out,
    long_chat,
    training_chat,
)  # fmt: skip

SHAPES = {"dense": Shape(intermediate=704), "moe": Shape(experts=8, intermediate=256)}
Batch = tuple[Tensor, Tensor]  # token ids and targets, [batch, length] each


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; field names are the command line's."""

    model: str = "dense"
    out: Path = Path("weft-demo")
    log: Path | None = None  # default: logs/<name of out>.jsonl beside this file
    checkpoint: Path | None = None  # default: no checkpoints
    resume: bool = False
    minutes: float = 0.0
    steps: int = 0
    seed: int = 0
    threads: int = 1
    compile: bool = False
    tokenizer_chats: int = 20_000  # that the tokenizer is trained on
    short_tokens: int = 3200  # per step
    long_every: int = 2  # steps from one long chat to the next; 0: none
    long_after: int = 400  # steps without long chats, while looking up is learned
    late_after: int = 1000  # steps before the weight shifts to the tasks that compute
    warmup: int = 50
    decay: float = 0.62  # share of the run
    matrix_rate: float = 0.02
    vector_rate: float = 0.004
    balance: float = 0.01  # weight of the experts' balance loss
    log_every: int = 20
    evaluate_every: int = 300
    save_seconds: float = 180.0


# --- Data --------------------------------------------------------------------------------


def step_chats(settings: Settings, tokenizer: Tokenizer, step: int) -> list[tuple[list[int], ...]]:
    """Token ids and targets of the chats of one step, shortest first."""
    rng = random.Random(f"train/{settings.seed}/{step}")
    late, encoded, total = step >= settings.late_after, [], 0
    every = settings.long_every * (2 if late else 1)
    if every and step >= settings.long_after and step % every == 0:
        encoded.append(encode(tokenizer, long_chat(rng)))
    while total < settings.short_tokens:
        encoded.append(encode(tokenizer, training_chat(rng, late)))
        total += len(encoded[-1][0])
    return sorted((e for e in encoded if len(e[0]) <= CONTEXT), key=lambda e: len(e[0]))


def padded(chats: list[tuple[list[int], ...]], pad: int) -> Batch:
    """Chats as one batch, padded on the right."""
    length = max(len(ids) for ids, _ in chats)
    ids = [ids + [pad] * (length - len(ids)) for ids, _ in chats]
    targets = [targets + [-100] * (length - len(targets)) for _, targets in chats]
    return torch.tensor(ids), torch.tensor(targets)


def batches(chats: list[tuple[list[int], ...]], pad: int, size: int = 1200) -> list[Batch]:
    """Batches of chats of similar length, each of about `size` tokens with padding."""
    groups: list[list[tuple[list[int], ...]]] = [[]]
    for chat in chats:
        if (len(groups[-1]) + 1) * len(chat[0]) > size and groups[-1]:
            groups.append([])
        groups[-1].append(chat)
    return [padded(group, pad) for group in groups]


# --- Optimizer ---------------------------------------------------------------------------


def orthogonal(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to update [..., rows, columns], roughly.

    Quintic Newton-Schulz iteration of Muon (Keller Jordan, 2024).
    """
    tall = update.shape[-2] > update.shape[-1]
    x: Tensor = update.mT if tall else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal; parameters [..., rows, columns] of equal rank."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * scale)


def optimizers(network: Network, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for attention and MLP matrices; AdamW for embedding, router and norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in network.named_parameters():
        inside = p.dim() > 1 and "embed_tokens" not in name and "mlp.gate.weight" not in name
        (matrices if inside else others).append(p)
    return [
        Muon(matrices, lr=settings.matrix_rate),
        torch.optim.AdamW(others, lr=settings.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(settings: Settings, step: int, progress: float) -> float:
    """What the learning rates are multiplied by; `progress` runs from 0 to 1."""
    rising = (step + 1) / settings.warmup
    falling = (1.0 - progress) / settings.decay
    return max(0.0, min(1.0, rising, falling))


# --- The run -----------------------------------------------------------------------------


class Run:
    """A training run: what a checkpoint holds, and the functions that advance it."""

    def __init__(self, settings: Settings, shape: Shape | None = None) -> None:
        torch.manual_seed(settings.seed)
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.tokenizer = train_tokenizer(settings.tokenizer_chats)
        self.pad = token_id(self.tokenizer, PAD)
        self.network = Network(shape or SHAPES[settings.model])
        if settings.compile:
            self.network.model.compile(dynamic=True)
        self.optimizers = optimizers(self.network, settings)
        self.step = self.tokens = self.learned = 0
        self.seconds = 0.0

    def progress(self) -> float:
        """Share of the run that is done."""
        if self.settings.minutes:
            return self.seconds / (60 * self.settings.minutes)
        return self.step / self.settings.steps

    def advance(self) -> dict[str, float]:
        """One optimizer step; returns what is logged of it."""
        started = time.monotonic()
        factor = rate_factor(self.settings, self.step, self.progress())
        for optimizer, rate in zip(
            self.optimizers, (self.settings.matrix_rate, self.settings.vector_rate), strict=True
        ):
            optimizer.param_groups[0]["lr"] = rate * factor
        chats = step_chats(self.settings, self.tokenizer, self.step)
        count = sum(target != -100 for _, targets in chats for target in targets)
        parts = batches(chats, self.pad)
        loss_sum = balance_sum = 0.0
        for ids, targets in parts:
            with torch.autocast("cpu", torch.bfloat16):
                loss, balance = self.network.loss(ids, targets)
            total = loss / count + self.settings.balance * balance / len(parts)
            total.backward()  # type: ignore[no-untyped-call]
            loss_sum, balance_sum = loss_sum + loss.item(), balance_sum + balance.item()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(len(ids) for ids, _ in chats)
        self.learned += count
        self.seconds += time.monotonic() - started
        return {"loss": loss_sum / count, "balance": balance_sum / len(parts), "rate": factor}

    @torch.inference_mode()
    def accuracy(self, task: str, count: int) -> float:
        """Share of held-out answers whose every token is the likeliest, given those before.

        That is the greedy answer being the gold one, at the price of one forward pass.
        """
        questions = held_out(task, count, seed=self.settings.seed + 1)
        chats = [
            encode(self.tokenizer, Chat((*q.messages, assistant(q.answer)), q.tools))
            for q in questions
        ]
        right = 0
        for ids, targets in batches(sorted(chats, key=lambda chat: len(chat[0])), self.pad):
            # Only the last turn is the answer; earlier assistant turns are given.
            with torch.autocast("cpu", torch.bfloat16):
                right += self.network.last_answers(ids, targets)
        return right / count

    def save(self) -> None:
        """Write the checkpoint in one step, and the export beside it."""
        path = self.settings.checkpoint
        if path is None:
            return
        state = {
            "network": self.network.state_dict(),
            "tokenizer": self.tokenizer.to_str(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": [self.step, self.tokens, self.learned, self.seconds],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)
        export(self.network, self.tokenizer, self.settings.out)

    def load(self) -> None:
        """Continue from the checkpoint."""
        assert self.settings.checkpoint is not None, "the command line sees to it"
        state = torch.load(self.settings.checkpoint, weights_only=True)
        self.tokenizer = Tokenizer.from_str(state["tokenizer"])
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.learned, self.seconds = state["counters"]


def write_line(path: Path, entry: dict[str, Any]) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def drop_lines(path: Path, after: int) -> None:
    """Remove what an interrupted run logged after its last checkpoint."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line).get("step", after + 1) <= after]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Values as they are logged."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def train(settings: Settings, shape: Shape | None = None) -> Run:
    """The whole run: train, log, save, and export at the end."""
    run = Run(settings, shape)
    log = settings.log or Path(__file__).parent / "logs" / f"{settings.out.name}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    if settings.resume:
        run.load()
        drop_lines(log, after=run.step)
    else:
        log.unlink(missing_ok=True)
    saved = run.seconds
    while run.progress() < 1.0:
        entry = run.advance()
        if run.step % settings.log_every == 0:
            counts = {"step": run.step, "tokens": run.tokens, "seconds": round(run.seconds, 1)}
            write_line(log, counts | rounded(entry))
        if run.step % settings.evaluate_every == 0:
            started = time.monotonic()
            scores = {task: run.accuracy(task, 10 if task == "needle" else 50) for task in TASKS}
            run.seconds += time.monotonic() - started
            write_line(log, {"step": run.step, "held_out": rounded(scores)})
        if run.seconds - saved > settings.save_seconds:
            saved = run.seconds
            run.save()
    run.save()
    export(run.network, run.tokenizer, settings.out)
    write_line(log, totals(run))
    return run


def totals(run: Run) -> dict[str, Any]:
    """The last line of the log."""
    size = (run.settings.out / "model.safetensors").stat().st_size
    return {
        "steps": run.step, "tokens": run.tokens, "assistant_tokens": run.learned,
        "minutes": round(run.seconds / 60, 1), "megabytes": round(size / 1e6, 2),
        "parameters": sum(p.numel() for p in run.network.parameters()),
        "shape": asdict(run.network.shape), "seed": run.settings.seed,
    }  # fmt: skip


def verify(settings: Settings, count: int = 100) -> dict[str, float]:
    """Share right per task of the exported checkpoint, as transformers runs it in bfloat16."""
    model, tokenizer = load_exported(settings.out)
    return {task: score(model, tokenizer, held_out(task, count)) for task in TASKS}


def arguments() -> Settings:
    """Settings from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in fields(Settings):
        name, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        else:
            kind = Path if default is None or isinstance(default, Path) else type(default)
            parser.add_argument(name, type=kind, default=default)
    settings = Settings(**vars(parser.parse_args()))
    if settings.model not in SHAPES:
        parser.error(f"--model must be one of {', '.join(SHAPES)}, not {settings.model}")
    if bool(settings.minutes) == bool(settings.steps):
        parser.error("give either --minutes or --steps")
    if settings.resume and (settings.checkpoint is None or not settings.checkpoint.exists()):
        parser.error("--resume needs the --checkpoint file that an earlier run wrote")
    return settings


def main() -> None:
    """Train, then score the export and add the scores to the log."""
    settings = arguments()
    train(settings)
    scores = verify(settings)
    log = settings.log or Path(__file__).parent / "logs" / f"{settings.out.name}.jsonl"
    write_line(log, {"held_out_exported": rounded(scores)})
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
