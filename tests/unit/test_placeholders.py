"""Prompts of token ids with tokens that stand for images, which are not sent with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mismatch_ext.adapters.placeholders import placeholders_at, placeholders_of, refuse_placeholders

from mismatch_ext.errors import RecordError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3VLMoe", {151655: "image_token_id", 151656: "video_token_id"}),
        ("Glm4vMoe", {151363: "image_token_id", 151364: "video_token_id"}),
        ("Llama4", {200092: "image_token_index"}),
        ("Aria", {9: "image_token_index"}),
        ("Gemma4", {258880: "image_token_id", 258884: "video_token_id", 258881: "audio_token_id"}),
        ("Qwen3Moe", {}),
    ],
)
def test_placeholders_are_read_off_a_checkpoint(name: str, found: dict[int, str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path)
    assert placeholders_of(config.to_dict()) == found
    assert placeholders_at(str(tmp_path)) == found


def test_what_is_no_folder_has_none() -> None:
    assert placeholders_at("Qwen/Qwen3-VL-30B-A3B-Instruct") == placeholders_at(None) == {}


def test_a_prompt_with_a_placeholder_is_refused_by_name() -> None:
    known = {7: "image_token_id"}
    refuse_placeholders([[1, 2], [3, 8]], known, "the model at /m")
    refuse_placeholders([[7]], {}, "the model at /m")
    with pytest.raises(RecordError) as refusal:
        refuse_placeholders([[1, 2], [3, 4, 7, 7]], known, "the model at /m")
    said = "prompt 1, position 2: token id 7 is image_token_id of the model at /m"
    assert said in str(refusal.value) and "prompts of text alone" in str(refusal.value)
