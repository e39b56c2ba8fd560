"""All ways to hold a model on a slice: layouts, replicas and number formats that fit.

For each number of devices that divides the slice, every layout with as many ranks is tried. The
model's sizes (spec/layout.py) and the memory ledger (memory/plan.py) rule out some of them.
The rest of the slice holds replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from weft.errors import ConfigError
from weft.models.memory.activations import (
    ActivationBytes,
    cpu_activations,
    jax_activations,
    sampler_state_bytes,
    triton_activations,
)
from weft.models.memory.ledger import Ledger, human_bytes
from weft.models.memory.plan import MemoryPlan
from weft.models.plan.hardware import Slice
from weft.models.plan.sizes import block_size
from weft.models.plan.step import Precision, anonymous
from weft.models.plan.switches import Decision
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout, check_layout
from weft.models.spec.spec import DTYPE_BYTES, ROUNDED, ModelSpec, Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """An engine's settings, as in `EngineConfig`. A `block_size` of None is decided by sizes.py.

    `kv_dtype` is the KV cache's dtype, by its torch name; None is the compute dtype.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    memory_fraction: float
    kv_cache_memory: int | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to serve a model on a slice.

    Attributes:
        place: the slice.
        layout: of each replica.
        replicas: number of engines.
        quantization: of the weights.
        ledger: one rank's memory.
        engine: the cost of one replica's steps.
        limits: each engine's settings.
    """

    place: Slice
    layout: Layout
    replicas: int
    quantization: str
    ledger: Ledger
    engine: Engine
    limits: Limits

    @property
    def rounding(self) -> int:
        """How coarsely the weights are rounded: 0 is not at all, and each format is one more."""
        return ("none", *ROUNDED).index(self.quantization)

    @property
    def flags(self) -> str:
        """The flags of `weft serve` for this choice."""
        layout = self.layout
        sizes = {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "pp": layout.pp}
        sizes["dp"] = self.replicas
        given = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
        if self.quantization != "none":
            given.append(f"--quantization {self.quantization}")
        return " ".join(given) or "--tp 1"


def choices(
    spec: ModelSpec,
    place: Slice,
    limits: Limits,
    *,
    dtype: str = "auto",
) -> list[Choice]:
    """Return all choices that fit on a slice.

    Args:
        spec: the model.
        place: the slice.
        limits: each engine's settings.
        dtype: activations and KV cache; "auto" is the checkpoint's.

    Raises:
        ConfigError: none fits; the message says how much memory is missing.
    """
    spec, compute = anonymous(spec), spec.compute_dtype(dtype)
    found, missing = [], []
    for layout in _layouts(spec, place):
        for quantization in formats(place):
            plan = _memory(spec, place, layout, limits, compute, quantization)
            if not plan.fits:
                missing.append((plan.fixed + plan.request_bytes - plan.budget, quantization))
                continue
            engine = Engine(
                *(
                    spec,
                    layout,
                    place,
                    Precision(compute, quantization, packed=packed(place, compute)),
                ),
                overlapped=_overlaps(place, layout),
            )
            replicas = place.devices // layout.world_size
            ledger = plan.ledger()
            found.append(Choice(place, layout, replicas, quantization, ledger, engine, limits))
    if not found:
        raise ConfigError(_misfit(spec, place, limits, compute, missing))
    return found


def packed(place: Slice, dtype: str) -> Packed:
    """Return whose kernels read quantised weights as they are stored."""
    compiled = place.device.cpu and dtype == "bfloat16"
    return "gpu" if place.device.gpu else "cpu" if compiled else None


def formats(place: Slice) -> tuple[str, ...]:
    """Return the quantisations that are compared on a slice; GPUs' others are not measured yet."""
    return ("none", *ROUNDED) if place.device.cpu else ("none",)


def fewest_ranks(
    spec: ModelSpec, place: Slice, limits: Limits, layout: Layout, *, dtype: str = "auto"
) -> Decision[int]:
    """Decide the tensor-parallel size: the fewest ranks with room for the model.

    If no size has room, the largest counts: it lacks least.

    Args:
        spec: the model.
        place: the devices for one engine.
        limits: the engine's settings.
        layout: the other sizes.
        dtype: activations and KV cache; "auto" is the checkpoint's.
    """
    compute, torus = spec.compute_dtype(dtype), bool(place.device.shapes)
    decided, told = 1, []
    for tp in range(1, place.devices + 1):
        tried = replace(layout, tp=tp)
        if tried.world_size > place.devices or not _works(spec, tried, torus=torus):
            continue
        plan = _memory(spec, place, tried, limits, compute, "none")
        decided = tp
        if plan.fits:
            told.append(f"it fits over {tp}")
            break
        lacks = human_bytes(plan.fixed + plan.request_bytes - plan.budget)
        told.append(f"with --tp {tp}, each device lacks {lacks}")
    return Decision(decided, "; ".join(told))


def _layouts(spec: ModelSpec, place: Slice) -> Iterator[Layout]:
    """Yield the layouts that the model's sizes and the backend allow."""
    torus = bool(place.device.shapes)
    experts = {
        size
        for size in _divisors(place.devices)
        if any(hasattr(layer.feed_forward, "router") for layer in spec.layers)
    } | {1}
    for devices in _divisors(place.devices):
        for pp in (1,) if torus else _divisors(devices):
            stage = devices // pp
            for dense in _divisors(stage):
                for cp in (1,) if torus else _divisors(dense):
                    for ep in sorted(experts):
                        layout = Layout(dense // cp, ep, cp=cp, pp=pp)
                        if layout.stage_size == stage and _works(spec, layout, torus=torus):
                            yield layout


def _works(spec: ModelSpec, layout: Layout, *, torus: bool) -> bool:
    if torus and layout.tp % layout.ep:
        return False  # as serving/executor/jax_loading.py checks
    try:
        check_layout(spec, layout.tp, layout.ep, layout.cp, layout.pp)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> Sequence[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _overlaps(place: Slice, layout: Layout) -> bool:
    """Tell if overlapped kernels serve the layout: within one node, or on a torus."""
    if place.device.cpu or not layout.can_overlap:
        return False
    return bool(place.device.shapes) or layout.dense_size <= place.device.node


def _memory(
    spec: ModelSpec, place: Slice, layout: Layout, limits: Limits, dtype: str, quantization: str
) -> MemoryPlan:
    """Return the memory plan of the fullest rank: the last one, which has the logits."""
    count: ActivationBytes = triton_activations
    available = place.device.memory
    if place.device.shapes:
        count = partial(jax_activations, tp=layout.tp)
        available -= sampler_state_bytes(spec, limits.max_num_seqs, layout.tp)
    elif place.device.cpu:
        count = cpu_activations
    last = Layout(layout.tp, layout.ep, layout.world_size - 1, layout.cp, layout.pp).local(spec)
    block = limits.block_size
    if block is None:
        seqs, length = limits.max_num_seqs, limits.max_model_len
        decision = block_size(last, place.device, dtype, max_num_seqs=seqs, max_model_len=length)
        block = decision.value
    return MemoryPlan(
        spec=last,
        dtype=dtype,
        kv_dtype=limits.kv_dtype,
        quantization=quantization,
        available=available,
        memory_fraction=limits.memory_fraction,
        kv_cache_memory=limits.kv_cache_memory,
        block_size=block,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        dp_size=layout.dp_size,
        cp=layout.cp,
        count_activations=count,
        packed=packed(place, dtype),
        sharded=_overlaps(place, layout) and layout.stage_size > layout.dp_size == 1,
    )


def _misfit(
    spec: ModelSpec,
    place: Slice,
    limits: Limits,
    dtype: str,
    missing: Sequence[tuple[int, str]],
) -> str:
    """Say how much memory is missing, and what would fit.

    Args:
        missing: bytes on each device, and the quantisation, for each choice.
    """
    weights = human_bytes(spec.weight_bytes(dtype))
    start = f"the model does not fit on {place}: its weights take {weights}"
    if not missing:
        return f"{start}, and its sizes allow no layout with up to {place.devices} devices"
    least, quantization = min(missing)
    weights_there = "" if quantization == "none" else f" and {quantization} weights"
    lacks = f"each device lacks {human_bytes(least)} with the best layout{weights_there}"
    shorter = _longest_that_fits(spec, place, limits, dtype)
    if shorter:
        return f"{start}, and {lacks}; it would fit with --max-model-len {shorter}"
    remedy = "choose a larger slice or a smaller model"
    unquantized = min(each for each, quantization in missing if quantization == "none")
    if (bits := _narrow_weights(spec, place, dtype, unquantized)) is not None:
        remedy += f". Weights with {bits} bits would fit"
        if place.device.shapes:
            remedy += ", but weft does not serve them there yet"
        elif place.device.gpu and spec.quantization is None:
            remedy += f": --quantization int{bits}"
    return f"{start}, and {lacks}; {remedy}"


def _narrow_weights(spec: ModelSpec, place: Slice, dtype: str, missing: int) -> int | None:
    """Return the bits, 8 or 4, of weights that would fit; None if neither does.

    The best layout divides the weights by all devices.

    Args:
        missing: bytes; each device lacks them without quantisation.
    """
    own, full = spec.weight_bytes(dtype) / place.devices, 8 * DTYPE_BYTES[dtype]
    served = [ROUNDED[each].bits for each in formats(place) if each in ROUNDED]
    narrow = (bits for bits in (8, 4) if bits not in served)
    return next((bits for bits in narrow if own * (1 - bits / full) >= missing), None)


def _longest_that_fits(spec: ModelSpec, place: Slice, limits: Limits, dtype: str) -> int:
    """Return the largest power of two for max_model_len that fits; 0 if none does."""
    length = 1 << (limits.max_model_len - 1).bit_length() - 1
    while length >= 1024:
        fewer = replace(limits, max_model_len=length)
        tried = product(_layouts(spec, place), formats(place))
        if any(_memory(spec, place, layout, fewer, dtype, each).fits for layout, each in tried):
            return length
        length //= 2
    return 0
