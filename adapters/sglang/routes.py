"""Turns the `routed_experts` of a response, which SGLang sends as bytes without shape or dtype, into routing traces.

Shapes: R rows, L decoder layers, K experts per token. The wire format of 0.5.9 to 0.5.23 is int32, little-endian, C order
`[R, L, K]`, base64 in a string; dense layers have rows of zeros, and the last sampled token has no row.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.sglang.fields import brief
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingShape, RoutingTrace
from mismatch_ext.versions import PEERS

FLAG = "--enable-return-routed-experts"
FIELD = "meta_info.routed_experts"
WIRE = np.dtype("<i4")
NARROWER = {1: "8-bit", 2: "16-bit", 8: "64-bit"}


def row_bytes(shape: RoutingShape) -> int:
    """Return the bytes of a token's row on the wire."""
    return shape.num_layers * shape.top_k * WIRE.itemsize


def to_trace(
    value: Any, *, prompt_tokens: int, output_tokens: int, shape: RoutingShape, start: int, version: int, request: str
) -> RoutingTrace:
    """Decode and check the routes of one response.

    Args:
        value: The field as the server sent it: base64 text, raw bytes, or an integer array.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens of the response.
        shape: The model's routing shape.
        start: `routed_experts_start_len` of the request. A server that ignored it sent all rows; those before it are cut.
        version: Weight version that the response was sampled with.
        request: Name of the request, for messages.

    Raises:
        RoutingError: Routes are missing, cannot be decoded, have another length, or have rows that no router can have written;
            names request, row and layer.
    """
    tokens = prompt_tokens + output_tokens
    if not 0 <= start <= prompt_tokens:
        raise RoutingError(
            f"request {request}: routed_experts_start={start}; allowed: 0 to {prompt_tokens}, the length of the prompt."
        )
    full = max(tokens - 1, 0)
    ids = decode_routes(value, rows=max(full - start, 0), full_rows=full, shape=shape, request=request)
    return RoutingTrace.ingest(
        ids[len(ids) - max(full - start, 0) :],
        num_experts=shape.num_experts,
        layers=shape.layers,
        tokens=tokens,
        version=version,
        request=request,
        top_k=shape.top_k,
        start=start,
        last_row=False,
    )


def decode_routes(value: Any, *, rows: int, full_rows: int, shape: RoutingShape, request: str) -> NDArray[Any]:
    """Return expert ids `[R, L, K]`; the length is checked before anything is decoded.

    Args:
        value: The field as the server sent it.
        rows: Number of rows that were asked for.
        full_rows: Number of rows that a server sends if it ignores `routed_experts_start_len`; this number is accepted too.
        shape: The model's routing shape.
        request: Name of the request, for messages.

    Raises:
        RoutingError: The field is missing, has another type or length, or is not base64.
    """
    if value is None:
        raise RoutingError(
            f"request {request}, {FIELD}: missing, so its routing is unknown; start the server with {FLAG} (without it SGLang "
            "ignores return_routed_experts of the request), and of a stream give the last chunk."
        )
    allowed = tuple(dict.fromkeys((rows, full_rows)))
    if isinstance(value, (str, bytes, bytearray)):
        raw = _from_text(value, allowed, shape, request) if isinstance(value, str) else value
        _check_bytes(len(raw), allowed, shape, request)
        return np.frombuffer(raw, dtype=WIRE).reshape(-1, shape.num_layers, shape.top_k)
    return _from_array(value, allowed, shape, request)


def _from_text(text: str, allowed: tuple[int, ...], shape: RoutingShape, request: str) -> bytes:
    wanted = [4 * -(-rows * row_bytes(shape) // 3) for rows in allowed]
    if len(text) not in wanted:
        _check_bytes(len(text) // 4 * 3 - text[-2:].count("="), allowed, shape, request)
        raise RoutingError(
            f"request {request}, {FIELD}: {len(text)} characters of base64; allowed: {' or '.join(map(str, wanted))}. It was "
            "cut or altered on its way."
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutingError(
            f"request {request}, {FIELD}: {brief(text)} is no base64 ({error}); it was altered on its way."
        ) from error


def _check_bytes(found: int, allowed: tuple[int, ...], shape: RoutingShape, request: str) -> None:
    if found in [rows * row_bytes(shape) for rows in allowed]:
        return
    where = f"request {request}, {FIELD}: {found} bytes"
    for size, name in NARROWER.items():
        if found and found * WIRE.itemsize in [rows * row_bytes(shape) * size for rows in allowed]:
            raise RoutingError(
                f"{where}, which is the length of {name} ids; allowed: 32-bit ids, as sglang "
                f"{PEERS['sglang'].supports} sends them."
            )
    meant = " or ".join(f"{rows * row_bytes(shape)} ({rows} rows)" for rows in allowed)
    rows, rest = divmod(found, row_bytes(shape))
    kind = f"{rows} rows" if not rest else f"no whole number of rows of {row_bytes(shape)} bytes"
    raise RoutingError(
        f"{where}, {kind}; allowed: {meant} of {shape.num_layers} layers x {shape.top_k} experts x 4 bytes. The server ran "
        "another model, another prompt, or a version that counts rows otherwise."
    )


def _from_array(value: Any, allowed: tuple[int, ...], shape: RoutingShape, request: str) -> NDArray[Any]:
    """Accept integers of an expected shape; the shape is checked before anything is copied from a device."""
    width = (shape.num_layers, shape.top_k)
    shapes = [(rows, *width) for rows in allowed] + [(rows * width[0] * width[1],) for rows in allowed]
    if isinstance(value, (Tensor, np.ndarray)) and tuple(value.shape) in shapes:
        ids = _integers(value)
        if ids is not None:
            return ids.reshape(-1, *width)
    kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else brief(value)
    rows = " or ".join(map(str, allowed))
    raise RoutingError(
        f"request {request}, {FIELD}: found {kind}; allowed: base64 text, bytes, or integers [{rows}, {width[0]}, {width[1]}] "
        "(rows, layers, experts per token)."
    )


def _integers(value: Tensor | NDArray[Any]) -> NDArray[Any] | None:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            return None
        if value.is_floating_point() or value.is_complex():
            return None
        value = value.detach().cpu().numpy()
    return value if value.dtype.kind in "iu" else None
