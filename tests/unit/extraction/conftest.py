import pytest

from support.lanes import Lane, make_samples


@pytest.fixture
def lane(tmp_path):
    return Lane(tmp_path, make_samples(60))
