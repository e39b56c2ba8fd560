"""`weft serve`: a server with OpenAI's API."""

from __future__ import annotations

import click

from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import Settings


@click.command(cls=TopicCommand)
@takes(EngineConfig, ServerConfig, model=True)
def serve(settings: Settings) -> int:
    """Serve MODEL over HTTP, with OpenAI's API.

    MODEL is OWNER/NAME on the Hugging Face hub, or a directory. If the model is not in the hub's
    cache, the server downloads it first.

    \b
    weft serve
    weft serve Qwen/Qwen3-0.6B
    weft serve ./my-finetune --port 9000 --max-model-len 4096
    """
    from weft.serving.api.server import serve

    return serve(settings.build(EngineConfig), settings.build(ServerConfig))
