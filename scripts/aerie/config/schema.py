"""The JSON Schema of a configuration file: editors complete and check YAML with it."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from aerie.config.root import Config


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # the key again, in capitals


def config_schema() -> str:
    """`config/schema.json`: JSON Schema, draft 2020-12.

    It accepts what a file may hold that is laid over config/config.yaml: sources as plain paths,
    and null to remove an entry of `drafters` or of `evaluation.prompt_sets`.
    """
    schema = Config.model_json_schema(schema_generator=_Schema)
    sections = schema["$defs"]
    sources = sections["Corpus"]["properties"]["sources"]
    sources["items"] = {"anyOf": [{"type": "string"}, sources["items"]]}
    prompt_sets = sections["Evaluation"]["properties"]["prompt_sets"]
    for table in (schema["properties"]["drafters"], prompt_sets):
        ((pattern, entry),) = table["patternProperties"].items()
        table["patternProperties"] = {pattern: {"anyOf": [entry, {"type": "null"}]}}
        table["additionalProperties"] = False
    for part in (schema, *sections.values()):
        _tidy(part)
        for field in part["properties"].values():
            _tidy(field)
            if "$ref" in field:
                field.pop("default", None)  # that of each key stands with the key
    schema = {
        "$schema": GenerateJsonSchema.schema_dialect,
        **schema,
        "title": "Aerie configuration",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _tidy(part: dict[str, Any]) -> None:
    if "description" in part:
        part["description"] = " ".join(part["description"].split())
