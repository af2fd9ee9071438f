"""The configuration: keys, types, units, defaults, and the checks that need no model.

One module for each section. `config/README.md` and `config/schema.json` are generated from them.
"""

from aerie.config.corpus import Corpus, Source
from aerie.config.drafter import Drafter
from aerie.config.engine import Engine
from aerie.config.evaluation import Evaluation
from aerie.config.generation import Generation
from aerie.config.hidden_states import HiddenStates
from aerie.config.loading import check_paths, load_config, read_config
from aerie.config.notify import Notify
from aerie.config.reference import describe_config
from aerie.config.root import Config
from aerie.config.samples import Samples
from aerie.config.self_prompts import SelfPrompts
from aerie.config.verifier import Verifier
from aerie.config.watch import StageWatch, Watch

__all__ = [
    "Config",
    "Corpus",
    "Drafter",
    "Engine",
    "Evaluation",
    "Generation",
    "HiddenStates",
    "Notify",
    "Samples",
    "SelfPrompts",
    "Source",
    "StageWatch",
    "Verifier",
    "Watch",
    "check_paths",
    "describe_config",
    "load_config",
    "read_config",
]
