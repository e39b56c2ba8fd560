"""A model's parameters: a tree of arrays, cut over the mesh, from a checkpoint's tensors.

Projections with the same input form one matrix: each device holds its part of the first projection,
then of the next. Matrices are [in, out]; the embedding and the LM head are [vocab, hidden]. A
vocabulary that does not divide is padded with zeros.

`describe` lists the arrays without reading data, so that steps can be compiled for devices that are
not attached. `load` puts the arrays onto this process's devices in turn. The host never holds more
than one device's part of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from weft.models.checkpoint.weights import Progress, Weights
from weft.models.jax.mesh import described, global_shape, partition
from weft.models.spec.layout import Layout
from weft.models.spec.spec import (
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    WeightSpec,
)

Part = npt.NDArray[Any]
DTYPES: dict[str, npt.DTypeLike] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class Linear(NamedTuple):
    """Matrix [in, out]; bias [out] or None."""

    weight: Any
    bias: Any


class Norm(NamedTuple):
    """Weight; bias, or None. See NormSpec."""

    weight: Any
    bias: Any


class Attention(NamedTuple):
    """Norm [hidden] or None; qkv [hidden, (H + 2 Hk) D] and o on each device.

    The norms of queries and keys are [head_dim], [H, D] and [Hk, D], or [H D] and [Hk D] on each
    device, or None.
    """

    norm: Norm | None
    qkv: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None


class Mlp(NamedTuple):
    """Norm [hidden] or None; on each device, gate_up [hidden, 2 x width] and down."""

    norm: Norm | None
    gate_up: Linear
    down: Linear


class Moe(NamedTuple):
    """Norm [hidden] or None; router [hidden, experts]; its bias [experts] or None; own experts.

    Gate and up are [experts, hidden, width], down is [experts, width, hidden]. The shared MLP and
    its gate [hidden, 1] may be None.
    """

    norm: Norm | None
    router: Any
    bias: Any
    gate: Any
    up: Any
    down: Any
    shared: Mlp | None
    shared_gate: Any


class Layer(NamedTuple):
    """One layer; the norms of its blocks' outputs are [hidden], or None."""

    attention: Attention
    attention_output_norm: Norm | None
    feed_forward: Mlp | Moe
    feed_forward_output_norm: Norm | None


class Params(NamedTuple):
    """Embedding [vocab, hidden]; norm [hidden]; lm_head like the embedding, or None if tied."""

    embedding: Any
    layers: tuple[Layer, ...]
    norm: Norm
    lm_head: Any


@dataclass(frozen=True)
class Parameter:
    """One array.

    Attributes:
        shape: shape of a device's part.
        cut: mesh axes along which it is cut.
        read: reads a device's part from its rank's weights, in a torch dtype.
        in_float32: it is float32, whatever the compute dtype is.
    """

    shape: tuple[int, ...]
    cut: PartitionSpec
    read: Callable[[Weights, torch.dtype], Tensor]
    in_float32: bool = False

    def dtype(self, computed: str) -> str:
        """Return its dtype, where the model is computed in another."""
        return "float32" if self.in_float32 else computed


def describe(spec: ModelSpec, layout: Layout) -> Params:
    """Make a `Parameter` for each array in a model with this layout."""
    local = layout.local(spec)
    each = -(-spec.vocab_size // layout.tp)
    return Params(
        embedding=_table(spec.embedding, each),
        layers=tuple(
            Layer(
                attention=_attention(layer.attention_norm, layer.attention, own.attention),
                attention_output_norm=_norm_if_any(layer.attention_output_norm),
                feed_forward=_moe(layer.feed_forward_norm, layer.feed_forward, own.feed_forward)
                if isinstance(layer.feed_forward, MoeSpec)
                else _mlp(layer.feed_forward_norm, layer.feed_forward, own.feed_forward),
                feed_forward_output_norm=_norm_if_any(layer.feed_forward_output_norm),
            )
            for layer, own in zip(spec.layers, local.layers, strict=True)
        ),
        norm=_norm(spec.norm),
        lm_head=None if spec.lm_head is None else _table(spec.lm_head, each),
    )


def shapes(parameters: Params, mesh: Mesh, dtype: str) -> Params:
    """Return the arrays from `describe`, without data."""
    arrays: Params = jax.tree.map(
        lambda p: described(mesh, p.shape, DTYPES[p.dtype(dtype)], p.cut),
        parameters,
        is_leaf=_is_parameter,
    )
    return arrays


def cuts(parameters: Params) -> Params:
    """Return how the arrays from `describe` are cut: a tree of PartitionSpec."""
    specs: Params = jax.tree.map(lambda p: p.cut, parameters, is_leaf=_is_parameter)
    return specs


def load(
    path: Path,
    spec: ModelSpec,
    layout: Layout,
    mesh: Mesh,
    dtype: str,
    progress: Progress | None = None,
) -> Params:
    """Read a checkpoint onto this process's devices in the mesh.

    Raises:
        ModelError: the checkpoint does not match `spec`.
    """
    here = set(jax.local_devices())
    ranks = [rank for rank, device in enumerate(mesh.devices.flat) if device in here]
    devices = mesh.devices.flat[ranks]
    progresses = _Progress(progress, len(ranks))
    weights = [
        Weights(path, spec, progresses.callback(index), Layout(layout.tp, layout.ep, rank))
        for index, rank in enumerate(ranks)
    ]

    def to_devices(parameter: Parameter) -> jax.Array:
        kind: torch.dtype = getattr(torch, parameter.dtype(dtype))
        parts = [
            jax.device_put(_numpy(parameter.read(own, kind)), device)
            for own, device in zip(weights, devices, strict=True)
        ]
        shape = global_shape(mesh, parameter.shape, parameter.cut)
        sharding = NamedSharding(mesh, parameter.cut)
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    with ExitStack() as stack:
        for own in weights:
            stack.enter_context(own.read_ahead())
        params: Params = jax.tree.map(to_devices, describe(spec, layout), is_leaf=_is_parameter)
    return params


class _Progress:
    """Adds up the reading progress over devices."""

    def __init__(self, progress: Progress | None, devices: int) -> None:
        self._progress = progress
        self._done = [0] * devices
        self._total = [0] * devices

    def callback(self, index: int) -> Progress:
        """Return the callback for one device."""

        def progress(done: int, total: int) -> None:
            self._done[index], self._total[index] = done, total
            if self._progress is not None:  # parts are about equally large
                self._progress(sum(self._done), len(self._total) * max(self._total))

        return progress


def _is_parameter(value: object) -> bool:
    return isinstance(value, Parameter)


def _numpy(x: Tensor) -> Part:
    """Copy to NumPy, so that the file's mapped pages may leave memory."""
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return np.array(x.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(x.numpy())


def _norm(norm: NormSpec) -> Norm:
    """Describe a norm, which every device has."""
    return Norm(_vector(norm.weight), None if norm.bias is None else _vector(norm.bias))


def _norm_if_any(norm: NormSpec | None) -> Norm | None:
    return None if norm is None else _norm(norm)


def _vector(weight: WeightSpec) -> Parameter:
    """Describe a vector that every device has."""

    def read(weights: Weights, dtype: torch.dtype) -> Tensor:
        return weights.read(weight).to(dtype)

    return Parameter(weight.shape, partition(weight), read, weight.in_float32)


def _table(weight: WeightSpec, each: int) -> Parameter:
    """Describe [vocab, hidden], with `each` tokens on each device."""

    def read(weights: Weights, dtype: torch.dtype) -> Tensor:
        table = weights.read(weight).to(dtype)
        return torch.cat((table, table.new_zeros(each - len(table), table.shape[1])))

    return Parameter((each, weight.shape[1]), partition(weight), read)


def _linear(linears: Sequence[LinearSpec], own: Sequence[LinearSpec]) -> Linear:
    """Describe projections with one input as one matrix [in, out]; `own` is a device's part."""
    columns = sum(linear.weight.shape[0] for linear in own)
    rows = own[0].weight.shape[1]

    def matrix(weights: Weights, dtype: torch.dtype) -> Tensor:
        return torch.cat([weights.read(linear.weight).to(dtype) for linear in linears]).t()

    def bias(weights: Weights, dtype: torch.dtype) -> Tensor:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return torch.cat([weights.read(one).to(dtype) for one in biases])

    out_axis, in_axis = partition(linears[0].weight)
    biased = linears[0].bias
    return Linear(
        Parameter((rows, columns), PartitionSpec(in_axis, out_axis), matrix),
        None if biased is None else Parameter((columns,), partition(biased), bias),
    )


def _attention(norm: NormSpec | None, spec: AttentionSpec, own: AttentionSpec) -> Attention:
    heads, _ = partition(spec.q.weight)

    def head_norm(whole: NormSpec | None, part: NormSpec | None) -> Norm | None:
        if whole is None or part is None or not (whole.spans_heads or whole.is_by_head):
            return _norm_if_any(whole)
        weight = whole.weight  # cut like the queries, also if devices have the same KV heads
        own = Parameter(
            part.weight.shape,
            PartitionSpec(heads),
            lambda source, kind: source.read(weight).to(kind),
        )
        return Norm(own, None)

    return Attention(
        norm=_norm_if_any(norm),
        qkv=_linear((spec.q, spec.k, spec.v), (own.q, own.k, own.v)),
        o=_linear((spec.o,), (own.o,)),
        q_norm=head_norm(spec.q_norm, own.q_norm),
        k_norm=head_norm(spec.k_norm, own.k_norm),
    )


def _mlp(norm: NormSpec | None, spec: MlpSpec, own: MlpSpec | MoeSpec | None) -> Mlp:
    assert isinstance(own, MlpSpec)
    return Mlp(
        norm=_norm_if_any(norm),
        gate_up=_linear((spec.gate, spec.up), (own.gate, own.up)),
        down=_linear((spec.down,), (own.down,)),
    )


def _moe(norm: NormSpec | None, spec: MoeSpec, own: MlpSpec | MoeSpec) -> Moe:
    assert isinstance(own, MoeSpec)
    experts, width, hidden = own.gate.shape

    def turned(weight: WeightSpec) -> Parameter:
        """Describe a matrix that every device has, transposed."""

        def read(weights: Weights, dtype: torch.dtype) -> Tensor:
            return weights.read(weight).to(dtype).t()

        cut = PartitionSpec(*partition(weight)[::-1])
        return Parameter(weight.shape[::-1], cut, read, weight.in_float32)

    def each(weight: WeightSpec) -> Callable[[Weights, torch.dtype], Tensor]:
        def read(weights: Weights, dtype: torch.dtype) -> Tensor:
            return torch.stack([one.to(dtype).t() for one in weights.read_each(weight)])

        return read

    expert_axis, width_axis, hidden_axis = partition(spec.gate)
    inward = PartitionSpec(expert_axis, hidden_axis, width_axis)
    return Moe(
        norm=_norm_if_any(norm),
        router=turned(spec.router.weight),
        bias=None if spec.router.bias is None else _vector(spec.router.bias),
        gate=Parameter((experts, hidden, width), inward, each(spec.gate)),
        up=Parameter((experts, hidden, width), inward, each(spec.up)),
        down=Parameter(
            (experts, width, hidden),
            PartitionSpec(expert_axis, width_axis, hidden_axis),
            each(spec.down),
        ),
        shared=None if spec.shared is None else _mlp(None, spec.shared, own.shared),
        shared_gate=None if spec.shared_gate is None else turned(spec.shared_gate),
    )
