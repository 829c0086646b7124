"""Prompts that several completions have in common are stored once."""

from __future__ import annotations

import torch

from mismatch_ext.routing import RoutingTrace, share_prompts
from tests.traces import traces_nbytes
from tests.unit.test_routing_trace import routes


def _completion(prompt_seed: int, seed: int, rows: int = 3, start: int = 0) -> RoutingTrace:
    ids = torch.cat([routes(4, seed=prompt_seed), routes(rows, seed=seed)]).to(torch.uint8)
    return RoutingTrace(parts=(ids[start:],), layers=(1, 3), num_experts=8, start=start, versions=((0, seed),))


def test_a_prompt_is_held_once_by_its_group() -> None:
    # Prompts of 4 rows x 6 bytes: A twice alike, A routed in another way twice, B twice; six responses of 3 rows.
    own = [
        _completion(1, 11),
        _completion(1, 12),
        _completion(2, 13),
        _completion(2, 14),
        _completion(1, 15),
        _completion(1, 16),
    ]
    sharing = share_prompts(own, [4] * 6, ["A", "A", "A", "A", "B", "B"])
    assert all(a.same_as(b) for a, b in zip(sharing, own, strict=True))
    first = [found.parts[0] for found in sharing]
    assert first[0] is first[1] and first[2] is first[3] and first[4] is first[5]
    assert len({id(part) for part in first}) == 3
    assert traces_nbytes(sharing) == (3 * 4 + 6 * 3) * 6
    # Nothing keeps the recordings alive.
    before = {found.parts[0].untyped_storage().data_ptr() for found in own}
    assert not before & {part.untyped_storage().data_ptr() for found in sharing for part in found.parts}


def test_prompts_left_out_in_part_or_whole() -> None:
    partly = [_completion(1, 11, start=2), _completion(1, 12, start=2), _completion(1, 13)]
    sharing = share_prompts(partly, [4, 4, 4], [0] * 3)
    assert all(a.same_as(b) for a, b in zip(sharing, partly, strict=True))
    first, second, third = (found.parts[0] for found in sharing)
    assert first is second is not third  # which starts elsewhere: not comparable
    without = [_completion(1, seed, start=4) for seed in (11, 12)]
    assert all(a is b for a, b in zip(share_prompts(without, [4, 4], [0, 0]), without, strict=True))
    # An empty response leaves the prompt's rows but the last; here the trace ends inside the prompt.
    short = [_completion(1, 1).slice(0, 3)] * 2
    first, second = share_prompts(short, [4, 4], [0, 0])
    assert first.parts[0] is second.parts[0]
