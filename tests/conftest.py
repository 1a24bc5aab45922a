"""What every test needs: no network, nothing measured or installed here, one core per worker."""

import gc
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# before torch is imported: each worker has a core, and two threads on it are slower than one
os.environ.setdefault("OMP_NUM_THREADS", "1")
# hundreds of tests start a child, which else compiles the package anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest
from fake_profiler import FakeProfiler, pretend_device
from hypothesis import settings

from whichlora.spec import members

# Examples follow from the test alone, so that CI says the same twice; the other profile looks for
# new ones (`--hypothesis-profile random`). How long an example takes says nothing about the code.
settings.register_profile("seeded", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("seeded")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker per usable core for a folder; none for files, which end before workers start."""
    if any(".py" in argument for argument in config.args):
        return 0
    return len(os.sched_getaffinity(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-case", action="store_true", help="run every case, where else a sample runs"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)` run n of its cases, the same each time."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    if config.getoption("every_case") or any("[" in argument for argument in config.args):
        return
    skipped: set[pytest.Item] = set()
    for name, of_test in cases.items():
        (count,) = of_test[0].get_closest_marker("sampled").args
        chosen = random.Random(name).sample(of_test, min(count, len(of_test)))
        skipped.update(set(of_test) - set(chosen))
    config.hook.pytest_deselected(items=[item for item in items if item in skipped])
    items[:] = [item for item in items if item not in skipped]


def pytest_configure(config: pytest.Config) -> None:
    """Hide what installed packages add: a message that names all must not depend on them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(members, "entry_points", lambda group: ())
    config.add_cleanup(patch.undo)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave alone what imports torch where its tests would be deselected: 9 s in every worker."""
    return (
        collection_path.name.endswith("_oracle.py") and "not oracle" in config.option.markexpr
    ) or None


def pytest_collection_finish() -> None:
    """Take the imported libraries, half a million objects, out of every later garbage collection.

    A step of the real Trainer collects three times, and counts the tensors among all objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("WHICHLORA_CALIBRATION", str(folder))
        yield


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects(request: pytest.FixtureRequest) -> None:
    """What earlier modules left is neither collected again nor counted as a live tensor."""
    if request.module.__name__.endswith("_oracle"):
        gc.collect()
    gc.freeze()


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> type[FakeProfiler]:
    """As of `pretend_device`."""
    pretend_device(monkeypatch)
    return FakeProfiler
