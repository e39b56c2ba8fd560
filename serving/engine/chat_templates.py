"""Chat templates: conversations as text, and the template arguments for thinking and verbosity.

A checkpoint's template is a Jinja program. transformers' sandbox runs it, so a hostile template
stays away from Python. Templates have different switches for a model's thinking. Qwen3 and GLM read
`enable_thinking`; DeepSeek, Granite and Kimi read `thinking`; gpt-oss and Mistral read
`reasoning_effort`. `Thinking` is the common form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser

from weft.errors import ConfigError, ModelError, RequestError

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Level = Literal["low", "medium", "high"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
_USUAL_EFFORTS = ("low", "medium", "high")
_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_VERBOSITY = "verbosity"

# Arguments from the API or transformers. Special tokens are reserved, too.
_RESERVED = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("conversations", "chat_template", "return_assistant_tokens_mask", "tokenize"),
    }
)
# `raise_exception` in a template raises jinja2.TemplateError. The others come from expressions
# that a message with an unexpected shape breaks.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class Thinking:
    """The requested thinking, independent of templates.

    Attributes:
        on: whether to think; None leaves it to the template.
        effort: how much to think; None leaves it to the template. Not "none": then `on` is false.
        param: the request's field, for errors.
    """

    on: bool | None = None
    effort: Effort | None = None
    param: str = "reasoning_effort"

    @classmethod
    def of_effort(cls, effort: Effort | None, param: str = "reasoning_effort") -> Self:
        """Convert an OpenAI effort: "none" is off, and the others are on."""
        if effort is None:
            return cls(param=param)
        return cls(False, None, param) if effort == "none" else cls(True, effort, param)


UNASKED = Thinking()
"""Leaves everything to the template."""


@dataclass(frozen=True)
class Verbosity:
    """The requested length of the answer.

    Attributes:
        level: None leaves it to the template.
        param: the request's field, for errors.
    """

    level: Level | None = None
    param: str = "verbosity"


UNASKED_LENGTH = Verbosity()
"""Leaves the length to the template."""


@dataclass(frozen=True)
class ChatTemplates:
    """One checkpoint's chat templates. Safe to use from several threads.

    Attributes:
        sources: name -> Jinja source; the usual one is "default".
        special_tokens: name -> text, such as "eos_token" -> "</s>"; templates can use them.
        defaults: arguments for all conversations, unless a request sets them.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def text(self) -> str:
        """All templates' sources, to look for a format's marks."""
        return "".join(self.sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continued: bool = False,
        arguments: Mapping[str, Any] | None = None,
        thinking: Thinking = UNASKED,
        verbosity: Verbosity = UNASKED_LENGTH,
    ) -> str:
        """Convert a conversation to text.

        Args:
            messages: dicts with "role", "content" and the template's other fields.
            tools: functions for the model, in OpenAI's format.
            add_generation_prompt: end with the opening of the assistant's turn.
            continued: end inside the last message, so that the model continues it.
            arguments: more variables for the template (`chat_template_kwargs`).
            thinking: becomes arguments for this template.
            verbosity: becomes an argument for this template.

        Raises:
            RequestError: there is no template, it rejects the conversation, it knows no verbosity,
                or the arguments are reserved or contradictory.
        """
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise RequestError(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        given = arguments or {}
        self._check_arguments(given)
        for_thinking = self.thinking_arguments(thinking)
        wanted = for_thinking | self.verbosity_arguments(verbosity)
        for key, value in wanted.items():
            if given.get(key, value) != value:
                param = thinking.param if key in for_thinking else verbosity.param
                raise RequestError(
                    f"{param} and chat_template_kwargs.{key} contradict each other; give one of "
                    "them",
                    param=param,
                )
        try:
            return self._rendered(
                name,
                messages,
                {
                    **self.defaults,
                    **given,
                    **wanted,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continued,
                },
            )
        except _TEMPLATE_ERRORS as error:
            shown = "the messages, with chat_template_kwargs" if given else "the messages"
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise RequestError(
                f"the model's chat template rejects {shown}: {reason}",
                param="messages",
                code="chat_template_error",
            ) from error

    def _rendered(
        self, name: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.sources[name],
            **{**arguments, **self.special_tokens},
        )
        return str(text)

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        for name in arguments:
            if name in _RESERVED or name in self.special_tokens:
                raise RequestError(
                    f"chat_template_kwargs.{name} is set by the server; leave it out",
                    param=f"chat_template_kwargs.{name}",
                )

    def thinking_arguments(self, thinking: Thinking) -> dict[str, Any]:
        """Return these templates' arguments for the requested thinking.

        An unknown effort becomes the template's nearest one. A template with only a switch thinks
        at every effort. A template without either gets no argument: the model thinks as it always
        does.

        Raises:
            RequestError: the thought cannot be switched off.
        """
        on, effort = thinking.on, thinking.effort
        if on is None and effort is None:
            return {}
        switches = [name for name in _SWITCHES if name in self.variables]
        arguments: dict[str, Any] = {} if on is None else dict.fromkeys(switches, on)
        if not self.efforts:
            return arguments
        if on is False:
            if "none" in self.efforts:
                arguments[_EFFORT] = "none"
            elif not switches:
                raise RequestError(
                    f"{thinking.param} asks for no thought; this model has the efforts "
                    f"{', '.join(self.efforts)}",
                    param=thinking.param,
                    code="unsupported_value",
                )
            return arguments
        if effort is None and on and "none" in self.efforts:  # it may be the template's default
            effort = "medium"
        if effort is not None:
            place = EFFORTS.index(effort)
            steps = {each: abs(EFFORTS.index(each) - place) for each in self.efforts}
            steps.pop("none", None)
            if steps:
                arguments[_EFFORT] = min(steps, key=steps.__getitem__)
        return arguments

    def verbosity_arguments(self, verbosity: Verbosity) -> dict[str, Any]:
        """Return these templates' arguments for the requested length of the answer.

        Raises:
            RequestError: no template reads it, and it is not the usual "medium".
        """
        level, param = verbosity.level, verbosity.param
        if level is not None and _VERBOSITY in self.variables:
            return {_VERBOSITY: level}
        if level in (None, "medium"):
            return {}
        raise RequestError(
            f"{param} is {level!r}; this model's chat template knows no verbosity: leave it out, "
            "or send 'medium'",
            param=param,
            code="unsupported_value",
        )

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the templates read and do not define themselves."""
        trees = [_ENVIRONMENT.parse(source) for source in self.sources.values()]
        return frozenset().union(*map(meta.find_undeclared_variables, trees))

    @cached_property
    def efforts(self) -> tuple[Effort, ...]:
        """The default template's values for `reasoning_effort`, rising.

        They are low, medium, high, and others in the template's text. Values that make the template
        fail are left out, unless all do.
        """
        if _EFFORT not in self.variables or "default" not in self.sources:
            return ()
        tree = _ENVIRONMENT.parse(self.sources["default"])
        known = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        known.update(_USUAL_EFFORTS)
        efforts = tuple(effort for effort in EFFORTS if effort in known)
        return tuple(filter(self._takes, efforts)) or efforts

    def _takes(self, effort: Effort) -> bool:
        greeting = {"role": "user", "content": "Hello"}
        arguments = {**self.defaults, "add_generation_prompt": True, _EFFORT: effort}
        try:
            self._rendered("default", [greeting], arguments)
        except _TEMPLATE_ERRORS:
            return False
        return True

    @cached_property
    def takes_late_system(self) -> bool:
        """True if the default template shows a system message after other messages.

        Some templates reject it, and some leave it out.
        """
        roles = ("user", "system", "assistant", "user", "system")
        messages = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]
        arguments = {**self.defaults, "add_generation_prompt": True}
        try:
            text = self._rendered("default", messages, arguments)
        except _TEMPLATE_ERRORS:
            return False
        return "system 1" in text and "system 4" in text

    @classmethod
    def load(
        cls,
        path: Path,
        config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        file: str | Path | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:
        """Read a checkpoint's templates.

        Args:
            path: the tokenizer's directory or GGUF file.
            config: tokenizer_config.json's content.
            special_tokens: see the class.
            file: a replacement for the checkpoint's template.
            defaults: see the class.

        Raises:
            ModelError: a template is no text, or is not valid Jinja.
            ConfigError: the file cannot be read, or an argument in `defaults` is reserved.
        """
        sources = _of_checkpoint(path, config) if file is None else {"default": _of_file(file)}
        templates = cls(sources, special_tokens, defaults or {})
        try:
            templates._check_arguments(templates.defaults)
        except RequestError as error:
            raise ConfigError(f"--default-chat-template-kwargs: {error}") from None
        return templates


class _Generation(Extension):
    """The tag `{% generation %}`: a training mark around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own class has the field

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # parses only


def _of_file(file: str | Path) -> str:
    try:
        template = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template is {file}: {error}") from error
    _check_template(template, Path(file), "default")
    return template


def _of_checkpoint(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates: from files, or from a key in the configuration (older).

    Raises:
        ModelError: a template is no text, not UTF-8, or not valid Jinja.
    """
    config_file = path if path.is_file() else path / "tokenizer_config.json"
    templates = config.get("chat_template") or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    elif isinstance(templates, list):
        try:
            templates = {entry["name"]: entry["template"] for entry in templates}
        except (KeyError, TypeError):
            templates = None
    if not isinstance(templates, dict) or not all(map(_is_text, [*templates, *templates.values()])):
        raise ModelError(
            f"{config_file}: chat_template must be a text, or a list of objects with the texts "
            "name and template"
        )
    sources = dict.fromkeys(templates, config_file)
    files = {"default": path / "chat_template.jinja"}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name], sources[name] = file.read_text(encoding="utf-8"), file
            except UnicodeDecodeError as error:
                raise ModelError(f"{file} is not UTF-8: {error}") from None
    for name, template in templates.items():
        _check_template(template, sources[name], name)
    return templates


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_template(template: str, file: Path, name: str) -> None:
    """Compile a chat template, without running it.

    Raises:
        ModelError: it is not valid Jinja.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    never = "{% for _ in [] %}" + template + "{% endfor %}"
    try:
        render_jinja_template(conversations=[[]], chat_template=never)
    except (TemplateSyntaxError, SyntaxError) as error:  # the latter from nesting too deep
        message = error.message if isinstance(error, TemplateSyntaxError) else error.msg
        raise ModelError(
            f"{file}: the chat template {name!r} is not valid Jinja, in line {error.lineno}: "
            f"{message}"
        ) from error
