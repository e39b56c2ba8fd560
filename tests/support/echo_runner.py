"""A model with a test's answers: it repeats the text between two marks in the prompt.

It is the mock runner with another next token. The chat template writes the marks. `write_echo` puts
the last message between them, and `write_script` a line from a script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.mock_runner import HIDDEN_SIZE, MockRunner
from support.tokenizers import write_byte_level
from weft.models.interface import FINITE
from weft.models.plan.sizes import BLOCK_UNIT
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.tokenizer import Tokenizer
from weft.serving.executor.loading import LoadedModel, ModelInfo, Progress

LOADER = "support.echo_runner:load"
NUM_BLOCKS = 16_384
START, END = "<|im_start|>", "<|im_end|>"
THOUGHT = "Let me think."

# The answer, then the whole conversation. The model writes Qwen's marks and thinks by default.
_SCRIPT = """{# <tool_call> #}
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
{%- set chosen = namespace(text=none) -%}
{%- for cue, text in script if cue in messages[-1].content | string -%}
  {%- if loop.first %}{% set chosen.text = text %}{% endif -%}
{%- endfor -%}
{{ start }}{{ thought ~ '</think>' if thinks }}{{ chosen.text or 'No cue fits.' }}{{ end }}
{{- tools | tojson if tools }}{{ messages | tojson -}}
{{ '<think>' if thinks else '<think></think>' }}"""


def write_echo(path: Path, *, marks: str = "", opening: str = "") -> Path:
    """Write the checkpoint of a model that repeats the last message.

    It is a tokenizer. Reasoning marks are single tokens.

    Args:
        path: the directory.
        marks: what the template mentions, such as "<tool_call>".
        opening: how the assistant's turn begins in the prompt.
    """
    template = (
        f"{{# {marks} #}}{{{{ tools | tojson if tools else '' }}}}{START}"
        f"{{{{ messages[-1].content or '' }}}}{END}{opening}"
    )
    special = [mark for mark in ("<think>", "</think>", "[TOOL_CALLS]") if mark in marks]
    return write_byte_level(path, special, chat_template=template)


def write_script(path: Path, script: Sequence[tuple[str, str]]) -> Path:
    """Write a checkpoint for a model with scripted answers, each after a thought.

    Args:
        path: the directory.
        script: pairs with a cue and an answer. The first cue in the last message counts.
    """
    values = {"script": script, "start": START, "end": END, "thought": THOUGHT}
    head = (f"{{% set {name} = {json.dumps(value)} %}}" for name, value in values.items())
    template = "".join(head) + _SCRIPT
    return write_byte_level(path, ["<think>", "</think>"], chat_template=template)


@dataclass
class EchoRunner(MockRunner):
    """See the module's text."""

    start: int = 0
    end: int = 0

    def next_token(self, tokens: np.ndarray, seed: int, index: int) -> int:
        """The index-th token between the prompt's marks, then the one that ends the turn."""
        start, end = (int((tokens == mark).argmax()) for mark in (self.start, self.end))
        said = tokens[start + 1 : end]
        return int(said[index]) if index < len(said) else self.end

    def status(self, tokens: np.ndarray) -> int:
        """No token is a mishap."""
        return FINITE


def load(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Stands in for `weft.serving.executor.loading.load_model`."""
    progress(1, 1)
    tokenizer = Tokenizer.load(config.model)
    start, end = (tokenizer.backend.token_to_id(mark) for mark in (START, END))
    block_size = config.block_size or BLOCK_UNIT
    runner = EchoRunner(block_size, start=start, end=end)
    runner.allocate_kv_cache(NUM_BLOCKS)
    info = ModelInfo(
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        vocab_size=tokenizer.vocab_size,
        max_model_len=config.max_model_len or 4096,
        dtype="int64",
        hidden_size=HIDDEN_SIZE,
    )
    return LoadedModel(runner, info)
