"""What the trainer asks verl's rollout servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from mismatch_ext.adapters.verl.driver.reports import RolloutAnswer
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, MismatchError, asking_engine
from mismatch_ext.versions import on_cpu_build
from mismatch_ext.weights import BitSums, Decoded

REPORT = "mismatch_report"
FIRST = -(1 << 20)
"""Priority of probes: vLLM takes requests with lower numbers first, and verl's have 0."""
PROBE = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
SEEDED = {"seed": 0}
"""vLLM would draw a seed for a request without one, from numbers that seed other requests too."""
DECODE = {"logprobs": True, "ignore_eos": True, "repetition_penalty": 1.0}
DRAWN = DECODE | {"temperature": 1.0, "seed": 0}
"""vLLM draws with the request's own seed, and leaves its other random numbers as they are."""
LIKELIEST = {"vllm": DECODE | {"temperature": 0.0}, "sglang": DECODE | {"temperature": 1.0, "top_k": 1}}
"""SGLang, and vLLM on a CPU, would draw from numbers that all requests share; both report these tokens at temperature 1."""


def read_rollouts(replicas: Sequence[Any], block: MismatchConfig, timeout: float) -> list[RolloutAnswer]:
    """Return what each rollout server runs with, or why it did not answer within `timeout` seconds for all of them together.

    Each worker of vLLM's first engine answers, and is told what it needs of the block; SGLang's server answers for all of its
    own.
    """
    asked = [_ask_server(replica, block, timeout) for replica in replicas]
    # All are asked by now: a node that is down is waited for once, not once for each of its servers.
    end = time.monotonic() + timeout + 10
    return [_collect(replica, answers, end) for replica, answers in zip(replicas, asked, strict=True)]


def is_servers_own(error: Exception) -> bool:
    """Return whether a question failed because of the server: it is gone or too slow, or its engine failed.

    Anything else that a method of this package raises in the server's process is a bug of ours.
    """
    if isinstance(error, RayTaskError):
        return isinstance(error, (MismatchError, TimeoutError))
    return isinstance(error, RayError)


def _is_sglang(replica: Any) -> bool:
    return bool(replica.config.name == "sglang")


def _ask_server(replica: Any, block: MismatchConfig, timeout: float) -> list[Any] | Exception:
    """Return what to wait for, or why the server cannot be asked."""
    try:
        if _is_sglang(replica):
            return [replica.servers[0].mismatch_report.remote()]
        return _ask_workers(replica, timeout, REPORT, sorted(block.features), block.acts)
    except Exception as error:  # noqa: BLE001 - as below; a server of verl's own class has no such method
        return error


def _collect(replica: Any, asked: list[Any] | Exception, end: float) -> RolloutAnswer:
    engine, sglang = str(replica.config.name), _is_sglang(replica)
    expected = 1 if sglang else int(replica.world_size) // int(replica.config.data_parallel_size or 1)
    if isinstance(asked, Exception):
        return RolloutAnswer(engine=engine, expected=expected, failure=asked)
    try:
        answers = ray.get(asked, timeout=max(0.0, end - time.monotonic()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the check of reports says it
        return RolloutAnswer(engine=engine, expected=expected, failure=error)
    reports = answers if sglang else [report for answer in answers for report in answer]
    return RolloutAnswer(engine=engine, expected=expected, reports=reports)


def refused_answers(replicas: Sequence[Any], timeout: float) -> str | None:
    """Return what SGLang's servers refused of their own answers since the last call, which verl only drops; None if nothing.

    Raises EngineError if a server does not answer.
    """
    servers = [replica.servers[0] for replica in replicas if _is_sglang(replica)]
    found = _answers(
        [server.mismatch_refusals.remote() for server in servers], timeout, "say what it refused", ours=True
    )
    count, messages = sum(number for number, _ in found), [text for _, texts in found for text in texts]
    return f"{count} answers were refused, the first of them: {messages[0]}" if count else None


def _ask_workers(replica: Any, timeout: float, method: str, *args: Any) -> list[Any]:
    return [server.__ray_call__.remote(_ask, method, args, timeout) for server in replica.servers]


def ask_sums(replica: Any, shapes: Mapping[str, Sequence[int]], timeout: float) -> list[Any]:
    """Ask vLLM's workers for the sums of tensors that they hold, by the shapes of the trainer's; SGLang's cannot be asked."""
    return [] if _is_sglang(replica) else _ask_workers(replica, timeout, "mismatch_sums", dict(shapes))


def answered_sums(asked: Sequence[Any], timeout: float) -> list[dict[str, BitSums]]:
    """Return what each worker holds, by name; raises EngineError if a server failed or does not answer."""
    return [sums for answer in _answers(asked, timeout, "read its weights", ours=True) for sums in answer]


def _ask(server: Any, method: str, args: tuple[Any, ...], timeout: float) -> list[Any]:
    """Call a method on the vLLM workers of a server, from within it; reports get what the server alone knows of itself."""
    if server.node_rank:
        return []  # a later node has no engine: the first node's engine reaches the workers of all nodes
    # Ray runs this in a thread of its own; the engine belongs to the loop that the HTTP server runs in.
    loop = server._server_task.get_loop()
    calling = server.engine.collective_rpc(method=method, args=args)  # of data-parallel engines the first one answers
    pending = asyncio.run_coroutine_threadsafe(calling, loop)
    with asking_engine(f"answer {method}"):
        found = pending.result(timeout)
    if method != REPORT:
        return list(found)
    own = {
        "sends_masks": getattr(server, "mismatch_masks", False),
        "patches": list(getattr(server, "mismatch_patches", ())),
    }
    return [{**report, "weight_version": server.global_steps, **own} for report in found]


def ask_decode(replica: Any, token_ids: Sequence[Sequence[int]], count: int) -> list[Any]:
    """Ask a rollout server to decode `count` tokens after N prompts of the same length; `answered_decode` waits for it."""
    drawn = not _is_sglang(replica) and not on_cpu_build()
    settings = (DRAWN if drawn else LIKELIEST[replica.config.name]) | {"max_tokens": count}
    return _generate(replica, token_ids, settings)


def ask_probes(replica: Any, token_ids: Sequence[Sequence[int]]) -> list[Any]:
    """Ask a rollout server to score N sequences of the same length T; `answered` waits for it."""
    if _is_sglang(replica):
        return _generate(replica, token_ids, PROBE)
    return _generate(replica, token_ids, PROBE | SEEDED)


def _generate(replica: Any, token_ids: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> list[Any]:
    server = replica.servers[0]
    urgency = {"priority": FIRST} if has_priorities(replica) else {}
    return [
        server.generate.remote(
            prompt_ids=list(ids), sampling_params=dict(settings), request_id=f"mismatch-probe-{row}", **urgency
        )
        for row, ids in enumerate(token_ids)
    ]


def has_priorities(replica: Any) -> bool:
    """Return whether a server's engine orders its requests by priority; others order them by arrival."""
    return not _is_sglang(replica) and getattr(replica.config, "scheduling_policy", None) == "priority"


def answered(asked: Sequence[Any], timeout: float) -> Tensor:
    """Return a server's log-probabilities of probe tokens `[N, T-1]`, float64; raises EngineError if there are none."""
    outputs = _whole(_answers(asked, timeout, "score probe tokens"), "score probe tokens")
    if any(not out.extra_fields.get("prompt_logprobs") for out in outputs):
        raise EngineError("the rollout server reported no log-probabilities of probe tokens; see its log.")
    # verl pads the list by one entry, for the token that was decoded.
    rows = [[entry[0] for entry in out.extra_fields["prompt_logprobs"][:-1]] for out in outputs]
    return torch.tensor(rows, dtype=torch.float64)


def answered_decode(asked: Sequence[Any], token_ids: Sequence[Sequence[int]], timeout: float) -> Decoded:
    """Return what a server decoded after prompts `token_ids`; raises EngineError if it decoded nothing."""
    outputs = _whole(_answers(asked, timeout, "decode after probe tokens"), "decode after probe tokens")
    if any(out.log_probs is None for out in outputs):
        raise EngineError("the rollout server reported no log-probabilities of tokens that it decoded; see its log.")
    if len({len(out.token_ids) for out in outputs}) > 1:
        raise EngineError("the rollout server decoded answers of different lengths after probe tokens.")
    return Decoded(
        tokens=torch.tensor([[*ids, *map(int, out.token_ids)] for ids, out in zip(token_ids, outputs, strict=True)]),
        logprobs=torch.tensor([out.log_probs for out in outputs], dtype=torch.float64),
    )


def _whole(outputs: list[Any], what: str) -> list[Any]:
    """Return answers; raises EngineError if verl has aborted one, as it does before its servers sleep."""
    if any(getattr(out, "stop_reason", None) == "aborted" for out in outputs):
        raise EngineError(f"the rollout server was stopped before it could {what}")
    return outputs


def _answers(asked: Sequence[Any], timeout: float, what: str, *, ours: bool = False) -> list[Any]:
    """Wait for answers; raises EngineError for a failure of the server, and anything else as it is.

    With `ours`, methods of this package answer, whose own bugs are no failure of the server.
    """
    try:
        return list(ray.get(list(asked), timeout=timeout))
    except RayError as error:
        if ours and not is_servers_own(error):
            raise
        raise EngineError(f"the rollout server could not {what}: {type(error).__name__}: {error}") from error
