#!/usr/bin/env python3
"""Renew the screenshots of the documentation, docs/images/, from a finished run.

    python docs/screenshots.py results/demo

Writes `status.svg`, the page of `make status`, and `report.png`, the top of the run's report.html
in a headless Chromium (`apt-get install chromium`).
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

IMAGES = Path(__file__).resolve().parent / "images"
sys.path.insert(0, str(IMAGES.parents[1] / "scripts"))

from aerie.watching.page import PAGE_WIDTH, draw  # noqa: E402
from aerie.watching.status import gather  # noqa: E402

MOST_BYTES = 300_000  # of one image
WINDOW = (1100, 1400)  # pixels of the report that are shown


def save_status(folder: Path, image: Path) -> None:
    console = Console(
        record=True, width=PAGE_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(draw(gather(folder)))
    svg = console.export_svg(title="make status", theme=DIMMED_MONOKAI)
    # Rich names a web font; without it the picture loads nothing, and any monospaced font will do.
    image.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def save_report(page: Path, image: Path, browser: str) -> None:
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--window-size={WINDOW[0]},{WINDOW[1]}",
                "--virtual-time-budget=10000",  # ms, for the plots to be drawn
                f"--screenshot={image}",
                page.resolve().as_uri(),
            ],
            check=True,
            timeout=120,
            stderr=subprocess.DEVNULL,  # messages about a desktop that is not there
        )
    # A palette makes the file a third of its size; the page has few colours.
    with Image.open(image) as picture:
        palette = picture.convert("RGB").quantize(128)
    palette.save(image, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run, results/NAME")
    parser.add_argument("--browser", default="chromium", help="program (default: chromium)")
    args = parser.parse_args()
    run = args.run.resolve()
    os.chdir(run.parents[1])  # so that the page names results/NAME, as it does for the user
    IMAGES.mkdir(exist_ok=True)
    save_status(run.relative_to(Path.cwd()), IMAGES / "status.svg")
    save_report(run / "report.html", IMAGES / "report.png", args.browser)
    large = [p.name for p in sorted(IMAGES.iterdir()) if p.stat().st_size > MOST_BYTES]
    if large:
        sys.exit(f"{', '.join(large)}: larger than {MOST_BYTES:,} bytes; show less of the page")


if __name__ == "__main__":
    main()
