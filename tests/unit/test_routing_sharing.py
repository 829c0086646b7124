"""Prompts that several completions have in common are stored once."""

from __future__ import annotations

import torch

from mismatch_ext.routing import RoutingTrace, share_prompts
from tests.traces import same, traces_nbytes
from tests.unit.test_routing_trace import routes


def _completion(prompt_seed: int, seed: int, rows: int = 3, start: int = 0) -> RoutingTrace:
    ids = torch.cat([routes(4, seed=prompt_seed), routes(rows, seed=seed)]).to(torch.uint8)
    return RoutingTrace(parts=(ids[start:],), layers=(1, 3), num_experts=8, start=start, versions=((0, seed),))


def test_a_prompt_is_held_once_by_its_group() -> None:
    # Prompts of 4 rows x 6 bytes: A twice alike, A routed in another way, B; four responses of 3 rows.
    own = [_completion(prompt, seed) for prompt, seed in ((1, 11), (1, 12), (2, 13), (1, 14))]
    sharing = share_prompts(own, [4] * 4, ["A", "A", "A", "B"])
    assert all(same(a, b) for a, b in zip(sharing, own, strict=True))
    first, second, third, fourth = (found.parts[0] for found in sharing)
    assert first is second and len({id(part) for part in (first, third, fourth)}) == 3
    assert traces_nbytes(sharing) == (3 * 4 + 4 * 3) * 6
    # Nothing keeps the recordings alive.
    before = {found.parts[0].untyped_storage().data_ptr() for found in own}
    assert not before & {part.untyped_storage().data_ptr() for found in sharing for part in found.parts}
