"""Stored tensors: plain ones, and quantised matrices in several parts.

`join_quantized` finds the parts of each quantised matrix by their names: numbers, scales, zero
points. The loader then sees one entry with the matrix's own name and shape, and reads any part of
it as float32. Scales that are not finite, or zero, are errors: they make all numbers in a block
wrong. In nvfp4 a block's scale may be zero, because float8 rounds the scale of tiny numbers to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import ModelError
from weft.kernels.packed import PackedForm, PackedMatrix
from weft.models.checkpoint.dequantize import dequantize, scale_grid, zero_grid
from weft.models.checkpoint.packing import form_of, pack
from weft.models.checkpoint.read_ahead import Span
from weft.models.spec.quantization import SECTION, Format, Quantization, QuantSpec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' dtypes, as torch's."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
FORMAT_SCALE_DTYPES: Mapping[Format, tuple[str, ...]] = {
    "mxfp4": ("U8",),
    "mxfp4_packed": ("U8",),
    "nvfp4": ("F8_E4M3",),
    "nvfp4_modelopt": ("F8_E4M3",),
}
"""dtypes of scales, in general and in some formats."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, as the file's header describes it.

    Attributes:
        file: the file.
        name: the tensor's name there.
        shape: its shape.
        dtype: its dtype, in safetensors' words.
        start, bytes: its place in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    bytes: int

    def map(self) -> Tensor:
        """Return the tensor, a view of the mapped file. Its pages leave memory with the last view.

        No view keeps the file open: a model may hold some thousands.

        Raises:
            ModelError: the file cannot be read, or is shorter than its header says.
        """
        if (dtype := DTYPES.get(self.dtype)) is None:
            raise ModelError(
                f"{self.file}: {self.name} is {self.dtype}; supported are {', '.join(DTYPES)}"
            )
        if not self.bytes:
            return torch.empty(self.shape, dtype=dtype)
        try:  # not shared: copied on write
            mapped = torch.from_file(
                str(self.file), shared=False, size=self.start + self.bytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            raise ModelError(f"{self.file}: cannot read {self.name}: {error}") from error
        numbers = mapped[self.start :]
        if self.start % dtype.itemsize:  # torch views aligned numbers only
            numbers = numbers.clone()
        return numbers.view(dtype).view(self.shape)

    def read(self, index: Index) -> Tensor:
        """Return a part of the tensor, a view."""
        return self.map()[index]

    def spans(self, index: Index) -> list[Span]:
        """Return the bytes that a part has: whole rows, or an expert."""
        first, last, size = 0, 1, self.bytes
        for at, length in zip(index, self.shape, strict=False):
            begin, end = (at, at + 1) if isinstance(at, int) else (at.start, at.stop)
            size //= max(1, length)
            first, last = first * length + begin, (last - 1) * length + end
            if last - first != 1:
                break
        return [Span(self.file, self.start + first * size, self.start + last * size)]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised matrix in a checkpoint, or one for each expert.

    Attributes:
        spec: its format.
        name: the matrix's own name, without the format's suffix.
        shape: the matrix's own shape.
        codes, scales: the tensors with its numbers and their scales.
        zeros: the tensor with zero points, if the format has some.
        order: a GPTQ matrix's group of each column; it must be in order.
        size: a packed matrix's tensor with its shape.
        global_scale: an nvfp4 matrix's tensor with the scale of its scales.
    """

    spec: QuantSpec
    name: str
    shape: tuple[int, ...]
    codes: Entry
    scales: Entry
    zeros: Entry | None = None
    order: Entry | None = None
    size: Entry | None = None
    global_scale: Entry | None = None

    @property
    def file(self) -> Path:
        """The file with the numbers."""
        return self.codes.file

    @property
    def bytes(self) -> int:
        """Size in the files."""
        return sum(part.bytes for part in self.parts)

    @property
    def parts(self) -> list[Entry]:
        """The tensors that it has."""
        own = (self.codes, self.scales, self.zeros, self.order, self.size, self.global_scale)
        return [part for part in own if part is not None]

    def read(self, index: Index) -> Tensor:
        """Return a part of the matrix, float32.

        Args:
            index: the part, one slice per axis; a number selects an expert.

        Raises:
            ModelError: a scale is zero or not finite, or the parts contradict each other.
        """
        expert, rows, columns = self._places(index)
        grid, points = self._grids(expert)
        part = dequantize(self.spec, self.codes.map()[expert], grid, points, rows, columns)
        return part.t() if self.is_transposed else part

    def form_of(self, index: Index) -> PackedForm | None:
        """Return the form of a part that kernels can read as it is stored; else None."""
        _, rows, columns = self._places(index)
        return form_of(self.spec, self._whole, rows, columns)

    def spans(self, index: Index) -> list[Span]:
        """Return the bytes that a part needs: the matrix's, or an expert's."""
        expert, _, _ = self._places(index)
        return [span for part in self.parts for span in part.spans(expert)]

    def pack(self, index: Index) -> PackedMatrix:
        """Return a part of the matrix as kernels read it: [out, in], also if `is_transposed`.

        Args:
            index: as in `read`. `form_of` must allow the part.

        Raises:
            ModelError: as `read`; or a number is not finite.
        """
        expert, rows, columns = self._places(index)
        grid, points = self._grids(expert)
        form = form_of(self.spec, self._whole, rows, columns)
        assert form is not None, "the caller has asked"
        codes = self.codes.map()[expert]
        part = pack(self.spec, codes, grid, points, rows, columns, form[1])
        if part.kind == "fp8" and ((part.codes & 127) == 127).any():
            raise ModelError(f"{self.file}: {self.name} holds nan; the file is damaged")
        return part

    def _places(self, index: Index) -> tuple[tuple[int, ...], slice, slice]:
        """Return the expert, and the part's rows and columns as they are stored."""
        expert = tuple(each for each in index if isinstance(each, int))
        rows, columns = (each for each in index if isinstance(each, slice))
        return (expert, columns, rows) if self.is_transposed else (expert, rows, columns)

    def _grids(self, expert: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Return the scales and zero points of all blocks, float32, once they are checked."""
        self._check_small_parts()
        scales = self.scales.map()[expert]
        zeros = None if self.zeros is None else self.zeros.map()
        blocks = self._blocks
        global_scale = None if self.global_scale is None else self.global_scale.map()
        if self.global_scale is not None and global_scale is not None:
            _check_scales(self.global_scale, global_scale)
        grid = scale_grid(self.spec, scales, blocks, global_scale)
        _check_scales(self.scales, grid, may_be_zero=self.global_scale is not None)
        points = zero_grid(self.spec, zeros, blocks)
        if self.zeros is not None and points is not None and self.spec.format == "gptq":
            self._check_zeros(points, self.zeros)
        return grid, points

    @property
    def is_transposed(self) -> bool:
        """True if `shape` has [in, out] for each expert."""
        return self.spec.format == "mxfp4"

    @property
    def _whole(self) -> tuple[int, int]:
        """Rows and columns as they are stored."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def _blocks(self) -> tuple[int, int]:
        """How many blocks each matrix has in each direction."""
        return _blocks(self.spec, self.shape)

    def _check_zeros(self, grid: Tensor, zeros: Entry) -> None:
        """Refuse zero points of 0 in GPTQ's first version: packing them damages their words."""
        if (grid == 0).any():
            raise ModelError(
                f"{zeros.file}: {zeros.name} holds a zero point of 0, which checkpoint_format "
                "'gptq' cannot store; give the checkpoint in the format 'gptq_v2'"
            )

    def _check_small_parts(self) -> None:
        """Compare a stored shape, and a stored order of columns, with the matrix."""
        if self.size is not None and (shape := tuple(self.size.map().tolist())) != self.shape:
            raise ModelError(
                f"{self.size.file}: {self.size.name} holds {shape}; {self.codes.name} and "
                f"config.json say {self.shape}"
            )
        if self.order is not None:
            columns = self.shape[1]
            straight = torch.arange(columns) // (self.spec.block[1] or columns)
            if not self.order.map().equal(straight.to(torch.int32)):
                raise ModelError(
                    f"{self.order.file}: {self.order.name} reorders the columns (act-order); weft "
                    "supports desc_act false alone"
                )


@dataclass(frozen=True, slots=True)
class _Names:
    """The ends of names in one format.

    Attributes:
        codes: of the numbers; their dtype.
        own: of the matrix itself, in place of `codes`.
        scales: of the scales; the first that is there counts.
        zeros, order, size, global_scale: of the other parts.
        zeros_may_lack: whether a matrix without zero points has zero points of 0.
    """

    codes: str
    dtype: str
    scales: tuple[str, ...]
    own: str = ""
    zeros: str | None = None
    order: str | None = None
    size: str | None = None
    global_scale: str | None = None
    zeros_may_lack: bool = False

    @property
    def others(self) -> tuple[str, ...]:
        """The ends for all but the numbers."""
        ends = (*self.scales, self.zeros, self.order, self.size, self.global_scale)
        return tuple(end for end in ends if end is not None)

    def match(self, entry: Entry) -> bool:
        """Tell whether a tensor is the numbers of a matrix in this format.

        Scales and zero points may have the numbers' dtype.
        """
        if entry.dtype != self.dtype or not entry.name.endswith(self.codes):
            return False
        return not entry.name.endswith(self.others)


_GPTQ = _Names(".qweight", "I32", (".scales",), ".weight", zeros=".qzeros", order=".g_idx")
_PACKED_FP4 = _Names("_packed", "U8", ("_scale",), global_scale="_global_scale")
NAMES: dict[Format, _Names] = {
    "fp8": _Names("", "F8_E4M3", ("_scale_inv", "_scale")),
    "int8": _Names("", "I8", ("_scale",), zeros="_zero_point"),
    "packed": _Names("_packed", "I32", ("_scale",), zeros="_zero_point", size="_shape"),
    "awq": _Names(".qweight", "I32", (".scales",), ".weight", zeros=".qzeros"),
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "mxfp4": _Names("_blocks", "U8", ("_scales",)),
    "mxfp4_packed": _PACKED_FP4,
    "nvfp4": _PACKED_FP4,
    "fp8_torchao": _Names("._weight_qdata", "F8_E4M3", ("._weight_scale",), ".weight"),
    "int8_torchao": _Names(
        "._weight_qdata",
        "I8",
        ("._weight_scale",),
        ".weight",
        zeros="._weight_zero_point",
        zeros_may_lack=True,
    ),
    "nvfp4_modelopt": _Names("", "U8", ("_scale",), global_scale="_scale_2"),
}
HAS_GLOBAL_SCALE = ("nvfp4", "nvfp4_modelopt")


PART_ENDS = tuple({end for names in NAMES.values() for end in (names.codes, *names.others) if end})
"""Ends of the names of quantised matrices' parts."""


def join_quantized(
    stored: Mapping[str, Entry], quantization: Quantization | None
) -> dict[str, Entry | Quantized]:
    """Replace the parts of each quantised matrix by one entry with the matrix's name.

    Args:
        stored: every tensor in the checkpoint, by name.
        quantization: the checkpoint's; None leaves all as it is.

    Raises:
        ModelError: a part is missing, has a wrong shape or dtype, or config.json says otherwise.
    """
    joined: dict[str, Entry | Quantized] = dict(stored)
    if quantization is None:
        return joined
    formats = {NAMES[each] for each in quantization.formats}
    for codes in stored.values():
        names = next((each for each in formats if each.match(codes)), None)
        if names is None:
            continue
        matrix = _join(codes, names, stored, quantization)
        for part in matrix.parts:
            joined.pop(part.name, None)
        if matrix.name in joined:
            raise ModelError(f"{codes.file} has both {codes.name} and {matrix.name}")
        joined[matrix.name] = matrix
    return joined


def _join(
    codes: Entry, names: _Names, stored: Mapping[str, Entry], quantization: Quantization
) -> Quantized:
    stem = codes.name.removesuffix(names.codes)
    name = stem + names.own
    spec = quantization.of(name.removesuffix(".weight"))
    if spec is None or NAMES[spec.format] != names:
        said = "is not quantized" if spec is None else f"is quantized as {spec.format}"
        raise ModelError(
            f"{codes.file}: {codes.name} is {codes.dtype}; by {SECTION} in config.json, "
            f"{name} {said}"
        )

    def part(*ends: str | None) -> Entry | None:
        return next((stored[stem + end] for end in ends if end and stem + end in stored), None)

    has_global_scale = spec.format in HAS_GLOBAL_SCALE
    scales, zeros = part(*names.scales), part(names.zeros) if spec.zero_points else None
    global_scale = part(names.global_scale) if has_global_scale else None
    lacking = stem + names.scales[0] if scales is None else None
    if spec.zero_points and zeros is None and not names.zeros_may_lack:
        lacking = f"{stem}{names.zeros}"
    if has_global_scale and global_scale is None:
        lacking = f"{stem}{names.global_scale}"
    if scales is None or lacking:
        raise ModelError(
            f"{codes.file} has {codes.name}, but no safetensors file has {lacking}; "
            "get the checkpoint again"
        )
    shape = _shape(spec, codes)
    order, size = part(names.order), part(names.size)
    matrix = Quantized(spec, name, shape, codes, scales, zeros, order, size, global_scale)
    _check_parts(matrix)
    return matrix


def _shape(spec: QuantSpec, codes: Entry) -> tuple[int, ...]:
    """Return the matrix's own shape.

    transformers stores experts that were mxfp4 as [experts, in, out].

    Raises:
        ModelError: the codes have a wrong number of dimensions.
    """
    shape, per_word = codes.shape, 32 // spec.bits
    match spec.format, shape:
        case _ if 0 in shape:
            pass
        case "fp8" | "int8", (_, _) | (_, _, _):
            return shape
        case "fp8_torchao" | "int8_torchao", (_, _):
            return shape
        case "packed", (rows, words):
            return rows, words * per_word
        case "awq", (columns, words):
            return words * per_word, columns
        case "gptq" | "gptq_v2", (words, rows):
            return rows, words * per_word
        case "mxfp4_packed" | "nvfp4" | "nvfp4_modelopt", (rows, pairs):
            return rows, pairs * 2
        case "mxfp4", (experts, rows, groups, 16):
            return experts, groups * 32, rows
    raise ModelError(
        f"{codes.file}: {codes.name} has shape {shape}; no {spec.format} matrix has this shape"
    )


def _blocks(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many blocks a matrix has in each direction."""
    rows, columns = reversed(shape[-2:]) if spec.format == "mxfp4" else shape[-2:]
    height, width = (size or whole for size, whole in zip(spec.block, (rows, columns), strict=True))
    return -(-rows // height), -(-columns // width)


def _check_parts(matrix: Quantized) -> None:
    """Compare the headers of scales and zero points with the matrix's blocks."""
    spec, lead = matrix.spec, matrix.shape[:-2]
    rows, columns = _blocks(spec, matrix.shape)
    per_word = 32 // spec.bits
    transposed = spec.format in ("awq", "gptq", "gptq_v2")
    grid = (columns, rows) if transposed else (rows, columns)
    # A single scale, or one for each row, may lack the other axes.
    shapes = [(*lead, *grid)]
    shapes += [(*lead, rows)] if columns == 1 else []
    shapes += [lead] if rows == columns == 1 else []
    _check_part(matrix.scales, shapes, FORMAT_SCALE_DTYPES.get(spec.format, SCALE_DTYPES))
    if matrix.global_scale is not None:
        _check_part(matrix.global_scale, [(1,), ()], ("F32",))
    if matrix.size is not None:
        _check_part(matrix.size, [(2,)], ("I64", "I32"))
    if matrix.order is not None:
        _check_part(matrix.order, [(matrix.shape[1],)], ("I32",))
    if matrix.zeros is None:
        return
    if spec.format == "packed":
        _check_part(matrix.zeros, [(-(-rows // per_word), columns)], ("I32",))
    elif transposed:
        _check_part(matrix.zeros, [(columns, rows // per_word)], ("I32",))
    else:
        _check_part(matrix.zeros, shapes, ("I8",))


def _check_scales(entry: Entry, scales: Tensor, may_be_zero: bool = False) -> None:
    """Refuse scales that make numbers wrong."""
    wrong = scales[~scales.isfinite() | ((scales == 0) & (not may_be_zero))]
    if wrong.numel():
        number = "finite number" if may_be_zero else "finite number other than 0"
        raise ModelError(
            f"{entry.file}: {entry.name} holds {wrong[0].item()}; a scale is a {number}, so the "
            "file is damaged"
        )


def _check_part(entry: Entry, shapes: list[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
    if entry.shape not in shapes:
        raise ModelError(
            f"{entry.file}: {entry.name} has shape {entry.shape}; by config.json it is {shapes[0]}"
        )
    if entry.dtype not in dtypes:
        raise ModelError(
            f"{entry.file}: {entry.name} is {entry.dtype}; supported is {', '.join(dtypes)}"
        )
