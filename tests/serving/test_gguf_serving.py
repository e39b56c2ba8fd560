"""A served GGUF file answers with transformers' tokens for the dequantised checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.server import start_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft import LLM, SamplingParams

PROMPT = "the thread that crosses the warp"


def _expected(plain: Path, ids: torch.Tensor) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    return [int(token) for token in answer[0, ids.shape[1] :]]


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("qwen3_moe", 2)])
def test_a_served_file_answers_as_transformers_does(tmp_path: Path, family: str, tp: int) -> None:
    # llama.cpp's Qwen3-MoE always normalises.
    moe = {"moe_intermediate_size": 64, "norm_topk_prob": True}
    sizes = moe if "moe" in family else {}
    source = make_checkpoint(tmp_path / "source", family, **sizes)
    file, plain = write_gguf(source, tmp_path / "out", Type.Q8_0)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    messages = [{"role": "user", "content": PROMPT}]
    with start_server(file, tmp_path, dtype="float32", tp=tp) as server:
        (listed,) = server.http.get("/v1/models").json()["data"]
        assert listed["id"] == "m"
        completion = server.http.post(
            "/v1/completions",
            json={
                "model": "m",
                "prompt": PROMPT,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        ).json()
        rendered = server.http.post("/tokenize", json={"model": "m", "messages": messages}).json()
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert completion["choices"][0]["token_ids"] == _expected(plain, ids)
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered["tokens"] == list(chat["input_ids"] if hasattr(chat, "keys") else chat)


def test_the_python_class_takes_a_file(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    file, plain = write_gguf(source, tmp_path / "out", Type.Q4_0)
    answers = []
    for model in (file, plain):
        with LLM(str(model), dtype="float32", threads=1) as llm:
            answers.append(llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0)))
    one, other = answers
    assert one[0].text == other[0].text
