"""TRL's and verl's own KL terms against exact enumeration: how they are measured, and what was found.

The figures are in `hosts.json`, which `python -m tests.kl_hosts` writes from the hosts' own code, one process per version.
`python -m tests.oracles.kl.hosts` prints their table and measures nothing. Nothing of a host is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mismatch_ext.testing import KlJudgement, Moments, Problem, judge_kl

Sampling = Literal["on-policy", "off-policy"]
SAMPLINGS: tuple[Sampling, ...] = ("on-policy", "off-policy")
FILE = Path(__file__).with_name("hosts.json")


@dataclass(frozen=True, kw_only=True)
class HostTerm(KlJudgement):
    """What a host's own KL term does on average.

    Args:
        host: "TRL" or "verl".
        version: Its version.
        setting: What was set besides the coefficient; empty for nothing.
        default: Whether the KL term is the one that the host's defaults give once it is switched on.
        sampling: "on-policy" or "off-policy".
    """

    host: str
    version: str
    setting: str
    default: bool
    sampling: Sampling

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Host, version, setting and sampling."""
        return self.host, self.version, self.setting, self.sampling


def problem_of(sampling: Sampling) -> Problem:
    """Return the policy that the page's tables are of: vocabulary 3, five tokens."""
    return Problem.random(3, 5, 0, distance=0.7, lag=0.0 if sampling == "on-policy" else 0.3)


def judge(
    found: Moments, *, host: str, version: str, setting: str = "", default: bool = False, sampling: Sampling
) -> HostTerm:
    """Hold the moments of a host's term, at coefficient 1 on `problem_of(sampling)`, against the exact divergences."""
    judgement = asdict(judge_kl(problem_of(sampling), found))
    return HostTerm(host=host, version=version, setting=setting, default=default, sampling=sampling, **judgement)


def read_terms() -> list[HostTerm]:
    """Return the measured terms, in the order of the page."""
    return [HostTerm(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]


def rows(terms: Iterable[HostTerm]) -> list[str]:
    """Return the rows of evidence/kl.md; versions of a host whose terms have the same figures share one."""
    versions: dict[tuple[str, ...], list[str]] = {}
    for term in terms:
        setting = f"{'**default** ' if term.default else ''}`{term.setting}`"
        responses, cos, tokens, std = (
            "" if figure is None else f"{figure:.3g}" for figure in (term.responses, term.cos, term.tokens, term.std)
        )
        of = term.regularizes.replace("|", "\\|") or "none of these"
        row = (term.host, setting, term.sampling, f"{term.value:.3g}", responses, cos, tokens, std, of)
        versions.setdefault(row, []).append(term.version.removesuffix(".0"))
    # The newest version comes first in the file.
    return [
        f"| {host} {f'{found[-1]} to ' if found[1:] else ''}{found[0]} | {' | '.join(rest)} |"
        for (host, *rest), found in versions.items()
    ]


def main() -> None:
    """Print the table."""
    print("| trainer | setting | sampling | value | responses | cos | tokens | std | its gradient is that of |")
    print("|---" * 9 + "|", *rows(read_terms()), sep="\n")


if __name__ == "__main__":
    main()
