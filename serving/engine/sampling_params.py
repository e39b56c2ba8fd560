"""Sampling settings of a request: how tokens are chosen, and when the output stops.

`SamplingParams` is the only list of these settings; requests of the API take their fields from it.
Values are checked here for HTTP, batch files and Python alike: a wrong value raises a RequestError
with the field's name. checks.py checks the settings against the model (vocabulary, context length).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from weft.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_LENGTH = 1 << 18
MAX_CHOICES = 1024
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 256
MAX_BAD_LENGTH = 1 << 14


class Range(NamedTuple):
    """Values from `low` (beyond it when `low_open`) to `high`."""

    low: float
    high: float
    low_open: bool = False


RANGES = {
    "n": Range(1, MAX_N),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, low_open=True),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "seed": Range(-(2**63), 2**63 - 1),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}
"""The allowed values of the numeric settings."""
_BIAS = Range(-100.0, 100.0)

GrammarKind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint on the whole output of a request; see docs/structured-output.md.

    Attributes:
        kind: "json_object" for any JSON object; "json_schema" for JSON of a schema; "regex" for a
            text that matches as a whole; "ebnf" for a text of the rule `root`; "choice" for one of
            several texts; "structural_tag" for a tag of xgrammar.
        text: the schema, expression, grammar or tag; for "choice" a JSON list of the texts; empty
            for "json_object".
        param: the field of the request, for error messages.
        before: an earlier part of the output, such as a thought: JSON of a structural tag's format.
        instead: an alternative output, such as tool calls: JSON of a structural tag's format.
        header: text before the constrained output, but not before `instead`; in the same form.
    """

    kind: GrammarKind
    text: str = ""
    param: str = "grammar"
    before: str = ""
    instead: str = ""
    header: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "json_object") != (not self.text):
            raise RequestError(
                "json_object takes no text" if self.text else f"{self.param} is empty",
                param=self.param,
            )
        for param, text in ((self.param, self.text), ("tools", self.instead)):
            if len(text) > MAX_GRAMMAR_LENGTH:
                raise RequestError(
                    f"{param} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH}",
                    param=param,
                )
        if not is_unicode(self.text):
            raise RequestError(
                f"{self.param} contains half of a surrogate pair, which is no character",
                param=self.param,
                code="invalid_unicode",
            )
        if self.kind == "choice":
            self._check_choices()

    @property
    def choices(self) -> list[str]:
        """The texts of a "choice"; RequestError if `text` is no JSON list of texts."""
        try:
            return msgspec.json.decode(self.text, type=list[str])
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            raise RequestError(f"{self.param} must be a list of texts", param=self.param) from None

    def _check_choices(self) -> None:
        choices = self.choices
        if not 0 < len(choices) <= MAX_CHOICES:
            raise RequestError(
                f"{self.param} has {len(choices)} choices; it must have 1 to {MAX_CHOICES}",
                param=self.param,
            )
        if "" in choices:
            raise RequestError(
                f"{self.param}[{choices.index('')}] is empty; a choice must have a text",
                param=self.param,
            )


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for settings without a value in a request; without arguments, OpenAI's defaults.

    Attributes: as in SamplingParams.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


NEUTRAL = SamplingDefaults()


_VLLM_NAMES = {
    "guided_json": '"json_schema"',
    "guided_regex": '"regex"',
    "guided_choice": '"choice"',
    "guided_grammar": '"ebnf"',
    "guided_decoding": "KIND",
    "structured_outputs": "KIND",
}
"""vLLM's names for constraints -> the kind of grammar."""


class _Advised(msgspec.StructMeta):
    """The type of SamplingParams: an error about vLLM's name for a constraint names ours."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:  # noqa: N805  as in a metaclass
        for name in settings.keys() & _VLLM_NAMES.keys():
            raise TypeError(
                f"SamplingParams has no {name}; use grammar=Grammar({_VLLM_NAMES[name]}, TEXT), "
                f"with Grammar from {Grammar.__module__}"
            )
        return super().__call__(*values, **settings)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_Advised
):
    """Sampling settings, with OpenAI's names and ranges where it has them.

    A setting of `SamplingDefaults` that is None gets the model's default: see generation_config.py.

    Attributes:
        n: number of answers to the same prompt, 1 to 128.
        max_tokens: maximum number of output tokens; None allows the whole context.
        min_tokens: neither an end token nor a stop string ends the output before this many tokens.
        temperature: 0 is greedy; at most 2.
        top_p, top_k, min_p: cut the distribution; see models/interface.py. `top_p` 0 is greedy, and
            `top_k` 0 or -1 keeps all tokens.
        repetition_penalty, presence_penalty, frequency_penalty: see models/interface.py.
        logit_bias: token id -> bias in [-100, 100].
        allowed_token_ids: the only allowed tokens in the output; None allows all.
        bad_words: forbidden texts. The output must not contain their token sequences, neither as at
            a text's beginning nor as after a space.
        seed: the same seed gives the same output, whatever else is served; None draws a seed.
        stop: strings that end the output; they are not part of it.
        include_stop_str_in_output: the stop string or token stays in the output's text.
        stop_token_ids: tokens that end the output, besides the model's own.
        skip_special_tokens: leave control tokens out of the text.
        ignore_eos: do not end at the model's own end tokens.
        logprobs: number of the most likely tokens to report with each token; None reports nothing.
        prompt_logprobs: the same for the prompt's tokens.
        grammar: constraint on the output; None leaves the output free.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def chosen(self, defaults: SamplingDefaults = NEUTRAL) -> SamplingDefaults:
        """Return the settings in `SamplingDefaults`, with `defaults` where they are None."""
        values = {name: getattr(self, name) for name in SamplingDefaults.__struct_fields__}
        given = {name: value for name, value in values.items() if value is not None}
        return msgspec.structs.replace(defaults, **given)

    def answer(self, i: int) -> SamplingParams:
        """Return the settings of the i-th of `n` answers; a seed becomes the answer's own."""
        seed = self.seed
        if seed is not None:
            seed = (seed + i + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            if (value := getattr(self, name)) is not None:
                _within(name, value, allowed)
        if self.max_tokens is not None:
            _within("min_tokens", self.min_tokens, Range(0, self.max_tokens))
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, "end every output")
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, "forbid every output")
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_LENGTH:
            raise RequestError(
                f"bad_words has {length} characters; at most {MAX_BAD_LENGTH}", param="bad_words"
            )
        if self.allowed_token_ids is not None and not (
            0 < len(self.allowed_token_ids) <= MAX_ALLOWED
        ):
            raise RequestError(
                f"allowed_token_ids has {len(self.allowed_token_ids)} entries; it must have 1 to "
                f"{MAX_ALLOWED}",
                param="allowed_token_ids",
            )
        for param, count, most in (
            ("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS),
            ("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS),
        ):
            if count > most:
                raise RequestError(f"{param} has {count} entries; at most {most}", param=param)
        for token, bias in self.logit_bias.items():
            _within("logit_bias", bias, _BIAS, where=f"logit_bias[{token}]")


# msgspec describes a type when it is first used, and crashes if two threads do so at once.
msgspec.json.Decoder(SamplingDefaults)
msgspec.json.Decoder(SamplingParams)


def _within(param: str, value: float, allowed: Range, *, where: str | None = None) -> None:
    """Raise RequestError unless the value is in the range."""
    low, high, low_open = allowed
    if (low < value if low_open else low <= value) and value <= high:  # false for NaN
        return
    bracket = "(" if low_open else "["
    raise RequestError(
        f"{where or param} is {value}; it must be in {bracket}{low}, {high}]", param=param
    )


def _check_texts(param: str, texts: tuple[str, ...], most: int, empty: str) -> None:
    """Raise RequestError for too many texts, or for an impossible text."""
    if len(texts) > most:
        raise RequestError(f"{param} has {len(texts)} strings; at most {most}", param=param)
    for i, text in enumerate(texts):
        if not text:
            raise RequestError(f"{param}[{i}] is empty; it would {empty}", param=param)
        if len(text) > MAX_STOP_LENGTH:
            raise RequestError(
                f"{param}[{i}] has {len(text)} characters; at most {MAX_STOP_LENGTH}", param=param
            )
        if not is_unicode(text):
            raise RequestError(f"{param}[{i}] has half a surrogate pair", param=param)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it contains no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
