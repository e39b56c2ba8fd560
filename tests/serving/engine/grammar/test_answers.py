"""A request with a grammar writes what the grammar allows, whatever else it asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import LLM, SamplingParams
from weft.errors import RequestError
from weft.models.bundled.tasks import held_out
from weft.serving.engine.completion import Completion
from weft.serving.engine.sampling_params import Grammar

PROMPTS = ["Hello", "Tell me about the sea.", "Once", "What is 2 + 2?"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("weft-demo", max_num_seqs=8, max_model_len=1024, threads=1) as llm:
        yield llm


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def answers(
    llm: LLM, grammar: Grammar | None, count: int = 4, **params: Any
) -> Sequence[Completion]:
    given: dict[str, Any] = {"temperature": 2.0, "max_tokens": 120, "seed": 1} | params
    each = SamplingParams(grammar=grammar, **given)
    return llm.generate([f"{PROMPTS[i % 4]} {i}" for i in range(count)], each)


names = st.text('abcxyz é"\\', min_size=1, max_size=4)
scalars: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-1000, 1000),
        st.integers(0, 5000),
    ),
    st.just({"type": "number", "minimum": -2.5, "maximum": 7}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    st.just({"type": "string", "pattern": "^[a-c]+-[0-9]{2,3}$"}),
    st.just({"type": "string", "format": "date"}),
    st.just({"type": ["integer", "null"], "maximum": 9, "minimum": -9}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(names, st.integers(-5, 5), st.none()), min_size=1, max_size=4),
    ),
    st.builds(lambda value: {"const": value}, st.one_of(names, st.booleans())),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(properties: dict[str, Any], required: int, closed: bool) -> Any:
        listed = {"type": "object", "properties": properties}
        listed["required"] = list(properties)[:required]
        return listed | ({"additionalProperties": False} if closed else {})

    return st.one_of(
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": 3},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "minItems": len(items)},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(
            an_object,
            st.dictionaries(names, inner, min_size=1, max_size=4),
            st.integers(0, 4),
            st.booleans(),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(scalars, containers, max_leaves=6)


def check_schemas(llm: LLM, value: Any) -> None:
    for answer in answers(llm, schema(value)):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), value)
        else:
            assert answer.finish_reason == "length"


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=schemas)
def test_every_text_validates_against_its_schema(llm: LLM, value: Any) -> None:
    check_schemas(llm, value)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(value=schemas)
def test_every_text_validates_against_its_schema_at_length(llm: LLM, value: Any) -> None:
    check_schemas(llm, value)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_object_of_several_properties(llm: LLM, temperature: float) -> None:
    done = answers(llm, schema(PERSON), temperature=temperature)
    complete = [answer for answer in done if answer.finish_reason == "stop"]
    assert complete or temperature == 0.0  # the most likely white space may go on
    for answer in complete:
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_any_json_object(llm: LLM) -> None:
    questions = [question.messages for question in held_out("extraction", 4)]
    params = SamplingParams(grammar=Grammar("json_object"), temperature=0.0, max_tokens=150)
    for answer in llm.chat(questions, params):
        assert answer.finish_reason == "stop"
        assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize(
    "regex", [r"[a-f]{3}-[0-9]{1,6}x", r"\d{1,3}(\.\d{1,3}){3}", "(é|☃|\U0001f600){2,9}", "a*"]
)
def test_a_regex_matches_as_a_whole(llm: LLM, regex: str) -> None:
    for answer in answers(llm, Grammar("regex", regex)):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(regex, answer.text)


def test_one_of_some_texts(llm: LLM) -> None:
    choices = ["yes", "no", "no, thanks", 'say "\\n"', "é\n☃"]
    done = answers(llm, Grammar("choice", json.dumps(choices)), 16)
    assert {answer.text for answer in done} <= set(choices)
    assert {answer.finish_reason for answer in done} == {"stop"}
    yes = llm.tokenizer.encode("yes")[0]
    done = answers(llm, Grammar("choice", '["yes", "no"]'), logit_bias={yes: -100.0})
    assert {answer.text for answer in done} <= {"yes", "no"}
    assert all(yes not in answer.token_ids for answer in done)


def test_a_grammar_of_brackets(llm: LLM) -> None:
    for answer in answers(llm, Grammar("ebnf", 'root ::= "(" root ")" | "."')):
        if answer.finish_reason == "stop":
            depth = answer.text.index(".")
            assert answer.text == "(" * depth + "." + ")" * depth


def test_bias_penalties_and_log_probabilities_go_with_it(llm: LLM) -> None:
    a, b = (llm.tokenizer.encode(text)[0] for text in "ab")
    grammar = Grammar("regex", "[ab]{8}")
    done = answers(llm, grammar, logit_bias={b: -100.0}, logprobs=2, temperature=1.0)
    for answer in done:
        assert b not in answer.token_ids
        assert re.fullmatch("a{8}", answer.text)
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
    assert any(a in answer.token_ids for answer in done)
    for answer in answers(llm, grammar, repetition_penalty=1.5, frequency_penalty=2.0, top_k=3):
        assert re.fullmatch("[ab]{8}", answer.text)


def test_min_tokens_and_ignore_eos_hold_as_far_as_the_grammar_goes(llm: LLM) -> None:
    for answer in answers(llm, Grammar("regex", "[ab]*"), min_tokens=20, max_tokens=80):
        assert len(answer.token_ids) > 20 or answer.finish_reason == "length"
        assert re.fullmatch("[ab]*", answer.text)
    for answer in answers(llm, Grammar("regex", "[ab]*"), ignore_eos=True, max_tokens=30):
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 30
    for params in ({"min_tokens": 50}, {"ignore_eos": True}):
        for answer in answers(llm, Grammar("choice", '["yes", "no"]'), **params):
            assert answer.text in ("yes", "no")
            assert answer.finish_reason == "stop"


def test_a_stop_string_ends_it_early(llm: LLM) -> None:
    for answer in answers(llm, Grammar("regex", "ab+c"), stop=("c",)):
        assert re.fullmatch("ab+", answer.text)
        assert answer.finish_reason == "stop"


def test_who_has_no_grammar_writes_what_it_would_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=40, seed=5)
    constrained = SamplingParams(temperature=2.0, max_tokens=60, seed=6, grammar=schema(PERSON))
    alone = [llm.generate(prompt, free)[0].token_ids for prompt in PROMPTS[:2]]
    mixed = llm.generate(
        [PROMPTS[0], *PROMPTS[:3], PROMPTS[1]], [free, constrained, constrained, constrained, free]
    )
    assert [mixed[0].token_ids, mixed[-1].token_ids] == alone
    for answer in mixed[1:4]:
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), PERSON)


def test_a_refusal_names_the_setting(llm: LLM) -> None:
    with pytest.raises(RequestError) as error:
        answers(llm, schema({"type": "string", "format": "colour"}))
    assert error.value.param == "grammar"
    assert "grammar: format 'colour' is not supported" in error.value.message
