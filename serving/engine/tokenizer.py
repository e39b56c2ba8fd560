"""Converts text to token ids and back, and conversations to token ids.

The `tokenizers` library reads a checkpoint's `tokenizer.json` directly. Loading it through
`transformers.AutoTokenizer` gives the same ids but imports torch (3.2 s and 240 MB against 0.5 s
and 55 MB).

A chat template yields one text for the tokenizer. So control tokens in a message's *content* (a
user writes `<|im_end|>`) act as control tokens, as with transformers and vLLM. Filter untrusted
text first if it must not control the model in this way.

A GGUF file's tokenizer is built from its metadata (gguf_tokenizer.py).

Not handled: tokenizers without a `tokenizer.json` (save them once with transformers to get one),
tokenizers written in Python, images and audio.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.errors import ModelError, RequestError, shown
from weft.models.checkpoint.gguf_header import is_gguf
from weft.models.checkpoint.gguf_model import gguf_config
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.chat_templates import ChatTemplates
from weft.serving.engine.gguf_tokenizer import check_gguf_tokenizer, read_gguf_tokenizer

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# A token's text depends at most on whether the token comes first and, with ByteFallback, on its
# neighbours. The incremental detokenizer relies on this property of these decoders.
_DECODERS = {
    "ByteFallback",
    "ByteLevel",
    "Fuse",
    "Metaspace",
    "Replace",
    "Sequence",
    "Strip",
    "WordPiece",
}
_ANCHOR = "a"
_BYTES = 6  # for each allowed token; above the usual ratio, so most prompts are tokenized once
_PIECE = 1 << 16  # characters


MARKS = frozenset(
    {
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
        *("<minimax:tool_call>", "</minimax:tool_call>", "<tool_calls>", "</tool_calls>"),
        *("<|tool_call|>", "<function_calls>", "</function_calls>"),
        *("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *("<|tool_call>", "<tool_call|>", '<|"|>', "<|python_start|>", "<|python_end|>"),
        *("<start_function_call>", "<end_function_call>", "<escape>"),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
        *("<|call|>", "<|return|>"),
    }
)
"""Texts around tool calls and thoughts in the formats that api/parsing reads."""


@dataclass
class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        eos_token_ids: tokens that end an answer, according to the checkpoint.
        special_tokens: name -> text, such as "eos_token" -> "</s>".
        special_token_ids: control tokens, such as the end of a turn.
        chat_templates: convert conversations to text.
        is_byte_level: the tokens' bytes, joined and decoded as UTF-8, are the text.
    """

    backend: Any
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    special_token_ids: frozenset[int]
    chat_templates: ChatTemplates
    is_byte_level: bool
    _token_bytes: dict[int, bytes] = field(default_factory=dict, repr=False)

    @cached_property
    def mark_tokens(self) -> dict[str, int]:
        """Special tokens around tool calls and thoughts, without end tokens: text -> token id."""
        inner = self.special_token_ids - set(self.eos_token_ids)
        special = {self.backend.id_to_token(token): token for token in inner}
        return {text: token for text, token in special.items() if text in MARKS}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        model: str | Path | None = None,
        chat_template: str | Path | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Load from files, without downloads and without running the checkpoint's code.

        Args:
            path: directory with `tokenizer.json`, or GGUF file.
            model: the checkpoint's directory or GGUF file, if it is a different one. Its
                `generation_config.json`, `config.json` or metadata name end tokens too.
            chat_template: file with a replacement for the checkpoint's template.
            template_arguments: arguments for the template in all conversations.

        Raises:
            ModelError: a file is missing or invalid.
            ConfigError: `chat_template` or `template_arguments` is wrong.
        """
        import transformers.utils.chat_template_utils  # noqa: F401  the first chat must not wait
        from tokenizers import Tokenizer as Backend

        path = Path(path)
        file = tokenizer_file(path)
        config_file = file if is_gguf(file) else path / "tokenizer_config.json"
        try:
            if is_gguf(file):
                backend, config = read_gguf_tokenizer(file)
            else:
                backend = Backend.from_file(str(file))
                config = _read_json(config_file)
        except ModelError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{file}: {error}") from error
        # A tokenizer saved after training may cut and pad; transformers ignores that, too.
        backend.no_truncation()
        backend.no_padding()
        if config.get("split_special_tokens"):
            raise ModelError(
                f"{config_file}: split_special_tokens is {shown(config['split_special_tokens'])}; "
                "supported is false"
            )
        named = _special_tokens(path, config)
        _add_tokens(backend, config, named, config_file)
        special_tokens = {name: text for name, each in named.items() if (text := _text_of(each))}
        decoders = _decoder_types(backend)
        if unknown := decoders - _DECODERS:
            raise ModelError(f"{file}: decoder {min(unknown)} is not supported")
        return cls(
            backend=backend,
            eos_token_ids=_eos_token_ids(backend, special_tokens, Path(model or path)),
            special_tokens=special_tokens,
            special_token_ids=frozenset(
                token_id
                for token_id, token in backend.get_added_tokens_decoder().items()
                if token.special
            ),
            chat_templates=ChatTemplates.load(
                path, config, special_tokens, chat_template, template_arguments
            ),
            is_byte_level=bool(decoders) and decoders <= {"ByteLevel", "Sequence"},
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary; the model's own table is often padded beyond it."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Convert a text to token ids.

        Args:
            text: any text.
            add_special_tokens: add tokens around the text as the tokenizer says, often a
                `bos_token`.
            most: reject a text with far more tokens after its beginning, before the rest costs
                seconds.

        Raises:
            RequestError: the text contains half of a surrogate pair, or it has far more than
                `most` tokens.
        """
        if most is not None:
            self.check_length(text, most)
        try:
            # `encode` would hold the GIL throughout; this method also omits offsets.
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:  # the library rejects a str without a UTF-8 form
            raise RequestError(
                "the text contains half of a surrogate pair, which is not a character",
                code="invalid_unicode",
            ) from error
        return list(encoding.ids)

    def check_length(self, text: str, most: int) -> None:
        """Raise RequestError if a long text certainly has more than `most` tokens.

        The text is tokenized in pieces, up to the first 2 x `most` tokens. The whole text then has
        more than `most`: tokenization only depends on nearby characters, so the whole has at least
        half as many tokens as its pieces.
        """
        size = len(text) * (1 if text.isascii() else 4)
        if size <= most * _BYTES:  # so the tokens are few enough
            return
        found = 0
        for start in range(0, len(text), _PIECE):
            found += len(self.encode(text[start : start + _PIECE], add_special_tokens=False))
            if found > 2 * most:
                raise RequestError(
                    f"the prompt of {len(text)} characters has more than {most} tokens; the "
                    f"maximum is {most}",
                    param="prompt",
                    code="context_length_exceeded",
                )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Convert token ids to text; unknown ids are omitted."""
        # `decode` would hold the GIL throughout.
        (text,) = self.backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds inside a text; maybe an incomplete character."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Return a token's text, with U+FFFD for an incomplete character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def pieces_to_text(self, pieces: Sequence[str], *, first: bool) -> str:
        """Convert vocabulary pieces to text, at the start of a text or after other text."""
        decoder = self.backend.decoder
        # At the start of a text, a piece may lose its leading space; after the anchor it keeps it.
        pieces = list(pieces) if first else [_ANCHOR, *pieces]
        text = str(decoder.decode(pieces)) if decoder is not None else " ".join(pieces)
        return text if first else text[len(_ANCHOR) :]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Convert a conversation to token ids, ready for the model to answer.

        Args and raises as `ChatTemplates.render`.
        """
        text = self.chat_templates.render(messages, tools, arguments=arguments)
        return self.encode(text, add_special_tokens=False)

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            # A piece with a character outside the alphabet is an added token: plain text.
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            except KeyError:
                return bytes(piece, "utf-8")
        if (byte := fallback_byte(piece)) is not None:
            return bytes([byte])
        return self.pieces_to_text([piece], first=False).encode()


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Load the tokenizer named in an engine's settings; errors as from `Tokenizer.load`."""
    from weft.models.checkpoint.locate import find

    model = find(config.model, config.revision)
    return Tokenizer.load(
        find(config.tokenizer) if config.tokenizer else model,
        model=model,
        chat_template=config.chat_template,
        template_arguments=config.template_arguments,
    )


def fallback_byte(piece: str) -> int | None:
    """Return the byte for a piece such as `<0xE2>` in vocabularies with byte fallback."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet for byte-level BPE: printable Latin-1, and U+0100 on for other bytes.

    Source: `bytes_to_unicode` of GPT-2 (Radford et al. 2019).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()


def tokenizer_file(path: Path) -> Path:
    """Return a directory's tokenizer.json; or a GGUF file itself.

    Raises:
        ModelError: there is none, and the message names other tokenizer forms; or the GGUF file's
            tokenizer is not supported.
    """
    if is_gguf(path):
        check_gguf_tokenizer(path)
        return path
    file = path / "tokenizer.json"
    if file.is_file():
        return file
    looked_for = f"no tokenizer in {path}: looked for tokenizer.json"
    for name in ("tokenizer.model", "vocab.json", "tiktoken.model"):
        if (path / name).is_file():
            raise ModelError(
                f"{looked_for}; {name} alone is not enough, convert it once with transformers: "
                "AutoTokenizer.from_pretrained(dir).save_pretrained(dir)"
            )
    raise ModelError(f"{looked_for}, tokenizer.model, vocab.json and tiktoken.model")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: it must contain a JSON object")
    return content


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the named special tokens, each a text or an object with options.

    Every field `..._token` is one, as in transformers. Those of a model's own may be in an object.
    """
    named = _read_json(path / "special_tokens_map.json") | config
    own = named.get("extra_special_tokens")
    found = {
        name: token
        for name, token in named.items()
        if name in _SPECIAL_TOKEN_NAMES or (name in config and name.endswith("_token"))
    } | (own if isinstance(own, dict) else {})
    return {name: token for name, token in found.items() if _text_of(token) is not None}


def _text_of(token: Any) -> str | None:
    """Return a token's text; None for what is no token."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_token(token: Any, **more: bool) -> Any:
    """Return the library's form of a text, or of an object with options."""
    from tokenizers import AddedToken

    options = ("single_word", "lstrip", "rstrip", "normalized", "special")
    given = token if isinstance(token, dict) else {"content": token}
    chosen = {name: given[name] for name in options if name in given}
    return AddedToken(given["content"], **(chosen | more))


def _add_tokens(
    backend: Any, config: dict[str, Any], special_tokens: dict[str, Any], file: Path
) -> None:
    """Add the tokens named only in tokenizer_config.json, in transformers' order.

    First come those of `added_tokens_decoder`, by id, then special tokens. A token's id is the
    next free one, as in transformers.

    Raises:
        ModelError: `added_tokens_decoder` does not describe tokens.
    """
    described = config.get("added_tokens_decoder") or {}
    try:
        ordered = sorted(described.items(), key=lambda item: int(item[0]))
        tokens = [_added_token({"content": token["content"]} | token) for _, token in ordered]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file}: added_tokens_decoder must be an object of ids and tokens, each with a content"
        ) from error
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in tokens if repr(token) not in known])
    names = {token.content for token in backend.get_added_tokens_decoder().values()}
    more = [*special_tokens.values()]
    listed = config.get("extra_special_tokens")
    if not (isinstance(listed, list) and listed):
        listed = config.get("additional_special_tokens")  # the older name
    more += listed if isinstance(listed, list) else []
    new = {text: token for token in more if (text := _text_of(token)) not in names and text}
    backend.add_tokens([_added_token(token, special=True) for token in new.values()])


def _decoder_types(backend: Any) -> set[str]:
    """Return the names of all decoders; empty if pieces are joined by spaces."""
    if backend.decoder is None:
        return set()
    found = set()
    todo = [json.loads(backend.decoder.__getstate__())]
    while todo:
        decoder = todo.pop()
        found.add(decoder["type"])
        todo.extend(decoder.get("decoders", ()))
    return found


def _eos_token_ids(backend: Any, special: dict[str, str], model: Path) -> tuple[int, ...]:
    """Return the end tokens from the first file with any.

    transformers goes by generation_config.json, and by config.json if the former names none. Only
    without both does the tokenizer's own end token count.

    Raises:
        ModelError: `eos_token_id` is neither a token id nor a list of them.
    """
    files = (model / "generation_config.json", model / "config.json")
    for file in (model,) if is_gguf(model) else files:
        config = gguf_config(file) if is_gguf(file) else _read_json(file)
        inner = config.get("text_config")
        for section in (config, inner if isinstance(inner, dict) else {}):
            named = section.get("eos_token_id")
            ids = named if isinstance(named, list) else [named]
            if named is None or not ids:
                continue
            if any(type(token_id) is not int or token_id < 0 for token_id in ids):
                raise ModelError(
                    f"{file}: eos_token_id is {shown(named)}; it must be a token id or a list of "
                    "them"
                )
            return tuple(dict.fromkeys(ids))
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if eos is None else (eos,)
