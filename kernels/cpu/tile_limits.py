"""Limits for the tiles of CPU attention, which also bound its memory; see attention.py."""

MAX_TILE_QUERIES = 256
"""Maximum number of a request's queries that share one gather of its pages."""

MAX_TILE_ELEMENTS = 1 << 20
"""Maximum scores, gathered keys or gathered values in a tile with several requests: 4 MiB of
float32.
"""

BY_HEAD_ROWS, BY_HEAD_SCORES = 64, 1 << 17
"""Minimum query rows and scores per KV head for computing a tile head by head. A tile with fewer
rows is too, if all heads' scores exceed MAX_TILE_ELEMENTS.
"""

MAX_BLOCK_QUERIES, MAX_BLOCK_SCORES = 64, 1 << 19
"""Maximum block for one KV head; larger blocks leave the cache, and overshoot the diagonal more."""

TILE_COST_IN_SCORES = 1 << 15
"""Dispatch cost of one more tile, as a number of scores computed in the same time."""
