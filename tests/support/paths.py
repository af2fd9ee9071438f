"""Where the project under test lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SHARED = ROOT.parent / "shared" / "data"
