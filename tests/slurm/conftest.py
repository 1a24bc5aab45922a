"""Real clusters for a test session."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench import Bench
from cluster import Cluster, Node, Site, missing

NODES = (
    Node("h0", "gpu:h100:2", "H100-80GB,ib"),
    Node("a0", "gpu:a100:4", "A100-80GB,ib"),
    Node("big", "gpu:v100:2", "V100-32GB,rack1", partition="old"),
    Node("small", "gpu:v100:2", "V100-16GB,rack2", partition="old"),
    Node("l0", "gpu:4", "L40S"),
    Node("m0", "gpu:1g.10gb:6", "A100,mig"),
    Node("c0", partition="cpu"),
)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Short: the path of a Unix socket has at most 108 characters."""
    with tempfile.TemporaryDirectory(prefix="wl") as name:
        yield Path(name)


def _site(folder: Path, *, accounting: bool) -> Iterator[Site]:
    reason = missing(accounting=accounting)
    if reason:
        pytest.skip(f"no Slurm to test with: {reason}")
    site = Site(folder, accounting=accounting)
    yield site
    site.stop()


@pytest.fixture(scope="session")
def plain_site(folder: Path) -> Iterator[Site]:
    yield from _site(folder / "p", accounting=False)


@pytest.fixture(scope="session")
def accounted_site(folder: Path) -> Iterator[Site]:
    yield from _site(folder / "a", accounting=True)


@pytest.fixture(scope="session")
def plain(plain_site: Site, folder: Path) -> Iterator[Cluster]:
    """Many kinds of nodes, short arrays, and nobody who remembers a job."""
    cluster = Cluster(plain_site, folder / "one", NODES, extra="MaxArraySize=4")
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def accounted(accounted_site: Site, folder: Path) -> Iterator[Cluster]:
    """One kind of node, accounting, and a partition whose jobs give way."""
    cluster = Cluster(
        accounted_site,
        folder / "two",
        [Node("h0", "gpu:h100:1", "H100-80GB")],
        extra="PreemptType=preempt/partition_prio\nPreemptMode=CANCEL\n"
        "PartitionName=spare Nodes=h0 PriorityTier=1 PreemptMode=CANCEL DefaultTime=5\n"
        "PartitionName=urgent Nodes=h0 PriorityTier=9 PreemptMode=OFF DefaultTime=5",
    )
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def second(accounted_site: Site, accounted: Cluster, folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(
        accounted_site,
        folder / "three",
        [Node("a0", "gpu:a100:2", "A100-80GB")],
        name="second",
    )
    yield cluster
    cluster.stop()


@pytest.fixture
def bench(folder: Path, request: pytest.FixtureRequest) -> Callable[[Cluster], Bench]:
    def make(cluster: Cluster) -> Bench:
        return Bench(Path(tempfile.mkdtemp(dir=folder)), cluster)

    return make
