from aerie.drafter.checkpoints import list_checkpoints


def test_an_unfinished_checkpoint_is_not_listed(tmp_path):
    (tmp_path / ".writing").mkdir()
    (tmp_path / "step-000000010").mkdir()
    (tmp_path / "step-000000002").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-000000002", "step-000000010"]
