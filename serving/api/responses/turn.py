"""A Responses request in its conversation: earlier responses, references, tools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.errors import RequestError
from weft.serving.api.conversation import Conversation
from weft.serving.api.openai.messages import Message
from weft.serving.api.responses.items import (
    InputItem,
    encoded,
    messages_of,
    named,
    references,
    text_part,
)
from weft.serving.api.responses.requests import InputTokensRequest
from weft.serving.api.responses.store import ResponseStore, Stored
from weft.serving.api.responses.tools import Toolbox


class Turn:
    """A request, with everything it refers to.

    Args:
        body: the request.
        store: earlier responses.
        owner: the API key's digest, or "" without keys.

    Attributes:
        owner: see above.
        toolbox: the request's tools, once there is a conversation.
        items: all input items as a JSON list, once there is a conversation.
        ids: the ids for clients' references to these items.

    Raises:
        RequestError: the request refers to a missing response or item, or twice to one item.
    """

    def __init__(self, body: InputTokensRequest, store: ResponseStore, owner: str) -> None:
        self.owner = owner
        self.toolbox: Toolbox
        self.items = b""
        self.ids: tuple[str, ...] = ()
        self._body = body
        self._previous: Stored | None = None
        if body.previous_response_id is not None:
            try:
                self._previous = store.get(owner, body.previous_response_id)
            except RequestError as error:
                raise RequestError(
                    error.message,
                    param="previous_response_id",
                    code="previous_response_not_found",
                    status=error.status,
                ) from None
        self._places: dict[str, Stored] = {}
        for item in body.input:
            if item.type == "item_reference" and item.id is not None:
                if item.id in self._places:  # a short reference may stand for a long text
                    raise RequestError(
                        f"input refers to the item {item.id!r} twice; refer to it once",
                        param="input",
                        code="duplicate_item",
                    )
                self._places[item.id] = store.with_item(owner, item.id)

    def conversation(self, fits: Callable[[Conversation], bool]) -> Conversation:
        """Return the conversation; this takes long if the conversation is long.

        Args:
            fits: returns whether a conversation fits into the model's context. If the request asks
                for truncation, its oldest turns are left out until the rest fits.

        Raises:
            RequestError: no item is for the model, an item is invalid, two tools have one name, or
                the tools and the choice contradict each other.
        """
        self.toolbox = Toolbox(self._body.tools or ())
        items = named(self._all_items())
        conversation = self._of(items)
        if self._body.truncation == "auto" and not fits(conversation):
            turns = [i for i, item in enumerate(items) if item.role == "user"] or [0]
            place = bisect_left(turns, True, key=lambda i: fits(self._of(_since(items, i))))
            items = _since(items, turns[min(place, len(turns) - 1)])
            conversation = self._of(items)
        self.items = encoded(items)
        self.ids = references(items)
        return conversation

    def _of(self, items: Sequence[InputItem]) -> Conversation:
        body = self._body
        messages = [] if body.instructions is None else [_system(body.instructions)]
        messages += messages_of(items, self.toolbox)
        if not messages:
            raise RequestError("input has no item that the model could see", param="input")
        return Conversation(
            messages,
            self.toolbox.functions,
            self.toolbox.choice(body.tool_choice),
            body.parallel_tool_calls is not False,
            thinking=body.thinking,
            verbosity=body.verbosity,
        )

    def _all_items(self) -> Iterator[InputItem]:
        if self._previous is not None:
            yield from map(_item, self._previous.conversation())
        distinct = {id(each): each for each in self._places.values()}.values()
        stored = {item["id"]: item for each in distinct for item in each.conversation()}
        for item in self._body.input:
            if item.type == "item_reference" and item.id is not None:
                item = _item(stored[item.id])
            yield item


def _since(items: Sequence[InputItem], place: int) -> list[InputItem]:
    """Return the items from a place on, and all earlier system messages."""
    system = [item for item in items[:place] if item.role in ("system", "developer")]
    return [*system, *items[place:]]


def _item(stored: dict[str, Any]) -> InputItem:
    return InputItem.model_validate(stored)


def _system(text: str) -> Message:
    return Message(role="system", content=[text_part(text)])
