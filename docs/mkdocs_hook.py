"""Hook of mkdocs.yml: pages from all over the repository, at the places they have there."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "config/*.md",
    "config/*.yaml",
    "config/*.json",
    "docs/*.md",
    "docs/images/*",
    "results/README.md",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    places = [path.relative_to(ROOT) for pattern in PAGES for path in ROOT.glob(pattern)]
    found = [
        File(str(p), str(ROOT), config.site_dir, config.use_directory_urls) for p in sorted(places)
    ]
    return Files([*found, *(f for f in files if f.src_dir != config.docs_dir)])
