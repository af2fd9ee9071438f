"""The whole configuration, and the checks across its sections."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from aerie.config.corpus import Corpus
from aerie.config.drafter import Drafter
from aerie.config.engine import Engine
from aerie.config.evaluation import Evaluation
from aerie.config.generation import Generation
from aerie.config.hidden_states import HiddenStates
from aerie.config.notify import Notify
from aerie.config.samples import Samples
from aerie.config.section import Folder, Name, Section
from aerie.config.self_prompts import SelfPrompts
from aerie.config.verifier import Verifier
from aerie.config.watch import Watch


class Config(Section):
    """The whole configuration."""

    run: Name = "demo"
    """Name of the run; its results are in `results/<run>/`."""
    store: Folder = "results/store"
    """Folder of the store, addressed by content and shared by all runs and checkouts: answers,
    hidden states, drafters, measurements. On any file system, with or without `flock`."""
    verifier: Verifier = Verifier()
    corpus: Corpus = Corpus()
    self_prompts: SelfPrompts = SelfPrompts()
    generation: Generation = Generation()
    samples: Samples = Samples()
    hidden_states: HiddenStates = HiddenStates()
    engine: Engine = Engine()
    drafters: Annotated[dict[Name, Drafter], Field(min_length=1)] = {"base": Drafter()}
    """Drafters by name."""
    evaluation: Evaluation = Evaluation()
    watch: Watch = Watch()
    notify: Notify = Notify()

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine; 0 when neither the engine nor any drafter asks for one."""
        gpus = self.engine.tensor_parallel_size
        return gpus if gpus > 1 or any(d.gpus for d in self.drafters.values()) else 0

    @model_validator(mode="before")
    @classmethod
    def _null_removes(cls, data: Any) -> Any:
        """In a configuration laid over another, null removes an entry of a table."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, table in (("drafters", data), ("prompt_sets", data.get("evaluation"))):
            if isinstance(table, dict) and isinstance(table.get(name), dict):
                gone = (None, "null", "~")
                table = {**table, name: {k: v for k, v in table[name].items() if v not in gone}}
                data = table if name == "drafters" else {**data, "evaluation": table}
        return data

    @model_validator(mode="after")
    def _across(self) -> "Config":
        if self.samples.min_supervised_tokens > self.samples.max_length:
            raise ValueError("samples.min_supervised_tokens is larger than samples.max_length")
        if not self.corpus.sources and not self.self_prompts.number:
            raise ValueError(
                "corpus.sources: found []; name at least one, or let the verifier write prompts "
                "itself (self_prompts.number)"
            )
        if self.self_prompts.number and self.generation.mode == "keep":
            raise ValueError(
                "self_prompts.number: prompts that the verifier writes have no answers to keep; "
                "set it to 0 or generation.mode to generate"
            )
        if "heldout" in self.evaluation.prompt_sets:
            raise ValueError(
                "evaluation.prompt_sets.heldout: this name is taken by the held-out prompts"
            )
        return self
