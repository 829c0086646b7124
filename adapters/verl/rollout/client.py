"""verl's client of its rollout servers, in the agent loops' processes: it notes which weights and experts sampled each token.

verl resumes an answer that a weight update has interrupted, but keeps only the versions at its first and last token. Of the turns
of its tool loop verl keeps only the last one's routes, in which the prefill has routed all earlier tokens anew.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from mismatch_ext.adapters.verl.rollout.digests import Numbers, with_digests
from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from mismatch_ext.errors import ConfigError
from mismatch_ext.sampling_mask import TokenSupport
from mismatch_ext.turns import Calls

FIELD = "weight_versions"
"""Entry of a rollout's `extra_fields`: each version in order, with the tokens (prompt too) before the first that it sampled."""

MASKS = "sampling_mask"
"""Entry of an answer's `extra_fields`: its masks, or why they are not known."""

SETTINGS = "sampling_settings"
"""Entry of a rollout's `extra_fields`: the settings that its tokens were sampled with, each different one once."""

SAMPLED = "sampled_tokens"
"""Entry of a rollout's `extra_fields`: for each request the numbers of tokens before and after it, and digests of them.

It is empty where nobody can say: R3's routes carry digests of their own, and token ids do not say what an image shows.
"""

READ = ("temperature", "top_p", "top_k")
"""Settings of a request that both sides must take into account."""
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings of a request that the trainer never takes into account, with the values that change nothing."""
MEDIA = ("image_data", "video_data", "audio_data")


class Conversation:
    """What is known of a conversation. Agent loops keep the object that came with its first turn, and later turns add to it."""

    # No dataclass: verl dumps rollouts by pydantic, which would make a dictionary of it, routes and all.

    def __init__(self) -> None:
        # Each request's version, and the number of tokens before the first that it sampled.
        self.segments: list[tuple[int | None, int]] = []
        self.asked = False  # whether the servers have a turn of the conversation; it has one at a time
        # Of the present answer, a piece for each request that sampled of it.
        self.masks: tuple[TokenSupport | str, ...] = ()
        self.tokens: list[int] = []  # of all turns so far
        self.numbers = Numbers()  # of the same
        # Of these tokens except the last `[tokens - 1, layers, experts]`, as they were when each was sampled.
        self.routes: Any = None
        # Plain lists, because loops hand them on: later turns add to those that came with the first one.
        self.settings: list[dict[str, float]] = []
        self.sampled: list[list[int]] = []
        self.has_media = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel with the rollout as the list of segments: only this process uses the rest, and routes have their own field."""
        return list, (self.segments,)

    def goes_on(self, prompt: int) -> bool:
        """Tell whether a request with a prompt of so many tokens is a later turn of this conversation."""
        return not self.asked and (not self.segments or prompt > self.segments[0][1])

    def note_settings(self, given: Mapping[str, Any]) -> None:
        """Note the settings that a request samples with."""
        settings = {name: given[name] for name in (*READ, *NEUTRAL) if given.get(name) is not None}
        if settings not in self.settings:
            self.settings.append(settings)

    def note_tokens(self, prompt_ids: Sequence[int], token_ids: Sequence[int], media: bool) -> None:
        """Note what a request sampled after which tokens; with images, video or audio these are not known."""
        if media:
            self.has_media = True
            self.sampled.clear()
        if self.has_media or not prompt_ids:
            return
        before, after = len(prompt_ids), len(prompt_ids) + len(token_ids)
        found = self.numbers.of([*prompt_ids, *token_ids])
        self.sampled.append([before, int(found[before - 1]), after, int(found[after - 1])])

    def take(self, prompt_ids: Sequence[int], output: Any) -> None:
        """Give tokens that earlier turns sampled, up to the first that is another now, the routes that they had then."""
        if output.routed_experts is not None and self.routes is not None:
            same = _shared(self.tokens, list(prompt_ids))
            kept = min(same, len(self.routes), len(output.routed_experts))
            output.routed_experts = np.concatenate([self.routes[:kept], output.routed_experts[kept:]])
        self.tokens, self.routes = [*prompt_ids, *output.token_ids], output.routed_experts


def _plain(prompt_ids: Any, known: list[int]) -> list[int]:
    """Return a prompt's tokens as verl reads them: a chat template may return a BatchEncoding or a batch of one.

    `known` are the tokens of the conversation so far, which are not looked at again.
    """
    # verl looks at token after token, at each turn again, and all on the event loop.
    if type(prompt_ids) is list:
        begun = len(known) if prompt_ids[: len(known)] == known else 0
        if {int}.issuperset(map(type, prompt_ids[begun:])):
            return list(prompt_ids)
    normalized: list[int] = normalize_token_ids(prompt_ids)
    return normalized


def _shared(one: list[int], other: list[int]) -> int:
    """Return how many tokens two sequences share, from the first on."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    differing = np.asarray(one[:count]) != np.asarray(other[:count])
    return int(differing.argmax())


_present: ContextVar[Conversation | None] = ContextVar("conversation", default=None)
_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)


@contextmanager
def following() -> Iterator[Calls]:
    """Note every call of the servers that this context makes from here on, under any request id, and yield the calls."""
    token = _calls.set(calls := Calls())
    try:
        yield calls
    finally:
        _calls.reset(token)


def present_calls() -> Calls:
    """Return the calls that this context has made; none outside of `following`."""
    return _calls.get() or Calls()


class Noting(LLMServerClient):
    """A client of ours."""

    replayed = False
    """Whether R3 replays the routes of the answers, which then carry digests of their tokens."""


class Recorder(Noting):
    """Sees every request to a server, the first one and those that resume it."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as verl does, and note the weights' version, and the token from which on they sampled."""
        settings = dict(kwargs.get("sampling_params") or {})  # copied, because verl takes some out
        output = await super().generate(*args, **kwargs)
        conversation = _present.get()
        if self.replayed and output.routed_experts is not None:
            tokens = [*kwargs["prompt_ids"], *output.token_ids]
            known = None if conversation is None else conversation.numbers
            # In a thread, because other conversations of this process wait for the event loop.
            output.routed_experts = await asyncio.to_thread(with_digests, output.routed_experts, tokens, known)
        # Noted even if it was interrupted before its first token: verl's first and last version count such a request too.
        masks = output.extra_fields.pop(MASKS, None)
        if conversation is not None:
            conversation.segments.append((output.extra_fields.get("global_steps"), len(kwargs["prompt_ids"])))
            conversation.masks += () if masks is None else (masks,)
            conversation.note_settings(settings)
            if not self.replayed:
                media = any(kwargs.get(name) for name in MEDIA)
                conversation.note_tokens(kwargs["prompt_ids"], output.token_ids, media)
        return output


class Conversing(Noting):
    """Keeps what is known of a conversation's turns, and adds it to each answer's `extra_fields` as `weight_versions`."""

    async def generate(self, request_id: Any, **kwargs: Any) -> Any:
        """Generate as verl does."""
        # Kept by id for as long as somebody has what came with the first turn: a client does not see when a conversation ends.
        known: WeakValueDictionary[Any, Conversation] = self.__dict__.setdefault(
            "_conversations", WeakValueDictionary()
        )
        conversation = known.get(request_id)
        prompt = _plain(kwargs["prompt_ids"], [] if conversation is None else conversation.tokens)
        kwargs["prompt_ids"] = prompt
        if conversation is None or not conversation.goes_on(len(prompt)):
            # With `full_determinism` verl gives all of its conversations the same id.
            conversation = known[request_id] = Conversation()
        conversation.asked, conversation.masks = True, ()
        token = _present.set(conversation)
        try:
            output = await super().generate(request_id, **kwargs)
        finally:
            conversation.asked = False
            _present.reset(token)
        if self.replayed:
            await asyncio.to_thread(conversation.take, prompt, output)
        if (calls := _calls.get()) is not None:
            support = _together(conversation.masks, len(output.token_ids))
            calls.add(prompt, output.token_ids, output.log_probs, support)
        output.extra_fields[FIELD] = conversation
        output.extra_fields[SETTINGS] = conversation.settings
        output.extra_fields[SAMPLED] = conversation.sampled
        return output


def _together(pieces: Sequence[TokenSupport | str], tokens: int) -> TokenSupport | str | None:
    """Return the masks of an answer from those of its pieces, or why they are not known; None where no server sent any."""
    known = [piece for piece in pieces if isinstance(piece, TokenSupport)]
    if len(known) < len(pieces):
        return next(piece for piece in pieces if isinstance(piece, str))
    if not known:
        return None
    found = TokenSupport.joined(known)
    if len(found) != tokens:
        return f"an answer of {tokens} tokens has sampling masks of {len(found)}: a server sent some of its tokens without them."
    return found


class VersionedClient(Conversing, FullyAsyncLLMServerClient, Recorder):
    """verl's client that resumes answers."""


class TurnsClient(Conversing, Recorder):
    """verl's client of synchronous modes."""


def versioned(client: Any, *, replayed: bool = False) -> Any:
    """Make a client of verl's own class note what sampled each token; a client of another class is left alone, with a warning.

    `replayed` says that R3 replays the routes. Raises ConfigError if nobody would say which tokens these are of.
    """
    if type(client) is FullyAsyncLLMServerClient:
        client.__class__ = VersionedClient
    elif type(client) is LLMServerClient:
        client.__class__ = TurnsClient
    elif not isinstance(client, Recorder):
        found = f"the client of verl's rollout servers has class {type(client).__name__}, not verl's own"
        derive = (
            "Derive it from TurnsClient or (asynchronous) VersionedClient in mismatch_ext.adapters.verl.rollout.client."
        )
        if replayed:
            raise ConfigError(
                f"mismatch.routing.mode=R3, but {found}: nobody says which tokens routes are of. {derive}"
            )
        warnings.warn(
            f"mismatch-ext: {found}, so that nobody notes which weights, experts and settings sampled which tokens. Versions are "
            f"those of a rollout's last answer. {derive}",
            stacklevel=2,
        )
    if isinstance(client, Recorder):
        client.replayed = replayed
    return client
