"""One server per home: two would disagree about limits, sessions and expiry.

Programs with `backend=local` may share the home with a server: their runs have different names, and shared files are written
whole or in transactions (storage/). The kernel releases the lock when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tinker_local_backend.errors import RequestError

logger = logging.getLogger(__name__)

LOCK_FILE = ".server.lock"

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""flock's errors on filesystems that do not support it."""


@contextmanager
def one_server(home: Path) -> Iterator[None]:
    """Hold the home's lock. Raises RequestError if another server has it (naming its process) or the home is not writable."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        file = open(home / LOCK_FILE, "a+")  # noqa: SIM115  (closed by the `with` below, which must not hide its errors)
    except OSError as error:
        raise RequestError(f"home={str(home)!r} cannot be written to: {error}; give another home") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RequestError(
                f"home={str(home)!r} is in use by another server: {_holder(file.read())}; stop that one, or give another home"
            ) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            logger.warning("the filesystem of home %s has no file locks: a second server there is not noticed", home)
        file.truncate(0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n")
        file.flush()
        yield


def _holder(content: str) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "it is just starting"
