import pytest

from pd_integration.sim.simulation import quiet


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    with quiet():
        yield
