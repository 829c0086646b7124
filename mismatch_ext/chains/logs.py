"""Reads conversations from logs: calls of an engine with or without token ids, lists of messages, verl's and TRL's dumps.

A line is recognized by its keys, in the order of `READERS`. Each reader returns the turns of a line. Lines with the same name of
a conversation are its turns, in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_ext.chains.turns import Chat, Conversation, KnownParts, Message, Parts, Request, Turn
from mismatch_ext.doctor.log_rows import Flags, Ids, Strict, checked, short
from mismatch_ext.errors import RecordError

NAMES = ("conversation", "conversation_id", "session_id", "trajectory_id", "request_id", "uid", "id")
"""Keys that may hold the name of a conversation; the first that a line has counts."""
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""Roles of logs in ShareGPT's form, under the names that templates know."""
READABLE = (
    "prompt_ids and response_ids; messages and response; messages alone; conversations (ShareGPT); request and response "
    "(OpenAI's API); input and output (verl); prompt and completion (TRL)"
)

Line = Mapping[str, Any]


class _Columns(Strict):
    prompt_ids: Ids
    response_ids: Ids
    response_mask: Flags | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes turns of lines, with the settings that apply where a line gives none."""

    chat: Chat
    tools: tuple[Any, ...] | None
    settings: Mapping[str, Any]
    parts: KnownParts

    def request(self, line: Line, messages: Any, where: str) -> Request:
        """Return what a prompt was rendered from."""
        settings = {**self.settings, **(line.get("chat_template_kwargs") or {})}
        tools = line.get("tools")
        return Request(
            messages=_messages(messages, where), tools=self.tools if tools is None else tuple(tools), settings=settings
        )

    def of_texts(self, where: str, prompt: str, response: str, request: Request | None, finish: Any = None) -> Turn:
        """Return a turn without token ids."""
        response_ids = tuple(self.chat.encode(response))
        return Turn(
            where=where,
            prompt_ids=tuple(self.chat.encode(prompt)),
            response_ids=response_ids,
            prompt_text=prompt,
            response_text=response,
            sampled=(True,) * len(response_ids),
            has_ids=False,
            request=request,
            finish_reason=finish,
        )

    def of_call(self, where: str, request: Request, answer: Message, finish: Any) -> Turn:
        """Return a turn whose prompt is rendered, and whose answer is a message."""
        prompt = request.render(self.chat)
        return self.of_texts(where, prompt, self._answer(request, prompt, answer, finish), request, finish)

    def _answer(self, request: Request, prompt: str, answer: Message, finish: Any) -> str:
        """Return the text that was sampled, as far as a message tells: its content, or what the template makes of calls."""
        parts = self.parts.under(request.settings)
        end = "" if finish == "length" else parts.end
        content = answer.get("content")
        further = answer.get("tool_calls") or answer.get("reasoning_content")
        if isinstance(content, str) and not further:
            return self._of_content(request, prompt, content, parts) + end
        if not parts.assistant_header:
            return str(content) + end
        whole = Request(messages=(*request.messages, answer), tools=request.tools, settings=request.settings)
        text = whole.render(self.chat, generation=False)
        place = text.rfind(parts.assistant_header) + len(parts.assistant_header)
        begun = prompt.rpartition(parts.assistant_header)[2]
        sampled = text[place:].removeprefix(begun)
        if not answer.get("reasoning_content") and sampled.startswith("<think>\n\n</think>"):
            # A template may write an empty block for the last answer alone; nothing says that it was sampled.
            sampled = sampled.removeprefix("<think>\n\n</think>").lstrip("\n")
        stop = sampled.rfind(parts.end) if parts.end else -1
        return sampled if stop < 0 else sampled[:stop] + end

    def _of_content(self, request: Request, prompt: str, content: str, parts: Parts) -> str:
        """Return what was sampled for a content: the text itself, or with what the template writes before every answer.

        Some models sample the beginning of an answer (a channel, an empty block of thinking) that their messages do not hold.
        """
        if not parts.assistant_header:
            return content
        begun = prompt.rpartition(parts.assistant_header)[2]
        if begun and content.startswith(begun):
            return content.removeprefix(begun)
        beginning = parts.assistant_header.removeprefix(parts.generation)
        if not beginning or beginning == parts.assistant_header:
            return content
        following = ({"role": "assistant", "content": content}, {"role": "user", "content": content})
        history = Request(messages=(*request.messages, *following), tools=request.tools, settings=request.settings)
        whole = history.render(self.chat, generation=False)
        return beginning + content if whole.startswith(prompt + beginning + content) else content


def _ids(reader: Reader, line: Line, where: str) -> list[Turn]:
    given = {name: line.get(name) for name in _Columns.model_fields if line.get(name) is not None}
    columns = checked(_Columns, given, where)
    mask = columns.response_mask
    if mask is not None and len(mask) != len(columns.response_ids):
        raise RecordError(
            f"{where}: {len(mask)} values of response_mask for {len(columns.response_ids)} response_ids. Give one for each."
        )
    messages = line.get("messages")
    request = None if messages is None else reader.request(line, messages, where)
    prompt_ids, response_ids = tuple(columns.prompt_ids), tuple(columns.response_ids)
    turn = Turn(
        where=where,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        prompt_text=reader.chat.decode(prompt_ids),
        response_text=reader.chat.decode(response_ids),
        sampled=(True,) * len(response_ids) if mask is None else tuple(mask),
        request=request,
        finish_reason=line.get("finish_reason"),
    )
    return [turn]


def _call(reader: Reader, line: Line, where: str) -> list[Turn]:
    request = reader.request(line, line["messages"], where)
    answer = line["response"]
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    return [reader.of_call(where, request, _messages([message], where)[0], line.get("finish_reason"))]


def _openai(reader: Reader, line: Line, where: str) -> list[Turn]:
    """Read a request to an API like OpenAI's and its response."""
    asked, choices = line["request"], line["response"].get("choices")
    if not isinstance(asked, Mapping) or not isinstance(choices, list) or not choices:
        raise RecordError(
            f"{where}: request and response must be those of /v1/chat/completions. Log both bodies whole."
        )
    request = reader.request(asked, asked.get("messages"), where)
    message = _messages([choices[0].get("message")], where)[0]
    return [reader.of_call(where, request, message, choices[0].get("finish_reason"))]


def _whole(reader: Reader, line: Line, where: str) -> list[Turn]:
    """Read a whole conversation: each message of the assistant is the answer of a turn."""
    request = reader.request(line, line["messages"], where)
    turns = []
    for place, message in enumerate(request.messages):
        if message["role"] == "assistant" and place:
            asked = Request(messages=request.messages[:place], tools=request.tools, settings=request.settings)
            turns.append(reader.of_call(f"{where}, message {place}", asked, message, None))
    return turns


def _sharegpt(reader: Reader, line: Line, where: str) -> list[Turn]:
    said = line["conversations"]
    if not isinstance(said, list) or not all(isinstance(one, Mapping) and "from" in one for one in said):
        raise RecordError(f"{where}: conversations must be a list of objects with from and value.")
    messages = [{"role": ROLES.get(one["from"], one["from"]), "content": one.get("value")} for one in said]
    return _whole(reader, {**line, "messages": messages}, where)


def _texts(reader: Reader, line: Line, where: str) -> list[Turn]:
    """Read verl's dump, whose texts have no special tokens."""
    return [reader.of_texts(where, str(line["input"]), str(line["output"]), None)]


def _trl(reader: Reader, line: Line, where: str) -> list[Turn]:
    prompt, completion = line["prompt"], line["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [reader.of_texts(where, prompt, completion, None)]
    if isinstance(prompt, Sequence) and isinstance(completion, Sequence):
        return _whole(reader, {**line, "messages": [*prompt, *completion]}, where)
    raise RecordError(f"{where}: prompt and completion must be two texts or two lists of messages.")


READERS: tuple[tuple[tuple[str, ...], Callable[[Reader, Line, str], list[Turn]]], ...] = (
    (("prompt_ids", "response_ids"), _ids),
    (("messages", "response"), _call),
    (("messages",), _whole),
    (("conversations",), _sharegpt),
    (("request", "response"), _openai),
    (("input", "output"), _texts),
    (("prompt", "completion"), _trl),
)
"""The keys by which a line is recognized, and what reads it."""


def _messages(given: Any, where: str) -> tuple[Message, ...]:
    """Return messages as templates take them; raises RecordError for anything but texts."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RecordError(f"{where}: messages is {short(given)}; it must be a list of messages.")
    return tuple(_message(one, where) for one in given)


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise RecordError(f"{where}: a message is {short(given)}; it must be an object with role and content.")
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RecordError(
                f"{where}: a message holds more than text. Conversations with images or sounds are not examined."
            )
        content = "".join(text for text in texts if text is not None)
    return {**message, "content": content}


def read_conversations(
    lines: Iterable[tuple[str, Any]],
    chat: Chat,
    *,
    tools: Sequence[Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[list[Conversation], list[str]]:
    """Return the conversations of a log's lines, each given with its place, and notes on what the log does not tell.

    `tools` and `settings` are for templates, where lines bring none. Raises RecordError, which names the line.
    """
    reader = Reader(
        chat=chat, tools=None if tools is None else tuple(tools), settings=settings or {}, parts=KnownParts(chat)
    )
    turns: dict[str, list[Turn]] = {}
    unnamed = 0
    for number, (where, line) in enumerate(lines, start=1):
        found = _read(reader, line, where)
        name = next((str(line[key]) for key in NAMES if line.get(key) is not None), None)
        if name is None:
            name = f"line {number}"
            unnamed += len(found) == 1
        turns.setdefault(name, []).extend(found)
    conversations = [Conversation(name=name, turns=tuple(own)) for name, own in turns.items() if own]
    if not conversations:
        raise RecordError(f"the log has no answer of an assistant. Give one with lines of {READABLE}.")
    return conversations, _notes(conversations, unnamed)


def _read(reader: Reader, line: Any, where: str) -> list[Turn]:
    if not isinstance(line, Mapping):
        raise RecordError(f"{where} is a {type(line).__name__}; it must be an object.")
    for keys, read in READERS:
        if all(line.get(key) is not None for key in keys):
            return read(reader, line, where)
    names = ", ".join(sorted(map(str, line))[:12]) or "nothing"
    raise RecordError(f"{where} has the keys {names}, by which no turn is known. Allowed are lines of {READABLE}.")


def _notes(conversations: Sequence[Conversation], unnamed: int) -> list[str]:
    notes = []
    by_text = sum(any(not turn.has_ids for turn in one.turns) for one in conversations)
    if by_text:
        notes.append(
            f"{by_text} of {len(conversations)} conversations have no token ids: only their texts are compared, and text "
            "that was tokenized again is not seen"
        )
    single = sum(len(one.turns) == 1 for one in conversations)
    if single:
        notes.append(f"{single} of {len(conversations)} conversations have one turn, which has nothing to extend")
    if unnamed > 1 and unnamed == single:
        notes.append(
            f"lines of one call without a name of their conversation stand alone: add one of {', '.join(NAMES)}"
        )
    return notes
