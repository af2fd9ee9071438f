from aerie.evaluation.results import Speed, SpeedSettings, Speedup, Timing


def test_the_file_has_the_keys_without_and_with(tmp_path):
    timing = Timing(
        concurrency=1,
        prompts=2,
        generated_tokens=10,
        seconds=2.0,
        tokens_per_second=5.0,
        time_per_output_token_s=0.2,
    )
    settings = SpeedSettings(
        num_speculative_tokens=3,
        prompts=2,
        max_tokens=16,
        max_length=128,
        concurrency=[1],
        temperature=0.0,
        engine={},
    )
    speed = Speed(
        without=[timing],
        with_=[timing],
        speedup=[Speedup(concurrency=1, ratio=1.0)],
        settings=settings,
        machine={},
    )
    assert list(speed.as_json()) == ["without", "with", "speedup", "settings", "machine"]
    speed.write(tmp_path / "speed.json")
    assert Speed.read(tmp_path / "speed.json") == speed
