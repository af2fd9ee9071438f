#!/usr/bin/env python3
"""Write config/schema.json, and the tables of all keys in config/README.md, from the library."""

from aerie.common.paths import CONFIG
from aerie.config.reference import describe_config
from aerie.config.schema import config_schema

README = CONFIG / "README.md"
MARK = "<!-- keys -->\n"

if __name__ == "__main__":
    head = README.read_text(encoding="utf-8").split(MARK)[0]
    README.write_text(head + MARK + "\n" + describe_config(), encoding="utf-8")
    (CONFIG / "schema.json").write_text(config_schema(), encoding="utf-8")
