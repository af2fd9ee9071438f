#!/usr/bin/env python3
"""Write the tables of the records into docs/formats.md, between its marks."""

from aerie.common.describe import fill_records
from aerie.common.paths import PROJECT

PAGE = PROJECT / "docs/formats.md"

if __name__ == "__main__":
    PAGE.write_text(fill_records(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
