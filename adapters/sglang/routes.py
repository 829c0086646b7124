"""The `routed_experts` of a response, which SGLang sends as bytes without shape or dtype, as routing traces.

Shapes: R rows, L decoder layers, K experts per token. The wire format of 0.5.9 to 0.5.23 is int32, little-endian, C order
`[R, L, K]`, base64 in a string; dense layers have rows of zeros, and the last sampled token has no row.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.sglang.fields import brief
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.versions import PEERS

FLAG = "--enable-return-routed-experts"
FIELD = "meta_info.routed_experts"
WIRE = np.dtype("<i4")
NARROWER = {1: "8-bit", 2: "16-bit", 8: "64-bit"}


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What the routes of a model look like; take it from the model that replays, for the bytes do not say.

    Args:
        num_layers: Decoder layers L, dense ones included (`num_hidden_layers`): SGLang has a row of every layer.
        layers: Absolute indices of the MoE layers, ascending.
        num_experts: Experts per layer.
        top_k: Experts per token K.

    Raises:
        RoutingError: A value is out of range.
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        last = max(self.layers, default=0)
        ascending = list(self.layers) == sorted(set(self.layers)) and bool(self.layers)
        for name, value, ok, allowed in (
            ("num_experts", self.num_experts, 1 <= self.num_experts <= 65536, "1 to 65536"),
            ("top_k", self.top_k, 1 <= self.top_k <= self.num_experts, f"1 to num_experts ({self.num_experts})"),
            ("layers", self.layers, ascending and self.layers[0] >= 0, "ascending decoder indices >= 0, at least one"),
            ("num_layers", self.num_layers, self.num_layers > last, f"more than {last}, the last MoE layer's index"),
        ):
            if not ok:
                raise RoutingError(f"routing shape {name}={brief(value)} is out of range; allowed: {allowed}.")

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row on the wire."""
        return self.num_layers * self.top_k * WIRE.itemsize


def to_trace(
    value: Any, *, prompt_tokens: int, output_tokens: int, shape: RoutingShape, start: int, version: int, request: str
) -> RoutingTrace:
    """Decode and check the routes of one response.

    Args:
        value: The field as the server sent it: base64 text, raw bytes, or an integer array.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens of the response.
        shape: The model's routing shape.
        start: What the request had as `routed_experts_start_len`; a server that ignored it sent all rows, which are cut.
        version: Weight version that sampled.
        request: Name of the request, for messages.

    Raises:
        RoutingError: Missing, undecodable or of another length, or rows that no router wrote; names request, row and layer.
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
    """Return expert ids `[R, L, K]`; the length is compared with the expected one before anything is decoded.

    Args:
        value: The field as the server sent it.
        rows: Rows that were asked for.
        full_rows: Rows of a server that ignores `routed_experts_start_len`, which are accepted too.
        shape: The model's routing shape.
        request: Name of the request, for messages.

    Raises:
        RoutingError: The field is missing, of another type or length, or no base64.
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
    wanted = [4 * -(-rows * shape.row_bytes // 3) for rows in allowed]
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
    if found in [rows * shape.row_bytes for rows in allowed]:
        return
    where = f"request {request}, {FIELD}: {found} bytes"
    for size, name in NARROWER.items():
        if found and found * WIRE.itemsize in [rows * shape.row_bytes * size for rows in allowed]:
            raise RoutingError(
                f"{where}, which is the length of {name} ids; allowed: 32-bit ids, as sglang "
                f"{PEERS['sglang'].supports} sends them."
            )
    meant = " or ".join(f"{rows * shape.row_bytes} ({rows} rows)" for rows in allowed)
    rows, rest = divmod(found, shape.row_bytes)
    kind = f"{rows} rows" if not rest else f"no whole number of rows of {shape.row_bytes} bytes"
    raise RoutingError(
        f"{where}, {kind}; allowed: {meant} of {shape.num_layers} layers x {shape.top_k} experts x 4 bytes. The server ran "
        "another model, another prompt, or a version that counts rows otherwise."
    )


def _from_array(value: Any, allowed: tuple[int, ...], shape: RoutingShape, request: str) -> NDArray[Any]:
    """Take an array as it is; its shape is looked at before anything is copied from a device."""
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
