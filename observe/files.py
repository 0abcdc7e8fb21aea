"""Files that only diagnose."""

from __future__ import annotations

import contextlib
import weakref

from observe.logs import logger


class DiagnosticFile:
    """A file in which the engine tells about itself. If writing fails, log it once and carry on.

    Args:
        option: that asks for it.
        path: of the file, which is replaced.
        tail: what it ends with after every write.

    Raises:
        ValueError: there can be no such file.
    """

    def __init__(self, option: str, path: str, tail: bytes = b""):
        self.name, self.tail, self.size = f"{option} is {path!r}", tail, 0  # bytes of all before the tail
        try:
            self.file = open(path, "wb", buffering=0)  # noqa: SIM115 (it stays open as long as its user lives)
        except OSError as error:
            raise ValueError(f"{self.name}: {error.strerror}") from None
        self.close = weakref.finalize(self, self.file.close)

    def write(self, data: bytes) -> None:
        """Add all of `data`, or nothing if it does not fit any more."""
        if self.file.closed:
            return
        try:
            if self.tail:  # a pipe has no places to seek
                self.file.seek(self.size)
            left = data + self.tail
            while left:  # a disk that becomes full takes a part, and tells why at the next try
                left = left[self.file.write(left) :]
            self.size += len(data)
        except OSError as error:
            logger.warning(f"{self.name}: {error.strerror}; no more is written there")
            with contextlib.suppress(OSError):
                self.file.truncate(self.size)
                self.file.seek(self.size)
                self.file.write(self.tail)
            self.close()
