"""What makes a turn extend the one before: each change is tried by rendering again, and named only if it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mismatch_ext.chains.turns import Chat, Fix, Message, Parts, Request, Turn
from mismatch_ext.errors import RecordError

SETTINGS: tuple[tuple[str, bool], ...] = (
    ("preserve_thinking", True),
    ("keep_thinking", True),
    ("clear_thinking", False),
    ("truncate_history_thinking", False),
    ("drop_thinking", False),
    ("strip_thinking", False),
    ("enable_thinking", True),
)
"""Arguments of public chat templates that keep the thinking of earlier answers, each with the value that does."""
LINES: tuple[tuple[tuple[str, str], ...], ...] = (
    # Qwen3's: thinking only behind the last question.
    (("loop.index0 > ns.last_query_index", "true"),),
    (
        ("loop.index0 > ns.last_query_index", "true"),
        ("loop.last or (not loop.last and reasoning_content)", "true"),
    ),
    # DeepSeek-R1's and QwQ's.
    (("content.split('</think>')[-1].lstrip('\\n')", "content"),),
    (("content.split('</think>')[-1]", "content"),),
    (("content.split('</think>', 1)[-1]", "content"),),
    # Whitespace.
    (("message['content'] | trim", "message['content']"),),
    (("message.content | trim", "message.content"),),
    (("content | trim", "content"),),
    (("message['content'].strip()", "message['content']"),),
    (("message.content.strip()", "message.content"),),
    (("content.strip()", "content"),),
)
"""Expressions of public chat templates that change earlier answers, with what to write in their place."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A break for which changes are tried: the turns so far, and the one that should extend the last of them."""

    turns: tuple[Turn, ...]
    later: Turn
    requests: tuple[Request, Request]  # of the last turn so far, and of the later one
    chat: Chat
    parts: Parts

    @property
    def earlier(self) -> Turn:
        """The turn that should be extended."""
        return self.turns[-1]

    def rendered(self, request: Request, template: str | None = None) -> str | None:
        """Return a prompt's text; None if the template refuses the messages."""
        try:
            return request.render(self.chat, template=template)
        except RecordError:
            return None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A change, and the texts of both turns with it."""

    change: str
    later: str | None
    earlier: str | None = None  # if the change is of the earlier turn


Changes = Callable[[Case], Iterator[Attempt]]


def _as_it_is(case: Case) -> Iterator[Attempt]:
    """The template as it is, in case the prompt was not rendered by it."""
    change = "render the prompt by this chat template, with the settings given here"
    yield Attempt(change=change, later=case.rendered(case.requests[1]))


def _settings(case: Case) -> Iterator[Attempt]:
    _, request = case.requests
    for name, value in SETTINGS:
        if name in case.chat.template and request.settings.get(name) != value:
            changed = replace(request, settings={**request.settings, name: value})
            yield Attempt(change=f"chat template setting {name}={value}", later=case.rendered(changed))


def _sampled_content(case: Case) -> Iterator[Attempt]:
    """Earlier answers as they were sampled, in place of what a client made of them."""
    _, request = case.requests
    whole = _with_sampled(request, case)
    if whole.messages != request.messages:
        change = "send each earlier answer as the content that was sampled, thinking and calls included"
        yield Attempt(change=change, later=case.rendered(whole))


def _with_sampled(request: Request, case: Case) -> Request:
    """Return a request whose answers are the sampled texts, as far as the turns so far hold them."""
    messages: list[Message] = list(request.messages)
    for turn in case.turns:
        place = len(turn.request.messages) if turn.request is not None else len(messages)
        if place >= len(messages) or messages[place].get("role") != "assistant":
            continue
        begun = turn.prompt_text.rpartition(case.parts.assistant_header)[2] if case.parts.assistant_header else ""
        text = (begun + turn.response_text).removesuffix(case.parts.end)
        if _text_of(messages[place]) != text:
            kept = {name: value for name, value in messages[place].items() if name == "role"}
            messages[place] = {**kept, "content": text}
    return replace(request, messages=tuple(messages))


def _text_of(message: Message) -> str | None:
    """Return the text of a message that has nothing else."""
    further = message.get("tool_calls") or message.get("reasoning_content") or message.get("thinking")
    content = message.get("content")
    return content if isinstance(content, str) and not further else None


def _lines(case: Case) -> Iterator[Attempt]:
    _, request = case.requests
    requests = {"": request}
    sampled = _with_sampled(request, case)
    if sampled.messages != request.messages:
        requests[", and send each earlier answer as the content that was sampled"] = sampled
    for replacements in LINES:
        template = case.chat.template
        if not all(old in template for old, _ in replacements):
            continue
        for old, new in replacements:
            template = template.replace(old, new)
        change = " and ".join(f"write `{new}` for `{old}`" for old, new in replacements)
        for also, changed in requests.items():
            text = case.rendered(changed, template)
            yield Attempt(change=f"in the chat template, {change}{also}", later=text)


def _generation_prompt(case: Case) -> Iterator[Attempt]:
    request, _ = case.requests
    settings = {name: value for name, value in request.settings.items() if name != "add_generation_prompt"}
    prompt = case.rendered(replace(request, settings=settings))
    if prompt is not None:
        yield Attempt(
            change="render every prompt with add_generation_prompt=True",
            later=case.later.prompt_text,
            earlier=prompt + case.earlier.response_text,
        )


def _thinking_prompt(case: Case) -> Iterator[Attempt]:
    """The setting under which the generation prompt begins no answer."""
    request, later = case.requests
    if "enable_thinking" not in case.chat.template:
        return
    settings = {**request.settings, "enable_thinking": True}
    prompt = case.rendered(replace(request, settings=settings))
    following = case.rendered(replace(later, settings={**later.settings, "enable_thinking": True}))
    if prompt is not None:
        change = "sample with the chat template setting enable_thinking=True"
        yield Attempt(change=change, later=following, earlier=prompt + case.earlier.response_text)


def _same_system(case: Case) -> Iterator[Attempt]:
    """The first message, and the tools, of the earlier turn."""
    earlier, later = case.requests
    yield from _same_tools(case)
    first = [message for message in earlier.messages[:1] if message.get("role") == "system"]
    rest = [message for place, message in enumerate(later.messages) if place or message.get("role") != "system"]
    changed = replace(later, messages=(*first, *rest))
    change = "give every turn the system message of the first one" if first else "give no turn a system message"
    yield Attempt(change=change, later=case.rendered(changed))
    default = case.parts.default_system
    if not first and default:
        text = default.removesuffix("\n").removesuffix(case.parts.end).partition("\n")[2]
        changed = replace(later, messages=({"role": "system", "content": text}, *rest))
        yield Attempt(change="give every turn the template's default system prompt", later=case.rendered(changed))


def _same_tools(case: Case) -> Iterator[Attempt]:
    earlier, later = case.requests
    if earlier.tools != later.tools:
        change = "give every turn the same tools in the same order"
        yield Attempt(change=change, later=case.rendered(replace(later, tools=earlier.tools)))


def _same_history(case: Case) -> Iterator[Attempt]:
    """The messages of the earlier turn and its answer, then the new ones."""
    earlier, later = case.requests
    text = case.earlier.response_text.removesuffix(case.parts.end)
    answer: Mapping[str, object] = {"role": "assistant", "content": text}
    # The new messages are those behind the last answer.
    places = [place for place, message in enumerate(later.messages) if message.get("role") == "assistant"]
    new = later.messages[places[-1] + 1 :] if places else later.messages[-1:]
    changed = replace(later, messages=(*earlier.messages, answer, *new))
    yield Attempt(change="send the history as it was sampled, unchanged and whole", later=case.rendered(changed))


def _content_without_end(case: Case) -> Iterator[Attempt]:
    request, end = case.requests[1], case.parts.end
    messages = tuple(_without_end(message, end) for message in request.messages)
    changed = replace(request, messages=messages)
    yield Attempt(change=f"cut {end} off the content of messages", later=case.rendered(changed))


def _without_end(message: Message, end: str) -> Message:
    content = message.get("content")
    return {**message, "content": content.removesuffix(end)} if isinstance(content, str) else message


FIXES: Mapping[str, tuple[Changes, ...]] = {
    "start_token": (_as_it_is,),
    "tools_reordered": (_same_tools,),
    "system_prompt": (_same_system,),
    "generation_prompt": (_generation_prompt, _settings, _lines, _thinking_prompt),
    "thinking_removed": (_settings, _sampled_content, _lines),
    "thinking_added": (_settings, _lines, _thinking_prompt),
    "template_rewrites": (_settings, _sampled_content, _lines),
    "tool_call_rewritten": (_sampled_content, _lines),
    "end_missing": (_as_it_is,),
    "end_doubled": (_content_without_end, _as_it_is),
    "whitespace": (_as_it_is, _sampled_content, _lines),
    "turn_truncated": (_same_history,),
    "turn_dropped": (_same_history,),
    "turn_edited": (_same_history,),
}
"""What is tried for each cause, in this order."""


def try_fixes(
    causes: Sequence[str], turns: tuple[Turn, ...], later: Turn, chat: Chat, parts: Parts
) -> tuple[Fix | None, tuple[str, ...]]:
    """Return the first change with which a turn extends the last of `turns`, and the changes that did not help."""
    if list(causes) == ["retokenized"]:
        return _keep_ids(turns[-1], later, chat)
    if turns[-1].request is None or later.request is None:
        return None, ()
    case = Case(turns=turns, later=later, requests=(turns[-1].request, later.request), chat=chat, parts=parts)
    failed: list[str] = []
    for cause in dict.fromkeys(causes):
        for changes in FIXES.get(cause, ()):
            for attempt in changes(case):
                if attempt.later is None:
                    continue
                fix = _judged(attempt, case)
                if fix is not None:
                    return fix, tuple(failed)
                failed.append(attempt.change)
    return None, tuple(failed)


def _judged(attempt: Attempt, case: Case) -> Fix | None:
    """Return the fix if the change makes the later turn extend the earlier one, with one end-of-turn token between them."""
    later = attempt.later or ""
    earlier = case.earlier.text if attempt.earlier is None else attempt.earlier
    end = case.parts.end
    behind = later[len(earlier) :]
    if not later.startswith(earlier):
        return None
    if end and earlier.endswith(end) and behind.lstrip().startswith(end):
        return None
    ids = case.earlier.ids if attempt.earlier is None else (*case.chat.encode(earlier),)
    if not case.earlier.has_ids:
        return Fix(change=attempt.change, level="text")
    by_ids = tuple(case.chat.encode(later)[: len(ids)]) == ids
    return Fix(change=attempt.change, level="ids" if by_ids else "text_alone")


def _keep_ids(earlier: Turn, later: Turn, chat: Chat) -> tuple[Fix | None, tuple[str, ...]]:
    """Try to append only the new text to the ids of the earlier turn."""
    change = "send the token ids of the turn before, and append those of the new text alone"
    new = chat.encode(later.prompt_text[len(earlier.text) :])
    if chat.decode([*earlier.ids, *new]) == later.prompt_text:
        return Fix(change=change, level="ids"), ()
    return None, (change,)
