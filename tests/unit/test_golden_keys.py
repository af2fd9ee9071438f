"""Keys under which the store keeps results, pinned: a changed value makes every user pay again.

The values were computed before the library was divided into packages. Change one only together
with its version constant (`aerie/common/versions.py`).
"""

from aerie.common.files import digest
from aerie.config import Drafter, Engine, SelfPrompts
from aerie.corpus.cleaning import duplicate_key, prompt_hash
from aerie.drafter.train import drafter_key
from aerie.evaluation.acceptance import acceptance_key
from aerie.evaluation.results import AcceptanceSettings, SpeedSettings
from aerie.evaluation.speed import speed_key
from aerie.generation.answers import Sampling
from aerie.generation.self_prompts import attempt_seed, attempts_key
from aerie.states.convention import Convention
from aerie.states.ids import group_records, sample_key, shard_id

VERIFIER = "f" * 32


def test_answers():
    assert Sampling(0.0, 1.0, 128, 512, 0).key(VERIFIER) == "111ecd0bd3f48466"
    assert Sampling(0.7, 0.95, 256, 2048, 3).key(VERIFIER) == "374642972894fe40"
    endpoint = Sampling(0.0, 1.0, 128, 512, 0, True, "served")
    assert endpoint.key(VERIFIER) == "d675de06ade9c642"


def test_hidden_states():
    def key(format: str, last_state: str) -> str:
        return Convention(VERIFIER, (2, 15, 27, 30), 576, format, last_state, "t" * 32).key

    assert key("lossless", "all") == "1bea7e845dff3f2f"
    assert key("lossless", "supervised") == "ac92eeb57f781b7c"
    assert key("raw", "all") == "e0503cd5e63f7223"
    assert key("raw", "supervised") == "8b5d99cbe62ba10d"
    assert key("fp8", "all") == "caa73ed13e11c370"
    assert key("fp8", "supervised") == "2cc648e5bd4f4ab1"


def test_shards():
    assert sample_key([1, 2, 300]) == "652bf76d47c335aec861be506537d938"
    masked = sample_key([1, 2, 300], [False, True, True])
    assert masked == "d696414f4aed4b1d6d24620c9bbfc775"
    shard = shard_id([sample_key([1, 2, 300]), sample_key([4])])
    assert shard == "936f4c45c978c3fc6945f6e6b611726c"
    groups = group_records([digest(i) for i in range(600)], 64)
    assert [len(group) for group in groups] == [187, 199, 182, 32]


def test_self_prompts():
    assert attempts_key(SelfPrompts(number=5), VERIFIER) == "eafc0b4fd075b0c3"
    assert attempt_seed(0, 7) == 1653557092


def test_records():
    identity = digest([{"role": "user", "content": "Hi"}], [])
    assert identity == "7c22a6785a97e2e665fe5f0cbe1b9319"
    turns = [
        {"role": "user", "content": " Hi  There "},
        {"role": "assistant", "content": "yes"},
    ]
    record = {"id": identity, "messages": turns}
    assert prompt_hash(record) == 8817058090339020468
    assert duplicate_key(record).hex() == "a19460b5dea8c7b54661308831c774be"


def test_drafters(tmp_path):
    (tmp_path / "samples.parquet").write_bytes(b"samples")
    (tmp_path / "t2d.npy").write_bytes(b"t2d")
    (tmp_path / "d2t.npy").write_bytes(b"d2t")
    shards = [("train", "s1", ["a", "b"]), ("heldout", "s0", ["c"])]

    def key(drafter: Drafter, maps: bool) -> str:
        samples, vocabulary = tmp_path / "samples.parquet", tmp_path if maps else None
        return drafter_key(drafter, VERIFIER, "c" * 16, shards, samples, vocabulary)

    assert key(Drafter(), True) == "8c2e608a76035b6b40e8785c485d430f"
    assert key(Drafter(), False) == "f1b2195248867ba871ab0696ba9081dd"
    two = Drafter(gpus=2, loader_workers=3)
    assert key(two, True) == "c274c441caa3b9b1c693b367abe4a1df"
    assert key(two, False) == "11188cbeab3a521d60b9b594e81eabfd"


def test_measurements():
    weights = ["a" * 32, "b" * 32]
    common = {"num_speculative_tokens": 3, "max_tokens": 128, "max_length": 512, "temperature": 0.0}
    common["engine"] = Engine().model_dump()
    sets = {"heldout": [[1, 2, 3]], "benchmark": [[4]]}
    acceptance = acceptance_key(
        VERIFIER, weights, AcceptanceSettings(**common, max_prompts=80), sets
    )
    assert acceptance == "966fb7a4648980c73afaa4f20a262e6f"
    settings = SpeedSettings(**common, prompts=2, concurrency=[1])
    speed = speed_key("node", VERIFIER, weights, settings, [[1, 2, 3], [4]])
    assert speed == "a37deb4dc68951d1ccc2d9f0093b0dda"


def test_a_checkpoint_made_from_a_gguf_file():
    assert digest("gguf", 1, "d" * 32) == "dee88f4839d96ed714fded38c846bdf9"
