"""The arithmetic of a plan, against published figures."""

import pytest

from aerie.common.errors import InputError
from aerie.common.formatting import GIB
from aerie.config.drafter import Drafter
from aerie.planning import costs, hardware
from aerie.planning.rates import measured_rates
from aerie.planning.shape import parameters, read_shape
from support.models import KIMI
from support.records import lane_manifest, responses_manifest

# config.json of meta-llama/Llama-3.1-8B: 8.03 B parameters.
LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DRAFTER = Drafter(
    vocabulary=32000, num_layers=1, sequence_length=2048, ttt_steps=3, optimizer="muon"
)


def test_raw_states_of_a_61_layer_verifier():
    """4 states × 7,168 × 2 bytes × 17.3 M tokens are 924 GiB."""
    shape = read_shape(KIMI)
    assert shape.layers == 61
    gib = costs.state_bytes(17_300_000, 4, shape.hidden) / GIB
    assert round(gib) == 924


def test_parameters_match_the_model_cards():
    total, active = parameters(read_shape(KIMI))
    assert total == pytest.approx(1.03e12, rel=0.02)
    assert active == pytest.approx(32e9, rel=0.03)
    total, active = parameters(read_shape(LLAMA))
    assert total == pytest.approx(8.03e9, rel=0.005)
    assert active == pytest.approx(7.5e9, rel=0.01)  # without the input embedding


def test_weight_bytes_follow_the_stored_format():
    assert read_shape(KIMI).weight_bytes_each == 1
    assert read_shape(LLAMA).weight_bytes_each == 2
    four = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    assert read_shape({**LLAMA, "quantization_config": four}).weight_bytes_each == 0.5


def test_cache_of_a_token():
    """Llama-3.1-8B: 32 layers × 2 × 8 heads × 128 × 2 bytes = 128 KiB; MLA: 61 × 576 × 2."""
    llama = read_shape(LLAMA)
    assert costs.cache_bytes(llama) == 128 * 1024
    assert costs.cache_bytes(llama, gpus=8) == 16 * 1024
    assert costs.cache_bytes(llama, gpus=16) == 16 * 1024  # 8 heads cannot be divided further
    kimi = read_shape(KIMI)
    assert costs.cache_bytes(kimi, gpus=8) == 61 * 576 * 2
    # Four captured states about double what a token needs.
    assert 1.7 < costs.cache_bytes(kimi, captured=4) / costs.cache_bytes(kimi) < 2.1


def test_terabyte_verifier_needs_two_machines_of_80_gib():
    shape = read_shape(KIMI)
    weights = parameters(shape)[0] * shape.weight_bytes_each
    eight = costs.engine_memory(shape, weights, 8, 4, 8192, 64, 4096)
    sixteen = costs.engine_memory(shape, weights, 16, 4, 8192, 64, 4096)
    assert eight.least > 80 * GIB > sixteen.least


def test_logits_grow_with_the_vocabulary():
    shape = read_shape(KIMI)
    small = costs.training_memory(shape, DRAFTER, 3, 2)
    full = costs.training_memory(shape, DRAFTER.model_copy(update={"vocabulary": "full"}), 3, 2)
    assert full.logits == (3 + 1) * 2048 * 163840 * 6
    assert full.logits / small.logits == pytest.approx(163840 / 32000)
    assert full.peak > small.peak > small.weights


def test_size_of_a_drafter_matches_a_real_one():
    """speculators' drafter for SmolLM2-135M (30 layers, width 576) with 4,000 tokens."""
    shape = read_shape(
        {
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
    )
    p = costs.drafter_parameters(shape, DRAFTER.model_copy(update={"vocabulary": 4000}), 3)
    assert p.head == 4000 * 576
    assert parameters(shape)[0] == pytest.approx(134.5e6, rel=0.01)


def test_configuration_without_sizes_raises():
    with pytest.raises(InputError, match="hidden_size"):
        read_shape({"model_type": "bert"})


def test_time_is_limited_by_compute_or_disk():
    machine = hardware.Hardware("x", 1, 80, 100, 0.5, 0.1, 0.25, 1.0, 2.0, 60.0)
    assert hardware.engine_seconds(machine, 1, (5e13, 1e13), 0) == pytest.approx(2.0)
    assert hardware.engine_seconds(machine, 2, (5e13, 1e13), 0) == pytest.approx(1.0)
    assert hardware.engine_seconds(machine, 1, (5e13, 1e13), 9e9) == pytest.approx(9.0)
    assert hardware.start_seconds(machine, 10e9) == pytest.approx(65.0)
    assert hardware.training_seconds(machine, 1, 2.5e13, 0) == pytest.approx(1.0)


def test_rates_ignore_work_found_in_the_store(tmp_path):
    run = tmp_path / "demo"
    path = run / "responses/manifest.json"
    counts = {"records": 100, "generated_tokens": 8000}
    responses_manifest(**counts, generated=50, seconds=50, load_seconds=10).write(path)
    rates = measured_rates(run, None)
    assert rates["generate_responses"].seconds_each == pytest.approx(40 / 4000)
    assert rates["generate_responses"].source == "demo"
    # Everything was found in the store: it shows no rate.
    responses_manifest(**counts, generated=0, seconds=1).write(path)
    lane_manifest(extracted_tokens=0, seconds=0.1).write(run / "hidden_states/lane-0.json")
    assert measured_rates(run, None) == {}
