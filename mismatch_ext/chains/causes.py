"""Why a turn does not extend the one before.

Each cause is an edit: it yields the texts that the earlier turn would have had under it. It is named only if the later prompt
agrees with one of them beyond the place where the two turns differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mismatch_ext.chains.turns import UNKNOWN, Chat, Parts, Turn, agreement, shared_tokens

# An edit must make the texts agree on so many more characters, or to the end: fewer agree by chance.
LEAST_GAIN = 8
MOST_EDITS = 200
# How far back from a difference the start of a tool call is looked for.
LONGEST_CALL = 20_000
THINKING = re.compile(r"\s*(?:<think>.*?</think>|<thinking>.*?</thinking>|\[THINK\].*?\[/THINK\])\s*", re.DOTALL)
"""A block of thinking with the whitespace around it."""
EMPTY = re.compile(r"\s*<think>\s*</think>\s*")
"""The same without a thought."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where the texts of two turns part; `boundary` is where the earlier turn's answer begins."""

    earlier: str
    later: str
    at: int
    boundary: int
    parts: Parts


Edits = Callable[[Difference], Iterator[str]]


def _start_token(gap: Difference) -> Iterator[str]:
    """The first token stands twice in one of the texts."""
    token = re.match(r"<[^<>\s]+>", gap.earlier)
    if token is not None:
        yield token.group() + gap.earlier
        if gap.earlier.startswith(token.group() * 2):
            yield gap.earlier.removeprefix(token.group())


def _leading(text: str, parts: Parts) -> str:
    """Return what stands before the first message of a user."""
    if not parts.user_header or parts.user_header not in text:
        return ""
    return text[: text.index(parts.user_header)]


def _tools_reordered(gap: Difference) -> Iterator[str]:
    earlier, later = _leading(gap.earlier, gap.parts), _leading(gap.later, gap.parts)
    schemas = _objects(earlier)
    if schemas and sorted(schemas) == sorted(_objects(later)):
        yield later + gap.earlier[len(earlier) :]


def _objects(text: str) -> list[str]:
    """Return the JSON objects in a text, each in one form."""
    decoder = json.JSONDecoder()
    objects: list[str] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            objects.append(json.dumps(value, sort_keys=True))
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return objects


def _system_prompt(gap: Difference) -> Iterator[str]:
    earlier, later = _leading(gap.earlier, gap.parts), _leading(gap.later, gap.parts)
    plain = ("", gap.parts.default_system)
    if earlier != later and (earlier in plain or later in plain):
        yield later + gap.earlier[len(earlier) :]


def _generation_prompt(gap: Difference) -> Iterator[str]:
    prompt, answer = gap.earlier[: gap.boundary], gap.earlier[gap.boundary :]
    generation, header = gap.parts.generation, gap.parts.assistant_header
    for text in dict.fromkeys((generation, header)):
        if text:
            yield prompt + text + answer
    if generation and prompt.endswith(generation):
        yield prompt.removesuffix(generation) + answer
    # A generation prompt may begin the answer, for example with an empty block of thinking.
    begun = prompt[prompt.rfind(header) + len(header) :] if header in prompt else ""
    if begun:
        yield prompt.removesuffix(begun) + answer
    # Of earlier answers, the part that their generation prompts began.
    addition = generation.removeprefix(header)
    place = gap.earlier.find(header + addition, max(0, gap.at - len(header + addition)))
    if header and addition and place >= 0:
        start = place + len(header)
        yield gap.earlier[:start] + gap.earlier[start + len(addition) :]


def _thinking_removed(gap: Difference) -> Iterator[str]:
    for block in THINKING.finditer(gap.earlier):
        if block.end() < gap.at:
            continue
        if block.start() > gap.at:
            return
        # Some templates leave an empty block.
        empty = EMPTY.match(gap.later, block.start())
        if empty is not None:
            yield gap.earlier[: block.start()] + empty.group() + gap.earlier[block.end() :]
        text = block.group()
        leading = text[: len(text) - len(text.lstrip())]
        trailing = text[len(text.rstrip()) :]
        for kept in dict.fromkeys((leading, "", leading + trailing, trailing)):
            yield gap.earlier[: block.start()] + kept + gap.earlier[block.end() :]


def _thinking_added(gap: Difference) -> Iterator[str]:
    for block in THINKING.finditer(gap.later):
        if block.end() <= gap.at:
            continue
        if block.start() > gap.at:
            return
        start = max(block.start(), len(gap.earlier[: gap.at].rstrip()))
        yield gap.earlier[:start] + gap.later[start : block.end()] + gap.earlier[start:].lstrip()


def _tool_call_rewritten(gap: Difference) -> Iterator[str]:
    """Both texts have an object with the same content around the difference."""
    decoder = json.JSONDecoder()
    for brace in re.finditer(r"\{", gap.earlier[max(0, gap.at - LONGEST_CALL) : gap.at + 1]):
        start = max(0, gap.at - LONGEST_CALL) + brace.start()
        try:
            value, end = decoder.raw_decode(gap.earlier, start)
            other, other_end = decoder.raw_decode(gap.later, start)
        except (ValueError, RecursionError):
            continue
        if value == other and end > gap.at:
            yield gap.earlier[:start] + gap.later[start:other_end] + gap.earlier[end:]


def _end_missing(gap: Difference) -> Iterator[str]:
    end = gap.parts.end
    if not end or not gap.earlier.startswith(end, gap.at):
        return
    # The next message must begin here; otherwise the later turn has a longer answer.
    if gap.later[gap.at :].lstrip().startswith(gap.parts.message_start):
        yield gap.earlier[: gap.at] + gap.earlier[gap.at + len(end) :]


def _end_doubled(gap: Difference) -> Iterator[str]:
    end = gap.parts.end
    if end and gap.later.startswith(end, gap.at) and gap.earlier[: gap.at].endswith(end):
        yield gap.earlier[: gap.at] + end + gap.earlier[gap.at :]


def _whitespace(gap: Difference) -> Iterator[str]:
    start = len(gap.earlier[: gap.at].rstrip())
    stop, other_stop = _behind_space(gap.earlier, gap.at), _behind_space(gap.later, gap.at)
    if gap.earlier[start:stop] != gap.later[start:other_stop]:
        yield gap.earlier[:start] + gap.later[start:other_stop] + gap.earlier[stop:]


def _behind_space(text: str, at: int) -> int:
    """Return the first place from `at` on that is not whitespace."""
    rest = text[at:]
    return at + len(rest) - len(rest.lstrip())


def _turn_truncated(gap: Difference) -> Iterator[str]:
    end = gap.parts.end
    stop = gap.earlier.find(end, gap.at) if end else -1
    if stop > gap.at and gap.later.startswith(end, gap.at):
        yield gap.earlier[: gap.at] + gap.earlier[stop:]


def _turn_dropped(gap: Difference) -> Iterator[str]:
    """Whole messages are missing, from the one with the difference on."""
    marker = gap.parts.message_start
    starts = [found.start() for found in re.finditer(re.escape(marker), gap.earlier)] if marker else []
    # The difference may be in the role that follows a marker, so the message may be the one that begins at it.
    first = max((start for start in starts if start <= gap.at), default=None)
    if first is None:
        return
    for stop in starts:
        if stop > first:
            yield gap.earlier[:first] + gap.earlier[stop:]
    header = gap.earlier[first : gap.earlier.find("\n", first)]
    if not gap.later.startswith(header, first):
        yield gap.earlier[:first]


def _turn_edited(gap: Difference) -> Iterator[str]:
    """Another text stands in the message with the difference."""
    end = gap.parts.end
    if not end:
        return
    stop, other_stop = gap.earlier.find(end, gap.at), gap.later.find(end, gap.at)
    if other_stop < 0:
        return
    rest = gap.earlier[stop:] if stop >= 0 else ""
    yield gap.earlier[: gap.at] + gap.later[gap.at : other_stop] + rest


EDITS: tuple[tuple[str, Edits], ...] = (
    ("start_token", _start_token),
    ("tools_reordered", _tools_reordered),
    ("system_prompt", _system_prompt),
    ("generation_prompt", _generation_prompt),
    ("thinking_removed", _thinking_removed),
    ("thinking_added", _thinking_added),
    ("tool_call_rewritten", _tool_call_rewritten),
    ("end_missing", _end_missing),
    ("end_doubled", _end_doubled),
    ("whitespace", _whitespace),
    ("turn_truncated", _turn_truncated),
    ("turn_dropped", _turn_dropped),
    ("turn_edited", _turn_edited),
)
"""The causes of texts that differ, the most specific first: the first one that explains a difference is named."""


def explain(earlier: Turn, later: Turn, chat: Chat, parts: Parts) -> list[str]:
    """Return the causes of a break in the order of their places; at least one, which may be unknown."""
    causes: list[str] = []
    text, boundary = earlier.text, len(earlier.prompt_text)
    if earlier.has_ids and later.has_ids and _only_ids_differ(earlier, later, chat):
        causes.append("retokenized")
    for _ in range(MOST_EDITS):
        at = agreement(text, later.prompt_text)
        if at == len(text):
            break
        found = _edit(Difference(earlier=text, later=later.prompt_text, at=at, boundary=boundary, parts=parts))
        if found is None:
            causes.append(UNKNOWN)
            break
        cause, edited = found
        if cause in BY_CLIENTS and history_kept(earlier, later, parts):
            cause = "template_rewrites"
        if at < boundary:
            boundary += len(edited) - len(text)
        causes.append(cause)
        text = edited
    return causes or ["retokenized"]


BY_CLIENTS = ("turn_truncated", "turn_dropped", "turn_edited")
"""Causes that say that messages were changed; where the log has the messages, and they were not, the template did it."""


def history_kept(earlier: Turn, later: Turn, parts: Parts) -> bool:
    """Whether the later turn's messages are known to begin with those of the earlier turn and its answer."""
    if earlier.request is None or later.request is None:
        return False
    before = earlier.request.messages
    if later.request.messages[: len(before)] != before or len(later.request.messages) == len(before):
        return False
    answer = later.request.messages[len(before)]
    if answer.get("tool_calls") or answer.get("reasoning_content"):
        return True
    sampled = earlier.response_text.removesuffix(parts.end)
    return answer.get("role") == "assistant" and sampled.endswith(str(answer.get("content")))


def _edit(gap: Difference) -> tuple[str, str] | None:
    """Return the first cause that explains a difference, and the earlier text with its edit."""
    for cause, edits in EDITS:
        best = max(edits(gap), key=lambda text: agreement(text, gap.later), default=None)
        if best is None:
            continue
        reached = agreement(best, gap.later)
        if reached == len(best) or reached >= gap.at + LEAST_GAIN:
            return cause, best
    return None


def _only_ids_differ(earlier: Turn, later: Turn, chat: Chat) -> bool:
    """Whether the ids of two turns part, and meet again, before their texts part."""
    place = shared_tokens(earlier.ids, later.prompt_ids)
    most = 16
    ours, theirs = earlier.ids[place : place + most], later.prompt_ids[place : place + most]
    ends = {chat.decode(theirs[:count]) for count in range(1, len(theirs) + 1)}
    for count in range(1, len(ours) + 1):
        text = chat.decode(ours[:count])
        # A part of a character is decoded as a replacement, whichever part it is.
        if text in ends and not text.endswith("\ufffd"):
            return True
    return False


def flaw_at_end(earlier: Turn, later: Turn, parts: Parts) -> str | None:
    """Return what is wrong with the end of an answer that the later turn extends; None if nothing is."""
    if not parts.end:
        return None
    behind = later.prompt_text[len(earlier.text) :]
    if earlier.text.endswith(parts.end) and behind.lstrip().startswith(parts.end):
        return "end_doubled"
    stopped = earlier.finish_reason == "stop"
    if stopped and not earlier.text.endswith(parts.end) and behind.startswith(parts.end):
        return "end_missing"
    return None


def counted_behind_end(turn: Turn, chat: Chat, parts: Parts) -> tuple[int, ...]:
    """Return the places of a response that count as the policy's, directly behind the end of an answer."""
    if parts.end_id is None:
        return ()
    header = tuple(chat.encode(parts.assistant_header))
    counted: list[int] = []
    place = 0
    while place < len(turn.response_ids) - 1:
        ended = turn.response_ids[place] == parts.end_id and turn.sampled[place]
        place += 1
        if not ended or not turn.sampled[place]:
            continue
        stop = _begin_of_answer(turn.response_ids, header, place)
        while place < stop and turn.sampled[place]:
            counted.append(place)
            place += 1
    return tuple(counted)


def _begin_of_answer(ids: Sequence[int], header: tuple[int, ...], place: int) -> int:
    """Return where the next answer begins: behind the header of an assistant's message, or at the end."""
    for start in range(place, len(ids) - len(header) + 1):
        if header and tuple(ids[start : start + len(header)]) == header:
            return start + len(header)
    return len(ids)
