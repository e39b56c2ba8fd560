"""What every request's body is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """An object whose every field is known and has exactly its type."""

    model_config = ConfigDict(extra="forbid", strict=True)
