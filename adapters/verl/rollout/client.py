"""verl's client of its rollout servers, in the processes of agent loops: it notes which weights sampled which tokens.

verl resumes an answer that a weight update has interrupted, and keeps the versions at its first and last token alone.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

FIELD = "weight_versions"
"""Entry of a rollout's `extra_fields`: (version, tokens in front of the first that it sampled, prompt included), in order."""


class Segments(list[tuple[int | None, int]]):
    """The segments of a conversation; agent loops keep what came with its first turn, and a later turn adds to it."""

    asked = False  # whether a turn is with the servers; a conversation has one at a time

    def goes_on(self, prompt: int) -> bool:
        """Tell whether a request with so many tokens in front is a later turn of this conversation."""
        return not self.asked and (not self or prompt > self[0][1])


_present: ContextVar[Segments | None] = ContextVar("segments", default=None)


class Recorder(LLMServerClient):
    """Sees every request to a server, the first one and those that resume it."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as verl does, and note from which token on, and with which weights."""
        output = await super().generate(*args, **kwargs)
        segments = _present.get()
        # Also where it was interrupted before a token: verl's first and last version are of such too.
        if segments is not None:
            segments.append((output.extra_fields.get("global_steps"), len(kwargs["prompt_ids"])))
        return output


class VersionedClient(FullyAsyncLLMServerClient, Recorder):
    """verl's client that resumes answers, with `weight_versions` among what comes with each."""

    async def generate(self, request_id: Any, **kwargs: Any) -> Any:
        """Generate as verl does."""
        # As long as somebody has the first turn's: conversations have one id, and no end that a client would see.
        known: WeakValueDictionary[Any, Segments] = self.__dict__.setdefault("_conversations", WeakValueDictionary())
        segments = known.get(request_id)
        if segments is None or not segments.goes_on(len(kwargs["prompt_ids"])):
            # With `full_determinism` verl gives all of its conversations the same id.
            segments = known[request_id] = Segments()
        segments.asked, token = True, _present.set(segments)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            segments.asked = False
            _present.reset(token)
        output.extra_fields[FIELD] = segments
        return output


def versioned(client: Any) -> Any:
    """Return a client that notes versions, in the place of verl's that resumes answers; another one is left alone."""
    if type(client) is FullyAsyncLLMServerClient:
        client.__class__ = VersionedClient
    return client
