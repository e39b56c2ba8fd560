"""The tokenizer against transformers, its templates, and its errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tokenizers as kinds

from weft.errors import ModelError, RequestError
from weft.serving.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world 😀"}]


_TRUNCATION = {"direction": "Right", "strategy": "LongestFirst", "stride": 0}
_DEEP = "{% for a in b %}" * 25 + "{% endfor %}" * 25
_PADDING = {
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(kinds.write_byte_level(tmp_path))


@pytest.fixture(scope="module", params=[kinds.write_byte_level, kinds.write_sentencepiece])
def any_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("write", [kinds.write_byte_level, kinds.write_sentencepiece])
def test_equals_transformers(tmp_path: Path, write: Callable[..., Path]) -> None:
    from transformers import PreTrainedTokenizerFast

    path = write(tmp_path, chat_template=kinds.CHATML)
    ours, theirs = Tokenizer.load(path), PreTrainedTokenizerFast.from_pretrained(path)
    for text in ("hello world", "", " he  llo", "日本 é", "a<|im_end|>b", "</s>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.apply_chat_template(MESSAGES) == list(
        theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    )


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ('{"eos_token_id": [5, 6, 5]}', '{"eos_token_id": 7}', (5, 6)),
        ('{"temperature": 0.6}', '{"eos_token_id": 7}', (7,)),
        ("{}", '{"text_config": {"eos_token_id": 8}}', (8,)),
        ("{}", '{"text_config": null, "eos_token_id": []}', None),
        ("{}", '{"text_config": "none"}', None),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_any(
    tmp_path: Path, generation: str, model: str, expected: tuple[int, ...] | None
) -> None:
    path = kinds.write_byte_level(tmp_path)
    (path / "generation_config.json").write_text(generation)
    (path / "config.json").write_text(model)
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_token_ids == (expected or (tokenizer.backend.token_to_id("<|im_end|>"),))


@pytest.mark.parametrize("value", ["true", '"</s>"', "[1, null]", "-1", "2.0"])
def test_an_end_token_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    path = kinds.write_byte_level(tmp_path)
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is .* it must be"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"truncation": {**_TRUNCATION, "max_length": 3}},
        {"padding": {**_PADDING, "strategy": {"Fixed": 64}}},
        {"padding": {**_PADDING, "strategy": "BatchLongest", "pad_to_multiple_of": 8}},
    ],
    ids=["truncation", "padding", "padding to a multiple"],
)
def test_how_training_cut_and_padded_is_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = kinds.write_byte_level(tmp_path)
    file = path / "tokenizer.json"
    whole = Tokenizer.load(path).encode("hello world, hello")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert Tokenizer.load(path).encode("hello world, hello") == whole
    assert len(whole) > 3


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    token = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    path = kinds.write_byte_level(
        tmp_path,
        added_tokens_decoder={
            "900": token | {"content": "<second>", "special": False},
            "30": token | {"content": "<new>", "special": True},
        },
        extra_special_tokens=["<extra>"],
        additional_special_tokens=["<no>"],  # not beside the newer name
        pad_token={"__type": "AddedToken", "content": "<pad>"} | token | {"lstrip": True},
        image_token="<image>",
    )
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    text = "a<new>b<second>c<extra>d <pad><image>e<no>"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert len(ids) == 14
    shown = "ab<second>cde<no>"
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == shown
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens["image_token"] == theirs.image_token == "<image>"


@pytest.mark.parametrize("value", [[], {"1": "<new>"}, {"one": {"content": "<new>"}}, {"1": {}}])
def test_added_tokens_of_another_shape_are_refused(tmp_path: Path, value: Any) -> None:
    path = kinds.write_byte_level(tmp_path, added_tokens_decoder=value)
    message = "tokenizer_config.json: added_tokens_decoder must be" if value else None
    with pytest.raises(ModelError, match=message) if message else nullcontext():
        Tokenizer.load(path)


def test_special_tokens_that_texts_split_are_refused(tmp_path: Path) -> None:
    path = kinds.write_byte_level(tmp_path, split_special_tokens=True)
    with pytest.raises(ModelError, match=r"tokenizer_config.json: split_special_tokens is true"):
        Tokenizer.load(path)


@pytest.mark.parametrize("value", [3, [{"template": "x"}], ["x"], {"default": 3}, [None]])
def test_a_chat_template_of_another_shape_is_refused(tmp_path: Path, value: Any) -> None:
    path = kinds.write_byte_level(tmp_path, chat_template=value)
    with pytest.raises(ModelError, match=r"tokenizer_config.json: chat_template must be a text"):
        Tokenizer.load(path)


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | no_such_filter }}", "a\n{% if x %}"])
def test_a_chat_template_that_is_no_jinja_is_found_at_load(tmp_path: Path, template: str) -> None:
    path = kinds.write_byte_level(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match=r"_config.json: the chat template 'default' is"):
        Tokenizer.load(path)
    path = kinds.write_byte_level(tmp_path)
    (path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=r"chat_template.jinja: .* is not valid Jinja, in line"):
        Tokenizer.load(path)


def test_token_bytes_join_to_the_text(byte_level: Tokenizer) -> None:
    text = "hello 日本 😀<|im_end|><tool call>"
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_token_bytes_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kinds.write_sentencepiece(tmp_path))
    ids = tokenizer.encode(" he é 日", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "  he é 日".encode()
    assert tokenizer.token_text(ids[-1]) == "\ufffd"


def test_ids_beyond_the_vocabulary_are_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    assert byte_level.decode([byte_level.vocab_size + 5]) == ""


def test_a_lone_surrogate_is_the_requests_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        byte_level.encode("a\ud800b")


@given(
    pieces=st.lists(st.sampled_from(["hello", " ", "\n", "world", "a", "😀", "é", "0"])),
    times=st.integers(1, 40),
    most=st.integers(0, 20),
)
def test_only_a_text_that_is_too_long_is_refused(
    any_kind: Tokenizer, pieces: list[str], times: int, most: int
) -> None:
    text = "".join(pieces) * times
    whole = any_kind.encode(text)
    with suppress(RequestError) if len(whole) > most else nullcontext():
        assert any_kind.encode(text, most=most) == whole


def test_of_a_text_that_is_far_too_long_the_rest_is_not_looked_at(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"of 10000001 characters has more than 100 tokens"):
        byte_level.encode("a" * 10_000_000 + "\ud800", most=100)


def test_others_go_on_while_a_long_text_is_encoded(byte_level: Tokenizer) -> None:
    turns = 0
    thread = Thread(target=byte_level.encode, args=("hello world " * 50_000,))
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)  # this needs the GIL to return
    assert turns > 10


def test_missing_tokenizer_is_one_line_with_the_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"looked for tokenizer\.json, tokenizer\.model") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelError, match=r"tokenizer\.model alone is not enough"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "\ufeff{}"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    kinds.write_byte_level(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        Tokenizer.load(tmp_path)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kinds.write_byte_level(tmp_path, chat_template=None))
    with pytest.raises(RequestError, match="no chat template") as error:
        tokenizer.apply_chat_template(MESSAGES)
    assert error.value.status == 400


def test_the_templates_file_wins_and_tools_have_their_own(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    path = kinds.write_byte_level(tmp_path, chat_template=templates)
    (path / "chat_template.jinja").write_text("new")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.chat_templates.render(MESSAGES) == "new"
    assert tokenizer.chat_templates.render(MESSAGES, tools=[{"type": "function"}]) == "tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "no element 7|undefined"),
        ("{{ messages + 1 }}", "list"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "[Rr]ange too big"),
    ],
)
def test_what_a_template_raises_is_a_request_error(
    tmp_path: Path, template: str, message: str
) -> None:
    tokenizer = Tokenizer.load(kinds.write_byte_level(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match=message) as error:
        tokenizer.apply_chat_template(MESSAGES)
    assert error.value.param == "messages"


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    path = kinds.write_byte_level(tmp_path, auto_map=auto_map, tokenizer_class="Evil")
    (path / "evil.py").write_text("raise SystemExit('executed')")
    (path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert Tokenizer.load(path).encode("hello")
