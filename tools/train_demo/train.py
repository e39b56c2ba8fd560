"""Train the two demo models from nothing, on a CPU, in about an hour and a half each.

    PYTHONPATH=tools python -m train_demo.train --model dense --minutes 93 --out weft-demo

Data: chats from `weft.models.bundled.tasks`; step k with seed s always sees the same chats, so a
resumed run continues where it stopped. Loss: only on the assistant's tokens. Optimizer: Muon for
the matrices inside the layers, AdamW for the rest. Schedule: warm-up, constant, then linear decay
to zero over the last three fifths (WSD). With --steps, two runs agree bit by bit. With --minutes
they do not, because the decay follows the clock.

Each checkpoint is also exported, so you can try a model while it trains.
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
    """All parameters of a run; each field is a flag."""

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
    tokenizer_chats: int = 20_000  # training data for the tokenizer
    short_tokens: int = 3200  # per step
    long_every: int = 2  # steps between long chats; 0 for none
    long_after: int = 400  # steps before the first long chat; the model learns to look up
    late_after: int = 1000  # steps before tasks that compute become more frequent
    warmup: int = 50
    decay: float = 0.62  # fraction of the run
    matrix_rate: float = 0.02
    vector_rate: float = 0.004
    balance: float = 0.01  # weight for the experts' balance loss
    log_every: int = 20
    evaluate_every: int = 300
    save_seconds: float = 180.0


# --- Data --------------------------------------------------------------------------------


def step_chats(settings: Settings, tokenizer: Tokenizer, step: int) -> list[tuple[list[int], ...]]:
    """Encode the chats for one step: token ids and targets, shortest chat first."""
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
    """Make one batch from chats, padded on the right."""
    length = max(len(ids) for ids, _ in chats)
    ids = [ids + [pad] * (length - len(ids)) for ids, _ in chats]
    targets = [targets + [-100] * (length - len(targets)) for _, targets in chats]
    return torch.tensor(ids), torch.tensor(targets)


def batches(chats: list[tuple[list[int], ...]], pad: int, size: int = 1200) -> list[Batch]:
    """Group chats with similar lengths into batches with about `size` tokens, padding included."""
    groups: list[list[tuple[list[int], ...]]] = [[]]
    for chat in chats:
        if (len(groups[-1]) + 1) * len(chat[0]) > size and groups[-1]:
            groups.append([])
        groups[-1].append(chat)
    return [padded(group, pad) for group in groups]


# --- Optimizer ---------------------------------------------------------------------------


def orthogonal(update: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices to update [..., rows, columns].

    Quintic Newton-Schulz iteration from Muon (Keller Jordan, 2024).
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
    """A Nesterov optimizer with orthogonal updates; parameters [..., rows, columns], equal rank."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * scale)


def optimizers(network: Network, settings: Settings) -> list[torch.optim.Optimizer]:
    """Make Muon for attention and MLP matrices, and AdamW for embedding, router and norms."""
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
    """Return the factor for the learning rates; `progress` runs from 0 to 1."""
    rising = (step + 1) / settings.warmup
    falling = (1.0 - progress) / settings.decay
    return max(0.0, min(1.0, rising, falling))


# --- The run -----------------------------------------------------------------------------


class Run:
    """A training run: the contents of a checkpoint, and the functions that advance it."""

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
        """Return the finished fraction of the run."""
        if self.settings.minutes:
            return self.seconds / (60 * self.settings.minutes)
        return self.step / self.settings.steps

    def advance(self) -> dict[str, float]:
        """Take one optimizer step; return values for the log."""
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
        """Return the fraction of held-out answers that greedy decoding would produce.

        One forward pass checks that each token of an answer is the likeliest after the ones before.
        """
        questions = held_out(task, count, seed=self.settings.seed + 1)
        chats = [
            encode(self.tokenizer, Chat((*q.messages, assistant(q.answer)), q.tools))
            for q in questions
        ]
        right = 0
        for ids, targets in batches(sorted(chats, key=lambda chat: len(chat[0])), self.pad):
            # Only the last turn is the answer; earlier assistant turns are part of the question.
            with torch.autocast("cpu", torch.bfloat16):
                right += self.network.last_answers(ids, targets)
        return right / count

    def save(self) -> None:
        """Replace the checkpoint in one step, and export the model."""
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
        assert self.settings.checkpoint is not None, "the command line checks it"
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
    """Remove log lines that an interrupted run wrote after its last checkpoint."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line).get("step", after + 1) <= after]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Round values for the log."""
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def train(settings: Settings, shape: Shape | None = None) -> Run:
    """Run the training to its end: train, log, save and export."""
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
    """Make the last line of the log."""
    size = (run.settings.out / "model.safetensors").stat().st_size
    return {
        "steps": run.step, "tokens": run.tokens, "assistant_tokens": run.learned,
        "minutes": round(run.seconds / 60, 1), "megabytes": round(size / 1e6, 2),
        "parameters": sum(p.numel() for p in run.network.parameters()),
        "shape": asdict(run.network.shape), "seed": run.settings.seed,
    }  # fmt: skip


def verify(settings: Settings, count: int = 100) -> dict[str, float]:
    """Score the exported checkpoint per task, as transformers runs it in bfloat16."""
    model, tokenizer = load_exported(settings.out)
    return {task: score(model, tokenizer, held_out(task, count)) for task in TASKS}


def arguments() -> Settings:
    """Read settings from the command line."""
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
    """Train, score the export, and log the scores."""
    settings = arguments()
    train(settings)
    scores = verify(settings)
    log = settings.log or Path(__file__).parent / "logs" / f"{settings.out.name}.jsonl"
    write_line(log, {"held_out_exported": rounded(scores)})
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
