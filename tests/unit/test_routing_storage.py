"""Traces on disk, and prompts stored once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing import RoutingTrace, align, share_prompts
from mismatch_ext.routing.tokens import ANY, PADDING
from tests.trace_files import load_traces, save_traces, traces_nbytes
from tests.unit.test_routing_trace import routes, trace


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    drawn=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=4),
    experts=st.sampled_from([8, 256, 257, 65536]),
)
def test_what_was_saved_is_loaded(tmp_path: Path, drawn: list[tuple[int, int, bool]], experts: int) -> None:
    saved = [
        trace(
            rows, experts=experts, seed=i, start=start, versions=((0, 1), (1, 2)) if mixed and rows > 1 else ((0, 9),),
        )
        for i, (rows, start, mixed) in enumerate(drawn)
    ]  # fmt: skip
    save_traces(tmp_path / "routes.npz", saved)
    loaded = load_traces(tmp_path / "routes.npz")
    assert len(loaded) == len(saved)
    assert all(a.same_as(b) for a, b in zip(loaded, saved, strict=True))
    assert os.listdir(tmp_path) == ["routes.npz"]


def test_shared_rows_are_stored_once_and_shared_again(tmp_path: Path) -> None:
    prompt = routes(1000, seed=1).to(torch.uint8)
    group = [
        RoutingTrace(parts=(prompt, routes(2, seed=i).to(torch.uint8)), layers=(1, 3), num_experts=8) for i in range(8)
    ]
    save_traces(tmp_path / "routes", group)
    # 1000 rows x 2 layers x 3 experts once is 6000 bytes; eight times would be 48000.
    assert os.path.getsize(tmp_path / "routes") < 12000
    loaded = load_traces(tmp_path / "routes")
    assert len({id(found.parts[0]) for found in loaded}) == 1
    assert traces_nbytes(loaded) == traces_nbytes(group) == 6000 + 8 * 2 * 6


def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    save_traces(tmp_path / "whole.npz", [trace(40, experts=300), trace(3, experts=300, seed=1)])
    content = (tmp_path / "whole.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    for size in [*range(0, len(content), 7), *range(len(content) - 64, len(content))]:
        cut.write_bytes(content[:size])
        with pytest.raises(RoutingError, match="cut.npz cannot be read"):
            load_traces(cut)


def test_a_flipped_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    saved = [trace(40), trace(3, seed=1)]
    save_traces(tmp_path / "whole.npz", saved)
    content = (tmp_path / "whole.npz").read_bytes()
    bad = tmp_path / "bad.npz"
    refused = 0
    for place in range(0, len(content), 11):
        bad.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            # Harmless: time stamps and other bytes of the archive that say nothing about the routes.
            assert all(a.same_as(b) for a, b in zip(load_traces(bad), saved, strict=True))
        except RoutingError as error:
            refused += 1
            assert "bad.npz" in str(error)
    assert refused > 20


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RoutingError, match="gone.npz cannot be read .FileNotFoundError"):
        load_traces(tmp_path / "gone.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    (tmp_path / "text.npz").write_text("routes")
    for name in ("array.npy", "other.npz", "text.npz"):
        with pytest.raises(RoutingError, match=f"{name} cannot be read"):
            load_traces(tmp_path / name)
    np.savez(tmp_path / "future.npz", header=np.frombuffer(b'{"schema": 3, "traces": []}', np.uint8))
    with pytest.raises(RoutingError, match=r"future.npz is of schema 3; this release reads schemas \(1, 2\)"):
        load_traces(tmp_path / "future.npz")
    np.savez(tmp_path / "pickle.npz", header=np.array([{"schema": 1}], dtype=object))
    with pytest.raises(RoutingError, match="pickle.npz cannot be read"):
        load_traces(tmp_path / "pickle.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [trace(3)]
    save_traces(tmp_path / "routes.npz", old)

    def full(file: object, **arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        save_traces(tmp_path / "routes.npz", [trace(5)])
    assert load_traces(tmp_path / "routes.npz")[0].same_as(old[0])


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
    result = share_prompts(own, [4] * 6, ["A", "A", "A", "A", "B", "B"])
    assert all(a.same_as(b) for a, b in zip(result.traces, own, strict=True))
    assert (result.shared, result.differing) == (3, 1)
    first = [found.parts[0] for found in result.traces]
    assert first[0] is first[1] and first[2] is first[3] and first[4] is first[5]
    assert len({id(part) for part in first}) == 3
    assert traces_nbytes(result.traces) == (3 * 4 + 6 * 3) * 6
    # Nothing keeps the recordings alive.
    before = {found.parts[0].untyped_storage().data_ptr() for found in own}
    assert not before & {part.untyped_storage().data_ptr() for found in result.traces for part in found.parts}


def test_prompts_left_out_in_part_or_whole() -> None:
    partly = [_completion(1, 11, start=2), _completion(1, 12, start=2), _completion(1, 13)]
    result = share_prompts(partly, [4, 4, 4])
    assert all(a.same_as(b) for a, b in zip(result.traces, partly, strict=True))
    assert (result.shared, result.differing) == (1, 0)  # the third starts elsewhere: not comparable, not counted
    without = [_completion(1, seed, start=4) for seed in (11, 12)]
    result = share_prompts(without, [4, 4])
    assert (result.shared, result.differing) == (0, 0)
    assert all(a.same_as(b) for a, b in zip(result.traces, without, strict=True))
    # An empty response leaves the prompt's rows but the last; here the trace ends inside the prompt.
    short = [_completion(1, 1).slice(0, 3)] * 2
    assert share_prompts(short, [4, 4]).shared == 1


def test_shared_prompts_align_like_their_own() -> None:
    own = [_completion(1, 11), _completion(1, 12)]
    shared = share_prompts(own, [4, 4]).traces
    mask = torch.ones(2, 8)
    assert align(own, mask)[0].same_as(align(shared, mask)[0])


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(RoutingError, match="1 routing traces, 2 prompt lengths and 1 groups"):
        share_prompts([trace(3)], [1, 2], ["A"])


def test_tokens_are_kept_and_a_file_of_schema_1_has_none(tmp_path: Path) -> None:
    plain = trace(4)
    told = plain.of_tokens([7, 8, 9, 10, 11])
    batch, _ = align([told, told.slice(0, 2)], torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]))
    save_traces(tmp_path / "two.npz", [plain, told, batch])
    loaded = load_traces(tmp_path / "two.npz")
    assert loaded[0].tokens is None and loaded[0].starts is loaded[1].starts is None
    assert loaded[1].tokens is not None and loaded[1].tokens.tolist() == [7, 8, 9, 10]
    assert loaded[2].tokens is not None and loaded[2].tokens.tolist() == [7, 8, 9, 10, PADDING, 7, 8, ANY]
    assert loaded[2].starts is not None and loaded[2].starts.nonzero().flatten().tolist() == [0, 5]
    # As the release before wrote it.
    part = plain.parts[0].numpy()
    entry = {"parts": ["part0"], "layers": plain.layers, "num_experts": plain.num_experts, "start": 0, "rows": 4}
    header = json.dumps({"schema": 1, "traces": [{**entry, "versions": [[0, 0]]}]}).encode()
    np.savez(tmp_path / "one.npz", part0=part, header=np.frombuffer(header, np.uint8))
    (old,) = load_traces(tmp_path / "one.npz")
    assert old.same_as(plain) and old.tokens is None
