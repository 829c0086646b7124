"""Turn the routing that vLLM recorded while it sampled into routing traces.

vLLM keeps the routes of a token beside its KV-cache slot. A prefix-cache hit returns the routes that were recorded when the
block was computed, with the weights that the engine had then. So the prefix cache must be reset after a weight update. vLLM's
own update leaves the reset to the caller. While a request holds blocks, vLLM declines the reset, and only the return value says
so. `update_weights` of this package resets the cache and raises an error if vLLM declines. For updates by other code,
`captured_outputs(version=...)` makes sure of the reset.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.errors import EngineError, RoutingError
from mismatch_ext.routing import RoutingShape, RoutingTrace

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

FLAG = "enable_return_routed_experts"

# By engine, the version of the weights that computed every cached block, if a capture has made sure of it.
_cached_versions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def records_routing(config: Any) -> bool:
    """Tell whether an engine with this configuration records routing.

    Args:
        config: vLLM's `VllmConfig`; the flag is in `model_config` before vLLM 0.31, and in `aux_output_config` since.
    """
    holders = (config.model_config, getattr(config, "aux_output_config", None))
    return any(bool(getattr(holder, FLAG, False)) for holder in holders)


def require_routing(llm: LLM) -> None:
    """Check that an engine records routing.

    Raises:
        RoutingError: It was started without the flag; names it.
    """
    if not records_routing(llm.llm_engine.vllm_config):
        raise RoutingError(f"the vLLM engine does not record routing; start it with LLM(..., {FLAG}=True).")


def reset_prefix_cache(llm: LLM) -> None:
    """Forget all cached prefixes and their routes; call it after every weight update.

    Raises:
        EngineError: vLLM declined, because a request still holds blocks.
    """
    _cached_versions.pop(llm, None)
    if not llm.reset_prefix_cache():
        raise EngineError(
            "vLLM did not reset its prefix cache, because unfinished requests hold blocks of it: their prompts' keys, values and "
            "routes would be those of the weights before; finish or abort them, then reset it again."
        )


@contextmanager
def captured_outputs(llm: LLM, *, version: int | Callable[[], int] | None = None) -> Iterator[list[RequestOutput]]:
    """Collect what an engine returns while other code calls its `generate`.

    TRL keeps token ids and log-probabilities of the outputs and drops the rest, routing included.

    Args:
        llm: The engine; its `generate` is shadowed on this object only, while the context is open.
        version: Version of the engine's weights, or a function that returns it when `generate` is called. If it differs from
            the version of the last capture on this engine, the prefix cache is reset first, so that the cache returns no routes
            of other weights. None leaves the reset to the caller.

    Yields:
        The outputs of all calls that returned, in order; those of a call that raised are lost, as they are to its caller.

    Raises:
        EngineError: The prefix cache had to be reset and could not be.
    """
    outputs: list[RequestOutput] = []
    before = vars(llm).get("generate")
    plain = llm.generate
    depth, ended = 0, False

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> list[RequestOutput]:
        nonlocal depth
        if version is not None and not depth and not ended:
            _forget_other_versions(llm, version() if callable(version) else version)
        depth += 1
        try:
            result = plain(*args, **kwargs)
        finally:
            depth -= 1
        # If generate calls itself, the outer call returns the inner call's outputs too.
        if not depth and not ended:
            outputs.extend(result)
        return result

    llm.generate = generate  # type: ignore[method-assign]
    try:
        yield outputs
    finally:
        ended = True
        # If other code has shadowed it after us, its shadow stays and still calls ours, which then only passes calls on.
        if vars(llm).get("generate") is generate:
            if before is None:
                del llm.generate
            else:
                llm.generate = before  # type: ignore[method-assign]


def _forget_other_versions(llm: LLM, version: int) -> None:
    if _cached_versions.get(llm) != version:
        reset_prefix_cache(llm)
        _cached_versions[llm] = version


def to_traces(
    outputs: Sequence[RequestOutput],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    shape: RoutingShape,
    version: int,
    n: int | None = None,
) -> list[RoutingTrace]:
    """Turn vLLM's outputs into one trace per completion, in the order of the outputs.

    vLLM returns `[prompt + completion - 1, layers, top_k]`. Prompt rows are included, also after a prefix-cache hit. The last
    sampled token has no row, because it never passed through the model. Each trace owns its prompt rows. For a GRPO group
    `mismatch_ext.routing.share_prompts(traces, prompt_lengths, groups)` stores equal prompt rows once; give it the prompt's
    token ids, as a tuple, for the group's key.

    Args:
        outputs: What `LLM.generate` returned, finished requests only.
        prompt_ids: Token ids of each prompt; None takes those that the outputs come with.
        shape: The routing shape of the model that replays.
        version: Weight version that the engine sampled with; `captured_outputs(llm, version=...)` or `reset_prefix_cache`
            has to make sure that the prefix cache held routes of no other version.
        n: Completions per prompt; None accepts any number.

    Raises:
        RoutingError: Routing is missing or malformed; names request, row and layer.
    """
    given = [None] * len(outputs) if prompt_ids is None else prompt_ids
    if len(given) != len(outputs) or (n is not None and any(len(output.outputs) != n for output in outputs)):
        responses = sum(len(output.outputs) for output in outputs)
        raise RoutingError(f"{responses} responses for {len(given)} prompts with n={n}; allowed: n per prompt.")
    return [
        _trace_of(output, completion, output.prompt_token_ids if ids is None else ids, shape, version)
        for output, ids in zip(outputs, given, strict=True)
        for completion in output.outputs
    ]


def judged_traces(
    outputs: Sequence[RequestOutput], *, shape: RoutingShape, version: int, bad: BadRows
) -> list[RoutingTrace | None]:
    """Turn vLLM's outputs into traces as `to_traces` does; a completion without usable routes is a bad row, and has None.

    Args:
        outputs: What `LLM.generate` returned.
        shape: As for `to_traces`.
        version: As for `to_traces`.
        bad: Takes the bad rows; row i is the i-th completion.

    Raises:
        RoutingError: Not one of several completions has usable routes.
    """
    traces: list[RoutingTrace | None] = []
    for output in outputs:
        for completion in output.outputs:
            trace = None
            with bad.judging(len(traces), "routes"):
                trace = _trace_of(output, completion, output.prompt_token_ids, shape, version)
            traces.append(trace)
    if bad.spoil_all and all(trace is None for trace in traces):
        raise RoutingError(bad.faults[0].message)
    return traces


def _trace_of(
    output: Any, completion: Any, prompt: Sequence[int] | None, shape: RoutingShape, version: int
) -> RoutingTrace:
    """Return the routes of one completion; raises RoutingError if they are missing or malformed."""
    request = f"{output.request_id}/{completion.index}"
    if prompt is None:
        raise RoutingError(
            f"request {request}: its prompt has no token ids (prompt embeddings?), so its rows cannot be counted; prompt with "
            "token ids."
        )
    if completion.routed_experts is None:
        raise RoutingError(f"request {request}: vLLM returned no routing; {_why_none(completion)}")
    return RoutingTrace.ingest(
        completion.routed_experts,
        num_experts=shape.num_experts,
        layers=shape.layers,
        tokens=[*prompt, *completion.token_ids],
        version=version,
        request=request,
        top_k=shape.top_k,
        last_row=False,
    )


def unpacked(routes: str | None) -> NDArray[Any] | None:
    """Return the experts that a choice in a server's answer holds in base64; None if it holds none."""
    if routes is None:
        return None
    experts: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(routes)), allow_pickle=False)
    return experts


def _why_none(completion: Any) -> str:
    if completion.finish_reason is None:
        return "it comes with the last output of a request, and this one is not finished."
    if not completion.token_ids:
        return f"the request ended ({completion.finish_reason}) before its first token; leave it out."
    return f"start the engine with LLM(..., {FLAG}=True)."
