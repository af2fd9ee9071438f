"""The files that a source names."""

import glob
import os
from pathlib import Path

from aerie.common.errors import InputError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet")


PACKED = (".gz", ".gzip", ".zst", ".zstd")


NOT_RECORDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


def expand(pattern: str) -> tuple[list[Path], list[Path]]:
    """The files that a file name, folder or glob pattern names, sorted; and the files skipped.

    In a folder only files with a data file's name count (`SUFFIXES`, also compressed). Raises
    `InputError` when there is none.
    """
    path = Path(pattern)
    if not pattern.strip():
        raise InputError(f"source {pattern!r}: no path; expected a file, a folder or a pattern")
    try:
        if path.is_file():
            return [path], []
        if path.is_dir():
            inside = _files_in(path)
            files = [p for p in inside if _is_data(p)]
            if not files:
                names = ", ".join(SUFFIXES)
                raise InputError(
                    f"{pattern}: this folder has no data file ({names}, also .gz, .zst)"
                )
            for file in files:
                _check_file(file)
            return files, [p for p in inside if not _is_data(p)]
        found = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
        files = [p for p in found if not p.is_dir()]
    except (OSError, ValueError) as error:
        raise InputError(f"{pattern[:200]!r}: not usable as a path ({error})") from None
    for file in files:
        _check_file(file)
    if not files:
        if glob.has_magic(pattern):
            raise InputError(f"{pattern}: no file matches this pattern")
        if path.exists():
            raise InputError(f"{pattern}: neither a file nor a folder")
        raise InputError(
            f"{pattern}: no such file or folder; check the path (a Hugging Face dataset is "
            "given as hf:OWNER/NAME)"
        )
    return files, []


def _files_in(folder: Path) -> list[Path]:
    """All visible files, sorted; each link to a folder is followed once."""
    found, seen = [], set()

    def stop(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = () if real in seen else sorted(f for f in folders if not f.startswith("."))
        if real not in seen:
            found += [Path(place, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(found)


def _check_file(path: Path) -> None:
    """Raise `InputError` for what cannot be read as a file."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: a link to nothing; fetch the file, or remove the link")
    if not path.is_file():
        raise InputError(f"{path}: neither a file nor a folder")


def _is_data(path: Path) -> bool:
    return data_name(path).endswith(SUFFIXES) and path.name not in NOT_RECORDS


def data_name(path: Path) -> str:
    """File name in lower case, without the suffix of a compressed file."""
    name = path.name.lower()
    for packed in PACKED:
        name = name.removesuffix(packed)
    return name
