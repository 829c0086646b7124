"""What the trainer asks verl's rollout servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from mismatch_ext.adapters.verl.reports import RolloutAnswer
from torch import Tensor

from mismatch_ext.errors import EngineError


def read_rollouts(replicas: Sequence[Any], timeout: float) -> list[RolloutAnswer]:
    """Ask every rollout server what it runs with: each of vLLM's workers, and SGLang's server for all of its own.

    Args:
        replicas: verl's rollout replicas.
        timeout: Seconds to wait, for all servers together.

    Returns:
        What each server answered, or why it did not.
    """
    asked = [_ask_server(replica, timeout) for replica in replicas]
    # All are asked by now, so that a node that is down is waited for once and not once for each of its servers.
    end = time.monotonic() + timeout + 10
    return [_collect(replica, answers, end) for replica, answers in zip(replicas, asked, strict=True)]


def _is_sglang(replica: Any) -> bool:
    return bool(replica.config.name == "sglang")


def _ask_server(replica: Any, timeout: float) -> list[Any] | Exception:
    """Return what to wait for, or why the server cannot be asked."""
    try:
        return [replica.servers[0].mismatch_report.remote()] if _is_sglang(replica) else _ask_workers(replica, timeout)
    except Exception as error:  # noqa: BLE001 - as below; a server of verl's own class has no such method
        return error


def _collect(replica: Any, asked: list[Any] | Exception, end: float) -> RolloutAnswer:
    engine, sglang = str(replica.config.name), _is_sglang(replica)
    expected = 1 if sglang else int(replica.world_size)
    if isinstance(asked, Exception):
        return RolloutAnswer(engine=engine, expected=expected, failure=asked)
    try:
        answers = ray.get(asked, timeout=max(0.0, end - time.monotonic()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the check of reports says it
        return RolloutAnswer(engine=engine, expected=expected, failure=error)
    reports = answers if sglang else [report for answer in answers for report in answer]
    return RolloutAnswer(engine=engine, expected=expected, reports=reports)


def refused_answers(replicas: Sequence[Any], timeout: float) -> str | None:
    """Return what SGLang's servers refused of their own answers since the last call; None if nothing.

    verl drops a rollout that failed, and trains on the others.

    Args:
        replicas: verl's rollout replicas.
        timeout: Seconds to wait for all servers.

    Raises:
        EngineError: A server does not answer.
    """
    servers = [replica.servers[0] for replica in replicas if _is_sglang(replica)]
    try:
        found = ray.get([server.mismatch_refusals.remote() for server in servers], timeout=timeout)
    except Exception as error:
        raise EngineError(
            f"a rollout server does not say which answers it refused: {type(error).__name__}: {error}"
        ) from error
    count, messages = sum(number for number, _ in found), [text for _, texts in found for text in texts]
    return f"{count} answers were refused, the first of them: {messages[0]}" if count else None


def _ask_workers(replica: Any, timeout: float) -> list[Any]:
    return [server.__ray_call__.remote(_ask, "mismatch_report", timeout) for server in replica.servers]


def _ask(server: Any, method: str, timeout: float) -> list[Any]:
    """Call a method on all vLLM workers of a server, from within it, and return what they return: verl's own call drops it."""
    if server.node_rank:
        return []  # without an engine of its own: the first node's reaches the workers of all
    # Ray runs this in a thread of its own; the engine belongs to the loop that the HTTP server runs in.
    loop = server._server_task.get_loop()
    return list(asyncio.run_coroutine_threadsafe(server.engine.collective_rpc(method=method), loop).result(timeout))


def ask_probes(replica: Any, token_ids: Sequence[Sequence[int]]) -> list[Any]:
    """Ask a rollout server to score probe tokens; `answered` waits for it.

    Greedy decoding of one token draws no random number, so that scoring leaves the server's sampling as it was.

    Args:
        replica: One of verl's rollout replicas.
        token_ids: N sequences of the same length T.
    """
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    return [
        replica.servers[0].generate.remote(
            prompt_ids=list(ids), sampling_params=dict(sampling), request_id=f"mismatch-probe-{row}"
        )
        for row, ids in enumerate(token_ids)
    ]


def answered(asked: Sequence[Any], timeout: float) -> Tensor:
    """Return a rollout server's log-probabilities of probe tokens `[N, T-1]`, float64.

    Raises:
        EngineError: The server failed, or does not answer.
    """
    try:
        outputs = ray.get(list(asked), timeout=timeout)
    except Exception as error:
        raise EngineError(
            f"the rollout server could not score probe tokens: {type(error).__name__}: {error}"
        ) from error
    # verl pads the list by one entry, for the token that was decoded.
    rows = [[entry[0] for entry in out.extra_fields["prompt_logprobs"][:-1]] for out in outputs]
    return torch.tensor(rows, dtype=torch.float64)
