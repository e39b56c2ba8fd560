"""The demo models' tokenizer and chat template.

The tokenizer is byte-level BPE, trained on text from `tasks.py`, with Qwen2's splitting rule (each
digit is alone). It has no normalizer, so decoding returns the exact text. `render` is the chat
template in Python, and marks the assistant's turns; a test compares it with the shipped template.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.models.bundled.tasks import Chat, long_chat, training_chat

VOCAB = 1536
CONTEXT = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Qwen2's rule: words with one leading mark, single digits, punctuation, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TOOLS_BEFORE = "# Tools\n\nYou may call a function:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call it, reply with:\n<tool_call>\n"
    '{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + '"""
    + TOOLS_BEFORE.replace("\n", "\\n")
    + """' }}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '"""
    + TOOLS_AFTER.replace("\n", "\\n")
    + """<|im_end|>\\n' }}
{%- elif system -%}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- elif message.role != 'system' or not loop.first -%}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\\n</tool_call>' }}
        {%- endfor -%}
        {{- '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
)


def render(chat: Chat) -> list[tuple[str, bool]]:
    """Render a chat as pieces of text; True marks the assistant's words with their end mark."""
    messages, system = chat.messages, ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if chat.tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        system += ("\n\n" if system else "") + TOOLS_BEFORE + lines + TOOLS_AFTER
    text, pieces = f"{START}system\n{system}{END}\n" if system else "", []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            pieces += [(f"{text}{START}assistant\n", False), (content + END, True)]
            text = "\n"
        else:
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            text += f"{START}{role}\n{content}{END}\n"
    return [*pieces, (text, False)]


def encode(tokenizer: Tokenizer, chat: Chat) -> tuple[list[int], list[int]]:
    """Return token ids [length], and the target after each token: -100 where nothing is learned."""
    ids, learned = [], []
    for text, mark in render(chat):
        piece = tokenizer.encode(text).ids
        ids += piece
        learned += [mark] * len(piece)
    targets = [t if mark else -100 for t, mark in zip(ids[1:], learned[1:], strict=True)]
    return ids[:-1], targets


def corpus(chats: int) -> Iterator[str]:
    """Yield training text for the tokenizer."""
    rng = random.Random("vocabulary")
    for index in range(chats):
        chat = long_chat(rng) if index % 64 == 0 else training_chat(rng)
        yield "".join(text for text, _ in render(chat))


@cache
def train_tokenizer(chats: int = 20_000) -> Tokenizer:
    """Train the tokenizer; every call gives the same one.

    The base vocabulary comes first, then special tokens and tags.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    specials = (PAD, START, END)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(specials) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((strip_marks(text) for text in corpus(chats)), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in TAGS])
    return tokenizer


def token_id(tokenizer: Tokenizer, mark: str) -> int:
    """Return a mark's id; KeyError if the tokenizer has no such token."""
    found: int | None = tokenizer.token_to_id(mark)
    if found is None:
        raise KeyError(mark)
    return found


def strip_marks(text: str) -> str:
    """Remove marks that are tokens themselves."""
    for mark in (PAD, START, END, *TAGS):
        text = text.replace(mark, "\n")
    return text


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template inside."""
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(mark)): {
            "content": mark, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": mark not in TAGS,
        }
        for mark in (PAD, START, END, *TAGS)
    }  # fmt: skip
    config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added,
        "additional_special_tokens": [START, END], "bos_token": None,
        "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": END,
        "errors": "replace", "model_max_length": CONTEXT, "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
