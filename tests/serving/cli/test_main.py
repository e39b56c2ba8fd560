"""The `weft` command as its users run it: real processes, pipes and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.commands import run_each

from weft import LLM, SamplingParams
from weft.models.checkpoint.locate import locate
from weft.models.memory.ledger import human_bytes

COMMANDS = ("batch", "chat", "config", "doctor", "eval", "generate", "join", "serve")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `weft ARGUMENTS` to its end, away from the repository."""

    def run(
        *arguments: object, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weft", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            timeout=400,
        )

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, a tokenizer and a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """The same model in this process: it says what the command has to write."""
    with LLM(checkpoint, threads=1) as llm:
        yield llm


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong; before it there may be the memory ledger."""
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("weft: error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("weft: error: ")


def test_version_is_quick_and_loads_nothing_heavy(run: Run) -> None:
    assert run("--version").stdout == "weft 0.1.0\n"
    code = (
        "import sys, weft.serving.cli.main as cli; sys.argv = ['weft', '--version']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'zmq', 'numpy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_the_commands_and_each_has_an_example(tmp_path: Path) -> None:
    lines = [[], ["--help"], *([command, "--help"] for command in COMMANDS)]
    bare, asked, *each = run_each(lines, tmp_path)
    assert bare.returncode == 0
    assert bare.stdout == asked.stdout
    for command, done in zip(COMMANDS, each, strict=True):
        assert f"\n  {command} " in bare.stdout
        assert "--config FILE" in done.stdout
        assert f"weft {command}" in done.stdout


def test_flags_of_settings_show_type_and_default(run: Run) -> None:
    text = " ".join(run("serve", "--help").stdout.split())
    assert "--max-queue N maximum waiting requests; further ones get a 429 [default: 1024]" in text
    assert "--kv-cache-memory SIZE" in text
    assert "--dtype auto|bfloat16|float16|half|float32" in text
    assert "--prefix-caching / --no-prefix-caching" in text


USAGE_ERRORS = [
    (["serve", "--prot", "3"], "--prot"),
    (["frobnicate"], "frobnicate"),
    (["generate"], "PROMPT"),
    (["generate", "owner/name"], "owner/name may be the model or the prompt: give a prompt after"),
    (["generate", "weft-demo", "--raw"], "weft-demo may be the model or the prompt"),
    (["generate", "hf://owner/name"], "hf://owner/name may be the model or the prompt"),
    (["generate", str(locate("weft-demo"))], "weft-demo may be the model or the prompt"),
    (
        ["serve", "--dtype", "fp8"],
        "--dtype is 'fp8'; it must be one of auto, bfloat16, float16, half, float32",
    ),
    (["serve", "--port", "70000"], "--port is 70000; it must be at most 65535"),
    (["serve", "--max-model-len", "many"], "--max-model-len is 'many'; it must be an integer"),
    (["config", "--config", "nowhere.toml"], "nowhere.toml: No such file or directory"),
    (["generate", "x", "--temperature", "9"], "temperature is 9.0; it must be in [0.0, 2.0]"),
    (["eval", "--task", "chess"], "--task is 'chess'; it must be one of arithmetic"),
]


def test_usage_errors_are_one_line_and_exit_2(tmp_path: Path) -> None:
    lines = [arguments for arguments, _ in USAGE_ERRORS]
    for done, (_, message) in zip(run_each(lines, tmp_path), USAGE_ERRORS, strict=True):
        assert done.returncode == 2
        assert message in error_of(done)
        assert done.stderr.count("\n") == 1


def test_unknown_names_in_file_and_environment_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "weft.toml").write_text("max_qeue = 3")
    done = run("config", "--config", "weft.toml")
    assert done.returncode == 2
    assert error_of(done) == "weft.toml: unknown key 'max_qeue'; did you mean max_queue?"
    done = run("config", WEFT_PROT="1")
    assert done.returncode == 2
    assert "did you mean WEFT_PORT?" in error_of(done)


def test_config_shows_what_defaults_come_to(run: Run) -> None:
    flags = ("--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--device", "cpu")
    found = json.loads(run("config", "--json", *flags).stdout)
    assert found["max_model_len"] == {"value": 2048, "source": "default: the model's context"}
    assert found["dtype"] == {"value": "bfloat16", "source": "default: the checkpoint's"}
    assert found["device"] == {"value": "cpu", "source": "--device"}
    assert found["kernels"]["value"] == "plain"
    assert found["threads"]["value"] >= 1
    cache = found["kv_cache_memory"]
    assert cache["source"] == "default: what requests can use"
    log = run("generate", "Hi", "--max-tokens", "1", *flags).stderr
    assert re.search(rf"memory: KV cache +{human_bytes(cache['value'])} ", log)
    # Settings with a value stay, and a missing model adds nothing.
    found = json.loads(
        run("config", "--json", "--max-model-len", "64", "--dtype", "float32").stdout
    )
    assert found["max_model_len"] == {"value": 64, "source": "--max-model-len"}
    assert found["dtype"] == {"value": "float32", "source": "--dtype"}
    found = json.loads(run("config", "--json", "--model", "nowhere").stdout)
    assert found["max_model_len"] == {"value": None, "source": "default"}


def test_config_says_where_each_value_comes_from(run: Run, tmp_path: Path) -> None:
    (tmp_path / "weft.toml").write_text('port = 1\nmax_queue = 7\nkv_cache_memory = "1G"\n')
    arguments = ("config", "--config", "weft.toml", "--port", "3")
    found = json.loads(run(*arguments, "--json", WEFT_PORT="2", WEFT_MAX_NUM_SEQS="5").stdout)
    assert found["port"] == {"value": 3, "source": "--port"}
    assert found["max_num_seqs"] == {"value": 5, "source": "WEFT_MAX_NUM_SEQS"}
    assert found["max_queue"] == {"value": 7, "source": "max_queue in weft.toml"}
    assert found["kv_cache_memory"]["value"] == 2**30
    assert found["request_timeout"] == {"value": None, "source": "default"}
    table = run(*arguments, WEFT_NODE_TOKEN="a secret of some length").stdout
    assert ["port", "3", "--port"] in [line.split() for line in table.splitlines()]
    assert ["node_token", "(set)", "WEFT_NODE_TOKEN"] in [
        line.split() for line in table.splitlines()
    ]
    assert "a secret" not in table


def test_models_that_cannot_be_served(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for name, text, message in (
        ("config.json", '{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}', "Mamba"),
        ("tokenizer.json", None, "no tokenizer in"),
        ("model.safetensors", "torn", "model.safetensors"),
    ):
        broken = tmp_path / name.replace(".", "-")
        broken.mkdir()
        for file in checkpoint.iterdir():
            if file.name != name:
                (broken / file.name).write_bytes(file.read_bytes())
        if text is not None:
            (broken / name).write_text(text)
        done = run("generate", "--model", broken, "Hello")
        assert done.returncode == 1
        assert message in error_of(done)


def test_settings_that_the_model_cannot_take(run: Run, checkpoint: Path) -> None:
    done = run("generate", "--model", "nowhere", "Hello")
    assert done.returncode == 1
    assert "no checkpoint at nowhere" in error_of(done)
    done = run("generate", "--model", checkpoint, "--max-model-len", 9999, "Hello")
    assert done.returncode == 2
    assert "--max-model-len is 9999" in error_of(done)


def test_generate_writes_only_the_answer(run: Run, checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    arguments = ("generate", "--model", checkpoint, "--max-tokens", 8)
    done = run(*arguments, "one/two")  # with --model, this is no model
    (answer,) = llm.chat([{"role": "user", "content": "one/two"}], params)
    assert (done.returncode, done.stdout) == (0, answer.text + "\n"), done.stderr
    done = run(*arguments, "--raw", "-", stdin="the weather")
    assert done.stdout == llm.generate("the weather", params)[0].text + "\n"


def test_a_prompt_that_does_not_fit_is_one_line(run: Run, checkpoint: Path) -> None:
    done = run("generate", "--model", checkpoint, "--raw", "-", stdin="the weather " * 2000)
    assert done.returncode == 1
    assert "512" in error_of(done)


def test_chat_keeps_the_conversation(run: Run, checkpoint: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)

    def answer(messages: list[dict[str, str]]) -> str:
        text = llm.chat(messages, params)[0].text
        messages.append({"role": "assistant", "content": text})
        return text + "\n"

    asked = {"role": "user", "content": "one two"}
    first, third = [asked], [{"role": "system", "content": "three"}, asked]
    expected = answer(first) + answer([*first, asked]) + answer([asked]) + answer(third)
    turns = "one two\none two\n/reset\none two\n/system three\none two\n\n/exit\nnever\n"
    done = run("chat", checkpoint, "--max-tokens", 6, stdin=turns)
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_on_a_terminal_an_interrupt_ends_the_answer_and_not_the_chat(checkpoint: Path) -> None:
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "weft", "chat", str(checkpoint)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)

        def wait_for(text: bytes) -> None:
            seen = b""
            while text not in seen:
                seen += os.read(controller, 1024)

        wait_for(b"> ")
        os.write(controller, b"one two\n")
        wait_for(b"one two\r\n")
        os.read(controller, 1)  # the answer has begun
        process.send_signal(signal.SIGINT)
        wait_for(b"\n> ")
        os.write(controller, b"/rest\n")
        wait_for(b"there is no /rest; /reset starts a new")  # it may have read the next prompt, too
        os.write(controller, b"/exit\n")
        assert process.wait(60) == 0
    os.close(controller)


def test_broken_pipe_is_quiet(checkpoint: Path) -> None:
    command = f"{sys.executable} -m weft generate --model {checkpoint} --raw one --max-tokens 99"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 1"], capture_output=True, timeout=400
    )
    assert b"rror" not in done.stderr, done.stderr


def test_interrupt_exits_130_without_a_word(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "weft", "chat", str(checkpoint)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one two\n")
        process.stdin.flush()
        process.stdout.read(1)  # it has loaded, and answers
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "rror" not in stderr
    assert "Traceback" not in stderr
