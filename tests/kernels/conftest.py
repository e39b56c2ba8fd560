"""Kernels run in Triton's interpreter; it is chosen when a kernel's module is imported."""

import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def nothing_is_tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ops choose does not depend on what was tuned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
