"""Where a conversation's turns stop extending one another, and why.

A turn is one call of the engine: a prompt, and the answer that was sampled after it. Turn N+1 extends turn N if its prompt
begins with the prompt and the answer of turn N. If it does not, the two turns cannot share one training sample: the conversation
*forks*, and the tokens that were sampled behind that place have log-probabilities of another context.

Here are the parts: turns, what a template writes around messages, and what is found. `causes.py` explains a break, `fixes.py`
tries what fixes it, `examining.py` walks through conversations, `logs.py` reads them, and `text.py` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

from mismatch_ext.errors import RecordError

Message = Mapping[str, Any]
"""A message as chat templates take it, with `role` and `content`."""

SCHEMA = 1
TURNS_FILE = "turns.json"
# An excerpt has so many tokens before the difference, and so many from there on.
BEFORE, AFTER = 3, 9
PROBE = "QZPROBEQZ"
"""Text that no template holds, by which its parts are found."""


class Chat(Protocol):
    """A tokenizer with its chat template."""

    template: str
    special_ids: frozenset[int]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        template: str | None = None,
        **settings: Any,
    ) -> str:
        """Return the text of messages; raises RecordError if the template refuses them."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, without adding special tokens; raises RecordError if it has none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a prompt was rendered from; `settings` are further arguments of the template."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def render(self, chat: Chat, *, generation: bool = True, template: str | None = None) -> str:
        """Return the prompt's text."""
        settings = {"add_generation_prompt": generation, **self.settings}
        return chat.render(self.messages, tools=self.tools, template=template, **settings)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call of the engine, as ids and as text.

    `has_ids` is False if the log has texts alone. Then the ids are those of a new tokenization, and only texts are compared.
    """

    where: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    prompt_text: str
    response_text: str
    sampled: tuple[bool, ...]  # which tokens of the response count as the policy's
    has_ids: bool = True
    request: Request | None = None
    finish_reason: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids

    @property
    def text(self) -> str:
        """Prompt and response."""
        return self.prompt_text + self.response_text


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one conversation, in the order of the calls."""

    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a chat template writes around messages; empty where it writes nothing, or refuses the messages that would show it."""

    end: str  # the token that ends an answer
    end_id: int | None
    message_start: str  # the text that begins every message
    user_header: str
    assistant_header: str
    generation: str  # what `add_generation_prompt` adds
    default_system: str  # what stands before the first message if that is the user's


def parts_of(chat: Chat, settings: Mapping[str, Any] | None = None) -> Parts:
    """Return what a template writes around messages."""
    user = {"role": "user", "content": PROBE}
    answer = {"role": "assistant", "content": PROBE}
    given = dict(settings or {})
    one = _rendered(chat, [user], given)
    two = _rendered(chat, [user, user], given)
    whole = _rendered(chat, [user, answer, user], given)
    asked = _rendered(chat, [user], {"add_generation_prompt": True, **given})
    user_block = two[len(one) :] if two.startswith(one) else ""
    default_system = one.removesuffix(user_block) if user_block else ""
    user_header = user_block.partition(PROBE)[0]
    assistant_header, _, behind = whole[len(one) :].partition(PROBE) if whole.startswith(one) else ("", "", "")
    # The probe may not be in the vocabulary of a small tokenizer.
    first = _encoded(chat, behind.partition(PROBE)[0])[:1]
    ends_answer = bool(first) and first[0] in chat.special_ids
    opening = _encoded(chat, user_header)[:1]
    opens_message = bool(opening) and opening[0] in chat.special_ids
    return Parts(
        end=chat.decode(first) if ends_answer else "",
        end_id=first[0] if ends_answer else None,
        message_start=chat.decode(opening) if opens_message else user_header,
        user_header=user_header,
        assistant_header=assistant_header,
        generation=asked[len(one) :] if asked.startswith(one) else "",
        default_system=default_system,
    )


class KnownParts:
    """The parts of a template by its settings, each worked out once."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: dict[str, Parts] = {}

    def under(self, settings: Mapping[str, Any]) -> Parts:
        """Return the parts under these settings."""
        key = repr(sorted(settings.items()))
        if key not in self._known:
            self._known[key] = parts_of(self._chat, settings)
        return self._known[key]


def _rendered(chat: Chat, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
    """Return the text of messages, empty if the template refuses them (some want users and assistants to alternate)."""
    try:
        return chat.render(messages, **settings)
    except RecordError:
        return ""


def _encoded(chat: Chat, text: str) -> list[int]:
    """Return the ids of a text, none if the tokenizer has no token for a part of it."""
    try:
        return chat.encode(text)
    except RecordError:
        return []


def agreement(first: str, second: str) -> int:
    """Return how many characters two texts share from the start."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences share from the start."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def extends(earlier: Turn, later: Turn) -> bool:
    """Whether a turn's prompt begins with all of an earlier turn; by text where the log has no token ids."""
    if earlier.has_ids and later.has_ids:
        whole = earlier.ids
        return later.prompt_ids[: len(whole)] == whole
    return later.prompt_text.startswith(earlier.text)


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A few tokens around a difference."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A change that was tried: with it, the later turn extends the earlier one."""

    change: str
    level: Literal["ids", "text", "text_alone"]  # what agrees; `text_alone` if the token ids still differ


@dataclass(frozen=True, kw_only=True)
class Break:
    """A place where a turn does not extend the one before, or where an answer's tokens are not what they should be."""

    conversation: str
    turn: int  # from 1: the turn whose prompt, or whose answer, is off
    after: int  # the turn that it should extend; itself where its own answer is off
    where: str  # in the log
    cause: str  # a key of `CAUSES`
    said: str
    further: tuple[str, ...]  # other causes, behind the first
    token: int  # the first token that differs, from 0, in the row of prompt and answer
    place: str
    forks: bool
    misplaced: int  # sampled tokens whose log-probability no longer belongs to them
    earlier: Excerpt
    later: Excerpt
    fix: Fix | None
    tried: tuple[str, ...]  # changes that did not help


@dataclass(frozen=True, kw_only=True)
class Chains:
    """What became of a log's conversations."""

    conversations: int
    turns: int
    forked: int  # conversations with a break that forks
    samples: int  # training samples: one for each conversation, one more for each fork and for each new branch
    most_samples: int  # of one conversation
    sampled_tokens: int
    misplaced_tokens: int
    by_text: int  # conversations without token ids
    breaks: tuple[Break, ...]
    notes: tuple[str, ...] = ()

    @property
    def forked_frac(self) -> float:
        """Share of the conversations that fork."""
        return self.forked / self.conversations if self.conversations else 0.0

    @property
    def status(self) -> int:
        """Exit status: 0 without a break, 1 if every break has a cause, 3 if one has none."""
        if any(found.cause == UNKNOWN for found in self.breaks):
            return 3
        return 1 if self.breaks else 0

    def causes(self) -> list[tuple[str, int, int, int]]:
        """Return for each cause, the most frequent first, its key and how many breaks, conversations and tokens it has."""
        rows = []
        for cause, group in groupby(sorted(self.breaks, key=lambda found: found.cause), key=lambda found: found.cause):
            breaks = list(group)
            conversations = len({found.conversation for found in breaks})
            rows.append((cause, len(breaks), conversations, sum(found.misplaced for found in breaks)))
        return sorted(rows, key=lambda row: -row[1])

    def data(self) -> dict[str, Any]:
        """Return it as JSON-able data."""
        return {"schema": SCHEMA, "forked_frac": self.forked_frac, **asdict(self)}


UNKNOWN = "unknown"
CAUSES = {
    "retokenized": "the same text was tokenized again, into other ids",
    "start_token": "the start token stands twice in one of the two turns",
    "tools_reordered": "the same tool schemas are written in another order",
    "system_prompt": "the system prompt is missing in one of the two turns, or is the template's default there",
    "generation_prompt": "the generation prompt is in one of the two turns alone",
    "thinking_removed": "the thinking of an earlier answer was removed",
    "thinking_added": "thinking that was not sampled was added to an earlier answer",
    "template_rewrites": "the chat template writes an unchanged message in another form than before",
    "tool_call_rewritten": "the same tool call is written in another form",
    "end_missing": "the end-of-turn token of an answer is missing",
    "end_doubled": "the end-of-turn token of an answer stands twice",
    "whitespace": "whitespace was stripped or added",
    "turn_truncated": "a message was cut short",
    "turn_dropped": "earlier messages were left out",
    "turn_edited": "the text of a message was changed",
    "tool_text_counted": "text behind the end of an answer counts as the policy's",
    UNKNOWN: "the texts differ in a way that no known cause explains",
}


def excerpt(chat: Chat, ids: Sequence[int], token: int) -> Excerpt:
    """Return the tokens around a place."""
    shown = tuple(ids[max(0, token - BEFORE) : token + AFTER])
    return Excerpt(ids=shown, text=chat.decode(shown))


def reasons(chains: Chains) -> Iterator[tuple[str, float]]:
    """Yield each cause with the share of the conversations that have a break of it."""
    for cause, _, conversations, _ in chains.causes():
        yield cause, conversations / chains.conversations
