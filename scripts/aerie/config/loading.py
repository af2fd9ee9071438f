"""Reading the configuration: merging files, explaining each fault in one line."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from aerie.common.describe import leaves
from aerie.common.errors import InputError
from aerie.common.paths import DEFAULT_CONFIG
from aerie.config.root import Config
from aerie.config.section import Section

RENAMED = {"hidden_states.layer_ids": "hidden_states.aux_layer_ids"}
"""Keys of earlier versions and what they are called now."""

REMOVED = {
    "corpus.min_characters": "0",
    "corpus.near_duplicates_from": "10000",
    "corpus.decontamination_words": "13",
    "self_prompts.min_tokens": "4",
    "self_prompts.max_attempts": "5",
    "self_prompts.max_repeated_share": "0.3",
    "self_prompts.near_duplicates": "0.8",
    "watch.stall_gaps": "10",
    "watch.loss_spike": "3",
    "watch.loss_divergence": "1.5",
}
"""Keys of earlier versions that are constants now, and their values."""


def read_config(over: list[Path]) -> dict[str, Any]:
    """The values of config/config.yaml, with other files laid over it key by key as Snakemake
    does.

    Raises `InputError` for a file that does not exist or does not hold a table.
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

    Raises `InputError` with one line for each fault: the key's full name, what was found, what
    was expected, and for an unknown key the nearest known one.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for fault in error.errors():
            key, text = _explain(fault)
            # A key that takes several types has one fault for each type.
            lines[key] = (
                f"{lines[key]} or {text.rpartition('should be ')[2]}" if key in lines else text
            )
        raise InputError(
            "the configuration is not valid:\n  " + "\n  ".join(lines.values())
        ) from None


def check_paths(config: Config) -> None:
    """Raise `InputError`, with one line for each, if files that the run needs do not exist.

    `corpus.sources` may hold patterns and is checked when it is expanded.
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
        raise InputError("the configuration names missing files:\n  " + "\n  ".join(faults))


def _explain(fault: ErrorDetails) -> tuple[str, str]:
    """Full name of the key, and the line about it."""
    # Pydantic adds the type it tried to the place, and `[key]` to a wrong name in a table.
    place = [
        p
        for p in map(str, fault["loc"])
        if not re.fullmatch(r"constrained-\w+|literal\[.*\]|\[key\]", p)
    ]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        if key in RENAMED:
            return key, f"{key}: renamed to {RENAMED[key]}"
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
    """An argparse type that parses the output of `sections_json` into a `Config`.

    Exactly these sections must be present: a missing one would silently get its defaults.
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
