"""The demo models' questions, tokenizer, chat template and training script."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from train_demo import train, vocabulary
from train_demo.export import load_exported
from train_demo.network import Shape
from weft.models.bundled import tasks

TINY = Shape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=32)


SHIPPED = Path(tasks.__file__).parent


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SHIPPED / "weft-demo")


def test_a_trained_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    train_tokenizer = vocabulary.train_tokenizer.__wrapped__
    vocabulary.save_tokenizer(train_tokenizer(200), tmp_path)
    first = (tmp_path / "tokenizer.json").read_text()
    assert first == train_tokenizer(200).to_str(pretty=True)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.decode(again.encode("naïve 日本 🎈\n")) == "naïve 日本 🎈\n"


def user_text(question: tasks.Question) -> str:
    return "\n".join(m["content"] for m in question.messages if m["role"] == "user")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_questions_are_the_same_on_every_call(task: str) -> None:
    first, second = tasks.held_out(task, 20), tasks.held_out(task, 20)
    assert first == second
    assert first != tasks.held_out(task, 20, seed=1)
    assert len({repr(q) for q in first}) == 20
    assert all(q.task == task and q.messages[-1]["role"] == "user" for q in first)


def test_training_never_sees_a_held_out_question() -> None:
    rng = random.Random(0)
    held = {user_text(q) for task in tasks.TASKS for q in tasks.held_out(task, 100)}
    for index in range(1500):
        chat = tasks.long_chat(rng) if index % 100 == 0 else tasks.training_chat(rng)
        users = [m["content"] for m in chat.messages if m["role"] == "user"]
        assert held.isdisjoint(users)
        assert "\n".join(users) not in held


@pytest.mark.parametrize("task", tasks.TASKS)
def test_check_accepts_the_answer_and_rejects_others(task: str) -> None:
    for question in tasks.held_out(task, 20):
        answer = question.answer
        assert tasks.check(question, answer)
        assert tasks.check(question, f"\n{answer} ")
        for wrong in ("", answer[:-1], answer + "1", "#" + answer[1:]):
            assert not tasks.check(question, wrong)


def test_check_compares_json_by_value() -> None:
    question = tasks.ask("extraction", "", '{"name": "Ada", "age": 1}')
    assert tasks.check(question, '{"age":1,\n"name":"Ada"}')
    assert not tasks.check(question, '{"name": "Ada", "age": "1"}')
    assert not tasks.check(question, '{"name": "Ada", "age": true}')
    assert not tasks.check(question, '{"name": "Ada"}')


def test_needles_are_about_1500_tokens_long(tokenizer: PreTrainedTokenizerBase) -> None:
    for question in tasks.held_out("needle", 20):
        assert 1400 <= len(tokenizer.encode(question.messages[0]["content"])) <= 1600


@settings(deadline=None, max_examples=100)
@given(text=st.text())
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_training_text_is_that_of_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = random.Random(1)
    for index in range(200):
        chat = tasks.long_chat(rng) if index % 50 == 0 else tasks.training_chat(rng)
        tools = list(chat.tools) if chat.tools else None
        text = tokenizer.apply_chat_template(list(chat.messages), tools=tools, tokenize=False)
        assert text == "".join(piece for piece, _ in vocabulary.render(chat))
        ids, targets = vocabulary.encode(tokenizer.backend_tokenizer, chat)
        assert ids == tokenizer.encode(text)[:-1]
        learned = tokenizer.decode([t for t in targets if t != -100])
        said = [m["content"] + "<|im_end|>" for m in chat.messages if m["role"] == "assistant"]
        assert learned == "".join(said)


def test_template_renders_tool_calls_and_results(tokenizer: PreTrainedTokenizerBase) -> None:
    call = {"name": "get_time", "arguments": '{"city": "Rome"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it in Rome?"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"time": "10:15"}'},
        {"role": "tool", "tool_call_id": "2", "content": "{}"},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(
        messages, tools=[tasks.tool_schema("get_time")], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(tasks.tool_schema("get_time")) in text
    assert text.endswith(
        "<|im_start|>user\nWhat time is it in Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n'
        "</tool_call><|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"time": "10:15"}\n</tool_response>\n'
        "<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, experts: int) -> None:
    shape = replace(TINY, experts=experts)
    whole = train.Settings(
        out=tmp_path / "whole", log=tmp_path / "log", checkpoint=tmp_path / "whole.pt",
        steps=6, short_tokens=300, tokenizer_chats=200, long_every=0, warmup=2, evaluate_every=100,
    )  # fmt: skip
    part = replace(whole, out=tmp_path / "part", checkpoint=tmp_path / "part.pt")
    expected = train.train(whole, shape).network.state_dict()

    interrupted = train.Run(part, shape)
    for _ in range(3):
        interrupted.advance()
    interrupted.save()
    resumed = train.train(replace(part, resume=True), shape)

    assert resumed.step == 6
    for name, value in resumed.network.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("experts", [0, 4])
def test_the_export_computes_what_was_trained(tmp_path: Path, experts: int) -> None:
    run_settings = train.Settings(
        out=tmp_path / "model", log=tmp_path / "log", tokenizer_chats=200, steps=2,
        short_tokens=300, long_every=0, warmup=1,
    )  # fmt: skip
    run = train.train(run_settings, replace(TINY, experts=experts))
    model, _ = load_exported(run_settings.out, dtype=torch.float32)
    ids = torch.randint(0, 1500, (2, 20), generator=torch.Generator().manual_seed(0))
    for parameter in run.network.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.inference_mode():
        states, _ = run.network.model(ids)
        logits = states @ run.network.model.embed_tokens.weight.T
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-3, atol=1e-4)
