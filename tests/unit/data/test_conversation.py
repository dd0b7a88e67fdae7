"""Conversation records to ids and labels, against the tokenizer itself and by hand."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlavaOnevisionProcessor, PreTrainedTokenizerFast

from dflop_ds.data.conversation import (
    IGNORED_LABEL,
    TokenizedSample,
    check_tokenizer,
    parse_record,
    tokenize_conversation,
)
from dflop_ds.data.demo import DemoPaths
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaItem, MediaKind, Modality
from dflop_ds.families.llava_onevision import LlavaOnevisionRule

MODALITIES = (Modality.IMAGE, Modality.VIDEO)


@pytest.fixture(scope="module")
def tokenizer(tiny_demo: DemoPaths) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_demo.model_dir, local_files_only=True)


def _record(*values: str, **media: Any) -> dict[str, Any]:
    senders = ("human", "gpt")
    turns = [{"from": senders[i % 2], "value": value} for i, value in enumerate(values)]
    return {"id": "r1", "conversations": turns, **media}


def _rule(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionRule:
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    return LlavaOnevisionRule(70, 14, ((70, 70),), 9, image, video)


def _tokenize(
    record: dict[str, Any], tokenizer: PreTrainedTokenizerFast, media: list[int]
) -> TokenizedSample:
    items = [MediaItem(MediaKind.WHOLE_IMAGE, 1, 1, num_tokens) for num_tokens in media]
    return tokenize_conversation(parse_record(record, "r1", MODALITIES), tokenizer, items, _rule(tokenizer))


def _chat_ml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def test_ids_and_labels_by_hand(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = _tokenize(
        _record("<image>\nHi?", "Yes.", "Why?", "No one knows.", image="a.jpg"), tokenizer, [3]
    )

    def part(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    expected = [
        (part("<|im_start|>user\n"), False),
        ([_rule(tokenizer).image_token_id] * 3, False),
        (part("\nHi?<|im_end|>\n<|im_start|>assistant\n"), False),
        (part("Yes.<|im_end|>"), True),
        (part("\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"), False),
        (part("No one knows.<|im_end|>"), True),
        (part("\n"), False),
    ]
    ids = [token for tokens, _ in expected for token in tokens]
    labels = [token if supervised else IGNORED_LABEL for tokens, supervised in expected for token in tokens]
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == labels
    assert sample.target_tokens == sum(label != IGNORED_LABEL for label in labels)
    assert sample.input_ids.dtype == sample.labels.dtype == np.int64


@pytest.mark.parametrize(
    "answer", [" leading", "trailing ", "\nnew line first", "two\n\nparagraphs\n", "日本語 😀é", ""]
)
def test_ids_equal_tokenising_the_expanded_text(tokenizer: PreTrainedTokenizerFast, answer: str) -> None:
    record = _record("<image>\nlook, <video> too", answer, image="a.jpg", video="b.mp4")
    sample = _tokenize(record, tokenizer, [5, 7])
    question = "<image>" * 5 + "\nlook, " + "<video>" * 7 + " too"
    text = _chat_ml(("user", question), ("assistant", answer))
    assert sample.input_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    supervised = sample.labels[sample.labels != IGNORED_LABEL]
    assert tokenizer.decode(supervised).strip() == f"{answer}<|im_end|>".strip()


def test_ids_equal_the_processor(tokenizer: PreTrainedTokenizerFast) -> None:
    """The processor's own replacement of placeholders, for one image of 5 x 5 patches on a 1 x 2 grid."""
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.vision_feature_select_strategy = 25, "full"
    processor.image_token, processor.vision_aspect_ratio = "<image>", "anyres_max_9"
    processor.image_processor = type("Settings", (), {"image_grid_pinpoints": [[70, 140]]})
    inputs = {
        "batch_num_images": [1],
        "image_sizes": [[70, 140]],
        "pixel_values": torch.zeros(1, 3, 3, 70, 70),
    }
    expanded = processor.replace_image_token(inputs, 0)
    assert expanded.count("<image>") == 25 + 5 * 11
    text = _chat_ml(("user", expanded + "\nHi?"), ("assistant", "Yes."))
    sample = _tokenize(_record("<image>\nHi?", "Yes.", image="a.jpg"), tokenizer, [25 + 5 * 11])
    assert sample.input_ids.tolist() == tokenizer(text)["input_ids"]


def test_roles_system_turns_and_missing_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}]
    sample = _tokenize({"conversations": turns}, tokenizer, [])
    assert sample.input_ids.tolist() == tokenizer.encode(_chat_ml(("system", "Be brief."), ("user", "Hi")))
    assert sample.target_tokens == 0
    turns.append({"from": "assistant", "value": "Hello"})
    assert _tokenize({"conversations": turns}, tokenizer, []).target_tokens > 1


def test_image_placeholder_stands_for_a_clip_when_there_are_only_clips() -> None:
    conversation = parse_record(_record("<image>\nWhat happens?", "Much.", video="a.mp4"), "r1", MODALITIES)
    assert conversation.messages[0] == ("user", "<video>\nWhat happens?")
    assert [(ref.path, ref.modality) for ref in conversation.media] == [("a.mp4", Modality.VIDEO)]


def test_media_without_placeholders_go_first() -> None:
    record = _record("What?", "That.", "And?", "This.", image=["a.jpg", "b.jpg"], video="c.mp4")
    record["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    conversation = parse_record(record, "r1", MODALITIES)
    assert conversation.messages[1] == ("user", "<image>\n<image>\n<video>\nWhat?")
    assert [ref.path for ref in conversation.media] == ["a.jpg", "b.jpg", "c.mp4"]


def test_media_are_in_the_order_of_their_placeholders() -> None:
    record = _record("<video> then <image>", "ok", "<image>", "ok", image=["a.jpg", "b.jpg"], video=["c.mp4"])
    assert [ref.path for ref in parse_record(record, "r1", MODALITIES).media] == ["c.mp4", "a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (_record("<image>", "ok"), "found 1 for 0 files"),
        (_record("<image>", "ok", image=["a.jpg", "b.jpg"]), "found 1 for 2 files"),
        (_record("<image>", "ok", image="a.jpg", video="b.mp4"), "one <video> per media file, found 0 for 1"),
        (_record("<video><video>", "ok", video="b.mp4"), "found 2 for 1 files"),
        ({"id": "r1"}, "'conversations' must be a list"),
        (_record(), "at least one turn"),
        ({"conversations": ["hello"]}, "'from' of turn 0 must be one of"),
        ({"conversations": [{"from": "robot", "value": "hello"}]}, "found 'robot'"),
        ({"conversations": [{"from": "human", "value": 3}]}, "'value' of turn 0 must be a string, found int"),
        (_record("hi", "ok", image=3), "'image' must be a path"),
        (_record("hi", "ok", image=[""]), "'image' must be a path"),
        (
            {"conversations": [{"from": "system", "value": "hi"}], "image": "a.jpg"},
            "human turn or a marker",
        ),
        (["no", "object"], "must be an object, found list"),
    ],
)
def test_malformed_records_are_named(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        parse_record(record, "r1", MODALITIES)
    assert caught.value.sample_id == "r1"
    assert "sample 'r1'" in str(caught.value)


def test_media_token_list_of_another_length_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="one media item per marker, found 2 for 1"):
        _tokenize(_record("<image>", "ok", image="a.jpg"), tokenizer, [3, 3])


def test_unusable_tokenizers_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    rule = _rule(tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="must have a chat template"):
        check_tokenizer(bare, rule.placeholders.values())
    with pytest.raises(ConfigError, match="must map '<image>' to token 9999"):
        check_tokenizer(tokenizer, dataclasses.replace(rule, image_token_id=9999).placeholders.values())


LAST_TURN_ONLY = "{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}"
FOREIGN_PROMPT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)
CONTENT_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [(LAST_TURN_ONLY, "left out"), (FOREIGN_PROMPT, "turn by turn"), (CONTENT_PARTS, "left out")],
)
def test_templates_that_hide_the_answer_are_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, message: str
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(ConfigError, match=message):
        _tokenize(_record("Why so?", "Because.", "Really?", "Yes."), other, [])


def test_template_that_refuses_the_turns_names_the_sample(tokenizer: PreTrainedTokenizerFast) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ raise_exception('turns must alternate') }}"
    with pytest.raises(DataError, match=r"sample 'r1'.*turns must alternate"):
        _tokenize(_record("a", "b"), other, [])


def test_template_without_end_of_turn_token_supervises_the_line_end(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    sample = _tokenize(_record("Why?", "So."), other, [])
    assert other.decode(sample.labels[sample.labels != IGNORED_LABEL]) == "So.\n"
