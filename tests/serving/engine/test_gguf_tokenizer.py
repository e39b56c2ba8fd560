"""Tokenizers in GGUF files give the ids of the tokenizer.json that they are from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.gguf_files import write_tokenizer
from support.tokenizers import write_sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from weft.errors import ModelError
from weft.serving.engine.tokenizer import Tokenizer as Mine
from weft.serving.engine.tokenizer import tokenizer_file

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As in Llama 3's tokenizer.json."""
TEXTS = [
    "The weft's threads CAN'T cross 12345 times.\n\n  It'll   hold\t\r\n",
    "naïve café e\u0301\u0302 日本語テキスト 😀👩‍👩‍👧 <|im_end|>after<think> x</think>",
    "  leading, trailing  ",
    "x=1;y==2  # comment\n\tif a!=b:\n",
    "",
    " ",
    "3.14159 and 2024-01-31 100000000",
]
CORPUS = [*TEXTS, "the weather 2024 and the weft can't cross it'll 1234567 100 000 don't café"] * 3


def _file(folder: Path, source: Path, pre: str = "gpt-2", **more: Any) -> Path:
    """Write a GGUF file with a tokenizer and hardly a model."""
    file = folder / "m.gguf"
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    write_tokenizer(writer, source, pre)
    for key, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _published(path: Path, pre: str) -> Path:
    """Write a tokenizer.json of the kind that the models with a split have."""
    whole = pre == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        "llama-bpe": _split(LLAMA3),
        "qwen2": _split(QWEN2),
    }[pre]
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    settings = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    if pre == "llama-bpe":
        settings["bos_token"] = "<|begin|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def assert_same(mine: Mine, theirs: Mine) -> None:
    for text in TEXTS:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert mine.encode(text, add_special_tokens=add) == ids, text
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert mine.decode(ids, skip_special_tokens=skip) == decoded
    assert mine.vocab_size == theirs.vocab_size
    assert mine.special_token_ids == theirs.special_token_ids
    assert mine.special_tokens == theirs.special_tokens
    assert mine.is_byte_level == theirs.is_byte_level
    for token in range(theirs.vocab_size):
        assert mine.token_bytes(token) == theirs.token_bytes(token)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_bpe_gives_the_ids_of_tokenizer_json(tmp_path: Path, pre: str) -> None:
    source = _published(tmp_path / "source", pre)
    mine, theirs = Mine.load(_file(tmp_path, source, pre)), Mine.load(source)
    assert_same(mine, theirs)
    assert mine.chat_templates.sources == theirs.chat_templates.sources


def test_sentencepiece_gives_the_ids_of_tokenizer_json(tmp_path: Path) -> None:
    source = write_sentencepiece(tmp_path / "source")
    assert_same(Mine.load(_file(tmp_path, source)), Mine.load(source))


def test_sentencepiece_may_lack_the_space_at_the_beginning(tmp_path: Path) -> None:
    source = write_sentencepiece(tmp_path / "source")
    file = _file(tmp_path, source, **{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
    tokenizer = Mine.load(file)
    assert tokenizer.encode("he a") == [tokenizer.backend.token_to_id(t) for t in ("he", "▁a")]
    assert tokenizer.decode(tokenizer.encode(" he a")) == " he a"


def test_texts_begin_and_end_as_the_file_says(tmp_path: Path) -> None:
    source = _published(tmp_path / "source", "llama-bpe")
    flags = {"ggml.add_bos_token": False, "ggml.add_eos_token": True}
    tokenizer = Mine.load(_file(tmp_path, source, "llama-bpe", **flags))
    assert tokenizer.encode("the") == [*tokenizer.encode("the", add_special_tokens=False), 2]


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    source = _published(tmp_path / "source", "qwen2")
    file = _file(tmp_path, source, "qwen2", **{"chat_template.tool_use": "{{ tools }}"})
    sources = Mine.load(file).chat_templates.sources
    assert sources == {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"qwen2-x", b"poro-xy", "tokenizer.ggml.pre is 'poro-xy'; supported is 'gpt-2' or"),
        (b"gpt2", b"bert", "tokenizer.ggml.model is 'bert'; supported is 'gpt2' or 'llama'"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.ledom", "has no tokenizer"),
    ],
)
def test_another_tokenizer_is_refused_before_any_process_starts(
    tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    source = _published(tmp_path / "source", "qwen2")
    file = _file(tmp_path, source, "qwen2-x" if old == b"qwen2-x" else "qwen2")
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=f"{message}.*--tokenizer names a directory"):
        tokenizer_file(file)


def test_a_wrong_vocabulary_is_refused(tmp_path: Path) -> None:
    source = _published(tmp_path / "source", "qwen2")
    file = _file(tmp_path, source, "qwen2")
    data = file.read_bytes()
    types = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type")
    file.write_bytes(data[: types + 4] + (6).to_bytes(4, "little") + data[types + 8 :])
    with pytest.raises(ModelError, match=r"tokenizer.ggml.token_type must be an array of int"):
        Mine.load(file)
    bad = data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.segrem")
    file.write_bytes(bad)
    with pytest.raises(ModelError, match=r"tokenizer.ggml.merges is missing"):
        Mine.load(file)


def test_scores_that_are_missing_are_named(tmp_path: Path) -> None:
    file = _file(tmp_path, write_sentencepiece(tmp_path / "source"))
    file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.serocs"))
    with pytest.raises(ModelError, match=r"tokenizer.ggml.scores is missing"):
        Mine.load(file)


def test_the_tokenizer_of_a_file_serves_another_model(tmp_path: Path) -> None:
    source = _published(tmp_path / "source", "qwen2")
    model = make_checkpoint(tmp_path / "model", "qwen2")
    tokenizer = Mine.load(_file(tmp_path, source, "qwen2"), model=model)
    assert tokenizer.eos_token_ids == (2, 0)
