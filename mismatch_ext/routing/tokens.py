"""The tokens of a forward pass, row by row, and the check that routes were recorded for exactly these tokens.

The route of a token depends on all tokens before it. Equal ids in equal places therefore prove that routes fit; counts do not.
Shapes: B batch, S positions, R = B * S rows of a forward pass, batch-first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mismatch_ext.errors import ReplayError, RoutingError

PADDING, ANY, ASTRAY = -1, -2, -3
"""Values instead of a token id: `PADDING` is not a token; `ANY` is a token without a route, which may have any id; `ASTRAY` is a
token that does not see exactly the tokens before it in its row."""

Others = Literal["refuse", "native", "replay"]
"""What happens to a pass that is not proven to have the tokens of its routes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRows:
    """Tokens along the rows of a forward pass: ids, `PADDING` or `ANY` `[R]`, and True where a sequence begins `[R]`.

    Without an attention mask (`masked`), an apparent token may be padding after its sequence, which no token of the sequence
    sees.
    """

    ids: Tensor
    starts: Tensor
    masked: bool = True

    def to(self, device: torch.device | str) -> TokenRows:
        """Return the rows on a device."""
        return TokenRows(ids=self.ids.to(device), starts=self.starts.to(device), masked=self.masked)

    def differ(self, other: TokenRows) -> Tensor:
        """Return True where a pass with as many rows has other tokens than these, bool `[R]`, without waiting for the device."""
        real = self.ids != PADDING
        wrong = real & (((self.ids != other.ids) & (self.ids != ANY)) | (self.starts != other.starts))
        return wrong | (real != (other.ids != PADDING)) if other.masked else wrong

    def named(self, row: int) -> str:
        """Return what is at a row, for messages."""
        token = int(self.ids[row])
        name = {PADDING: "padding", ANY: "any token", ASTRAY: "a token out of its sequence"}.get(
            token, f"token {token}"
        )
        return f"{name} at the beginning of a sequence" if bool(self.starts[row]) else name


def token_rows(
    input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> TokenRows:
    """Read the tokens of a forward pass from its arguments `[B, S]`; without a mask all are tokens, or padding comes last.

    Without a mask, a new sequence begins where a position is not the one before plus 1, as in a packed row.
    """
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    starts = real & (real.cumsum(1) == 1)
    ids = torch.where(real, input_ids, PADDING)
    if position_ids is not None:
        jumps = real[:, 1:] & real[:, :-1] & (position_ids[:, 1:] != position_ids[:, :-1] + 1)
        if attention_mask is None:
            starts[:, 1:] |= jumps
        else:  # with a mask, a row stays one sequence
            ids[:, 1:] = ids[:, 1:].masked_fill(jumps.expand(len(ids), -1), ASTRAY)
    return TokenRows(ids=ids.flatten(), starts=starts.flatten(), masked=attention_mask is not None)


class Proof:
    """Tells whether a pass has the tokens of some routes, and counts the `others`, which the model routed itself (`reason`).

    Raises RoutingError if the tokens are not known, and `action` is not "replay".
    """

    def __init__(self, expected: TokenRows | None, rows: int, action: Others) -> None:
        if action not in get_args(Others):
            raise RoutingError(f"others={action!r}; allowed: {', '.join(map(repr, get_args(Others)))}.")
        if action != "replay" and expected is None:
            raise RoutingError(
                "the routing trace does not know which tokens its routes are of, so that no forward pass can be shown to be "
                "theirs. Say so by trace.of_tokens(ids) for each sequence, or vouch for a pass with images or other inputs "
                "beside its token ids by others='replay'."
            )
        self.others = 0
        self.reason = ""
        self._expected, self._rows, self._action = expected, rows, action

    def holds(self, tokens: TokenRows | str, where: str, *, again: bool = False) -> bool:
        """Tell whether a pass is to be replayed, by its tokens, or the reason why they are unknown; raises ReplayError.

        `again` says that the pass was counted before and now runs again in a backward pass.
        """
        if self._action == "replay" or (why := self._why_other(tokens)) is None:
            return True
        if self._action == "refuse":
            raise ReplayError(
                f"{where}: {why} Replay in this context the pass that the routes were recorded of; run others outside of it, or "
                "let the model route them itself by replay_routing(..., others='native')."
            )
        self.others += not again
        self.reason = why
        return False

    def expect_replayed(self, forwards: int, where: str) -> None:
        """Refuse a context in which only other passes ran, and not the one that was to be replayed."""
        if self.others and not forwards:
            raise ReplayError(
                f"{where}: none of the {self.others} forward passes is the one that the routing trace was recorded of, so "
                f"nothing was replayed: {self.reason}"
            )

    def _why_other(self, tokens: TokenRows | str) -> str | None:
        if isinstance(tokens, str):
            return f"a forward pass does not show which tokens it is over: {tokens}."
        if len(tokens.ids) != self._rows:
            return (
                f"the routing trace has {self._rows} rows, the forward pass {len(tokens.ids)} tokens, padding included; pass "
                "the rows of exactly these tokens, as mismatch_ext.routing.align makes them."
            )
        assert self._expected is not None
        self._expected = self._expected.to(tokens.ids.device)
        wrong = self._expected.differ(tokens)
        if not bool(wrong.any()):
            return None
        row = int(wrong.nonzero()[0])
        return (
            f"a forward pass is over other tokens than its routes: {int(wrong.sum())} of {len(wrong)} rows differ, the first is "
            f"row {row}, {tokens.named(row)} in the pass and {self._expected.named(row)} in the trace."
        )
