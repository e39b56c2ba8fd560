"""A GGUF file's metadata -> a tokenizer, and the fields of its tokenizer_config.json.

The metadata has the vocabulary, each token's type, and merges or scores. It names the rest: the
kind of model ("gpt2" is byte-level BPE, "llama" is SentencePiece's BPE), and for byte-level BPE how
text is split before the merges. Sources: llama.cpp's llama-vocab.cpp, and the tokenizer.json files
of the models whose splits are named.

transformers builds a tokenizer from GGUF files, too. It is not used: it imports torch, releases
before 5.20 take 15 s and split Llama 3's text wrongly, and an unknown split becomes GPT-2's without
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import ModelError, shown
from weft.models.checkpoint.gguf_header import Header, read_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
"""Types of tokens in tokenizer.ggml.token_type."""
ADVICE = "--tokenizer names a directory with the original model's tokenizer.json"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class Split:
    """How text is split before byte-level BPE.

    Attributes:
        pattern: a regular expression for the pieces; "" is GPT-2's.
        digits: whether each digit is a piece, before the pattern.
        composed: whether text is composed first (Unicode's NFC).
        whole: whether a piece that is a token is not merged from parts.
        begins: whether texts begin with bos_token, unless the file says otherwise.
    """

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole: bool = False
    begins: bool = False


_GPT4 = Split(rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}")
_LLAMA3 = replace(_GPT4, whole=True, begins=True)
_QWEN2 = Split(rf"{_WORDS}|\p{{N}}{_REST}", composed=True)
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "glm4": _GPT4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole=True,
        begins=True,
    ),
}
"""Values of tokenizer.ggml.pre."""

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # llama.cpp's spelling
    "pad_token": "padding_token_id",
}
"""Fields in tokenizer_config.json, and their keys."""


def check_gguf_tokenizer(file: Path) -> None:
    """Check that a GGUF file has a tokenizer of a supported kind; it takes milliseconds.

    Raises:
        ModelError: it has none, or of another kind.
    """
    header = read_header(file)
    kind = header.get("tokenizer.ggml.model", str)
    if kind is None:
        raise ModelError(f"{file} has no tokenizer (tokenizer.ggml.model); {ADVICE}")
    if kind not in ("gpt2", "llama"):
        raise _refused(header, "model", ("gpt2", "llama"))
    if kind == "gpt2" and header.get("tokenizer.ggml.pre", str) not in SPLITS:
        raise _refused(header, "pre", tuple(SPLITS))


def read_gguf_tokenizer(file: Path) -> tuple[Any, dict[str, Any]]:
    """Build a GGUF file's tokenizer.

    Returns:
        A `tokenizers.Tokenizer`, and what tokenizer_config.json would say.

    Raises:
        ModelError: a key is missing, has a wrong type, or contradicts another.
        Exception: `tokenizers` refuses the vocabulary or the merges.
    """
    from tokenizers import AddedToken

    check_gguf_tokenizer(file)
    header = read_header(file)
    texts = _list(header, "tokens", str)
    types = _list(header, "token_type", int, len(texts)) or [NORMAL] * len(texts)
    special = {name: _text(header, key, texts) for name, key in SPECIAL.items()}
    kept = {
        text: i
        for i, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind != UNUSED or text in special.values()
    }
    if header.need("tokenizer.ggml.model", str) == "gpt2":
        split = SPLITS[header.need("tokenizer.ggml.pre", str)]
        backend, begins = _byte_level(header, kept, split), split.begins
    else:
        header.need("tokenizer.ggml.scores", list)
        scores = _list(header, "scores", float, len(texts))
        backend, begins = _sentencepiece(header, kept, types, scores, special["unk_token"]), True
    for kinds, is_special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [text for text, i in kept.items() if types[i] in kinds]
        backend.add_tokens(
            [AddedToken(text, normalized=False, special=is_special) for text in added]
        )
    _add_ends(header, backend, special, begins)
    named = {name: text for name, text in special.items() if text is not None}
    return backend, {**named, "chat_template": _chat_templates(header)}


def _byte_level(header: Header, vocab: dict[str, int], split: Split) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ")) for merge in _list(header, "merges", str)]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.composed:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    header: Header,
    vocab: dict[str, int],
    types: Sequence[int],
    scores: Sequence[float],
    unknown: str | None,
) -> Any:
    """Build SentencePiece's BPE; two pieces merge earlier, the higher their whole's score is."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    if header.get("tokenizer.ggml.remove_extra_whitespaces", bool):
        raise _refused(header, "remove_extra_whitespaces", (False,))
    merges = []
    for text, i in vocab.items():
        if types[i] != NORMAL:
            continue
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += [(-scores[i], i, vocab[one], vocab[two], one, two) for one, two in known]
    merges.sort()
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(one, two) for *_, one, two in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = header.get("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(steps)
    return backend


def _add_ends(
    header: Header, backend: Any, special: Mapping[str, str | None], begins: bool
) -> None:
    """Let texts begin and end with special tokens, as the file says.

    Args:
        begins: whether they begin with one if the file does not say.
    """
    from tokenizers import processors

    template, used = ["$A"], []
    for name, place, default in (("bos_token", 0, begins), ("eos_token", 2, False)):
        added = header.get(f"tokenizer.ggml.add_{name}", bool)
        if not (default if added is None else added):
            continue
        if (text := special[name]) is None:
            raise ModelError(
                f"{header.file}: tokenizer.ggml.{name}_id is missing, but texts have the token"
            )
        template.insert(place, text)
        used.append((text, backend.token_to_id(text)))
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict.fromkeys(used))
        )


def _chat_templates(header: Header) -> list[dict[str, Any]]:
    """Return the chat templates, as tokenizer_config.json lists them."""
    key = "tokenizer.chat_template"
    names = {key: "default"} | {
        each: each.removeprefix(f"{key}.") for each in header.metadata if each.startswith(f"{key}.")
    }
    return [
        {"name": name, "template": text}
        for each, name in names.items()
        if (text := header.get(each, str)) is not None
    ]


def _list(header: Header, name: str, kind: type, length: int | None = None) -> list[Any]:
    """Return an array; empty if it is absent and its length is given.

    Args:
        header: the file's.
        name: the key after tokenizer.ggml.
        kind: of the elements.
        length: the vocabulary's, if there is one element for each token.
    """
    key = f"tokenizer.ggml.{name}"
    values = header.need(key, list) if length is None else header.get(key, list) or []
    if any(type(value) is not kind for value in values):
        raise ModelError(f"{header.file}: {key} must be an array of {kind.__name__}")
    if length is not None and values and len(values) != length:
        raise ModelError(f"{header.file}: {key} has {len(values)} entries for {length} tokens")
    return values


def _text(header: Header, name: str, texts: Sequence[str]) -> str | None:
    """Return a token's text by the key with its id."""
    key = f"tokenizer.ggml.{name}"
    if (token := header.get(key, int)) is None:
        return None
    if not 0 <= token < len(texts):
        raise ModelError(f"{header.file}: {key} is {token}; there are {len(texts)} tokens")
    return texts[token]


def _refused(header: Header, name: str, supported: Sequence[object]) -> ModelError:
    key = f"tokenizer.ggml.{name}"
    values = " or ".join(map(shown, supported))
    value = shown(header.metadata.get(key))
    return ModelError(f"{header.file}: {key} is {value}; supported is {values}. {ADVICE}")
