"""Up to how many tokens a layer's products run in which way, by the kernels' cost model.

It needs no GPU, and no Triton: `weft plan --why` asks, too.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.kernels.gpu.tuning.costs import Gpu
from weft.kernels.gpu.tuning.products import Product, expected_choices, predicted, three_ways
from weft.models.plan import switches
from weft.models.spec.spec import ModelSpec, MoeSpec


class LayerProducts(NamedTuple):
    """A layer's products on one rank; see `three_ways`."""

    begins: list[Product]
    ends: list[Product]
    expert_begins: list[Product]
    expert_ends: list[Product]


def products_of(local: ModelSpec) -> LayerProducts:
    """Return the products of a rank's first layer, which stands for all."""
    layer, hidden = local.layers[0], local.hidden_size
    products = [Product(*each) for each in switches.layer_products(layer, hidden)]
    begins, ends, moe = products[::2], products[1::2], layer.feed_forward
    if not isinstance(moe, MoeSpec):
        return LayerProducts(begins, ends, [], [])
    own, width, _ = moe.gate.shape
    choices = expected_choices(moe.router.top_k, moe.router.weight.shape[0], own)
    gate_up = Product(2 * width, hidden, own, choices)
    return LayerProducts(begins, ends, [gate_up], [Product(hidden, width, own, choices)])


def predicted_limits(
    device: Gpu, world_size: int, products: LayerProducts, dtype: str, max_tokens: int
) -> switches.Decision[list[int]]:
    """Predict up to how many tokens the first and the second of `three_ways` are the fastest.

    Args:
        device: the GPUs.
        world_size: number of ranks.
        products: from `products_of`.
        dtype: compute dtype, by its torch name.
        max_tokens: maximum number of tokens in a step.
    """
    ways = three_ways(world_size, *products)
    costs = {
        tokens: [predicted(way, tokens, dtype, device) for way in ways]
        for tokens in switches.sizes(max_tokens)
    }
    return switches.limits(costs, max_tokens)
