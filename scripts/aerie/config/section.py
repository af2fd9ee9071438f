"""Base class and types that all sections of the configuration use."""

import shlex
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_from_command_line(cls, data: Any) -> Any:
        # `snakemake --config` passes every nested value as text, null included.
        if isinstance(data, dict):
            return {k: None if v in ("null", "~") else v for k, v in data.items()}
        return data


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _check_url(text: str) -> str:
    """The base URL without a trailing slash. `ValueError` if it is not one or contains a key."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"found {text!r}; expected a base URL such as http://host:8000/v1")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "a base URL must not contain a user name, key or query; put the key into the "
            "environment variable AERIE_API_KEY"
        )
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]


def _check_folder(text: str) -> str:
    if "://" in text:
        raise ValueError(
            f"found {text!r}; expected a folder: the store writes, syncs and renames files, "
            "which a bucket cannot do"
        )
    if not text or shlex.quote(text) != text:
        raise ValueError(
            f"found {text!r}; expected a folder whose name has no blanks, no ~ and no other "
            "character that a shell interprets"
        )
    return text


Folder = Annotated[str, AfterValidator(_check_folder)]
