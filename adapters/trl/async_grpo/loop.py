"""TRL's rollout loop, in the process that TRL spawns for it: each request, and so each token, is of one known weight version.

vLLM's pause ends the running requests with the tokens that they have so far. When the new weights are there, each goes on as a
new request whose prompt includes those tokens. vLLM's own way of keeping requests computes their cache anew, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from mismatch_ext.adapters.http import NOT_FINITE, words
from mismatch_ext.adapters.trl.async_grpo.carried import Carried, Sampled, Turn
from mismatch_ext.adapters.trl.async_grpo.gate import Gate, Held
from mismatch_ext.adapters.vllm.http import COMPLETIONS
from mismatch_ext.adapters.vllm.routing import unpacked
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from mismatch_ext.errors import EngineError, NonFiniteLogprobError

CUT = "abort"
"""vLLM's finish reason of a request that its pause has ended."""
LOOK_AGAIN = 0.02
"""Seconds between two looks at a closed gate."""
CUTS = "mismatch/responses_cut_total"
"""Metric that counts answers which a weight update has cut."""


@dataclass(frozen=True, kw_only=True)
class Following:
    """What the loop has to know of the trainer.

    Args:
        gate: Lets requests through.
        owner: Prefix of the trainer's names of weight updates.
    """

    gate: Gate
    owner: str


class VersionedLoop(_AsyncRolloutLoop):
    """TRL's loop, whose log-probabilities know the version of their weights.

    Args:
        mismatch: What the trainer tells the loop.
        **kwargs: TRL's own arguments.
    """

    def __init__(self, *, mismatch: Following, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._following = mismatch

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        """Ask as TRL does, and continue an answer that an update has cut until it is complete."""
        if path != COMPLETIONS:
            return await super()._post(path, payload, timeout, max_retries)
        # For a setting that it is not sent, the server takes the model's own default, which the trainer does not score with.
        asked = {"min_p": 0.0, **payload}
        turn = Turn(None, 0)
        ids: list[int] = []
        logprobs: list[Sampled] = []
        while True:
            parts = {"prompt": [*payload["prompt"], *ids], "max_tokens": payload["max_tokens"] - len(ids)}

            async def ask(body: dict[str, Any] = asked | parts) -> tuple[Held, dict[str, Any]]:
                async with self._through() as held:
                    answer = await self._answer(path, body, timeout)
                    await self._expect(held)
                    return held, answer

            held, answer = await self._retry(ask, label=f"POST {path}", max_attempts=max_retries)
            choice = answer["choices"][0]
            sampled = choice["token_ids"] or []
            ids += sampled
            logprobs += Sampled.of((choice["logprobs"] or {}).get("token_logprobs") or [], held.step, turn)
            turn.step = held.step
            if choice["finish_reason"] != CUT:
                break
            if sampled:
                self._counters[CUTS] += 1
            # The same seed would repeat, for the next tokens, the draws of the first tokens.
            asked["seed"] = random.getrandbits(63)
        turn.routes = unpacked(choice.get("routed_experts"))
        whole = {**choice, "token_ids": ids, "logprobs": {**(choice["logprobs"] or {}), "token_logprobs": logprobs}}
        return {**answer, "choices": [whole]}

    @asynccontextmanager
    async def _through(self) -> AsyncIterator[Held]:
        """Wait until the gate is open, and be inside."""
        gate = self._following.gate
        while (held := gate.enter()) is None:
            await asyncio.sleep(LOOK_AGAIN)
        try:
            yield held
        finally:
            gate.leave()

    def _opened(self) -> aiohttp.ClientSession:
        assert self.session is not None  # TRL opens it before the first request
        return self.session

    async def _answer(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the server's answer to one request; a refused request is not sent again, because the server would refuse again.

        Raises:
            NonFiniteLogprobError: A log-probability of the answer is not finite.
            EngineError: The server refuses.
        """
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self._opened().post(self.vllm_server_url + path, json=body, timeout=limit) as response:
            if 400 <= response.status < 500:
                said = words(await response.text())
                if NOT_FINITE in said:
                    raise NonFiniteLogprobError(
                        f"log-probabilities of the vLLM server at {self.vllm_server_url} are not finite: its weights are "
                        "corrupted, or its dtype overflows."
                    )
                raise EngineError(
                    f"the vLLM server at {self.vllm_server_url} answered {path} with status {response.status}: {said}"
                )
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
            return found

    async def _expect(self, held: Held) -> None:
        """Refuse an answer by other weights than those that the trainer sent last.

        Raises:
            EngineError: The server was restarted, or somebody else has sent weights.
        """
        limit = aiohttp.ClientTimeout(total=self.request_timeout)
        async with self._opened().get(f"{self.vllm_server_url}/weight_info", timeout=limit) as response:
            response.raise_for_status()
            found = (await response.json())["weight_version"]
        wanted = f"{self._following.owner}{held.update}"
        if found != wanted:
            raise EngineError(
                f"the vLLM server at {self.vllm_server_url} does not hold this trainer's weights: it calls them {found!r}, and "
                f"they were sent as {wanted!r}. It was restarted, or another trainer has sent weights to it; give each trainer a "
                "server of its own, and resume from the last checkpoint."
            )

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        """Score a group as TRL does, and attach to each row what is known of its tokens."""
        samples: list[RolloutSample] = await super()._score_group(group)
        rows = [row for conversation in group.completions_sequences for row in conversation]
        for sample, row in zip(samples, rows, strict=True):
            sample.metrics = Carried.along(sample.metrics, row.old_log_probs)
        return samples
