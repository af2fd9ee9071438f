"""Bytes of a file, decompressed."""

import gzip
import io
import re
from pathlib import Path
from typing import Any

import zstandard

from aerie.corpus.records import CHUNK, Meter

SKIPPED = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""Start of a zstandard frame without data, such as a seek table."""


class CountedFile(io.FileIO):
    """A file whose bytes are counted as they are read."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self.meter = meter

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.meter.done += count or 0
        return count


class _Zstandard(io.RawIOBase):
    """Decompressed bytes of all frames; raises `EOFError` when the last one is cut short.

    (`zstandard`'s own stream reader ends there without an error.)
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.frame: Any = None
        self.packed = b""
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            packed = self.packed or self.source.read(2**17)
            if not packed:
                if self.frame is not None:
                    raise EOFError("it ends within a zstandard frame")
                return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            self.ready = memoryview(self.frame.decompress(packed))
            self.packed = b""
            if self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


def decompressed(raw: CountedFile, magic: bytes) -> io.BufferedReader:
    """The bytes of a file that starts with `magic`; gzip and zstandard are decompressed."""
    stream: Any = io.BufferedReader(raw, CHUNK)
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), CHUNK)  # type: ignore[type-var]
    if magic.startswith(zstandard.FRAME_HEADER) or SKIPPED.match(magic):
        return io.BufferedReader(_Zstandard(stream), CHUNK)
    return stream
