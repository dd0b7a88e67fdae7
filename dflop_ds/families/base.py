"""What a model family must tell about its media before anything is decoded."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dflop_ds.errors import DataError


class Modality(str, enum.Enum):
    """Kinds of media files; the value is the key in a record, and the marker in its text."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    @property
    def marker(self) -> str:
        """What stands for such a file in the text of a record, whatever the family."""
        return f"<{self.value}>"


class MediaKind(enum.IntEnum):
    """How the encoder treats one media item."""

    TILED_IMAGE = 0
    """An image cut into tiles."""
    WHOLE_IMAGE = 1
    """An image in one piece."""
    CLIP = 2
    """Frames of a clip."""
    AUDIO = 3
    """Windows of a recording."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, clip or recording: what it costs, and what the layers need to know of it.

    Attributes
    ----------
    kind : MediaKind
    num_inputs : int
        Encoder inputs that the cost model counts: tiles, frames, windows or patches.
    num_rows : int
        Rows of the media tensor that are this item's own; the processor gives as many.
    num_tokens : int
        LLM tokens that the encoder output becomes. Fixed text around them is not counted.
    extent : tuple of int
        Whatever the family's layers need, such as height and width; they alone read it.
    """

    kind: MediaKind
    num_inputs: int
    num_rows: int
    num_tokens: int
    extent: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """The token that is repeated once for each media token.

    Attributes
    ----------
    token : str
        Its text; the tokenizer must know it as a single token.
    token_id : int
    before, after : str
        Fixed text around the repeated tokens.
    """

    token: str
    token_id: int
    before: str = ""
    after: str = ""


class MediaRule(abc.ABC):
    """Sizes in, encoder inputs and LLM tokens out; one subclass per model family.

    Importable without torch. Two rules with equal ``repr`` must give equal items, as the cache of
    shapes relies on it: a frozen dataclass does.

    Attributes
    ----------
    sampling_rate_hz : int
        Rate at which recordings reach :meth:`audio` and the processor.
    needs_upright_size : bool
        Whether :meth:`clip` depends on the size of the frames. It is then read from the first one,
        since containers keep a rotation where it cannot be seen without decoding.
    """

    sampling_rate_hz: ClassVar[int] = 16_000
    needs_upright_size: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def placeholders(self) -> Mapping[Modality, Placeholder]:
        """Placeholder of every modality that the family takes."""

    def image(self, height: int, width: int, num_images: int) -> MediaItem:
        """One image.

        Parameters
        ----------
        height, width : int
            Size in pixels after EXIF orientation.
        num_images : int
            Images in the sample, this one included.

        Raises
        ------
        DataError
            If the family takes no images, or not this one.
        """
        raise _not_taken(Modality.IMAGE)

    def clip(
        self, num_frames: int, height: int = 0, width: int = 0, frame_interval_s: float = 0.0
    ) -> MediaItem:
        """One clip.

        Parameters
        ----------
        num_frames : int
            Frames that are used.
        height, width : int
            Size in pixels; 0 where unknown.
        frame_interval_s : float
            Mean time from one used frame to the next, in seconds; 0 where unknown.

        Raises
        ------
        DataError
            If the family takes no clips, or not this one.
        """
        raise _not_taken(Modality.VIDEO)

    def audio(self, num_samples: int) -> MediaItem:
        """One recording.

        Parameters
        ----------
        num_samples : int
            Samples after mixing down and resampling to ``sampling_rate_hz``.

        Raises
        ------
        DataError
            If the family takes no audio, or not this recording.
        """
        raise _not_taken(Modality.AUDIO)

    @property
    def max_audio_samples(self) -> int | None:
        """Samples of a recording that the processor looks at; None: all of them."""
        return None

    def sizes(self, item: MediaItem) -> Mapping[str, float]:
        """What an item adds to the columns of its sample's :class:`dflop_ds.shapes.SampleShape`.

        By default its inputs are frames if it is a clip, and tiles otherwise.
        """
        return {"num_frames" if item.kind is MediaKind.CLIP else "num_tiles": item.num_inputs}

    def text(self, modality: Modality, item: MediaItem) -> str:
        """Text that replaces the marker of an item; it has one placeholder token per run."""
        placeholder = self.placeholders[modality]
        return placeholder.before + placeholder.token + placeholder.after

    def texts(self, media: Sequence[tuple[Modality, MediaItem]]) -> list[str]:
        """Texts that replace all markers of a conversation, in order."""
        return [self.text(modality, item) for modality, item in media]

    def runs(self, item: MediaItem) -> tuple[int, ...]:
        """How often each placeholder of :meth:`text` is repeated; the sum is ``item.num_tokens``."""
        return (item.num_tokens,)


def _not_taken(modality: Modality) -> DataError:
    return DataError(
        f"the model family takes no {modality.value} files, found one; "
        "drop the sample or use a model of another family."
    )


def check_image_size(height: int, width: int) -> None:
    """Raise :class:`DataError` unless an image has pixels."""
    if min(height, width) < 1:
        raise DataError(
            f"an image must be at least 1 x 1 pixel, found {height} x {width}; replace or drop it."
        )


def check_num_frames(num_frames: int) -> None:
    """Raise :class:`DataError` unless a clip has frames."""
    if num_frames < 1:
        raise DataError(f"a clip must have at least 1 frame, found {num_frames}; replace or drop it.")
