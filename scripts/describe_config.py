#!/usr/bin/env python3
"""Write the reference of all keys into config/README.md, after its line `<!-- keys -->`."""

from aerie.common.paths import CONFIG
from aerie.config import describe_config

README = CONFIG / "README.md"
MARK = "<!-- keys -->\n"

if __name__ == "__main__":
    head = README.read_text(encoding="utf-8").split(MARK)[0]
    README.write_text(head + MARK + "\n" + describe_config(), encoding="utf-8")
