"""Switches between two ways to run a step, by the cost of each on the devices at hand.

Tensor parallelism has two ways to exchange tokens around a block's products (Korthikanti et al.
2022, section 4.2):

    few     all tokens on each device      product, product, all-reduce
    many    some tokens on each device     all-gather beside a product, product beside a scatter

On a torus, N devices form a ring. Each passes on a part and multiplies it meanwhile (Wang et al.
2023). In each of N - 1 hops, the longer of both counts; one part has no hop beside it:

    c = product / N + launches             l = hop latency + V / (2 N W)
    seconds = (N - 1) max(c, l) + c

V is the bytes that go round in two directions, W a link's bandwidth. A product is the longer of its
arithmetic and its memory traffic. XLA keeps its weights in the chip's vector memory, from the first
part to the last. A Pallas kernel reads them again for each part.

With very many tokens, an MLP's weights are fewer bytes than its tokens. They go round instead
(Pope et al. 2022, section 3.2.3).

GPUs have no rings. Tiles and methods decide there, so the kernels' own cost model gives the
seconds, of three ways (kernels/gpu/tuning/products.py).

Norms and residual sums are not counted. With few tokens, each device repeats them for all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from weft.kernels.devices import Device, Link
from weft.models.plan import collectives
from weft.models.plan.hardware import Axis, Slice
from weft.models.plan.times import span
from weft.models.spec.spec import DTYPE_BYTES, LayerSpec, MlpSpec, ModelSpec

Value = TypeVar("Value")

FEWEST = 16
"""Smallest number of tokens that is compared; the tuning file's smallest, too."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[Value]):
    """A decision, and the costs that were compared for it.

    Attributes:
        value: what was decided.
        reason: the costs, in one sentence.
    """

    value: Value
    reason: str


class Torus:
    """The costs of both ways on a torus.

    Args:
        place: the slice.
        local: one device's part of the model.
        devices: number of devices that share it.
        dtype: compute dtype: "bfloat16" or "float32".
        in_kernels: rings are Pallas kernels (kernels/tpu/matmul), not XLA's.
    """

    def __init__(
        self,
        place: Slice,
        local: ModelSpec,
        devices: int,
        dtype: str,
        *,
        in_kernels: bool = False,
    ) -> None:
        self._name, self._devices, self._in_kernels = place.device.name, devices, in_kernels
        self._item, self._hidden = DTYPE_BYTES[dtype], local.hidden_size
        device = place.device
        self._flops = device.flops[dtype] * device.reached.flops
        self._bandwidth = device.bandwidth * device.reached.bandwidth
        self._launch = device.launch
        self._share = device.reached.links
        self._axes = span(place.axes, devices)
        self._link = _ring_link(place.device, self._axes)
        layers = {id(layer): layer for layer in local.layers}  # equal layers may be one object
        counts = Counter(map(id, local.layers))
        self._layers = [(layer, counts[key]) for key, layer in layers.items()]

    def shards_tokens(self, tokens: int) -> Decision[bool]:
        """Decide whether each device has some of a step's tokens between blocks, or all of them.

        Experts do not count: both ways exchange the same bytes for them.

        Args:
            tokens: number of tokens in the step.
        """
        devices = self._devices
        if devices == 1:
            return Decision(False, "there is one device")
        if tokens % (2 * devices):
            return Decision(
                False, f"{tokens} tokens do not divide into two parts for each of {devices} devices"
            )
        few = sum(times * self._replicated(layer, tokens) for layer, times in self._layers)
        many = sum(times * self._sharded(layer, tokens) for layer, times in self._layers)
        return Decision(
            many < few,
            f"all layers' products and exchanges take {_ms(many)} with {tokens // devices} tokens "
            f"on each of {devices} {self._name}, and {_ms(few)} with all {tokens} on each",
        )

    def gathers_weights(self, tokens: int) -> Decision[bool]:
        """Decide whether dense MLPs leave sharded tokens in place and pass weights round.

        Args:
            tokens: number of tokens in the step; sharded.
        """
        blocks = [(layer.feed_forward, times) for layer, times in self._layers]
        mlps = [(block, times) for block, times in blocks if isinstance(block, MlpSpec)]
        if not mlps:
            return Decision(False, "there is no dense MLP")
        moving = sum(times * self._passing_tokens(mlp, tokens) for mlp, times in mlps)
        staying = sum(times * self._passing_weights(mlp, tokens) for mlp, times in mlps)
        return Decision(
            staying < moving,
            f"all MLPs take {_ms(staying)} if their weights go round the {self._devices} "
            f"{self._name}, and {_ms(moving)} if {tokens} tokens do",
        )

    def _replicated(self, layer: LayerSpec, tokens: int) -> float:
        """Return the seconds of a layer's dense products and all-reduces, with all tokens."""
        products = layer_products(layer, self._hidden)
        payload = tokens * self._hidden * self._item / self._share
        reduces = len(products) / 2 * collectives.all_reduce(payload, self._axes)
        alone = sum(self._product(tokens, *product) + self._launch for product in products)
        return alone + reduces

    def _sharded(self, layer: LayerSpec, tokens: int) -> float:
        """Return the seconds of the same products in rings."""
        return sum(
            self._token_ring(tokens, *product) for product in layer_products(layer, self._hidden)
        )

    def _passing_tokens(self, mlp: MlpSpec, tokens: int) -> float:
        return sum(self._token_ring(tokens, *each) for each in _mlp_products(mlp, self._hidden))

    def _passing_weights(self, mlp: MlpSpec, tokens: int) -> float:
        """Return the seconds of an MLP for a device's tokens, with the weights in a ring."""
        size = 3 * mlp.gate.weight.size  # one device's part
        width = mlp.gate.weight.shape[0] * self._devices
        own = tokens / self._devices
        flops = 2 * own * size * self._devices
        moved = size * self._devices + own * (2 * self._hidden + 3 * width)
        product = max(flops / self._flops, moved * self._item / self._bandwidth)
        return self._ring(product, size * self._devices * self._item, launches=6)

    def _token_ring(self, tokens: int, columns: int, width: int) -> float:
        payload = tokens * self._hidden * self._item
        if self._in_kernels:
            parts = 2 * self._devices
            product = parts * self._product(tokens / parts, columns, width)
            return self._launch + self._ring(product, payload)
        return self._ring(self._product(tokens, columns, width), payload, launches=2)

    def _ring(self, product: float, payload: float, launches: int = 0) -> float:
        """Return the seconds of a product in a ring.

        Args:
            product: seconds of the whole product on one device.
            payload: bytes of the array that goes round.
            launches: number of products that are launched in a hop.
        """
        devices = self._devices
        own = product / devices + launches * self._launch
        rate = 2 * self._link.bandwidth * self._share
        hop = self._link.hop + payload / devices / rate
        return (devices - 1) * max(own, hop) + own

    def _product(self, rows: float, columns: int, width: int) -> float:
        """Return the seconds of [rows, width] x [width, columns]."""
        moved = (columns * width + rows * (columns + width)) * self._item
        return max(2 * rows * columns * width / self._flops, moved / self._bandwidth)


def sizes(most: int) -> list[int]:
    """Return the numbers of tokens to compare: powers of two from FEWEST to `most` or above."""
    found = [FEWEST]
    while found[-1] < most:
        found.append(2 * found[-1])
    return found


def limits(costs: Mapping[int, Sequence[float]], most: int) -> Decision[list[int]]:
    """Decide up to how many tokens each way is used, in their order.

    No other limits take fewer seconds, summed over all compared numbers of tokens. If costs cross
    once, the limit is where they cross.

    Args:
        costs: for each compared number of tokens, a power of two, each way's seconds.
        most: maximum number of tokens in a step; no limit is above it.

    Returns:
        A limit for each way but the last, ascending. A way is never used if its limit is not above
        the one before. A limit below FEWEST is 1.
    """
    compared = sorted(costs)
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    # best[n]: the least seconds for the n smallest sizes by the ways so far, and where each ends.
    for way in range(len(costs[compared[0]])):
        taken = [0.0]
        for size in compared:
            taken.append(taken[-1] + costs[size][way])
        best = [
            min(
                (total + taken[end] - taken[begin], [*ends, end])
                for begin, (total, ends) in enumerate(best[: end + 1])
            )
            for end in range(len(compared) + 1)
        ]
    ends = best[-1][1][:-1]

    def limit(end: int) -> int:
        if end:
            return min(compared[end - 1], most)
        return 1 if compared[0] == FEWEST else min(compared[0] // 2, most)

    at = [compared[min(end, len(compared) - 1)] for end in ends]
    told = "; ".join(
        f"with {size} tokens, a layer's products take {', '.join(map(_us, costs[size]))}"
        for size in dict.fromkeys(at)
    )
    return Decision([limit(end) for end in ends], told)


def _ring_link(device: Device, axes: Sequence[Axis]) -> Link:
    """Return the slowest link in a ring.

    Two devices on a chip share its links to others. In a ring, only one of them uses each.
    """
    if device.inside is not None and all(axis.link == device.inside for axis in axes):
        return device.inside
    return replace(device.link, bandwidth=device.per_chip * device.link.bandwidth)


def layer_products(layer: LayerSpec, hidden: int) -> list[tuple[int, int]]:
    """Return (columns, width) of a layer's dense products on one device, fused as in a step.

    Those at even places begin a block, and the others end it.
    """
    attention = layer.attention
    heads = attention.q.weight.shape[0]
    columns = heads + attention.k.weight.shape[0] + attention.v.weight.shape[0]
    products = [(columns, hidden), (hidden, heads)]
    if isinstance(layer.feed_forward, MlpSpec):
        products += _mlp_products(layer.feed_forward, hidden)
    return products


def _mlp_products(mlp: MlpSpec, hidden: int) -> list[tuple[int, int]]:
    width = mlp.gate.weight.shape[0]
    return [(2 * width, hidden), (hidden, width)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
