"""Flags that several commands share, and help that lists flags by topic.

Each setting gets a flag, made from its field in serving/config/settings.py. Flags without a topic
come first in the help, under "Options".
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click
import msgspec

from weft.errors import ConfigError, RequestError
from weft.serving.config import logs, vllm_names
from weft.serving.config.fields import Setting, settings_of
from weft.serving.config.settings import TOPICS, EngineConfig, ServerConfig
from weft.serving.config.sources import resolve

if TYPE_CHECKING:
    from weft.serving.engine.sampling_params import SamplingParams
    from weft.serving.llm import LLM

Command = Callable[..., int]

NO_TOPIC = "Options"
SIMILAR = 0.8  # for two flags, from 0 to 1; a suggestion is at least as similar
SIMILAR_WORDS = 0.6  # for each word in them
TOPIC_OF = {name: topic for topic, names in TOPICS.items() for name in names}
_ORDER = {name: place for place, name in enumerate(TOPIC_OF)}


class TopicOption(click.Option):
    """A flag with a topic for the help, and with hidden other names."""

    def __init__(
        self, param_decls: Sequence[str], *, topic: str, aliases: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(param_decls, **kwargs)
        self.topic = topic
        for alias in aliases:
            on, _, off = alias.partition("/")
            self.opts.extend([on] if on else [])
            self.secondary_opts.extend([off] if off else [])
        self._hidden = {name for alias in aliases for name in alias.split("/")}

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the flag and its help, without the other names."""
        names = self.opts, self.secondary_opts
        self.opts, self.secondary_opts = (
            [name for name in each if name not in self._hidden] for each in names
        )
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts, self.secondary_opts = names


class TopicCommand(click.Command):
    """A command whose help lists its flags by topic."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse flags; an unknown one gets advice, or a very similar suggestion."""
        if any(isinstance(param, TopicOption) for param in self.params):
            args = [arg for arg in args if arg not in vllm_names.NO_OPS]
        typed = list(args)  # the parser empties the other list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = _whole(error.option_name, typed)
            if (advice := vllm_names.ADVICE.get(flag)) is not None:
                raise click.UsageError(f"There is no {flag}: {advice}.", ctx) from None
            known = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            raise click.NoSuchOption(flag, possibilities=_typed_for(flag, known), ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each topic, in the order of the command's flags."""
        sections: dict[str, list[tuple[str, str]]] = {NO_TOPIC: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "topic", NO_TOPIC), []).append(record)
        for topic, records in sections.items():
            with formatter.section(topic):
                formatter.write_dl(records)


def _whole(flag: str, typed: Sequence[str]) -> str:
    """Return the flag as it was typed: for an unknown -dcp, click names only -d."""
    whole = [each.partition("=")[0] for each in typed if each.startswith(flag)]
    return flag if flag.startswith("--") or not whole else whole[0]


def _typed_for(flag: str, known: Sequence[str]) -> list[str]:
    """Return the known flag that the user probably meant, if there is one.

    They differ within words: `--cuda-graph-sizes` is not meant to be `--cuda-graphs`.
    """
    near = difflib.get_close_matches(flag, known, n=3, cutoff=SIMILAR)
    return [name for name in near if _alike(flag, name)][:1]


def _alike(one: str, other: str) -> bool:
    words, others = one.lstrip("-").split("-"), other.lstrip("-").split("-")
    if "".join(words) == "".join(others):
        return True
    return len(words) == len(others) and all(
        a[:1] == b[:1] and difflib.SequenceMatcher(None, a, b).ratio() >= SIMILAR_WORDS
        for a, b in zip(words, others, strict=True)
    )


def option(topic: str) -> Callable[..., Callable[[Command], Command]]:
    """Return `click.option` for flags under one topic."""
    return partial(click.option, cls=TopicOption, topic=topic)


def takes(
    *configs: type[EngineConfig] | type[ServerConfig],
    model: bool = False,
    only: Collection[str] | None = None,
) -> Callable[[Command], Command]:
    """Give a command a flag for each setting, and the resolved `Settings` as first argument.

    Args:
        configs: dataclasses with the settings.
        model: the command takes the model as an argument, besides the flag --model.
        only: names of usable settings; None for all.
    """
    taken = sorted(
        (
            setting
            for config in configs
            for setting in settings_of(config)
            if only is None or setting.name in only
        ),
        key=lambda setting: _ORDER[setting.name],
    )

    def decorate(function: Command) -> Command:
        def command(config_file: Path | None, **options: Any) -> int:
            given = {setting.name: options.pop(setting.name) for setting in taken}
            if (argument := options.pop("model_argument", None)) is not None:
                if given["model"] not in (None, argument):
                    raise ConfigError(
                        f"--model is {given['model']}, and MODEL is {argument}: give one of them"
                    )
                given["model"] = argument
            flags = {name: raw for name, raw in given.items() if raw is not None}
            settings = resolve(flags, os.environ, config_file)
            logs.configure(settings["log_format"].value)
            return function(settings, **options)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        # The last decorator comes first in the help.
        for setting in reversed(taken):
            _flag(setting)(command)
        if model:
            click.argument("model_argument", metavar="[MODEL]", required=False)(command)
        return click.option(
            "--config",
            "config_file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="TOML file with settings; else the file that WEFT_CONFIG names",
        )(command)

    return decorate


def _flag(setting: Setting) -> Callable[[Command], Command]:
    """Return the click option of a setting.

    It has no default, so `takes` can tell which flags were given.
    """
    add = option(TOPIC_OF[setting.name])
    default = "" if setting.default is None else f"  [default: {setting.default}]"
    text = setting.help.text + default
    aliases = vllm_names.ALIASES.get(setting.name, ())
    if setting.type is bool:
        names = f"{setting.flag}/--no-{setting.flag[2:]}"
        return add(names, setting.name, default=None, help=text, aliases=aliases)
    return add(setting.flag, setting.name, metavar=_metavar(setting), help=text, aliases=aliases)


def _metavar(setting: Setting) -> str:
    if setting.help.unit == "bytes":
        return "SIZE"
    if get_origin(setting.type) is Literal:
        return "|".join(get_args(setting.type))
    return "TEXT" if str in (setting.type, *get_args(setting.type)) else "N"


def sampling(function: Command) -> Command:
    """Give a command the flags for sampling; `sampling_params` reads them."""
    add = option("Sampling")
    for flag, kind, text in (
        ("--top-k", int, "sample among the N likeliest tokens"),
        ("--top-p", float, "sample among the likeliest tokens with this total probability"),
        (
            "--temperature",
            float,
            "0 always takes the likeliest token, 1 samples  [default: the model's, else 0]",
        ),
        ("--max-tokens", int, "maximum tokens in the answer; else the rest of the context"),
    ):
        add(flag, type=kind, metavar="N", help=text)(function)
    text = "end the answer at this text; repeatable"
    return add("--stop", multiple=True, metavar="TEXT", help=text)(function)


def sampling_params(flags: dict[str, Any]) -> SamplingParams:
    """Make SamplingParams from the flags of `sampling`; ConfigError if a value is invalid."""
    from weft.serving.engine.sampling_params import SamplingParams

    try:
        return SamplingParams(**{name: value for name, value in flags.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"a sampling flag: {error}") from None


def greedy_by_default(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Return the settings with temperature 0, unless they or the model have another one."""
    if params.temperature is not None or "temperature" in llm.generation_config.named:
        return params
    return msgspec.structs.replace(params, temperature=0.0)
