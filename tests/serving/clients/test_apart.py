"""litellm, LangChain's agents and lm-eval, in the environment from `make test-clients`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.echo_runner import THOUGHT
from support.server import Server
from support.tool_loop import ANSWER, BOTH, FUNCTIONS, PARALLEL, QUESTION

BIN = Path(__file__).parents[3] / "build" / "clients" / "python" / "bin"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not BIN.exists(), reason="`make test-clients` installs these clients"),
]

SUMS = [(12, 30), (5, 9), (41, 17), (20, 22)]

CHAT_TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{left}} + {{right}}?"
doc_to_target: "{{left}} + {{right}} = {{sum}}"
generation_kwargs: {max_gen_toks: 32, until: ["\\n\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
# The template is written out: /v1/completions takes a prompt as it stands.
CHOICE_TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: PROMPT
target_delimiter: ""
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""

LITELLM = """
import json, sys
import litellm

base, key = sys.argv[1:]
options = {
    "model": "hosted_vllm/weft-demo",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "api_base": base, "api_key": key, "temperature": 0,
}
whole = litellm.completion(**options)
streamed = list(litellm.completion(**options, stream=True))
tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
called = litellm.completion(**options, tools=[tool], tool_choice="required", max_tokens=60)
vectors = litellm.embedding(
    model="hosted_vllm/weft-demo", input=["one", "two"], api_base=base, api_key=key
)
try:
    litellm.completion(**options | {"temperature": 9})
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "usage": whole.usage.total_tokens,
    "streamed": "".join(event.choices[0].delta.content or "" for event in streamed),
    "called": called.choices[0].message.tool_calls[0].function.name,
    "vectors": [len(each["embedding"]) for each in vectors.data],
    "refused": refused,
}))
"""

# Agent loops; the arguments are the address, the key, the question and the functions.
LITELLM_LOOP = """
import itertools, json, sys
import litellm

base, key, question, functions = sys.argv[1:]
answers = {}
for effort, stream in itertools.product(("low", "none"), (False, True)):
    messages = [{"role": "user", "content": question}]
    for _ in range(5):
        got = litellm.completion(
            model="hosted_vllm/scripted", api_base=base, api_key=key, messages=messages,
            tools=[{"type": "function", "function": each} for each in json.loads(functions)],
            reasoning_effort=effort, stream=stream,
        )
        if stream:
            got = litellm.stream_chunk_builder(list(got), messages=messages)
        message = got.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            given = json.loads(call.function.arguments)
            a, b = given["a"], given["b"]
            result = {"multiply": a * b, "add": a + b}[call.function.name]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        if not message.tool_calls:
            break
    thought = getattr(message, "reasoning_content", None)
    answers[f"{effort} {stream}"] = f"{thought} {message.content}"
print(json.dumps(answers))
"""

LANGCHAIN_LOOP = """
import json, sys
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

base, key, question, _ = sys.argv[1:]

def multiply(a: int, b: int) -> int:
    "Multiply two numbers."
    return a * b

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

answers = {}
for responses in (False, True):
    for streaming in (False, True):
        model = ChatOpenAI(
            model="scripted", base_url=base, api_key=key, max_retries=0,
            use_responses_api=responses, streaming=streaming,
        )
        agent = create_agent(model, [multiply, add], system_prompt="You compute.")
        said = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 12})
        answers[f"{responses} {streaming}"] = said["messages"][-1].text
print(json.dumps(answers))
"""


def run(*command: str | Path, **environment: str) -> str:
    """What a command of that environment writes; it has no network but this machine's."""
    inherited = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def scores(folder: Path, server: Server, key: str, model: str, task: str, **more: str) -> float:
    """What lm-eval finds: the share of right answers."""
    examples = [
        {"left": a, "right": b, "sum": a + b, "choices": [f"{a} + {b} = {n}" for n in (a + b, a)]}
        for a, b in SUMS
    ]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, examples)))
    (folder / "task.yaml").write_text(task.replace("FOLDER", str(folder)))
    name = task.split()[1]
    route = "chat/completions" if "chat" in model else "completions"
    arguments = {"model": "weft-demo", "base_url": f"{server.url}/v1/{route}"} | more
    run(
        *(BIN / "lm_eval", "run", "--model", model, "--tasks", name, "--include_path", folder),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--output_path", folder / "out.json"),
        *(["--apply_chat_template"] if "chat" in model else []),
        OPENAI_API_KEY=key,
        HF_HOME=str(folder),
    )
    (out,) = folder.glob("out*.json")
    found: dict[str, float] = json.loads(out.read_text())["results"][name]
    return next(
        value for metric, value in found.items() if metric in ("acc,none", "exact_match,none")
    )


def test_lm_eval_asks_the_chat(demo: Server, key: str, tmp_path: Path) -> None:
    assert scores(tmp_path, demo, key, "local-chat-completions", CHAT_TASK) == 1.0


def test_lm_eval_weighs_choices(demo: Server, key: str, tmp_path: Path) -> None:
    """By log probabilities of prompts, with weft's own tokenizer over HTTP."""
    messages = [{"role": "user", "content": "What is LEFT + RIGHT?"}]
    tokens = demo.http.post(
        "/tokenize", json={"messages": messages}, headers={"Authorization": f"Bearer {key}"}
    ).json()["tokens"]
    prompt = demo.http.post(
        "/detokenize", json={"tokens": tokens}, headers={"Authorization": f"Bearer {key}"}
    ).json()["prompt"]
    prompt = prompt.replace("LEFT", "{{left}}").replace("RIGHT", "{{right}}")
    task = CHOICE_TASK.replace("PROMPT", json.dumps(prompt))
    remote = {"tokenizer_backend": "remote", "auth_token": key}
    assert scores(tmp_path, demo, key, "local-completions", task, **remote) == 1.0


def test_litellm(demo: Server, key: str) -> None:
    told = json.loads(run(BIN / "python", "-c", LITELLM, f"{demo.url}/v1", key).splitlines()[-1])
    assert told["whole"] == told["streamed"] == "12 + 30 = 42"
    assert told["usage"] > 0
    assert told["called"] == "get_weather"
    one, two = told["vectors"]
    assert one == two
    assert "temperature" in told["refused"]


@pytest.mark.parametrize(("question", "answer"), [(QUESTION, ANSWER), (PARALLEL, BOTH)])
@pytest.mark.parametrize(
    ("script", "ways"),
    [
        (LITELLM_LOOP, [f"{THOUGHT} ANSWER"] * 2 + ["None ANSWER"] * 2),
        (LANGCHAIN_LOOP, ["ANSWER"] * 4),
    ],
    ids=["litellm", "langchain"],
)
def test_agent_loops(
    scripted: Server, key: str, script: str, ways: list[str], question: str, answer: str
) -> None:
    arguments = (f"{scripted.url}/v1", key, question, json.dumps(FUNCTIONS))
    told = json.loads(run(BIN / "python", "-c", script, *arguments).splitlines()[-1])
    assert list(told.values()) == [way.replace("ANSWER", answer) for way in ways], told
