"""`weft generate`: the answer to one prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from weft.models.checkpoint.locate import BUNDLED, is_like_a_model
from weft.serving.cli.chat import decode, write_answer
from weft.serving.cli.options import (
    TopicCommand,
    greedy_by_default,
    sampling,
    sampling_params,
    takes,
)
from weft.serving.config.logs import say
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings


class _Generate(TopicCommand):
    """A command with `[MODEL] PROMPT`: a single argument is the prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give a single argument to PROMPT; click gives it to the first one."""
        rest = super().parse_args(ctx, args)
        if ctx.params["prompt"] is None:
            prompt = ctx.params["prompt"] = ctx.params.pop("model_argument")
            ctx.params["model_argument"] = None
            if prompt is None and not ctx.resilient_parsing:
                raise click.MissingParameter(ctx=ctx, param_type="argument", param_hint="PROMPT")
            if prompt and ctx.params["model"] is None and is_like_a_model(prompt):
                raise click.UsageError(
                    f"{prompt} may be the model or the prompt: give a prompt after the model, or "
                    f"name the model that gets this prompt, as in --model {BUNDLED[0]}"
                )
        return rest


@click.command(cls=_Generate)
@click.option("--raw", is_flag=True, help="continue the text, without the chat template")
@sampling
@takes(EngineConfig, model=True)
@click.argument("prompt", metavar="PROMPT", required=False)
def generate(settings: Settings, prompt: str, raw: bool, **sampling: Any) -> int:
    """Answer PROMPT, and write the answer while it is generated.

    PROMPT can be -; then it is read from stdin. A model without a chat template continues the text,
    as with --raw.

    \b
    weft generate "What is 47 + 85?"
    weft generate Qwen/Qwen3-0.6B "Name three rivers."
    weft generate --raw "Once upon a time" --max-tokens 40 --temperature 0.8
    weft generate Qwen/Qwen3-0.6B - < question.txt
    """
    from weft.serving.llm import LLM

    params = sampling_params(sampling)
    text = decode(sys.stdin.buffer.read()) if prompt == "-" else prompt
    with LLM.of(settings.build(EngineConfig)) as llm:
        chat = not raw and bool(llm.tokenizer.chat_templates)
        if not raw and not chat:
            say("the model has no chat template: it continues the text, as with --raw")
        asked = [{"role": "user", "content": text}] if chat else text
        write_answer(llm, asked, greedy_by_default(params, llm))
    return 0
