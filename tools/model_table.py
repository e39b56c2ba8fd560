"""Writes docs/model-table.md: families and formats, on each backend and in each layout.

python tools/model_table.py          # write the file

The cases come from the tests' own parameters, and families and formats from their registries. A
refusal is provoked here, and its message quoted. An empty cell fails the test of this page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/model-table.md"
AXES = ("tp", "ep", "cp", "pp")
BACKENDS = ("CPU", "GPU", "TPU")
APART = "apart"
"""A cell whose backend and layout are shown, but by two tests."""
STORED = "tests/models/checkpoint/test_stored.py"
FILES = (
    ("quantized", STORED, "test_every_family_is_read_as_its_numbers"),
    (
        "GGUF",
        "tests/models/checkpoint/test_gguf.py",
        "test_every_family_has_the_weights_that_the_file_stands_for",
    ),
)
"""Columns of files in other forms, with their tests."""

INTRODUCTION = """# Families and formats

`python tools/model_table.py` writes this page from the registries and the tests' parameters. A test
fails if a cell is empty or out of date: a new family or format needs its cases.

| cell | meaning |
| --- | --- |
| t1 | [Test 1](#tests) has a case with it. |
| r1 | It is refused. [Refusal 1](#refusals) has the message. |
| apart | No test has both. One has the family or format here; another has the layout on CPUs. |

A backend's column has any layout; the columns after it have that layout, perhaps with others. These
tests need no GPU and no TPU: Triton's interpreter runs GPU kernels, and jax runs on CPUs. Tests
marked "slow" run with `make test-slow`. Of a "sample", `make test` runs one case in four.
"""
FORMATS = """## Formats

Tests dequantize each rank's part, and compare it bit by bit with a plain checkpoint. On TPUs they
compare the numbers in jax, and on GPUs the model's tokens. One test crosses all formats with some
families; another reads each family in one format, in the column "quantized" above.

TPUs dequantize the weights when loading. GPUs keep them packed, and CPUs some of them: the last
columns have the form of the numbers in memory. On CPUs, this needs compiled kernels and bfloat16.
int4 then has scales for whole rows or for groups of 32, 64 or more columns, and int8 for whole rows
without zero points. Others are dequantized.
"""
GGUF = """## GGUF files

A GGUF file becomes the same model, with the same numbers. The column "GGUF" above names the test.
It reads plain and quantized files. Mistral's files name the architecture `llama`, and load as
such.
"""


class Case(NamedTuple):
    """One or several cases in a test.

    Attributes:
        what: the family, or the format.
        backend: one of BACKENDS, or a column of FILES.
        axes: the layout's.
        test: the file, the function, and its case if the case has several families.
        slow: whether only `make test-slow` runs it.
    """

    what: str
    backend: str
    axes: frozenset[str]
    test: str
    slow: bool = False


@cache
def module(path: str) -> ModuleType:
    """Import a test's file."""
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.insert(0, tests)
    name = path.removesuffix(".py").replace("/", "_")
    spec = spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def parameters(path: str, test: str) -> Iterator[tuple[dict[str, Any], str | None, bool]]:
    """Yield a test's cases: each one's parameters, own id if any, and whether it is slow.

    Several decorators' parameters are combined.
    """
    marks = getattr(module(path), test).pytestmark
    slow = any(mark.name == "slow" for mark in marks)
    decorators = [mark for mark in marks if mark.name == "parametrize"]
    for each in product(*map(_values, decorators)):
        values = dict(chain.from_iterable(given.items() for given, _, _ in each))
        ids = [name for _, name, _ in each if name is not None]
        yield values, "-".join(ids) or None, slow or any(is_slow for _, _, is_slow in each)


def _values(mark: Any) -> Iterator[tuple[dict[str, Any], str | None, bool]]:
    names, given = mark.args
    names = [names] if isinstance(names, str) else list(names)
    ids = mark.kwargs.get("ids")
    for i, case in enumerate(given):
        marked = hasattr(case, "marks")
        values = case.values if marked else case if len(names) > 1 else (case,)
        name = ids[i] if isinstance(ids, list | tuple) else case.id if marked else None
        slow = marked and any(mark.name == "slow" for mark in case.marks)
        yield dict(zip(names, values, strict=True)), name, slow


def axes_of(layout: Any) -> frozenset[str]:
    """Return a layout's split axes."""
    return frozenset(axis for axis in AXES if getattr(layout, axis) > 1)


def family_cases() -> Iterator[Case]:
    """Yield the cases with a family."""
    parity, split = "tests/models/torch/test_parity.py", "tests/models/torch/test_split.py"
    for family, _ in module(parity).MODELS.values():
        test = f"{parity}::test_logits_equal_those_of_transformers"
        yield Case(family, "CPU", frozenset(), test)
    models, interpreted = module(split).MODELS, module(split).INTERPRETED
    test = "test_tokens_are_those_of_one_rank"
    for values, name, slow in parameters(split, test):
        for model, _, layout in values["which"]:
            if layout.world_size == values["size"]:
                of_group = f"{split}::{test}[{name}]"
                yield Case(models[model][0], "CPU", axes_of(layout), of_group, slow)
    for test in (
        "test_gpu_kernels_between_plain_collectives_give_the_tokens_of_cpu_kernels",
        "test_overlapped_kernels_give_the_tokens_of_plain_ones",
    ):
        for values, name, slow in parameters(split, test):
            for model, layout in values["layouts"]:
                of_group = f"{split}::{test}[{name}]"
                yield Case(interpreted[model][0], "GPU", axes_of(layout), of_group, slow)
    path, test = "tests/models/jax/test_parity.py", "test_logits_equal_those_of_transformers"
    for values, _, slow in parameters(path, test):
        axes = frozenset(axis for axis in ("tp", "ep") if values[axis] > 1)
        yield Case(values["family"], "TPU", axes, f"{path}::{test}", slow)
    for column, path, test in FILES:
        for values, _, slow in parameters(path, test):
            yield Case(values["family"], column, frozenset(), named(path, test), slow)


def named(path: str, test: str) -> str:
    """Return a test's name, and whether the default run takes only a sample."""
    sample = any(mark.name == "sweep" for mark in getattr(module(path), test).pytestmark)
    return f"{path}::{test}" + " (sample)" * sample


def format_cases() -> Iterator[Case]:
    """Yield the cases with a quantised format, by its row's name."""
    packed, of_ranks = "tests/models/torch/test_packed.py", "tests/models/torch/test_quantized.py"
    of_jax = "tests/models/jax/test_quantized.py"
    read = [axes_of(layout) for layout in module(STORED).EXPERT_LAYOUTS]
    alone = [frozenset[str]()]
    for path, test, backend, layouts in (
        (STORED, "test_every_format_is_read_as_its_numbers", "CPU", read),
        (STORED, "test_stacked_experts_have_stacked_scales", "CPU", read),
        (packed, "test_tokens_are_those_of_the_plain_checkpoint", "GPU", alone),
        (packed, "test_stacked_experts_give_the_tokens_of_the_plain_checkpoint", "GPU", alone),
        (of_jax, "test_parameters_are_those_of_the_plain_checkpoint", "TPU", alone),
        (of_jax, "test_stacked_experts_are_those_of_the_plain_checkpoint", "TPU", alone),
    ):
        for values, _, slow in parameters(path, test):
            own = frozenset(axis for axis in ("tp", "ep") if values.get(axis, 1) > 1)
            for row, axes in product(_rows(values["form"]), layouts):
                yield Case(row, backend, axes | own, named(path, test), slow)
    test = "test_ranks_give_what_they_give_with_the_plain_checkpoint"
    for _, form, layout in module(of_ranks).CASES:
        for row in _rows(form):
            yield Case(row, "CPU", axes_of(layout), f"{of_ranks}::{test}")
    test = "test_ranks_sample_what_they_sample_with_the_plain_checkpoint"
    for cases in module(packed).CASES.values():
        for _, form, layout in cases:
            for row in _rows(form):
                yield Case(row, "GPU", axes_of(layout), f"{packed}::{test}")


def _rows(form: str) -> list[str]:
    """Return a form's rows; none for a test's own name."""
    return [row for row, forms in format_rows().items() if form in forms]


@cache
def format_rows() -> dict[str, dict[str, Any]]:
    """Return each `quant_method` with a stored format, and its forms in the tests.

    A form has a matrix's specification.
    """
    from weft.models.spec.config_fields import Fields
    from weft.models.spec.quantization import METHODS, SECTION, Format, read_quantization

    forms = module("tests/support/quantized.py")
    rows: dict[str, dict[str, Any]] = {}
    for name, form in (forms.FORMATS | forms.EXPERT_FORMATS).items():
        read = read_quantization(Fields({SECTION: form.config}, Path("config.json")))
        assert read is not None, name
        for spec in (*(spec for _, spec in read.groups), *read.named.values()):
            row = f"{form.config['quant_method']}: {spec.format}"
            rows.setdefault(row, {}).setdefault(name, spec)
    methods, formats = ({row.split(": ")[i] for row in rows} for i in range(2))
    assert not (lacking := METHODS.keys() - methods), f"no form has {sorted(lacking)}"
    assert not (lacking := set(get_args(Format)) - formats), f"no form has {sorted(lacking)}"
    order = list(METHODS)
    return dict(sorted(rows.items(), key=lambda row: order.index(row[0].split(": ")[0])))


def families() -> dict[str, str]:
    """Return each family's architecture."""
    from weft.models.spec.families.registry import FAMILIES, WRAPPERS

    return {each.model_type: name for name, each in (FAMILIES | WRAPPERS).items()}


def message_of(provoke: Callable[[], object]) -> str:
    """Return a refusal's message; AssertionError if nothing is refused."""
    from weft.errors import WeftError

    try:
        provoke()
    except WeftError as error:
        return str(error)
    raise AssertionError(f"{provoke} refuses nothing")


def of_backends(axes: Iterable[str], backends: Iterable[str] = BACKENDS) -> list[str]:
    """Return some axes' columns; "" stands for the backend's own."""
    return [f"{backend} {axis}".strip() for backend, axis in product(backends, axes)]


COLUMNS = of_backends(("", *AXES))
FAMILY_COLUMNS = [*COLUMNS, *(column for column, *_ in FILES)]
OTHER = "any other: "
"""The row of formats without one."""


def refusals_of_jax(rows: Iterable[str]) -> dict[tuple[str, str], str]:
    """Return the layouts' refusals by jax, by row and column."""
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.jax_loading import check_settings

    messages = {
        "TPU cp": message_of(lambda: check_settings(EngineConfig(backend="jax", cp=2))),
        "TPU pp": message_of(lambda: check_settings(EngineConfig(backend="jax", pp=2))),
    }
    return {(row, column): messages[column] for row, column in product(rows, messages)}


def family_refusals() -> dict[tuple[str, str], str]:
    """Return the refusals' messages, by family and column."""
    from weft.models.checkpoint.gguf_model import ARCHITECTURES
    from weft.models.spec.build import build_spec
    from weft.models.spec.layout import check_layout
    from weft.models.spec.spec import MoeSpec

    config_of = module("tests/models/spec/test_families.py").config_of
    read = {each.name for each in ARCHITECTURES.values()}
    found = refusals_of_jax(families())
    for family, architecture in families().items():
        spec = build_spec(config_of(architecture), Path("config.json"))
        if not any(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers):
            message = message_of(partial(check_layout, spec, 1, 2))
            found |= {(family, column): message for column in of_backends(("ep",))}
        if architecture not in read:
            found[family, "GGUF"] = gguf_refusal(family)
    return found


def gguf_refusal(name: str) -> str:
    """Return the message about a GGUF file with another architecture."""
    from gguf import GGUFWriter

    from weft.models.checkpoint.gguf_model import gguf_config

    with TemporaryDirectory() as folder:
        file = Path(folder) / "m.gguf"
        writer = GGUFWriter(file, name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        message = message_of(lambda: gguf_config(file))
    return message.replace(str(file), "m.gguf").replace(repr(name), "'NAME'")


def format_refusals() -> dict[tuple[str, str], str]:
    """Return the refusals' messages, by format and column."""
    from weft.models.spec.config_fields import Fields
    from weft.models.spec.quantization import SECTION, read_quantization

    section = {SECTION: {"quant_method": "another"}}
    message = message_of(lambda: read_quantization(Fields(section, Path("config.json"))))
    return refusals_of_jax(format_rows()) | {(OTHER, column): message for column in COLUMNS}


def shown_by(cases: Iterable[Case]) -> dict[tuple[str, str], str]:
    """Return for each row and column the test with the fewest other axes; a fast one precedes."""
    best: dict[tuple[str, str], tuple[bool, int, str]] = {}
    for case in cases:
        for column in (case.backend, *of_backends(case.axes, [case.backend])):
            place = case.what, column
            rank = case.slow, len(case.axes), case.test + " (slow)" * case.slow
            best[place] = min(best.get(place, rank), rank)
    return {place: test for place, (_, _, test) in best.items()}


class Cells(NamedTuple):
    """Both tables' cells, some perhaps empty, and the numbered tests and messages."""

    families: dict[tuple[str, str], str]
    formats: dict[tuple[str, str], str]
    tests: list[str]
    messages: list[str]


def cells() -> Cells:
    """Return the cells; AssertionError if a refused one has a test."""
    shown = [shown_by(family_cases()), shown_by(format_cases())]
    refused = [family_refusals(), format_refusals()]
    for one, other in zip(shown, refused, strict=True):
        assert not (twice := one.keys() & other.keys()), f"shown and refused: {sorted(twice)}"
    tests = sorted({test for each in shown for test in each.values()})
    messages = list(dict.fromkeys(chain(*(each.values() for each in refused))))
    numbers = {text: f"t{i}" for i, text in enumerate(tests, 1)}
    numbers |= {text: f"r{i}" for i, text in enumerate(messages, 1)}

    def cell(given: Mapping[tuple[str, str], str], row: str, column: str) -> str:
        if text := given.get((row, column)):
            return numbers[text]
        backend, _, axis = column.partition(" ")
        apart = axis and (row, backend) in given and (row, f"CPU {axis}") in given
        return APART if apart else ""

    own, formats = (
        {place: cell(one | other, *place) for place in product(rows, names)}
        for one, other, rows, names in (
            (shown[0], refused[0], families(), FAMILY_COLUMNS),
            (shown[1], refused[1], [*format_rows(), OTHER], COLUMNS),
        )
    )
    return Cells(own, formats, tests, messages)


def page(made: Cells) -> str:
    """Return the whole page."""
    from weft.models.checkpoint.packing import kind_of

    heads = [column.replace(" ", " `--") + "`" * (" " in column) for column in COLUMNS]
    own = [
        [f"`{family}`", f"`{name}`", *(made.families[family, each] for each in FAMILY_COLUMNS)]
        for family, name in families().items()
    ]
    formats = [
        [
            *(row.split(": ") if row == OTHER else [f"`{word}`" for word in row.split(": ")]),
            *(made.formats[row, each] for each in COLUMNS),
            ", ".join(sorted({kind_of(spec) for spec in format_rows().get(row, {}).values()})),
            on_cpus(row),
        ]
        for row in [*format_rows(), OTHER]
    ]
    tests = [[f"t{i}", _link(test)] for i, test in enumerate(made.tests, 1)]
    messages = [[f"r{i}", message] for i, message in enumerate(made.messages, 1)]
    return "\n".join(
        [
            INTRODUCTION,
            "## Families\n",
            _table(["family", "architecture", *heads, *FAMILY_COLUMNS[len(COLUMNS) :]], own),
            FORMATS,
            _table(["`quant_method`", "stored as", *heads, "on GPUs", "on CPUs"], formats),
            f"[{Path(STORED).name}](../{STORED}) crosses each format with these families: "
            f"{crossed()}.\n",
            GGUF,
            "## Tests\n",
            _table(["", "test"], tests),
            "## Refusals\n",
            _table(["", "message"], messages),
        ]
    )


def on_cpus(row: str) -> str:
    """Return the forms of a format's numbers in a CPU's memory, with groups of a usual size."""
    from weft.models.checkpoint.packing import kind_of

    specs = format_rows().get(row, {}).values()
    usual = [replace(spec, block=(1, 128 if spec.block[1] else 0)) for spec in specs]
    kept = {kind_of(spec) for spec in usual if spec.native_bytes((128, 128)) is not None}
    return ", ".join(sorted(kept)) or ("dequantized" if usual else "")


def crossed() -> str:
    """Return the families in the test with all formats."""
    cases = parameters(STORED, "test_every_format_is_read_as_its_numbers")
    return ", ".join(dict.fromkeys(f"`{values['family']}`" for values, _, _ in cases))


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    name, *notes = name.split(" (")
    return f"[{Path(path).name}](../{path}) `{name}`" + "".join(f" ({note}" for note in notes)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(cells()))
