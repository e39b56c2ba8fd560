"""How a model is split over ranks: which part of each weight is whose.

A weight's axes say how it may be cut (spec.py); a Layout says how many parts an
axis has and which of them a rank holds:

| axis | parts | |
| --- | --- | --- |
| layers | pp | a stage is the layers of some ranks |
| vocab, q_heads, intermediate | tp x cp | |
| kv_heads | tp, or one for each head if there are fewer | heads are then on several ranks |
| positions of the KV cache | cp | |
| expert | ep | |
| moe_intermediate | tp x cp / ep | experts are cut where there are more ranks than parts of them |
| hidden, head_dim, choice | 1 | |

A stage has max(tp x cp, ep) ranks. With ep above tp x cp it has ep / (tp x cp) copies of what
is not an expert. Ranks that are next to each other exchange most: rank = ((stage x copies +
copy) x tp + tensor) x cp + context. Parts are of equal size, but for the vocabulary, whose
last part may be smaller, and stages, of which the last ones may have one layer more.
(Megatron-LM, Shoeybi et al. 2019, section 3, and Narayanan et al. 2021, section 2, for stages;
GShard, Lepikhin et al. 2020, for experts; Helix, Bhatia et al. 2025, for cp beside tp.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

from weft.errors import ConfigError
from weft.models.spec.spec import Axis, MlpSpec, ModelSpec, MoeSpec, WeightSpec

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank of a model's.

    Attributes:
        tp: parts of KV heads; with cp, of attention, of dense MLPs and of the vocabulary.
        ep: parts of the experts; divides tp x cp or is a multiple of it.
        rank: this one, in [0, world_size).
        cp: ranks that share each KV head, by position.
        pp: stages, each of which has some layers.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0
    cp: int = 1
    pp: int = 1

    @property
    def split(self) -> int:
        """Ranks that share what is not an expert."""
        return self.tp * self.cp

    @property
    def can_overlap(self) -> bool:
        """Whether overlapped kernels have it; see models/torch/overlapped.py."""
        return not 1 < self.split < self.ep

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return max(self.split, self.ep)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.stage_size * self.pp

    @property
    def copies(self) -> int:
        """Of what is not an expert, in a stage."""
        return self.stage_size // self.split

    @property
    def stage(self) -> int:
        """This rank's, in [0, pp)."""
        return self.rank // self.stage_size

    @property
    def copy(self) -> int:
        """This rank's, in [0, copies)."""
        return self.rank % self.stage_size // self.split

    @property
    def context(self) -> int:
        """This rank's part of the positions, in [0, cp)."""
        return self.rank % self.cp

    def layers(self, count: int) -> range:
        """This rank's, of so many."""
        return range(self.stage * count // self.pp, (self.stage + 1) * count // self.pp)

    def of_stage(self, spec: ModelSpec) -> ModelSpec:
        """The part of the model that this rank's stage has: some of its layers, uncut."""
        own = self.layers(len(spec.layers))
        return replace(
            spec,
            layers=spec.layers[own.start : own.stop],
            is_first=self.stage == 0,
            is_last=self.stage == self.pp - 1,
        )

    def part(self, spec: ModelSpec, axis: Axis, size: int) -> slice:
        """This rank's part of an axis of that many numbers, of a weight of the model."""
        in_stage = self.rank % self.stage_size
        in_split = in_stage % self.split
        if axis in ("hidden", "head_dim", "choice"):
            return slice(0, size)
        if axis == "kv_heads":
            parts = min(self.tp, spec.num_kv_heads)
            return _part(size, parts, in_split // self.cp * parts // self.tp)
        if axis == "expert":
            return _part(size, self.ep, in_stage * self.ep // self.stage_size)
        if axis == "moe_intermediate":
            parts = max(1, self.split // self.ep)
            return _part(size, parts, in_stage % parts)
        return _part(size, self.split, in_split)

    def parts(self, spec: ModelSpec, weight: WeightSpec) -> tuple[slice, ...]:
        """This rank's part of a weight, by axis."""
        sizes = zip(weight.axes, weight.shape, strict=True)
        return tuple(self.part(spec, axis, size) for axis, size in sizes)

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The model that this rank has: with its layers, its shapes, its heads and its experts."""

        def cut(value: Value) -> Value:
            if isinstance(value, WeightSpec):
                parts = self.parts(spec, value)
                return replace(value, shape=tuple(map(_length, parts)))
            if isinstance(value, tuple):
                return tuple(map(cut, value))  # type: ignore[return-value]
            if is_dataclass(value) and not isinstance(value, type):
                return replace(
                    value, **{f.name: cut(getattr(value, f.name)) for f in fields(value)}
                )
            return value

        return replace(
            cut(self.of_stage(spec)),
            num_heads=_length(self.part(spec, "q_heads", spec.num_heads)),
            num_kv_heads=_length(self.part(spec, "kv_heads", spec.num_kv_heads)),
        )


WHOLE = Layout()
"""One rank, which has everything."""


def check_layout(
    spec: ModelSpec, tp: int, ep: int, cp: int = 1, pp: int = 1, *, overlapped: bool = False
) -> None:
    """Refuse a split that the model's sizes do not allow; or overlapped kernels, if they must be.

    Raises:
        ConfigError: naming the flag, what does not divide, and the sizes that work.
    """
    if pp > (most := len(spec.layers)):
        sizes = _listed(list(range(1, most + 1)))
        raise ConfigError(f"--pp is {pp}; the model has {most} layers. These sizes work: {sizes}")
    own = 1 if ep == 1 else None  # else --ep decides how experts are cut
    if problem := _problem(spec, tp, own):
        works = [size for size in range(1, spec.num_heads + 1) if not _problem(spec, size, own)]
        raise ConfigError(f"--tp is {tp}; {problem}. These sizes work: {_listed(works)}")
    if problem := _problem(spec, tp, own, cp):
        most = spec.num_heads // tp
        works = [size for size in range(1, most + 1) if not _problem(spec, tp, own, size)]
        beside = _beside(tp=tp)
        raise ConfigError(f"--cp is {cp}{beside}; {problem}. These sizes work: {_listed(works)}")
    if problem := _problem(spec, tp, ep, cp):
        most = max([tp * cp, *(moe.gate.shape[0] for moe in _moes(spec))])
        works = [size for size in range(1, most + 1) if not _problem(spec, tp, size, cp)]
        beside = _beside(tp=tp, cp=cp)
        raise ConfigError(
            f"--ep is {ep}{beside}; {problem}. These sizes of --ep work: {_listed(works)}"
        )
    if overlapped and not Layout(tp, ep, cp=cp).can_overlap:
        raise ConfigError(
            f"--ep is {ep}{_beside(tp=tp, cp=cp)}; with --kernels overlapped it must be at most "
            f"{tp * cp}"
        )


def _problem(spec: ModelSpec, tp: int, ep: int | None, cp: int = 1) -> str | None:
    """Why the model cannot be split like that, if it cannot; without ep, but for its experts."""
    split = tp * cp
    it, parts = ("it", "tp") if cp == 1 else (f"tp x cp, {split},", "tp x cp")
    if spec.num_heads % split:
        return f"{it} must divide the model's {spec.num_heads} heads"
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        return f"it must divide the model's {spec.num_kv_heads} KV heads or be a multiple of them"
    if spec.vocab_size <= (split - 1) * -(-spec.vocab_size // split):
        return f"{it} leaves ranks without any of the {spec.vocab_size} tokens of the vocabulary"
    for layer in spec.layers:
        block = layer.feed_forward
        if isinstance(block, MlpSpec) and block.gate.weight.shape[0] % split:
            return f"{it} must divide the MLP's width of {block.gate.weight.shape[0]}"
    if ep is None:
        return None
    if split % ep and ep % split:
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
        if width % max(1, split // ep):
            return f"{parts} / ep, {split // ep}, must divide the experts' width of {width}"
    return None


def _beside(**sizes: int) -> str:
    """The flags that were given, for a message."""
    given = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    return f" beside {' and '.join(given)}" if given else ""


def _moes(spec: ModelSpec) -> list[MoeSpec]:
    blocks = (layer.feed_forward for layer in spec.layers)
    return [block for block in blocks if isinstance(block, MoeSpec)]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


def _part(size: int, parts: int, index: int) -> slice:
    """Part `index` of so many of an axis, the last of which may be smaller."""
    each = -(-size // parts)
    return slice(min(size, index * each), min(size, (index + 1) * each))
