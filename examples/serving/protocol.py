"""What clients send and receive: a part of OpenAI's completions, and a tokenizer of bytes."""

import codecs
import hashlib
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from examples.serving.model import VOCABULARY
from examples.serving.request import Refused

# The answer to each reason for which a request is not taken.
STATUS = {"invalid": 400, "too_long": 400, "busy": 503, "failed": 500}
# And to each way in which one ends without an answer.
ENDS = {"timeout": 504, "cancelled": 409, "failed": 500}

TokenId = Annotated[int, Field(ge=0, lt=VOCABULARY)]


class Completion(BaseModel):
    """The body of POST /v1/completions.

    prompt: text, of which each byte of UTF-8 is a token, or token ids. timeout: seconds until it
    is given up, waiting included. logprobs: those of the tokens chosen, if 1. cache_salt: only
    requests with the same one share pages, and may learn from the time taken that they do.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[TokenId]
    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stream: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None
    logprobs: Literal[0, 1] | None = None
    cache_salt: str = ""
    user: str = ""
    # Answers are greedy: other values of these would be ignored, so they are refused.
    temperature: Annotated[float, Field(ge=0, le=0)] = 0.0
    n: Literal[1] = 1

    @property
    def tokens(self) -> list[int]:
        """The prompt's tokens."""
        return list(self.prompt.encode()) if isinstance(self.prompt, str) else self.prompt

    @property
    def salt(self) -> bytes:
        """What the names of the prompt's pages begin with."""
        text = self.cache_salt.encode()
        return hashlib.blake2b(text, digest_size=16).digest() if text else b""


def read_completion(body: bytes, model: str) -> Completion:
    """The request in a body. Raises Refused, with the fields that are wrong."""
    try:
        found = Completion.model_validate_json(body)
    except ValidationError as error:
        # Of a union each alternative has an error of its own.
        wrong = dict.fromkeys(
            f"{'.'.join(map(str, each['loc'][:2])) or 'body'}: {each['msg']}"
            for each in error.errors()
        )
        raise Refused("invalid", "; ".join([*wrong][:5])) from None
    if found.model not in ("", model):
        raise Refused("invalid", f"model: {found.model!r} is not served here, {model!r} is")
    return found


def error_body(kind: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"type": kind, "message": message}}


class Writer:
    """Bodies of one answer: chunks of a stream, or all of it."""

    def __init__(self, id: str, asked: Completion, model: str) -> None:
        self._head = {
            "id": id, "object": "text_completion", "created": int(time.time()), "model": model,
        }  # fmt: skip
        self._logprobs = bool(asked.logprobs)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def body(self, tokens: list[int], logprobs: list[float], end: str = "") -> dict[str, Any]:
        """Some tokens, in their order; end: the finish_reason, with the last ones."""
        choice: dict[str, Any] = {
            "index": 0, "text": self._decode(bytes(tokens), bool(end)), "token_ids": tokens,
            "finish_reason": end or None,
        }  # fmt: skip
        if self._logprobs:
            choice["logprobs"] = {"token_logprobs": logprobs}
        return {**self._head, "choices": [choice]}


def usage(prompt: int, made: int, cached: int) -> dict[str, Any]:
    """Tokens of a request, and those of its prompt whose keys were found."""
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
