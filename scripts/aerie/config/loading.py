"""Reading the configuration: files laid over each other, faults explained in one line each."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from aerie.common.describe import leaves
from aerie.common.errors import InputError
from aerie.common.paths import DEFAULT_CONFIG
from aerie.config.root import Config
from aerie.config.section import Section

REMOVED = {
    "watch.stall_gaps": "10",
    "watch.loss_spike": "3",
    "watch.loss_divergence": "1.5",
}
"""Keys of earlier versions → the value that they are fixed at."""


def read_config(over: list[Path]) -> dict[str, Any]:
    """The values of config/config.yaml with those of other files laid over them key by key, as
    Snakemake does.

    Raises `InputError` for a file that is not there or holds no table.
    """
    values: dict[str, Any] = {}
    for path in [DEFAULT_CONFIG, *over]:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{path}: not readable as YAML ({error})") from None
        if not isinstance(found, dict):
            raise InputError(f"{path}: found {found!r:.80}; expected a table of keys")
        _lay_over(values, found)
    return values


def _lay_over(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _lay_over(values[key], value)
        else:
            values[key] = value


def load_config(values: dict[str, Any]) -> Config:
    """Check `values` (as read from YAML) and fill in defaults.

    Raises `InputError` with one line a fault: the key's full name, what was found, what was
    expected, and the nearest known key for an unknown one.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for fault in error.errors():
            key, text = _explain(fault)
            # Of a key that takes one of several types there is a fault a type.
            lines[key] = (
                f"{lines[key]} or {text.rpartition('should be ')[2]}" if key in lines else text
            )
        raise InputError(
            "the configuration is not valid:\n  " + "\n  ".join(lines.values())
        ) from None


def check_paths(config: Config) -> None:
    """Raise `InputError`, one line a fault, when files that are not made by the run are not there.

    Not those of `corpus.sources`, which may be patterns: `reading.expand`.
    """
    sets = config.evaluation.prompt_sets.items()
    starts = [(n, d.from_checkpoint) for n, d in config.drafters.items() if d.from_checkpoint]
    faults = [
        *(
            f"evaluation.prompt_sets.{n}: {p}: no such file"
            for n, p in sets
            if not Path(p).is_file()
        ),
        *(
            f"drafters.{n}.from_checkpoint: {p}: no such folder"
            for n, p in starts
            if not Path(p).is_dir()
        ),
    ]
    if faults:
        raise InputError("the configuration names what is not there:\n  " + "\n  ".join(faults))


def _explain(fault: dict[str, Any]) -> tuple[str, str]:
    """Full name of the key, and the line about it."""
    # Pydantic adds the type that it tried to the place, and `[key]` to a wrong name in a table.
    place = [
        p
        for p in map(str, fault["loc"])
        if not re.fullmatch(r"constrained-\w+|literal\[.*\]|\[key\]", p)
    ]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        if (fixed := REMOVED.get(f"{place[0]}.{place[-1]}")) is not None:
            return key, f"{key}: no longer a key; it is fixed at {fixed}. Remove it"
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return key, f"{key}: unknown key; {hint}"
    found = fault["input"]
    if fault["type"] == "value_error":
        return key, f"{key + ': ' if key else ''}{fault['ctx']['error']}"
    message = fault["msg"].split(", unable to ")[0].replace("Input should", "it should")
    text = f"{key}: found {found!r}; {message[0].lower()}{message[1:]}"
    if fault["type"] == "string_type" and isinstance(found, int | float):
        text += (
            f"; on the command line say that it is text: --config '{key}=!!str TEXT' "
            "(Snakemake turns 2023_02 into a number)"
            if len(place) == 1
            else "; put it in quotes"
        )
    return key, text


def _known_keys(place: list[str]) -> list[str]:
    model: type[Section] = Config
    for part in place:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else model
        found = [a for a in leaves(annotation) if isinstance(a, type) and issubclass(a, Section)]
        if found:
            model = found[0]
    return sorted(model.model_fields)


def sections_json(config: Config, *sections: str) -> str:
    """These sections of a configuration as one JSON object, for a script's `--settings`."""
    return json.dumps({name: config.model_dump(mode="json")[name] for name in sections})


def settings_argument(*sections: str) -> Callable[[str], Config]:
    """An argparse type that parses what `sections_json` made into a `Config`.

    The sections must be exactly these: one that is left out would silently have its defaults.
    """

    def parse(text: str) -> Config:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InputError(f"--settings: not JSON ({error})") from None
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        if found != sorted(sections):
            raise InputError(f"--settings: found {found}; expected {sorted(sections)}")
        return load_config(values)

    return parse
