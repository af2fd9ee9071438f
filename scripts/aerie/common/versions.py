"""Version constants: raise one when the same inputs would give other results.

Each is one of its rule's `params`, and part of the key under which the store keeps the results, so
raising it makes them anew. This module imports nothing: the rules read it on every `snakemake -n`.
"""

VERIFIER_VERSION = 1
"""Raised when the checkpoint made from a GGUF file would come out different."""

TEMPLATE_VERSION = 1
"""Part of the fingerprint: raised when the same conversation gives other tokens or another mask."""

SELF_PROMPTS_VERSION = 1
"""Raised when the same settings would give other attempts at a prompt."""

CORPUS_VERSION = 1
"""Raised when the same sources and settings would give other records."""

RESPONSES_VERSION = 1
"""Raised when the same prompts and settings would be answered differently."""

SAMPLES_VERSION = 1
"""Raised when the same conversations and settings would give other samples or shards."""

VOCABULARY_VERSION = 1
"""Raised when the same samples would give another map."""

SHARD_VERSION = 2
"""Raised when the same samples would be stored differently or must be extracted again."""

TRAINING_VERSION = 2
"""Raised when the same shards and settings would give another drafter."""

EVALUATION_VERSION = 1
"""Raised when the same drafter and prompts would be measured differently."""

REPORT_VERSION = 3
"""Raised when the same results would be shown differently."""
