"""Up to how many tokens each GPU has all of them, by the kernels' cost model.

It needs no GPU, and no Triton: `weft plan --why` asks, too.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.kernels.gpu.tuning.costs import Gpu
from weft.kernels.gpu.tuning.products import Product, predicted, two_ways
from weft.models.plan import switches
from weft.models.spec.spec import ModelSpec, MoeSpec


class LayerProducts(NamedTuple):
    """A layer's products on one rank; see `two_ways`."""

    begins: list[Product]
    ends: list[Product]
    sums: list[Product]


def products_of(local: ModelSpec) -> LayerProducts:
    """Return the products of a rank's first layer, which stands for all."""
    layer, hidden = local.layers[0], local.hidden_size
    products = [Product(*each) for each in switches.layer_products(layer, hidden)]
    sums = [Product(hidden, 0)] if isinstance(layer.feed_forward, MoeSpec) else []
    return LayerProducts(products[::2], products[1::2], sums)


def predicted_few_tokens(
    device: Gpu, world_size: int, products: LayerProducts, dtype: str, max_tokens: int
) -> switches.Decision[int]:
    """Predict the number of tokens up to which replicating them is faster.

    Args:
        device: the GPUs.
        world_size: number of ranks.
        products: from `products_of`.
        dtype: compute dtype, by its torch name.
        max_tokens: maximum number of tokens in a step.
    """
    ways = two_ways(world_size, *products)

    def seconds(tokens: int) -> tuple[float, float]:
        few, many = (predicted(way, tokens, dtype, device) for way in ways)
        return few, many

    return switches.few_tokens(seconds, max_tokens)
