"""A model that says what the last message says, so that a test writes its answers.

It is the mock runner with another next token. Its chat template shows the last message alone,
and mentions the marks that the model is to be taken to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.mock_runner import HIDDEN_SIZE, MockRunner
from support.tokenizers import write_byte_level
from weft.models.interface import FINITE
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.tokenizer import Tokenizer
from weft.serving.executor.loading import LoadedModel, ModelInfo, Progress

LOADER = "support.echo_runner:load"
START, END = "<|im_start|>", "<|im_end|>"


def write_echo(path: Path, *, marks: str = "", opening: str = "") -> Path:
    """Its checkpoint, which is a tokenizer; tokens of its own are the marks of reasoning.

    Args:
        path: of the directory.
        marks: what the template mentions, such as "<tool_call>".
        opening: how the assistant's turn begins in the prompt.
    """
    template = (
        f"{{# {marks} #}}{{{{ tools | tojson if tools else '' }}}}{START}"
        f"{{{{ messages[-1].content or '' }}}}{END}{opening}"
    )
    special = [mark for mark in ("<think>", "</think>", "[TOOL_CALLS]") if mark in marks]
    return write_byte_level(path, special, chat_template=template)


@dataclass
class EchoRunner(MockRunner):
    """See the module's text."""

    start: int = 0
    end: int = 0

    def next_token(self, tokens: np.ndarray, seed: int, index: int) -> int:
        """The index-th token between the prompt's marks, then the one that ends the turn."""
        prompt = tokens[: len(tokens) - index].tolist()
        said = prompt[prompt.index(self.start) + 1 : prompt.index(self.end)]
        return int(said[index]) if index < len(said) else self.end

    def status(self, tokens: np.ndarray) -> int:
        """No token is a mishap."""
        return FINITE


def load(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Stands in for `weft.serving.executor.loading.load_model`."""
    progress(1, 1)
    tokenizer = Tokenizer.load(config.model)
    start, end = (tokenizer.backend.token_to_id(mark) for mark in (START, END))
    runner = EchoRunner(config.block_size, start=start, end=end)
    runner.allocate_kv_cache(4096)
    info = ModelInfo(
        num_blocks=4096,
        vocab_size=tokenizer.vocab_size,
        max_model_len=config.max_model_len or 4096,
        dtype="int64",
        hidden_size=HIDDEN_SIZE,
    )
    return LoadedModel(runner, info)
