"""Follow a file of JSON lines while another process appends to it."""

from typing import Any

from tinker_cookbook.stores.storage import Storage, file_label
from tinker_cookbook.utils.files import parse_jsonl


class IncrementalReader:
    """Reads the lines that were added to a JSON-lines file since the last read. Incomplete lines are ignored.

    A resumed run drops the lines of steps that it repeats. These lines, and those after them, are then returned again.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage, self._path = storage, path
        self._records: list[dict[str, Any]] = []
        self._offset, self._lines, self._last = 0, 0, b""

    @property
    def records(self) -> list[dict[str, Any]]:
        """All rows of the file at the last read."""
        return list(self._records)

    def read(self) -> list[dict[str, Any]]:
        """The new rows, in order; empty if there is no file.

        Raises:
            DataFormatError: a line is damaged. The message begins with the file and the line.
        """
        if self._storage.stat(self._path) is None:
            return self._take(b"", anew=True)
        # The last line is read again: if it has changed, the file was rewritten.
        added = self._storage.read_range(self._path, self._offset - len(self._last))
        if added.startswith(self._last):
            return self._take(added[len(self._last) :], anew=False)
        return self._take(self._storage.read(self._path), anew=True)

    def _take(self, content: bytes, anew: bool) -> list[dict[str, Any]]:
        whole = content[: content.rfind(b"\n") + 1]
        first = 1 if anew else self._lines + 1
        rows = [line.row for line in parse_jsonl(whole, file_label(self._storage, self._path), first=first)]
        if not anew:
            self._records += rows
        else:
            before, self._records = self._records, rows
            same = next((i for i, row in enumerate(rows) if i >= len(before) or row != before[i]), len(rows))
            self._offset, self._last, rows = 0, b"", rows[same:]
        self._offset += len(whole)
        self._lines = first - 1 + whole.count(b"\n")
        self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :] if whole else self._last
        return rows
