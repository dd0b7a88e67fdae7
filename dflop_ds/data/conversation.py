"""LLaVA conversation records to token ids and labels.

The whole conversation is rendered with the tokenizer's chat template and tokenised once, so the
ids are those that a Hugging Face processor gives. Supervised are the assistant's answers together
with their end-of-turn token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dflop_ds.data.memory import MediaBytes, media_value
from dflop_ds.errors import ConfigError, DataError
from dflop_ds.families import MediaItem, MediaRule, Modality, Placeholder

IGNORED_LABEL = -100

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


@dataclasses.dataclass(frozen=True, slots=True)
class MediaRef:
    """One medium of a record.

    Attributes
    ----------
    path : str
        As written in the record; a name for messages where the record holds the medium itself.
    modality : Modality
    value : MediaBytes, Image, Recording, list of ndarray or None
        The medium, where the record holds it.
    """

    path: str
    modality: Modality
    value: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def is_decoded(self) -> bool:
        """Whether the record holds the medium decoded."""
        return self.value is not None and not isinstance(self.value, MediaBytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """A record after validation.

    Attributes
    ----------
    sample_id : str
    messages : tuple of (str, str)
        Chat role and content; the content holds one marker per media file.
    media : tuple of MediaRef
        In the order of the markers.
    """

    sample_id: str
    messages: tuple[tuple[str, str], ...]
    media: tuple[MediaRef, ...]


@dataclasses.dataclass(frozen=True)
class TokenizedSample:
    """Token ids of a sample, media placeholders expanded.

    Attributes
    ----------
    input_ids : ndarray of int64, shape (num_tokens,)
    labels : ndarray of int64, shape (num_tokens,)
        The id where the token is supervised, -100 elsewhere; not shifted.
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @property
    def target_tokens(self) -> int:
        """Tokens that carry loss after the shift by one."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED_LABEL))


def parse_record(record: Mapping[str, Any], sample_id: str, modalities: Iterable[Modality]) -> Conversation:
    """Check a LLaVA record and bring its media into the order of their markers.

    Parameters
    ----------
    record : dict
        ``{"image": str | list, "video": str | list, "audio": str | list, "conversations":
        [{"from", "value"}, ...]}``. A sample of clips only may write ``<image>`` for a clip.
        Without any marker all media go in front of the first human turn.
    sample_id : str
        Named in errors.
    modalities : iterable of Modality
        What the model takes; markers of others are plain text.

    Raises
    ------
    DataError
        If the record is malformed, names media that the model does not take, or markers and media
        differ in number.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"a record must be an object, found {type(record).__name__}; correct it.", sample_id)
    taken = list(modalities)
    paths = {modality: _media(record, modality, sample_id) for modality in Modality}
    for modality, named in paths.items():
        if named and modality not in taken:
            raise DataError(
                f"the media of a sample must be among {[one.value for one in taken]} for this model, found "
                f"{modality.value} files; drop the sample or use a model that takes them.",
                sample_id,
            )
    messages = _messages(record, sample_id)
    text = "\n".join(content for _, content in messages)
    clips_only = [modality for modality in Modality if paths[modality]] == [Modality.VIDEO]
    if clips_only and Modality.VIDEO.marker not in text:
        messages = [
            (role, content.replace(Modality.IMAGE.marker, Modality.VIDEO.marker))
            for role, content in messages
        ]
    marker = markers(taken)
    if any(paths.values()) and marker.search(text) is None:
        front = "".join(f"{one.marker}\n" * len(paths[one]) for one in Modality)
        messages = _media_first(messages, front, sample_id)
    found = marker.findall("\n".join(content for _, content in messages))
    for modality in taken:
        if found.count(modality.marker) != len(paths[modality]):
            raise DataError(
                f"the text must hold one {modality.marker} per media file, found "
                f"{found.count(modality.marker)} for {len(paths[modality])} files; "
                "correct the text or the file list.",
                sample_id,
            )
    queues = {modality.marker: (modality, iter(paths[modality])) for modality in taken}
    media: list[MediaRef] = []
    for text in found:
        modality, queue = queues[text]
        media.append(_ref(next(queue), modality, len(media)))
    return Conversation(sample_id, tuple(messages), tuple(media))


def markers(modalities: Iterable[Modality]) -> re.Pattern[str]:
    """Pattern of the markers of some modalities; it matches nothing where there are none."""
    return re.compile("|".join(modality.marker for modality in modalities) or r"(?!)")


def _ref(medium: Any, modality: Modality, number: int) -> MediaRef:
    if isinstance(medium, str):
        return MediaRef(medium, modality)
    return MediaRef(f"{modality.value} {number} of the record", modality, medium)


def _media(record: Mapping[str, Any], modality: Modality, sample_id: str) -> list[Any]:
    """The paths, or the media themselves, that a record has of one modality."""
    key, value = modality.value, record.get(modality.value)
    is_clip = modality is Modality.VIDEO
    # A list of frames is one clip; a list of clips holds paths, files, arrays or lists of frames.
    one_clip = is_clip and isinstance(value, list) and bool(value) and isinstance(value[0], Image.Image)
    given = [] if value is None else value if isinstance(value, list) and not one_clip else [value]
    try:
        media = [media_value(one, repr(key), is_clip) for one in given]
    except DataError as error:
        raise DataError(str(error), sample_id) from error
    for one in media:
        if isinstance(one, str) and not (one and "\0" not in one and _is_encodable(one)):
            raise DataError(
                f"{key!r} must be a path or a list of paths, found {value!r}; correct the record.", sample_id
            )
    return media


def _messages(record: Mapping[str, Any], sample_id: str) -> list[tuple[str, str]]:
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f"'conversations' must be a list of at least one turn, found {turns!r}; correct the record.",
            sample_id,
        )
    messages = []
    for number, turn in enumerate(turns):
        sender = turn.get("from") if isinstance(turn, Mapping) else None
        value = turn.get("value") if isinstance(turn, Mapping) else None
        if not isinstance(sender, str) or sender not in _ROLES:
            raise DataError(
                f"'from' of turn {number} must be "
                f"one of {sorted(_ROLES)}, found {sender!r}; correct the record.",
                sample_id,
            )
        if not isinstance(value, str):
            raise DataError(
                f"'value' of turn {number} must be "
                f"a string, found {type(value).__name__}; correct the record.",
                sample_id,
            )
        if not _is_encodable(value):
            raise DataError(
                f"'value' of turn {number} must be valid Unicode, found a lone surrogate; correct the "
                f"record.",
                sample_id,
            )
        messages.append((_ROLES[sender], value))
    if messages[0][0] == "assistant":
        raise DataError(
            "a conversation must begin with a human or system turn, found an answer; remove that turn.",
            sample_id,
        )
    return messages


def _is_encodable(text: str) -> bool:
    """Whether a tokenizer and a file system can take the text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _media_first(messages: list[tuple[str, str]], front: str, sample_id: str) -> list[tuple[str, str]]:
    for position, (role, content) in enumerate(messages):
        if role == "user":
            return [*messages[:position], (role, front + content), *messages[position + 1 :]]
    raise DataError(
        "a record with media must have a human turn or a marker to put them at, found neither; correct it.",
        sample_id,
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, placeholders: Iterable[Placeholder]) -> None:
    """Refuse a tokenizer that cannot render and tokenise conversations.

    Raises
    ------
    ConfigError
        If it has no chat template, gives no offsets, or knows other placeholder tokens.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not tokenizer.chat_template:
        raise ConfigError(
            f"tokenizer {name!r} must have a chat template, found none; "
            "set tokenizer.chat_template, or use an instruction-tuned checkpoint."
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer {name!r} must be a fast one, found a slow one; save a tokenizer.json for it."
        )
    for placeholder in placeholders:
        found = tokenizer.encode(placeholder.token, add_special_tokens=False)
        if found != [placeholder.token_id]:
            raise ConfigError(
                f"tokenizer {name!r} must map {placeholder.token!r} to token {placeholder.token_id} of the "
                f"model's config.json, found {found}; use the tokenizer that belongs to the model."
            )


def tokenize_conversation(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[MediaItem],
    rule: MediaRule,
) -> TokenizedSample:
    """Token ids and labels of a conversation.

    Parameters
    ----------
    conversation : Conversation
    tokenizer : PreTrainedTokenizerBase
        A fast tokenizer with a chat template, see :func:`check_tokenizer`.
    items : sequence of MediaItem
        What the media become, in the order of their markers.
    rule : MediaRule
        Of the model's family: the text that stands for an item.

    Raises
    ------
    DataError
        If the template refuses the conversation, or the text holds placeholder tokens of its own.
    ConfigError
        If the template does not extend a conversation turn by turn.
    """
    text, spans = _render(_with_placeholders(conversation, items, rule), tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    supervised = np.zeros(ids.shape, dtype=np.bool_)
    for start, stop in spans:
        supervised |= (starts >= start) & (starts < stop)
    is_media = np.isin(ids, [placeholder.token_id for placeholder in rule.placeholders.values()])
    runs = [run for item in items for run in rule.runs(item)]
    if int(is_media.sum()) != len(runs):
        raise DataError(
            f"the tokenised text must hold {len(runs)} placeholders for {len(items)} media items, found "
            f"{int(is_media.sum())}; keep placeholders apart from other text.",
            conversation.sample_id,
        )
    labels = np.where(supervised & ~is_media, ids, IGNORED_LABEL)
    copies = np.ones(ids.shape, dtype=np.int64)
    copies[is_media] = runs
    return TokenizedSample(np.repeat(ids, copies), np.repeat(labels, copies))


def _with_placeholders(
    conversation: Conversation, items: Sequence[MediaItem], rule: MediaRule
) -> Conversation:
    """Put the family's text at the markers."""
    if len(items) != len(conversation.media):
        raise DataError(
            f"there must be one media item per marker, found {len(items)} for {len(conversation.media)}; "
            "read the media of this conversation.",
            conversation.sample_id,
        )
    media = [(ref.modality, item) for ref, item in zip(conversation.media, items, strict=True)]
    texts = iter(rule.texts(media))
    marker = markers(rule.placeholders)
    messages = tuple(
        (role, marker.sub(lambda _: next(texts), content)) for role, content in conversation.messages
    )
    return dataclasses.replace(conversation, messages=messages)


def _render(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as one text, and the character spans that are supervised."""
    messages = [{"role": role, "content": content} for role, content in conversation.messages]

    def render(num_messages: int, ask: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(
                messages[:num_messages], tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"the chat template must accept the order of turns, found {error}; correct the record.",
                conversation.sample_id,
            ) from error
        return str(text)

    text = render(len(messages), False)
    spans = []
    for number, message in enumerate(messages):
        if message["content"].strip() not in text:
            raise ConfigError(
                f"the chat template must render message contents that are strings, found turn {number} of "
                f"sample {conversation.sample_id!r} left out; use the text template of the language model."
            )
        if message["role"] != "assistant":
            continue
        prompt = render(number, True)
        answered = text if number + 1 == len(messages) else render(number + 1, False)
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise ConfigError(
                "the chat template must extend a conversation turn by turn, found that it rewrites what "
                f"precedes turn {number} of sample {conversation.sample_id!r}; use a template whose "
                "generation prompt starts the answer and which keeps earlier turns as they were."
            )
        spans.append((len(prompt), _answer_stop(answered, len(prompt), message["content"])))
    return text, spans


def _answer_stop(answered: str, start: int, answer: str) -> int:
    """End of the supervised span: behind the end-of-turn token, without white space that follows it."""
    turn = answered[start:]
    closed = turn.rstrip()
    if closed == answer.strip():
        return len(answered)
    return start + len(closed)
