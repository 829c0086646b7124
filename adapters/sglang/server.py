"""The settings of an SGLang server, read from its own report, and one verdict on whether the trainer can match it.

The report comes from `GET /server_info` (`/get_server_info` in earlier versions) or from `Engine.get_server_info()`. It holds
the server's version and its arguments after the server resolved them. `dtype` may still be "auto" there, which does not say the
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.sglang.fields import brief
from mismatch_ext.adapters.sglang.server_checks import (
    ORIGINAL_LOGPROB,
    ServerProblem,
    model_problems,
    numeric_problems,
    precision_problems,
    routing_problems,
    server_notes,
    version_problems,
)

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.precision.names import spelled
from mismatch_ext.precision.policy import PrecisionPolicy
from mismatch_ext.versions import PEERS


@dataclass(frozen=True, kw_only=True)
class ServerVerdict:
    """Whether a server fits the trainer, and everything that does not fit.

    Args:
        version: The server's version.
        problems: All problems, in the order of the checks.
        notes: Assumptions about what the report does not show, and what requests to this server must not ask for.
    """

    version: str
    problems: tuple[ServerProblem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def flags(self) -> tuple[str, ...]:
        """What to change when the server is started, each change once."""
        return tuple(dict.fromkeys(problem.flag for problem in self.problems))

    def raise_for_problems(self) -> None:
        """Refuse a server that does not fit.

        Raises:
            EngineError: There is a problem; the message has one line for each.
        """
        if self.problems:
            raise EngineError(str(self))

    def __str__(self) -> str:
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        if self.ok:
            return f"sglang {self.version}: runs as the trainer needs it.{notes}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        head = f"sglang {self.version} does not run as the trainer needs it, {len(self.problems)} problems:"
        return f"{head}\n{lines}{notes}"


def read_server(info: Any, *, original_logprobs: bool | None = None) -> EngineReading:
    """Read the dtypes and modes that a server reports.

    Args:
        info: The server's report.
        original_logprobs: Whether the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`, which SGLang's report does not show.
            None takes it from the report if `EngineTransport.server_info` added it there, and otherwise assumes that it is unset.

    Returns:
        The reading. It has no parameter dtypes, because they cannot be read, and a dtype "auto" stays "auto". Over HTTP the
        quantisation is the one of the server's arguments; a quantisation that only the checkpoint states is not seen. Its
        "processed_logprobs" are log_softmax(logits / T), as the trainer computes them; unlike vLLM's mode of that name, they
        are not renormalised over the tokens that top-p, top-k and min-p keep.

    Raises:
        EngineError: `info` is not a report of SGLang; names the field.
    """
    fields = _report(info)
    if original_logprobs is None:
        original_logprobs = fields.get(ORIGINAL_LOGPROB) is True
    return EngineReading(
        engine="sglang",
        version=_text(fields, "version"),
        model_dtype=spelled(_text(fields, "dtype")),
        parameter_dtypes={},
        kv_cache_dtype=spelled(_text(fields, "kv_cache_dtype")),
        logprobs_mode="raw_logprobs" if original_logprobs else "processed_logprobs",
        quantization=_quantization(fields),
    )


def check_server(
    info: Any,
    *,
    config: MismatchConfig,
    trainer_dtype: str,
    needs_routing: bool | None = None,
    deterministic: bool = False,
    original_logprobs: bool | None = None,
    sends_all_weights: bool = False,
) -> ServerVerdict:
    """Compare all settings of a server with what the trainer needs, before the first request.

    Args:
        info: The server's report.
        config: The `mismatch:` block; if it has a `precision` section, the dtype is taken from there.
        trainer_dtype: Dtype that the trainer computes in, used if the block has no `precision` section.
        needs_routing: Whether routes are replayed; None takes it from the block (`routing.mode` R3).
        deterministic: Whether the run has to be deterministic.
        original_logprobs: As in `read_server`.
        sends_all_weights: Whether the trainer sends all weights before the first request, so that the server may begin with
            random ones.

    Returns:
        The verdict; call `raise_for_problems` to refuse the server.

    Raises:
        EngineError: `info` is not a report of SGLang; names the field.
        PrecisionError: `trainer_dtype` is not a compute dtype.
    """
    fields = _report(info)
    reading = read_server(info, original_logprobs=original_logprobs)
    policy = (
        PrecisionPolicy(canonical(trainer_dtype)) if config.precision is None else PrecisionPolicy.of(config.precision)
    )
    routing = config.routing is not None and config.routing.mode == "R3" if needs_routing is None else needs_routing
    problems = [
        *version_problems(reading),
        *precision_problems(reading, policy),
        *model_problems(fields, sends_all_weights, policy.quantization),
        *numeric_problems(fields, policy, deterministic),
        *(routing_problems(fields) if routing else ()),
    ]
    assumed = original_logprobs is None and not isinstance(fields.get(ORIGINAL_LOGPROB), bool)
    return ServerVerdict(version=reading.version, problems=tuple(problems), notes=server_notes(fields, assumed))


def _report(info: Any) -> Mapping[Any, Any]:
    if not isinstance(info, Mapping):
        raise EngineError(
            f"the report of the SGLang server is {brief(info)}; allowed: the object of GET /server_info or of "
            "Engine.get_server_info()."
        )
    return info


def _text(fields: Mapping[Any, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 80:
        raise EngineError(
            f"the report of the SGLang server has {name}={brief(value)}; allowed: text. Is it that of GET /server_info of an "
            f"SGLang server ({PEERS['sglang'].supports})?"
        )
    return value


def _quantization(fields: Mapping[Any, Any]) -> str | None:
    for name in ("quantization", "torchao_config", "modelopt_quant"):
        value = fields.get(name)
        if isinstance(value, str) and value in ("", "unquant"):
            continue
        if value is not None:
            return value if isinstance(value, str) and len(value) <= 60 else brief(value)
    return None
