"""Pull and push against real clients: s3fs with moto's server, huggingface_hub with a small hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import GPU, a_database, a_record, ids
from hub_server import hub_server

pytestmark = pytest.mark.oracle


def in_process(database: Path, *args: str, **environment: str) -> str:
    """Both clients read their settings when they are imported, so each call is a process."""
    done = subprocess.run(
        [sys.executable, "-m", "whichlora", "calibrate", *args],
        env=os.environ | environment | {"WHICHLORA_CALIBRATION": str(database)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def exchange(tmp_path: Path, url: str, **environment: str) -> None:
    """Two users push what they have and pull what the other has."""
    mine = a_database(tmp_path / "mine", [a_record(n) for n in range(3)])
    yours = a_database(tmp_path / "yours", [a_record(n) for n in range(2, 5)])
    assert "3 new records" in in_process(mine, "push", url, **environment)
    assert "2 new records" in in_process(yours, "push", url, **environment)
    assert "0 new records" in in_process(mine, "push", url, **environment)
    assert f"{GPU}: 2 new records" in in_process(mine, "pull", url, **environment)
    assert f"{GPU}: 2 new records" in in_process(yours, "pull", url, **environment)
    assert ids(mine) == ids(yours) == [f"run-{n}" for n in range(5)]


@pytest.fixture
def s3() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def test_two_users_share_a_bucket(tmp_path: Path, s3: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": s3}
    keys["AWS_DEFAULT_REGION"] = "us-east-1"
    code = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    subprocess.run([sys.executable, "-c", code], env=os.environ | keys, check=True, timeout=60)
    exchange(tmp_path, "s3://bucket/calibration", **keys)


def test_two_users_share_a_dataset_of_the_hub(tmp_path: Path) -> None:
    with hub_server() as (address, files):
        hub = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test"}
        hub |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        exchange(tmp_path, "hf://datasets/o/r", **hub)
    assert len(files) == 2
    assert all(name.startswith(f"{GPU}/measurements/") for name in files)
