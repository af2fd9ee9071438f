"""Where the project's own files are."""

from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]
PROJECT = SCRIPTS.parent
CONFIG = PROJECT / "config"
DEFAULT_CONFIG = CONFIG / "config.yaml"
LOG_PATTERNS = CONFIG / "log_patterns.yaml"
