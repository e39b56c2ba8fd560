"""How a model is split over ranks: which part every rank holds.

A weight's axes say along which dimensions it may be cut (spec.py). A Layout says how many parts an
axis has and which part belongs to a rank:

| axis | parts | |
| --- | --- | --- |
| layers | pp | a stage is a run of layers |
| vocab, q_heads, intermediate | tp x cp | |
| kv_heads | min(tp, KV heads) | with fewer heads than tp, several ranks hold the same head |
| positions of the KV cache | cp | |
| expert | ep | |
| moe_intermediate | tp x cp / ep | experts are cut only if tp x cp is larger than ep |
| hidden, head_dim, choice | 1 | |

A stage has max(tp x cp, ep) ranks. If ep is larger than tp x cp, a stage has data-parallel
attention: dp = ep / (tp x cp) groups of ranks. Each group holds all weights except the experts and
has its own tokens. Neighbouring ranks communicate most: rank = ((stage x dp + group) x tp + tensor)
x cp + context.

Parts have equal sizes, with two exceptions: the last part of the vocabulary may be smaller, and the
last stages may have one layer more.

Sources: Megatron-LM (Shoeybi et al. 2019, section 3; Narayanan et al. 2021, section 2, for stages);
GShard (Lepikhin et al. 2020) for experts; Helix (Bhatia et al. 2025) for cp together with tp.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

from weft.errors import ConfigError
from weft.models.spec.spec import Axis, LayerSpec, MlpSpec, ModelSpec, MoeSpec, WeightSpec

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's position in a parallel layout.

    Attributes:
        tp: parts of the KV heads; attention, dense MLPs and the vocabulary have tp x cp.
        ep: parts of the experts; divides tp x cp or is a multiple of it.
        rank: this rank, in [0, world_size).
        cp: ranks that share each KV head, split by position.
        pp: stages; each stage has some layers.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0
    cp: int = 1
    pp: int = 1

    @property
    def dense_size(self) -> int:
        """Ranks that share the dense weights (all weights except the experts)."""
        return self.tp * self.cp

    @property
    def can_overlap(self) -> bool:
        """True if overlapped kernels support this layout; see models/torch/overlapped.py."""
        return not 1 < self.dense_size < self.ep

    @property
    def stage_size(self) -> int:
        """Ranks per stage."""
        return max(self.dense_size, self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pp

    @property
    def dp_size(self) -> int:
        """Data-parallel attention groups per stage."""
        return self.stage_size // self.dense_size

    @property
    def stage(self) -> int:
        """This rank's stage, in [0, pp)."""
        return self.rank // self.stage_size

    @property
    def dp_group(self) -> int:
        """This rank's data-parallel attention group, in [0, dp_size)."""
        return self.rank % self.stage_size // self.dense_size

    @property
    def context(self) -> int:
        """This rank's part of the positions, in [0, cp)."""
        return self.rank % self.cp

    def layers(self, count: int) -> range:
        """Return the indices of this rank's layers, for a model with `count` layers."""
        return range(self.stage * count // self.pp, (self.stage + 1) * count // self.pp)

    def of_stage(self, spec: ModelSpec) -> ModelSpec:
        """Return the model that this rank's stage runs: a run of layers, uncut."""
        own = self.layers(len(spec.layers))
        return replace(
            spec,
            layers=spec.layers[own.start : own.stop],
            is_first=self.stage == 0,
            is_last=self.stage == self.pp - 1,
        )

    def part(self, spec: ModelSpec, axis: Axis, size: int) -> slice:
        """Return this rank's part of a weight's axis that is `size` long."""
        in_stage = self.rank % self.stage_size
        in_split = in_stage % self.dense_size
        if axis in ("hidden", "head_dim", "choice"):
            return slice(0, size)
        if axis == "kv_heads":
            parts = min(self.tp, spec.num_kv_heads)
            return _part(size, parts, in_split // self.cp * parts // self.tp)
        if axis == "expert":
            return _part(size, self.ep, in_stage * self.ep // self.stage_size)
        if axis == "moe_intermediate":
            parts = max(1, self.dense_size // self.ep)
            return _part(size, parts, in_stage % parts)
        return _part(size, self.dense_size, in_split)

    def parts(self, spec: ModelSpec, weight: WeightSpec) -> tuple[slice, ...]:
        """Return this rank's part of a weight, one slice per axis."""
        sizes = zip(weight.axes, weight.shape, strict=True)
        return tuple(self.part(spec, axis, size) for axis, size in sizes)

    def local(self, spec: ModelSpec) -> ModelSpec:
        """Return the model that this rank runs: its layers, with its part's shapes and heads."""

        done: dict[int, LayerSpec] = {}  # equal layers may be one object

        def cut(value: Value) -> Value:
            if isinstance(value, LayerSpec):
                if id(value) not in done:
                    done[id(value)] = cut_fields(value)
                return done[id(value)]  # type: ignore[return-value]
            if isinstance(value, WeightSpec):
                parts = self.parts(spec, value)
                return replace(value, shape=tuple(map(_length, parts)))
            if isinstance(value, tuple):
                return tuple(map(cut, value))  # type: ignore[return-value]
            if is_dataclass(value) and not isinstance(value, type):
                return cut_fields(value)
            return value

        def cut_fields(value: Value) -> Value:
            own = {f.name: cut(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
            return replace(value, **own)  # type: ignore[type-var]

        return replace(
            cut(self.of_stage(spec)),
            num_heads=_length(self.part(spec, "q_heads", spec.num_heads)),
            num_kv_heads=_length(self.part(spec, "kv_heads", spec.num_kv_heads)),
        )


WHOLE = Layout()
"""The layout of a single rank, which holds everything."""


def check_layout(
    spec: ModelSpec,
    tp: int,
    ep: int,
    cp: int = 1,
    pp: int = 1,
    *,
    overlapped: bool = False,
    redundant_experts: int = 0,
) -> None:
    """Refuse a layout that the model's sizes do not allow.

    Args:
        spec: the model.
        tp, ep, cp, pp: as in `Layout`.
        overlapped: also refuse layouts that overlapped kernels do not support.
        redundant_experts: slots for copies of experts, on all ranks of a stage together.

    Raises:
        ConfigError: with the flag, the reason and the sizes that work.
    """
    if pp > (limit := len(spec.layers)):
        working = list(range(1, limit + 1))
        raise ConfigError(
            f"--pp is {pp}; the model has {limit} layers. These sizes work: {_join(working)}"
        )
    unless_ep = 1 if ep == 1 else None  # with --ep, the experts are checked last
    if problem := _problem(spec, tp, unless_ep):
        working = [
            size for size in range(1, spec.num_heads + 1) if not _problem(spec, size, unless_ep)
        ]
        raise ConfigError(f"--tp is {tp}; {problem}. These sizes work: {_join(working)}")
    if problem := _problem(spec, tp, unless_ep, cp):
        limit = spec.num_heads // tp
        working = [size for size in range(1, limit + 1) if not _problem(spec, tp, unless_ep, size)]
        flags = _with_flags(tp=tp)
        raise ConfigError(f"--cp is {cp}{flags}; {problem}. These sizes work: {_join(working)}")
    if problem := _problem(spec, tp, ep, cp):
        limit = max([tp * cp, *(moe.gate.shape[0] for moe in _moes(spec))])
        working = [size for size in range(1, limit + 1) if not _problem(spec, tp, size, cp)]
        flags = _with_flags(tp=tp, cp=cp)
        raise ConfigError(
            f"--ep is {ep}{flags}; {problem}. These sizes of --ep work: {_join(working)}"
        )
    most = min((moe.gate.shape[0] for moe in _moes(spec)), default=0)
    if redundant_experts > most:
        raise ConfigError(
            f"--redundant-experts is {redundant_experts}; it must be at most the model's {most} "
            "experts"
        )
    if overlapped and not Layout(tp, ep, cp=cp).can_overlap:
        raise ConfigError(
            f"--ep is {ep}{_with_flags(tp=tp, cp=cp)}; with --kernels overlapped it must be "
            f"at most {tp * cp}"
        )


def _problem(spec: ModelSpec, tp: int, ep: int | None, cp: int = 1) -> str | None:
    """Return why the model cannot be split this way, or None; ep None leaves the experts out."""
    dense_size = tp * cp
    it, parts = ("it", "tp") if cp == 1 else (f"tp x cp, {dense_size},", "tp x cp")
    if spec.num_heads % dense_size:
        return f"{it} must divide the model's {spec.num_heads} heads"
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        return f"it must divide the model's {spec.num_kv_heads} KV heads or be a multiple of them"
    if spec.vocab_size <= (dense_size - 1) * -(-spec.vocab_size // dense_size):
        return f"{it} leaves ranks without any of the {spec.vocab_size} tokens of the vocabulary"
    for layer in spec.layers:
        block = layer.feed_forward
        mlp = block if isinstance(block, MlpSpec) else block.shared
        if mlp is not None and mlp.gate.weight.shape[0] % dense_size:
            whose = "the MLP" if mlp is block else "the shared experts"
            return f"{it} must divide {whose}'s width of {mlp.gate.weight.shape[0]}"
    if ep is None:
        return None
    if dense_size % ep and ep % dense_size:
        return (
            f"one of {'the two' if cp == 1 else 'it and tp x cp'} must be a multiple of the other"
        )
    moes = _moes(spec)
    if ep > 1 and not moes:
        return "the model has no experts"
    for moe in moes:
        experts, width, _ = moe.gate.shape
        if experts % ep:
            return f"it must divide the model's {experts} experts"
        if width % max(1, dense_size // ep):
            return f"{parts} / ep, {dense_size // ep}, must divide the experts' width of {width}"
    return None


def _with_flags(**sizes: int) -> str:
    """List the given flags for a message, " with --tp 2 and --cp 2"."""
    given = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    return f" with {' and '.join(given)}" if given else ""


def _moes(spec: ModelSpec) -> list[MoeSpec]:
    blocks = (layer.feed_forward for layer in spec.layers)
    return [block for block in blocks if isinstance(block, MoeSpec)]


def _join(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def _part(size: int, parts: int, index: int) -> slice:
    """Return part `index` of an axis cut into `parts` equal parts; the last may be smaller."""
    each = -(-size // parts)
    return slice(min(size, index * each), min(size, (index + 1) * each))
