"""The triage of a log file, in constant memory."""

import codecs
from collections.abc import Callable, Iterator
from typing import BinaryIO

from aerie.common.errors import InputError
from aerie.watching.catalogue import Catalogue
from aerie.watching.triage import LONGEST, Finding, Triage

BLOCK = 1 << 20  # bytes read at a time

_PACKED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "zstd -d", b"\xfd7zXZ": "unxz"}
_CONTROLS = bytes(b for b in range(32) if b not in b"\t\n\r\x1b\x08\x0c\x00")


def triage(
    file: BinaryIO,
    name: str,
    catalogue: Catalogue,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Finding]:
    """Findings of a log, see `Triage.finish`; `on_bytes` gets the number of bytes of each read.

    Bytes that are not UTF-8 are replaced. Raises `InputError` for a compressed or binary file.
    """
    judge = Triage(catalogue)
    for block in _blocks(file, name, on_bytes):
        judge.feed(block)
    return judge.finish()


def _blocks(file: BinaryIO, name: str, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """Text in blocks of about `BLOCK` characters, cut where a line or a very long piece ends."""
    data = file.read(BLOCK)
    for magic, command in _PACKED.items():
        if data.startswith(magic):
            raise InputError(f"{name}: is compressed; unpack it first ({command})")
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not wide:
        # A log that was truncated while it was written begins with zeros; ignore them.
        start = data.replace(b"\0", b"")[:LONGEST]
        odd = len(start) - len(start.translate(None, _CONTROLS))
        if data and (not start or odd > 0.02 * len(start)):
            raise InputError(f"{name}: contains binary data; expected the text of a log")
    decoder = codecs.getincrementaldecoder("utf-16" if wide else "utf-8-sig")("replace")
    rest = ""
    while True:
        text = rest + decoder.decode(data, final=not data).replace("\0", "")
        on_bytes(len(data))
        cut = text.rfind("\n") + 1
        if not data:
            if text:
                yield text
            return
        if len(text) - cut > LONGEST:
            # A progress bar that was drawn for hours is one very long line.
            cut = text.rfind("\r") + 1 or len(text)
        if cut:
            yield text[:cut]
        rest = text[cut:]
        data = file.read(BLOCK)
