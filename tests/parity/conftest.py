"""Trainings of OLMo's that several files of tests go on from, each made once a session."""
import pytest


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    from olmo_runs import LATER, start  # not every test here has OLMo
    return start(tmp_path_factory, "plain", 2, last=LATER)


@pytest.fixture(scope="session")
def dropout(tmp_path_factory):
    from olmo_runs import start
    return start(tmp_path_factory, "dropout", 2, dropout=0.1)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """Two copies of the model, each on two ranks."""
    from olmo_runs import start
    return start(tmp_path_factory, "hybrid", 4, hybrid=True)
