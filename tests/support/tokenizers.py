"""Tokenizers of the usual kinds, built on the spot and written as a checkpoint has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ["he", "ll", "llo", "hello", "wor", "ld", "world", "the", " the", "é", "日本", "😀"]


def write_byte_level(path: Path, special: Sequence[str] = (), **config: Any) -> Path:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen: any byte sequence can be written.

    `special` are more tokens that are no text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        piece = byte_level.pre_tokenize_str(word)[0][0]
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                merges.append((piece[: end - 1], piece[end - 1]))
                vocab[piece[:end]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokens = ("<|im_start|>", "<|im_end|>", *special)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("<é>")])
    return _write(path, tokenizer, {"eos_token": "<|im_end|>", "chat_template": CHATML} | config)


def write_sentencepiece(path: Path, **config: Any) -> Path:
    """BPE with a marked space and single bytes for the rest, as of Llama 2 and Mistral."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "c", "e", "h", "l", "o", "é", "he", "ll", "▁a", "▁b", "▁he"]
    merges = [("▁", "▁"), ("h", "e"), ("l", "l"), ("▁", "a"), ("▁", "b"), ("▁", "he")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    special = [AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    return _write(path, tokenizer, config)


def write_metaspace(path: Path, **config: Any) -> Path:
    """A unigram vocabulary with a marked space, as of T5 and XLM-R."""
    scores = [("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0), ("b", -2.0), ("▁bc", -1.5), ("c", -2.5)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _write(path, tokenizer, config)


def write_wordpiece(path: Path, **config: Any) -> Path:
    """Words and their continuations, as of BERT."""
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "un", "##do", "##ing", "it", ".", "n't"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return _write(path, tokenizer, config)


def _write(path: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
