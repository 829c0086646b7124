"""prime-rl's `rollouts/step_N/train/*/traces.jsonl`: one line of JSON per episode; its traces are graphs of messages.

`FileMonitor.log_episodes` of `src/prime_rl/monitors/file.py` (PrimeIntellect-ai/prime-rl, commit
559b44772e471d1538537b8805cc77f3824a5e64) writes it, with `Episode.to_record` of `verifiers/v1/episode.py`
(PrimeIntellect-ai/verifiers, commit a60a606ecc4d309247edf9ff92c3eabca362781f). Each path from a root to a leaf is one
sequence. If several paths share a message, it is trained on only in the first of them (`iter_trainable_branches` of
`src/prime_rl/orchestrator/trajectories.py`). A message has log-probabilities only for its sampled tokens. `policy` holds
the versions of the weights at the episode's start and end. Routes are not written to the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.rollouts.fields import flags, logprobs, token_ids
from mismatch_ext.rollouts.logged import LoggedResponse, split

HOST = "prime-rl"


def is_prime_rls(row: Mapping[str, Any]) -> bool:
    """Whether a row is an episode in prime-rl's format."""
    return row.keys() >= {"env", "task", "traces"}


def read_row(row: Mapping[str, Any], where: str) -> list[LoggedResponse | None]:
    """Read the sequences that the policy sampled in one episode; None stands for a trace without any.

    Raises:
        RecordError: A field is missing or malformed; names trace and field.
    """
    if not isinstance(row["traces"], list):
        raise RecordError(f"{where}: traces must be a list.")
    found: list[LoggedResponse | None] = []
    for number, trace in enumerate(row["traces"]):
        place = f"{where}, trace {number}"
        if not isinstance(trace, dict) or not isinstance(trace.get("nodes"), list):
            raise RecordError(f"{place} has no list of nodes, as verifiers' traces have.")
        # The tokens of a judge come from another model.
        mine = _table(trace, "agent").get("trainable", True)
        sequences = list(_sequences(trace, _versions(row), place)) if mine else []
        found += sequences or [None]
    return found


def _table(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def _versions(row: Mapping[str, Any]) -> tuple[str, ...]:
    policy = _table(_table(_table(row, "run"), "work"), "policy")
    return tuple(str(policy[key]) for key in ("start", "end") if key in policy)


def _settings(trace: Mapping[str, Any], path: list[int]) -> dict[str, Any]:
    """Return the sampling settings of the first model call on a path."""
    for call in trace.get("calls") or []:
        if isinstance(call, dict) and call.get("node") in path:
            sampling = _table(call, "sampling")
            return {name: sampling[name] for name in ("temperature", "top_p") if sampling.get(name) is not None}
    return {}


def _sequences(trace: Mapping[str, Any], versions: tuple[str, ...], where: str) -> Iterator[LoggedResponse]:
    nodes = [_node(node, f"{where}, node {number}", number) for number, node in enumerate(trace["nodes"])]
    parents = {node["parent"] for node in nodes}
    taken: set[int] = set()
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = nodes[at]["parent"]
        path.reverse()
        tokens = tuple(token for at in path for token in nodes[at]["tokens"])
        values = tuple(value for at in path for value in nodes[at]["logprobs"])
        mask = tuple(kept and at not in taken for at in path for kept in nodes[at]["mask"])
        taken |= {at for at in path if any(nodes[at]["mask"])}
        found = split(tokens, mask, values, where)
        if found is not None:
            yield LoggedResponse(**found, versions=versions, settings=_settings(trace, path))


def _node(node: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(node, dict):
        raise RecordError(f"{where} must be an object.")
    parent = node.get("parent")
    if parent is not None and not (type(parent) is int and 0 <= parent < number):
        raise RecordError(f"{where}: parent {parent!r} must be the number of a node before it.")
    # If no renderer tokenised a node, its empty lists are not in the file.
    filled = {key: node.get(key) or [] for key in ("token_ids", "mask", "logprobs")}
    tokens, mask = token_ids(filled, "token_ids", where), flags(filled, "mask", where)
    given = logprobs(filled, "logprobs", where)
    if len(mask) != len(tokens):
        raise RecordError(f"{where}: {len(tokens)} token_ids and {len(mask)} values of mask; the two must be equal.")
    if len(given) != sum(mask):
        raise RecordError(
            f"{where}: {len(given)} logprobs for {sum(mask)} sampled tokens; the two must be equal: is it of a client that "
            "gives none?"
        )
    values = iter(given)
    return {
        "parent": parent,
        "tokens": tokens,
        "mask": mask,
        "logprobs": tuple(next(values) if kept else 0.0 for kept in mask),
    }
