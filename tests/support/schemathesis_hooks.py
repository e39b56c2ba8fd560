"""What Schemathesis is told of the server beside its document, for test_schemathesis.py."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis import Case, HookContext
from schemathesis.core.failures import Failure
from schemathesis.core.transport import Response
from schemathesis.openapi.checks import AllowHeaderMismatch
from schemathesis.specs.openapi.checks import RejectedPositiveData

MODEL = "weft-demo"
MOST_ANSWERS = 2

# Refusals of requests that fit the document, by what it cannot say. All others are failures.
BEYOND_SCHEMAS = re.compile(
    "|".join(
        [
            # One number or text depends on another, or on the model.
            r"best_of is .* only when 1 or equal to n",
            r"(min|max)_tokens is .* (must be in|room for)",
            r"the prompt (has \d+|of \d+ characters has more than \d+) tokens; the (context|max)",
            r"dimensions is \d+; it must be in \[1, ",
            r"token ids are in \[0, \d+\)",
            r"answers; at most",
            # At most one of ten fields is given.
            r"each constrain the answer",
            # Two of many fields; a schema with one more rule for fields is too much to generate.
            r"continue_final_message and add_generation_prompt are two ends",
            # What two fields together leave.
            r"allowed_token_ids.* leaves? no token that can follow",
            # A name that is given elsewhere in the request, or by an earlier one.
            r"tool_choice ((asks for|requires) a call|names) ",
            r"there is no (file|batch) ",
            r"requests\[\d+\]\.custom_id is .* each must differ",
            r"give one of after_id and before_id",
            r"the purpose 'batch_output'",
            # Where in a conversation what may be.
            r"messages ends with a message of the assistant (that has a block|whose text ends)",
            r"messages has only an empty message of the assistant",
            r"continue_final_message (is only for a last|continues a text; the last) message",
            # A text or an object that has a syntax of its own.
            r"(guided_|response_format|structured_outputs|regex|ebnf|json_schema|text\.format|tools)",
            r"the model's chat template rejects",
            r"chat template knows no verbosity",
            r"encrypted_content is not from this server",
            # JSON schema takes 5.0 for an integer; a client that sends it has made a mistake.
            r"is -?[\d.e+]+; it should be a valid integer",
            r"(prompt|input)\[\d+\]:? (must be a|the prompt must be) text or a list of token ids",
        ]
    )
)

# GET and DELETE take the last part of these paths for the id of a response.
LIKE_AN_ID = ("/v1/responses/input_tokens",)


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Of what is to be accepted, ask the model that is there, and for few answers."""
    body = case.body
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], MOST_ANSWERS)


@schemathesis.hook
def filter_failure(context: HookContext, failure: Failure, case: Case, response: Response) -> bool:
    """Whether it is one."""
    if isinstance(failure, AllowHeaderMismatch):
        return case.path not in LIKE_AN_ID
    if not isinstance(failure, RejectedPositiveData) or response.status_code != 400:
        return True
    return BEYOND_SCHEMAS.search(response.json()["error"]["message"]) is None
