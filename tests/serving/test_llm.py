"""The LLM class on a real (tiny, random) model: order, equality of the ways in, and errors."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from support.checkpoints import make_checkpoint

from weft import LLM, SamplingParams
from weft.errors import ConfigError, EngineError, ModelError, RequestError
from weft.serving.config.progress import Progress
from weft.serving.engine.sampling_params import Grammar

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [f"the weather is {word}" for word in ("one", "two", "three", "four", "five", "six")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True, scope="module")
def no_thread_is_left() -> Iterator[None]:
    """Every thread of weft's ends, though what one is loading is not cut short."""
    yield
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("weft-")]
    for thread in mine:
        thread.join(60)
    assert not any(thread.is_alive() for thread in mine)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, max_num_seqs=2, max_queue=1, threads=1) as llm:
        yield llm


def test_answers_come_in_the_order_of_many_more_prompts_than_fit(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.prompt_token_ids for answer in together] == list(
        map(llm.tokenizer.encode, PROMPTS)
    )
    assert len({answer.text for answer in together}) > 1


def test_two_engines_answer_as_one(llm: LLM, checkpoint: Path) -> None:
    alone = llm.generate(PROMPTS, GREEDY)
    with LLM(checkpoint, dp=2, max_num_seqs=2, max_queue=1, threads=2) as two:
        together = two.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    (from_text,), (from_ids,) = llm.generate(PROMPTS[0], GREEDY), llm.generate(ids, GREEDY)
    assert from_text.text == from_ids.text
    assert llm.tokenizer.decode(from_text.token_ids) == from_text.text
    assert from_text.finish_reason in ("stop", "length")
    assert llm.generate([]) == []


def test_each_prompt_can_have_its_own_params(llm: LLM) -> None:
    lengths = (1, 5, 3)
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = llm.generate(PROMPTS[:3], each)
    assert tuple(len(answer.token_ids) for answer in answers) == lengths
    with pytest.raises(RequestError, match="params has 3 entries for 2 prompts"):
        llm.generate(PROMPTS[:2], each)


def test_n_answers_follow_one_another_and_depend_on_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, max_tokens=8)
    first = llm.generate(PROMPTS[:2], params)
    assert len(first) == 6
    assert [a.prompt_token_ids for a in first[::3]] == list(map(llm.tokenizer.encode, PROMPTS[:2]))
    assert len({answer.text for answer in first[:3]}) == 3
    again = llm.generate(PROMPTS[:2], params)
    assert [answer.text for answer in first] == [answer.text for answer in again]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "one two"}]
    ids = llm.tokenizer.apply_chat_template(conversation)
    (one,) = llm.chat(conversation, GREEDY)
    two, three = llm.chat([conversation, conversation], GREEDY, tools=[None, None])
    assert one.prompt_token_ids == ids
    assert one.text == two.text == three.text == llm.generate(ids, GREEDY)[0].text


def test_streamed_equals_unstreamed(llm: LLM) -> None:
    deltas = list(llm.stream(PROMPTS[0], GREEDY))
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.finish_reason
    conversation = [{"role": "user", "content": "one two"}]
    streamed = "".join(delta.text for delta in llm.stream(conversation, GREEDY))
    assert streamed == llm.chat(conversation, GREEDY)[0].text


def test_a_stream_that_is_left_is_aborted(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for _ in range(4):  # more than fit: had they gone on, the last would be refused
        stream = llm.stream(PROMPTS[0], params)
        next(stream)
        stream.close()


def test_stop_logprobs_and_cache_are_reported(llm: LLM) -> None:
    prompt = "the system counts the numbers " * 12
    plain, _ = llm.generate([prompt, prompt], GREEDY)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, stop=(plain.text[2:4],), logprobs=2, prompt_logprobs=0
    )
    (stopped,) = llm.generate(prompt, params)
    assert stopped.text == plain.text.partition(plain.text[2:4])[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", plain.text[2:4])
    assert stopped.logprobs is not None
    assert [entry.token_id for entry in stopped.logprobs] == stopped.token_ids
    assert stopped.prompt_logprobs is not None
    assert len(stopped.prompt_logprobs) == len(stopped.prompt_token_ids) - 1
    (again,) = llm.generate(prompt, GREEDY)
    assert again.cached_tokens >= llm.info.block_size


def test_a_prompt_that_cannot_be_served_is_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: the prompt has \d+ tokens; .* 512"):
        llm.generate(["one", "the weather " * 1000], GREEDY)
    with pytest.raises(RequestError, match=r"prompt 0: .*template rejects"):
        llm.chat([{"role": "user"}], GREEDY)


def test_a_dictionary_is_no_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompts is a dictionary with 'prompt_token_ids'"):
        llm.generate({"prompt_token_ids": [1]})  # type: ignore[arg-type]


def test_progress_is_on_stderr(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.config.progress.LINE_EVERY", 0.0)
    llm.generate(PROMPTS, GREEDY, progress="weather")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    for i, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"weather: {i}/6 requests, \d+ tokens/s, \d+ s left", line), line
    assert len(lines) == 6
    assert lines[-1].endswith(" 0 s left")
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr() == ("", "")


def test_a_line_tells_count_rate_and_time_left_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("weft.serving.config.progress.time", SimpleNamespace(monotonic=lambda: now))
    with Progress("weather", 4, unit="lines") as progress:
        for now in (4.0, 12.0, 16.0, 24.0):  # noqa: B007  the clock reads it
            progress.advance(tokens=30)
    assert capsys.readouterr().err.splitlines() == [
        "weather: 2/4 lines, 5 tokens/s, 12 s left",
        "weather: 4/4 lines, 5 tokens/s, 0 s left",
    ]


def test_on_a_terminal_progress_is_a_bar(checkpoint: Path) -> None:
    controller, terminal = os.openpty()
    script = (
        "from weft import LLM, SamplingParams; "
        f"LLM({str(checkpoint)!r}, threads=1)"
        ".generate(['one'] * 3, SamplingParams(max_tokens=2), progress='weather')"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        seen = b""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while data := os.read(controller, 1024):
                seen += data
        os.close(controller)
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait(60) == 0, seen
    last = re.split("[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode()).strip())[-1]
    assert re.fullmatch(r"weather ━+ 3/3 [\d,]+ tokens/s 0:00:00", last), seen


def test_close_is_final_and_may_be_repeated(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("one")


def test_what_cannot_be_loaded_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint at"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        LLM(dtype="int3")


def test_a_script_may_end_without_closing(checkpoint: Path) -> None:
    script = (
        "from weft import LLM, SamplingParams; "
        f"print(len(LLM({str(checkpoint)!r}).generate('one', SamplingParams(max_tokens=2))))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Error" not in done.stderr


def test_settings_are_checked_as_everywhere(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no setting 'max_modle_len'; did you mean max_model_len"):
        LLM(checkpoint, max_modle_len=8)
    with pytest.raises(ConfigError, match="kv_cache_memory is '4 apples'; it must be a number of"):
        LLM(checkpoint, kv_cache_memory="4 apples")
    with LLM(checkpoint, threads=1, kv_cache_memory="1M", max_model_len=64) as llm:
        assert llm.info.num_blocks * llm.info.block_size >= 64


def test_allowed_tokens_and_bad_words(llm: LLM) -> None:
    """Without these settings, the random model's output has other tokens and these words."""
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, max_tokens=24))
    allowed = tuple(sorted(set(free.token_ids)))[::2]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, allowed_token_ids=allowed)
    (kept,) = llm.generate(PROMPTS[0], params)
    assert len(kept.token_ids) == 24
    assert set(kept.token_ids) <= set(allowed)
    assert set(free.token_ids) - set(allowed)

    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    (free,) = llm.generate(PROMPTS[0], greedy)
    token = next(t for t in free.token_ids if llm.tokenizer.token_text(t).strip().isalnum())
    word = llm.tokenizer.token_text(token).strip()
    (other,) = llm.generate(PROMPTS[0], msgspec.structs.replace(greedy, bad_words=(word,)))
    ids = {llm.tokenizer.encode(text)[0] for text in (word, " " + word)}
    assert ids & set(free.token_ids)
    assert not ids & set(other.token_ids)


def test_a_bad_word_of_several_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, n=4, seed=1, grammar=Grammar("regex", "(a[bc]){16}"))
    free = llm.generate("a", params)
    assert all("ab" in answer.text for answer in free)
    banned = msgspec.structs.replace(params, bad_words=("ab",))
    assert {answer.text for answer in llm.generate("a", banned)} == {"ac" * 16}


def test_restrictions_that_leave_nothing(llm: LLM) -> None:
    only = Grammar("regex", "(ab){4}")
    (answer,) = llm.generate("a", SamplingParams(grammar=only, bad_words=("ab",)))
    assert answer.text in ("", "a")
    assert answer.finish_reason == "error"
    assert answer.error == "bad_words and the grammar leave no token that can follow"
    (token,) = llm.tokenizer.encode("a")
    params = SamplingParams(allowed_token_ids=(token,), bad_words=("a",))
    with pytest.raises(RequestError, match="bad_words forbids all of allowed_token_ids"):
        llm.generate("a", params)


def test_bounds_that_mean_off_or_greedy(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, GREEDY)
    hot = SamplingParams(temperature=1.5, top_p=0.0, seed=3, max_tokens=8)
    assert [a.token_ids for a in llm.generate(PROMPTS, hot)] == [a.token_ids for a in greedy]
    params = [SamplingParams(seed=5, max_tokens=8, top_k=top_k) for top_k in (0, -1)]
    off, minus = llm.generate([PROMPTS[0]] * 2, params)
    assert off.token_ids == minus.token_ids


def test_the_stop_string_and_special_tokens_may_stay_in_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=16))
    stop = whole.text[3:5]
    cut = SamplingParams(temperature=0.0, max_tokens=16, stop=(stop,))
    (without,) = llm.generate(PROMPTS[0], cut)
    (kept,) = llm.generate(
        PROMPTS[0], msgspec.structs.replace(cut, include_stop_str_in_output=True)
    )
    assert kept.text == without.text + stop
    assert whole.text.startswith(kept.text)

    end, eos = llm.tokenizer.eos_token_ids[0], llm.tokenizer.special_tokens["eos_token"]
    only = SamplingParams(max_tokens=3, allowed_token_ids=(end,), ignore_eos=True)
    assert llm.generate("a", only)[0].text == ""
    shown = msgspec.structs.replace(only, skip_special_tokens=False)
    assert llm.generate("a", shown)[0].text == eos * 3
    ending = msgspec.structs.replace(shown, ignore_eos=False)
    assert llm.generate("a", ending)[0].text == ""
    ending = msgspec.structs.replace(ending, include_stop_str_in_output=True)
    assert llm.generate("a", ending)[0].text == eos


def test_chat_template_arguments(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match=r"kwargs.messages is set by the server"):
        llm.chat(chat, GREEDY, chat_template_kwargs={"messages": []})
    (answer,) = llm.chat(chat, GREEDY, chat_template_kwargs={"unread": 1})
    assert answer.token_ids == llm.chat(chat, GREEDY)[0].token_ids
    assert list(llm.stream(chat, GREEDY, chat_template_kwargs={"unread": 1}))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("guided_json", "json_schema"), ("guided_choice", "choice"), ("structured_outputs", "KIND")],
)
def test_a_constraint_by_vllms_name(name: str, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^SamplingParams has no {name}; use grammar=Gr.*{kind}"):
        SamplingParams(**{name: {"type": "object"}})
    with pytest.raises(TypeError, match="Unexpected keyword argument 'guide'"):
        SamplingParams(guide=1)  # type: ignore[call-arg]
