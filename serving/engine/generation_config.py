"""A checkpoint's sampling defaults, from generation_config.json.

Without this file the fields come from config.json, as in transformers. A GGUF file has them in its
metadata (`general.sampling.*`). Sources: transformers' `GenerationConfig`, and vLLM's
`--generation-config` with the same fields. As in vLLM, `do_sample` is not read: temperature 0 is
greedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ConfigError, ModelError, RequestError, shown
from weft.models.checkpoint.gguf_header import is_gguf
from weft.models.checkpoint.gguf_model import gguf_sampling
from weft.models.checkpoint.locate import find, read_json
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.sampling_params import NEUTRAL, SamplingDefaults, SamplingParams

FILE = "generation_config.json"
FIELDS = {name: name for name in SamplingDefaults.__struct_fields__} | {
    "max_tokens": "max_new_tokens"
}
"""Setting -> its field in the file."""

NOT_FOLLOWED: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "length_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": None,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "top_h": None,
    "typical_p": 1.0,
    "general.sampling.mirostat": 0,
    "general.sampling.penalty_last_n": -1,
    "general.sampling.sequence": None,
    "general.sampling.xtc_probability": 0.0,
}
"""Fields with an effect in transformers, and keys with one in llama.cpp, and none in weft. With
each, the value without an effect."""

_VLLM_NAMES = {"auto": "model", "vllm": "none"}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The sampling defaults in force.

    Attributes:
        defaults: a value for each setting.
        source: the file with the `named` settings; None without a file.
        named: the file's settings.
        ignored: the file's other fields with an effect elsewhere; see `NOT_FOLLOWED`.
    """

    defaults: SamplingDefaults = NEUTRAL
    source: str | None = None
    named: frozenset[str] = field(default_factory=frozenset)
    ignored: tuple[str, ...] = ()

    def described(self) -> dict[str, dict[str, Any]]:
        """Return each setting's value and source, for people."""
        return {
            name: {
                "value": getattr(self.defaults, name),
                "source": self.source if name in self.named else "default",
            }
            for name in SamplingDefaults.__struct_fields__
        }


def load_generation_config(config: EngineConfig) -> GenerationConfig:
    """Read the sampling defaults for a `--generation-config` value.

    Raises:
        ConfigError: the named file does not exist.
        ModelError: a value in the file is not allowed.
    """
    choice = _VLLM_NAMES.get(config.generation_config, config.generation_config)
    if choice == "none":
        return GenerationConfig()
    if choice == "model":
        folder, source = find(config.model, config.revision), FILE
        if not (folder / FILE).is_file():  # older models have these fields in config.json
            source = "config.json"
        path = folder if is_gguf(folder) else folder / source
        source = path.name
        if not path.is_file():
            return GenerationConfig()
    else:
        path = Path(choice).expanduser()
        path = path / FILE if path.is_dir() else path
        source = str(path)
        if not path.is_file():
            raise ConfigError(
                f"--generation-config is {choice}; it must be model, none, or a file or directory "
                f"with {FILE}"
            )
    content = gguf_sampling(path) if is_gguf(path) else read_json(path)
    named = {name: content[key] for name, key in FIELDS.items() if content.get(key) is not None}
    for name, value in named.items():
        try:
            msgspec.convert({name: value}, SamplingDefaults)
        except msgspec.ValidationError as error:
            kind = "an integer" if "`int" in str(error) else "a number"
            raise _refused(path, f"{FIELDS[name]} is {shown(value)}; it must be {kind}") from None
    defaults = msgspec.convert(named, SamplingDefaults)
    try:
        SamplingParams(**msgspec.structs.asdict(defaults))
    except RequestError as error:
        message = error.message.replace("max_tokens", FIELDS["max_tokens"])
        raise _refused(path, message) from None
    ignored = tuple(
        name
        for name, default in NOT_FOLLOWED.items()
        if content.get(name, default) not in (default, None, [])
    )
    return GenerationConfig(defaults, source, frozenset(named), ignored)


def _refused(path: Path, message: str) -> ModelError:
    return ModelError(f"{path}: {message}; --generation-config none ignores the file")
