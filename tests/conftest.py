"""What every test needs: no network, and nothing that this user measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# how long an example takes says more about the machine than about the code
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("WHICHLORA_CALIBRATION", str(folder))
        yield
