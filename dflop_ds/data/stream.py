"""Streams of records: read in order, numbered, kept until they are trained, resumed where they were."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflop_ds.data.dataset import LlavaDataset
from dflop_ds.data.hub_records import check_columns
from dflop_ds.data.probe import Limits
from dflop_ds.data.probed import ProbedDataset
from dflop_ds.errors import DataError
from dflop_ds.shapes import SampleShape, ShapeTable

Drawn = tuple[int, Any]
"""Running number of a record, and the record."""


class StreamRecords:
    """Records of an iterable, numbered from 0 over all passes through it.

    Every rank reads the whole stream and keeps a record until its plan shows that another replica
    trains it, or until it has been drawn. Where a rank both plans and trains, both read the same object.

    Parameters
    ----------
    stream : datasets.IterableDataset or iterable
        Yields the same records on every rank. ``set_epoch``, ``state_dict`` and ``load_state_dict`` are used
        where it has them; without the last two, resuming reads and forgets what came before.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        if hasattr(stream, "column_names"):
            check_columns(stream)
        # Media stay encoded, so that shapes come from headers.
        encoded = getattr(stream, "decode", None)
        known = getattr(stream, "features", None) is not None
        self._stream: Any = encoded(False) if encoded is not None and known else stream
        self._lock = threading.RLock()
        self._iterator: Iterator[Any] | None = None
        self._window, self._highest = -1, -1
        self._fresh = self._capture()
        self._go_to(0, 0, 0)

    @property
    def pass_number(self) -> int:
        """Passes through the stream that have ended."""
        return self._pass

    def read_next(self, pass_number: int) -> Drawn | None:
        """The next record, read and kept if it may be needed; None when this pass has ended.

        Raises
        ------
        DataError
            If the stream holds no record.
        """
        with self._lock:
            return self._advance() if self._pass == pass_number else None

    def record(self, number: int) -> Any:
        """A record that is kept, or comes later in the stream."""
        with self._lock:
            while self._next <= number:
                self._advance()
            if number not in self._kept:
                raise DataError(
                    f"record {number} of the stream must be kept until it is trained, found it forgotten; "
                    "this is a fault of dflop_ds, please report it."
                )
            return self._kept[number]

    def draw(self, number: int) -> Drawn:
        """A record that is about to be trained; it is not kept any longer."""
        with self._lock:
            record = self.record(number)
            del self._kept[number]
            self._own.discard(number)
            return number, record

    def planned(self, window: int, own: Iterable[int], others: Iterable[int]) -> None:
        """Learn from a plan which records this rank needs.

        Parameters
        ----------
        window : int
            Windows come one after the other: a later one shows that nothing before it will be planned.
        own, others : iterable of int
            Records that this rank draws, and those of other replicas.
        """
        with self._lock:
            if window != self._window:
                self._forget(n for n in list(self._kept) if n <= self._highest and n not in self._own)
                self._window = window
            foreign = set(others)
            self._own.update(own)
            self._highest = max([self._highest, *self._own, *foreign])
            self._unwanted.update(n for n in foreign if n >= self._next)
            self._forget(foreign)

    def state(self) -> dict[str, Any]:
        """Where the next record is, as JSON."""
        with self._lock:
            return {
                "number": self._next,
                "pass": self._pass,
                "offset": self._offset,
                "stream": self._start if self._iterator is None else self._capture(),
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state` told.

        Raises
        ------
        DataError
            If the stream is shorter than it was.
        """
        with self._lock:
            self._go_to(state["number"], state["pass"], state["offset"])
            if state["stream"] is not None:
                self._start = state["stream"]
                self._stream.load_state_dict(copy.deepcopy(self._start))
                return
            self._iterator = iter(self._stream)
            for _ in range(state["offset"]):
                if next(self._iterator, None) is None:
                    raise DataError(
                        f"a stream must hold the {state['offset']} records that were read before, found "
                        "fewer; resume with the same stream."
                    )

    def _capture(self) -> Any:
        """State of the stream itself, None where it knows none."""
        capture = getattr(self._stream, "state_dict", None)
        return None if capture is None else copy.deepcopy(capture())

    def _go_to(self, number: int, pass_number: int, offset: int) -> None:
        self._next, self._pass, self._offset = number, pass_number, offset
        self._kept: dict[int, Any] = {}
        self._own: set[int] = set()
        self._unwanted: set[int] = set()
        self._window, self._highest = -1, number - 1
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._iterator = None
        # An exhausted stream of datasets still tells its end, so each pass begins in the very first state.
        self._start = None if self._fresh is None else {**self._fresh, "epoch": self._pass}
        set_epoch = getattr(self._stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._pass)

    def _advance(self) -> Drawn | None:
        """Read one record; None when the pass has ended and the next one begins."""
        if self._iterator is None:
            self._iterator = iter(self._stream)
        try:
            record = next(self._iterator)
        except StopIteration:
            if self._offset == 0:
                raise DataError(
                    f"a stream must hold records in every pass, found none in pass {self._pass + 1}; "
                    "check its source (a generator can be read once only)."
                ) from None
            self._pass, self._offset = self._pass + 1, 0
            self._begin_pass()
            return None
        if self._next in self._unwanted:
            self._unwanted.discard(self._next)
        else:
            self._kept[self._next] = record
        self._next, self._offset = self._next + 1, self._offset + 1
        return self._next - 1, record

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)


class HeldRecord:
    """One record under its number in the stream.

    Parameters
    ----------
    number : int
    record : object
    """

    def __init__(self, number: int, record: Any) -> None:
        self._number, self._record = number, record

    def __len__(self) -> int:
        return self._number + 1

    def __getitem__(self, number: int) -> Any:
        return self._record

    def fallback_id(self, number: int) -> str:
        """Number in the stream, from 0."""
        return f"record {number} of the stream"

    def fingerprint(self) -> list[Any]:
        """Of no use: streams have no shape cache."""
        return [self._number]


class ShapeReader:
    """Shapes of a stream's samples, in order; see :class:`~dflop_ds.scheduling.windows.ShapeStream`.

    Parameters
    ----------
    records : StreamRecords
    dataset : LlavaDataset
        Its settings; its own records are not used.
    limits : Limits
    """

    def __init__(self, records: StreamRecords, dataset: LlavaDataset, limits: Limits) -> None:
        self._records, self._dataset, self._limits = records, dataset, limits

    @property
    def pass_number(self) -> int:
        """Passes through the stream that have ended."""
        return self._records.pass_number

    def state(self) -> dict[str, Any]:
        """Position before the next sample, as JSON."""
        return self._records.state()

    def next_shape(self, pass_number: int) -> tuple[int, SampleShape | None] | None:
        """Number and shape of the next sample (None: it is left out), or None when the pass has ended.

        Raises
        ------
        DataError
            If a sample is not usable and the policy says so.
        """
        found = self._records.read_next(pass_number)
        if found is None:
            return None
        return found[0], self._limits.usable(self._dataset.with_records(HeldRecord(*found)), found[0])


class StreamDataset(ProbedDataset):
    """A stream, with the samples of its first window.

    Loader workers get records, not numbers: the rank alone reads the stream.

    Parameters
    ----------
    head : LlavaDataset
        Over the usable records of the first window.
    table : ShapeTable
        Their shapes.
    records : StreamRecords
    shapes : ShapeReader
    """

    def __init__(
        self, head: LlavaDataset, table: ShapeTable, records: StreamRecords, shapes: ShapeReader
    ) -> None:
        super().__init__(head, table)
        self.records = records
        self.shapes = shapes

    def __getitem__(self, index: Any) -> Any:
        """A sample of the first window by its position, or one that was drawn."""
        if isinstance(index, tuple):
            number, record = index
            return self.dataset.with_records(HeldRecord(number, record))[number]
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "records": None, "shapes": None}

    def without_media(self) -> StreamDataset:
        """View that yields labels only, over the same stream."""
        return StreamDataset(self.dataset.without_media(), self.table, self.records, self.shapes)
