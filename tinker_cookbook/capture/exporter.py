"""Export of records: a bounded queue, and a thread that empties it.

The recorded program never waits and never gets an error: records that cannot be stored are counted, and the counts are
logged at the end.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from tinker_cookbook.stores.storage import Storage, storage_join
from tinker_cookbook.utils.files import json_line, to_jsonable
from tinker_cookbook.utils.secrets import redactor

logger = logging.getLogger(__name__)

CaptureRecord: TypeAlias = dict[str, Any]
"""A JSON object; its `kind` (sample, train_op) determines its file."""


class CaptureSink(Protocol):
    """Stores records."""

    def export(self, records: Sequence[CaptureRecord], timeout: float | None = None) -> None:
        """Store one or more records. `timeout`: maximum duration in seconds."""
        ...


class JsonlFileSink:
    """Appends records to `capture/<kind>.jsonl`, without secrets (`utils.secrets`).

    Args:
        storage: the storage of the run.
        prefix: the run's folder in it.
    """

    def __init__(self, storage: Storage, prefix: str = "") -> None:
        self._storage, self._prefix = storage, prefix

    def export(self, records: Sequence[CaptureRecord], timeout: float | None = None) -> None:
        lines: dict[str, bytes] = {}
        without_secrets = redactor()
        for record in records:
            kind = str(record.get("kind", "unknown"))
            lines[kind] = lines.get(kind, b"") + json_line(without_secrets(to_jsonable(record)))
        for kind, content in lines.items():
            self._storage.append(storage_join(self._prefix, "capture", f"{kind}.jsonl"), content)


class CaptureExporter:
    """Passes records to a sink in batches, in a separate thread. Shut down at exit.

    Args:
        max_queue_size: capacity of the queue; further records are dropped.
        max_batch_size: a batch is exported when it has this many records.
        flush_interval_sec: smaller batches are exported after this time.
        export_timeout_sec: the timeout passed to the sink.
    """

    def __init__(
        self,
        sink: CaptureSink,
        *,
        max_queue_size: int = 4096,
        max_batch_size: int = 256,
        flush_interval_sec: float = 1.0,
        export_timeout_sec: float = 10.0,
    ) -> None:
        self._sink = sink
        self._size, self._batch = max_queue_size, max_batch_size
        self._interval, self._timeout = flush_interval_sec, export_timeout_sec
        self._closed = False
        self._begin()
        atexit.register(self.shutdown)
        # A forked process does not have its parent's thread. The parent empties the queue.
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (exporter := itself()) and exporter._begin())

    def _begin(self) -> None:
        self.dropped = 0
        """records dropped because the queue was full or the exporter shut down"""
        self.export_failures = 0
        """batches for which the sink failed; their records are lost"""
        self.callback_failures = 0
        """calls that could not be recorded"""
        self._queue: deque[CaptureRecord] = deque()
        self._changed = threading.Condition()
        self._pending, self._flush_requested, self._exporting = 0, False, False
        self._thread = threading.Thread(target=self._work, name="capture-exporter", daemon=True)
        if not self._closed:
            self._thread.start()

    def enqueue(self, record: CaptureRecord) -> None:
        """Add a record, unless the queue is full or the exporter is shut down. Returns immediately."""
        with self._changed:
            if self._closed or len(self._queue) >= self._size:
                self.dropped += 1
                return
            self._queue.append(record)
            self._changed.notify_all()

    def track_pending(self) -> None:
        """A call has started; its record follows later."""
        with self._changed:
            self._pending += 1

    def pending_done(self) -> None:
        """The record of such a call has arrived, or never will."""
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()

    def wait_pending(self, timeout: float | None = None) -> bool:
        """Wait until no call is in flight; return whether that happened within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending <= 0, timeout)

    def force_flush(self, timeout: float | None = None) -> bool:
        """Wait until all records are exported; return whether that succeeded within `timeout` seconds."""
        with self._changed:
            failures, self._flush_requested = self.export_failures, True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue and not self._exporting, timeout)
            self._flush_requested = False
            return done and self.export_failures == failures

    def shutdown(self, timeout: float = 5.0) -> None:
        """Accept no more records, and export the queued ones within `timeout` seconds. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        atexit.unregister(self.shutdown)
        lost = {"dropped records": self.dropped, "failed exports": self.export_failures}
        lost |= {"calls not recorded": self.callback_failures, "records not exported": len(self._queue)}
        if losses := ", ".join(f"{count} {what}" for what, count in lost.items() if count):
            logger.warning("capture: some records were lost: %s", losses)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due, self._interval)
                batch = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
                self._exporting = bool(batch)
                if self._closed and not batch:
                    return
            if not batch:
                continue
            failed = not self._export(batch)
            with self._changed:
                self.export_failures += failed
                self._exporting = False
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._closed or (self._flush_requested and bool(self._queue)) or len(self._queue) >= self._batch

    def _export(self, batch: list[CaptureRecord]) -> bool:
        try:
            self._sink.export(batch, timeout=self._timeout)
        except Exception:
            # Logged once: a broken sink fails every second.
            level = logging.DEBUG if self.export_failures else logging.WARNING
            logger.log(level, "capture: %d records could not be exported", len(batch), exc_info=True)
            return False
        return True
