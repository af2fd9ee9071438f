"""docs/formats.md has the tables of the records as the classes have them."""

from aerie.common.describe import fill_records
from support.paths import ROOT


def test_the_page_is_that_of_the_classes():
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    assert page == fill_records(page), "run: python scripts/describe_formats.py"
