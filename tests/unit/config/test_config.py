import pytest
import yaml

from aerie.common.errors import InputError
from aerie.config import Config, check_paths, describe_config, load_config, read_config
from support.paths import ROOT


def test_demo_configuration_is_valid():
    assert load_config(yaml.safe_load((ROOT / "config/config.yaml").read_text())).run == "demo"


def test_exponent_without_a_point_is_a_number():
    # YAML 1.1 reads 1e-4 as text.
    values = yaml.safe_load("drafters: {a: {learning_rate: 1e-4}}")
    assert load_config(values).drafters["a"].learning_rate == 1e-4


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"corpsu": {}}, "corpsu: unknown key; did you mean 'corpus'"),
        (
            {"drafters": {"a": {"learning_rat": 1}}},
            "drafters.a.learning_rat: unknown key; did you mean 'learning_rate'",
        ),
        (
            {"corpus": {"sources": [{"path": "x", "limti": 3}]}},
            "corpus.sources.0.limti: unknown key; did you mean 'limit'",
        ),
        ({"run": 202302}, "run: found 202302"),
        ({"run": "../up"}, "run: found '../up'"),
        ({"hidden_states": {"aux_layer_ids": [3, 3]}}, "sorted and distinct"),
        (
            {"hidden_states": {"layer_ids": [1]}},
            "hidden_states.layer_ids: renamed to hidden_states.aux_layer_ids",
        ),
        ({"evaluation": {"prompt_sets": {"heldout": "x"}}}, "heldout: this name is taken"),
        ({"generation": {"temperature": -1}}, "generation.temperature: found -1"),
        ({"drafters": {}}, "drafters: found {}"),
        ({"engine": None}, "engine: found None"),
    ],
)
def test_wrong_value_is_reported_with_its_key(values, expected):
    with pytest.raises(InputError) as error:
        load_config(values)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"drafters": {"a": {"learning_rate": "fast"}}},
            "drafters.a.learning_rate: found 'fast'; it should be a valid number",
        ),
        (
            {"drafters": {"a": {"vocabulary": "fulll"}}},
            "drafters.a.vocabulary: found 'fulll'; it should be a valid integer or 'full'",
        ),
    ],
)
def test_wrong_type_is_reported_once(values, expected):
    with pytest.raises(InputError) as error:
        load_config(values)
    assert str(error.value).splitlines()[1:] == [f"  {expected}"]


def test_all_faults_are_reported_together():
    with pytest.raises(InputError) as error:
        load_config({"engin": {}, "generation": {"max_tokens": 0}})
    assert "engin:" in str(error.value)
    assert "generation.max_tokens" in str(error.value)


def test_null_text_from_the_command_line_is_null():
    # snakemake --config 'corpus={limit: null}' arrives as text.
    assert load_config({"corpus": {"limit": "null"}}).corpus.limit is None


def test_null_removes_a_table_entry():
    over = {"drafters": {"base": None, "mine": {}}, "evaluation": {"prompt_sets": {"b": None}}}
    found = load_config(over)
    assert list(found.drafters) == ["mine"]
    assert found.evaluation.prompt_sets == {}


def test_readme_example_resets_the_demo_limits(tmp_path):
    text = (ROOT / "README.md").read_text()
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.split("```yaml\n")[1].split("```")[0])
    found = load_config(read_config([mine]))
    assert list(found.drafters) == ["small", "full"]
    assert not found.engine.enforce_eager
    defaults = Config()
    assert found.generation.max_tokens == defaults.generation.max_tokens
    assert found.samples.max_length == defaults.samples.max_length
    assert found.evaluation.max_tokens == defaults.evaluation.max_tokens
    assert found.evaluation.speed_prompts == defaults.evaluation.speed_prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n", "expected a table"), ("a: [", "not readable as YAML"), (None, "No such file")],
)
def test_unreadable_configuration_is_named(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=rf"mine\.yaml.*{message}"):
        read_config([path])


def test_missing_files_are_reported_with_their_keys(tmp_path):
    there = tmp_path / "quiz.jsonl"
    there.write_text("{}")
    config = load_config(
        {
            "evaluation": {"prompt_sets": {"quiz": str(there), "exam": "gone.jsonl"}},
            "drafters": {"a": {"from_checkpoint": "old/model"}, "b": {}},
        }
    )
    with pytest.raises(InputError) as error:
        check_paths(config)
    assert str(error.value).splitlines()[1:] == [
        "  evaluation.prompt_sets.exam: gone.jsonl: no such file",
        "  drafters.a.from_checkpoint: old/model: no such folder",
    ]


def test_every_key_has_a_description():
    def sections(model):
        for name, field in model.model_fields.items():
            assert (
                field.description
                or issubclass(type(field.default), type(model))
                or (isinstance(field.annotation, type))
            ), f"{model.__name__}.{name} has no description"

    sections(Config)


def test_readme_tables_are_current():
    text = (ROOT / "config/README.md").read_text()
    assert describe_config() in text, "run `python scripts/describe_config.py`"


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("s3://bucket/store", "which a bucket cannot do"),
        ("my store", "no blanks"),
        ("~/store", "no ~"),
        ("", "no blanks"),
    ],
)
def test_the_store_is_a_folder(store, words):
    with pytest.raises(InputError, match=f"store: found {store!r}.*{words}"):
        load_config({"store": store})
