"""How many conversations of a batch fork, and why: metrics of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mismatch_ext.chains.causes import explain
from mismatch_ext.chains.turns import CAUSES, UNKNOWN, Chat, KnownParts, Turn
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sums import over_ranks
from mismatch_ext.turns import Fork, Matched, begins

EXPLAINED = 8
"""The most forks of a batch whose causes are looked for; the shares of the causes are estimated from these."""


@dataclass(kw_only=True)
class Forks:
    """The conversations of a batch, those that fork, and the causes of some of them."""

    conversations: int
    forked: int
    causes: Counter[str] = field(default_factory=Counter)
    misplaced: int = 0
    """Tokens of the policy's that no turn sampled where they are trained on."""
    tokens: int = 0
    """Tokens of the policy's, if it is known where they were sampled."""

    def over(self, ranks: Ranks) -> Forks:
        """Return the same of all ranks together; each must take part."""
        own = {
            "conversations": self.conversations,
            "forked": self.forked,
            "misplaced": self.misplaced,
            "tokens": self.tokens,
            **{name: self.causes[name] for name in CAUSES},
        }
        whole = over_ranks({name: torch.tensor(float(value)) for name, value in own.items()}, ranks)
        counts = {name: int(value) for name, value in whole.items()}
        causes = Counter({name: counts[name] for name in CAUSES if counts[name]})
        return Forks(
            conversations=counts["conversations"],
            forked=counts["forked"],
            causes=causes,
            misplaced=counts["misplaced"],
            tokens=counts["tokens"],
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of the conversations that fork, and the share for each cause."""
        if not self.conversations:
            return {}
        share = self.forked / self.conversations
        explained = self.causes.total()
        by_cause = {f"turns/forked/{cause}": share * count / explained for cause, count in self.causes.items()}
        metrics = {"turns/forked_frac": share, **by_cause}
        if self.tokens:
            metrics["turns/misplaced_frac"] = self.misplaced / self.tokens
        return metrics


def forks_of_completions(matched: Matched, chat: Chat | None) -> Forks:
    """Return the forks of completions whose turns were looked for; `chat` says why they fork."""
    found = matched.forks()
    misplaced, tokens = matched.misplaced()
    return Forks(
        conversations=len(matched.rows),
        forked=len(found),
        causes=_causes(found, chat),
        misplaced=misplaced,
        tokens=tokens,
    )


def forks_of_turns(conversations: Sequence[Sequence[RolloutRecord]], chat: Chat | None) -> Forks:
    """Return the forks of conversations, each the records of its turns in the order of the calls."""
    found = [fork for turns in conversations if (fork := _first_fork(turns)) is not None]
    return Forks(conversations=len(conversations), forked=len(found), causes=_causes(found, chat))


def _first_fork(turns: Sequence[RolloutRecord]) -> Fork | None:
    """Return the first turn that extends none of the turns before, and the one right before it."""
    for number in range(1, len(turns)):
        prompt = turns[number].prompt_ids
        before = turns[:number]
        if any(begins(turn.token_ids, prompt) for turn in before):
            continue
        if any(begins(prompt, turn.prompt_ids) for turn in before):  # the prompt was sampled from again
            continue
        last = before[-1]
        return Fork(earlier=(last.prompt_ids, last.response_ids), later=prompt)
    return None


def _causes(found: Sequence[Fork | None], chat: Chat | None) -> Counter[str]:
    """Return the first causes of some of the forks, spread over the batch; none without a tokenizer."""
    causes: Counter[str] = Counter()
    if chat is None or not found:
        return causes
    parts = KnownParts(chat).under({})
    step = max(1, -(-len(found) // EXPLAINED))
    for fork in found[::step]:
        if fork is None:
            causes[UNKNOWN] += 1
            continue
        prompt, response = fork.earlier
        earlier = _turn(tuple(prompt.tolist()), tuple(response.tolist()), chat)
        later = _turn(tuple(fork.later.tolist()), (), chat)
        causes[explain(earlier, later, chat, parts)[0]] += 1
    return causes


def _turn(prompt: tuple[int, ...], response: tuple[int, ...], chat: Chat) -> Turn:
    return Turn(
        where="",
        prompt_ids=prompt,
        response_ids=response,
        prompt_text=chat.decode(prompt),
        response_text=chat.decode(response),
        sampled=(True,) * len(response),
    )
