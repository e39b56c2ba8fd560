"""A model's small files, checked before any process starts, and warnings about them at load."""

from __future__ import annotations

import logging

from weft.models.checkpoint.locate import (
    config_file,
    find,
    find_files,
    locate,
    read_config,
    read_spec,
)
from weft.models.spec.build import unread_fields
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.generation_config import GenerationConfig
from weft.serving.engine.tokenizer import tokenizer_file

logger = logging.getLogger(__name__)


def check_model(config: EngineConfig) -> None:
    """Check the small files, without reading weights: it takes milliseconds.

    Raises:
        ConfigError: `model` and `revision` do not fit together.
        ModelError: the model is not on this machine, a file is missing, or the model is not
            supported.
    """
    path = locate(config.model, config.revision)
    read_spec(path)
    find_files(path)
    tokenizer_file(find(config.tokenizer) if config.tokenizer else path)


def warn_of_unread_fields(config: EngineConfig) -> None:
    """Log the unused fields in config.json: one may be misspelt."""
    path = locate(config.model, config.revision)
    if fields := unread_fields(read_config(path)):
        logger.warning("%s: weft does not read %s", config_file(path), ", ".join(fields))


def warn_of_ignored_defaults(generation_config: GenerationConfig) -> None:
    """Log the ignored fields in generation_config.json."""
    if ignored := generation_config.ignored:
        logger.warning(
            "weft does not follow %s of %s", ", ".join(ignored), generation_config.source
        )


def warn_of_large_tokenizer(config: EngineConfig, tokens: int, vocab_size: int) -> None:
    """Log a tokenizer with more tokens than the model: prompts with the others are refused."""
    if tokens > vocab_size:
        logger.warning(
            "the tokenizer of %s has %s tokens, and the model has %s: a prompt with a token beyond "
            "that is refused",
            *(config.tokenizer or config.model, f"{tokens:,}", f"{vocab_size:,}"),
        )
