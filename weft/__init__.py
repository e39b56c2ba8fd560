"""weft: serve large language models that are split over many accelerators.

`import weft` is cheap (well under 0.3 s), because each name below is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from weft.version import __version__

if TYPE_CHECKING:
    from weft.serving.engine.sampling_params import SamplingParams
    from weft.serving.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "weft.serving.llm", "SamplingParams": "weft.serving.engine.sampling_params"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
