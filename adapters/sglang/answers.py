"""What this package accepts as an answer of SGLang's over HTTP: its length, its type, and its form of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import urlsplit

from mismatch_ext.adapters.sglang.fields import brief, is_integer

from mismatch_ext.errors import EngineError

ANSWER_BYTES = 1 << 19
"""Bytes that any answer may have. SGLang's report of itself is the longest (about 20 kB). Parsed JSON takes up to about forty
times the memory of its text."""
TOKEN_BYTES = 1 << 10
"""Bytes that an answer may have in addition for each token of prompt and response; id, text and log-probability take some 100."""
ROUTES_BYTES = 1 << 14
"""The same for the routes of a token: room for 3,072 pairs of layer and expert, as base64 of 32-bit ids; the largest models have
752."""
UNSAID_TOKENS = 1 << 17
"""Length that is assumed of a response whose request sets none."""
REFUSAL_BYTES = 1 << 12
"""Bytes that are read of an answer that is an error, to quote them in the message."""
JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json")
EVENT_STREAM = re.compile(r"text/event-stream")


def most_bytes(request: Mapping[str, Any]) -> int:
    """Return the bytes that the answer to a generation request can need, for all of its responses together.

    Args:
        request: A dict that `generate_request` built, or a request of your own.
    """
    prompts = request.get("input_ids", request.get("text", ()))
    if not prompts or not isinstance(prompts, (list, tuple)) or is_integer(prompts[0]):
        prompts = [prompts]
    settings = request.get("sampling_params") or {}
    each = settings if isinstance(settings, (list, tuple)) else [settings] * len(prompts)
    tokens = 0
    for prompt, one in zip(prompts, each, strict=False):
        new, copies = one.get("max_new_tokens", UNSAID_TOKENS), one.get("n", 1)
        new = int(new) if is_integer(new) else UNSAID_TOKENS
        tokens += (int(copies) if is_integer(copies) else 1) * (len(prompt) + new)
    top = request.get("top_logprobs_num", 0)
    per_token = TOKEN_BYTES * (1 + (int(top) if is_integer(top) else 0))
    return ANSWER_BYTES + tokens * (per_token + (ROUTES_BYTES if request.get("return_routed_experts") else 0))


def strict_json(text: bytes) -> Any:
    """Parse JSON in UTF-8; raise ValueError for any other text, for NaN and infinities, and for an object with a key twice."""
    return json.loads(text.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:60]!r} stands twice in an object")
        found[key] = value
    return found


def check_url(url: Any) -> None:
    """Raise `EngineError` if `url` is not the address of a server, or if it contains a name or password."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        secret = "@" in parts.netloc
    except (ValueError, TypeError, AttributeError):
        right, secret = False, False
    if secret:
        raise EngineError("url holds a name or password, which errors would print; give them as the session's auth.")
    if not right:
        raise EngineError(f"url={brief(url)}; allowed: an address such as 'http://127.0.0.1:30000'.")


def media_type(header: str) -> str:
    """Return the media type of a Content-Type header, without its parameters."""
    return header.partition(";")[0].strip().lower()


def shown(body: bytes) -> str:
    """Return the beginning of a body, to quote it in a message."""
    return brief(body[:1000].decode("utf-8", "replace"))
