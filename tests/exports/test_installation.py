"""Where another machine installs WhichLoRA from: where this one did."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from whichlora.exports import installation as module
from whichlora.exports.installation import Installation, installation, installed_from


class Metadata:
    """What `importlib.metadata` says of a package."""

    version = "1.2.3"

    def __init__(self, origin: dict[str, object] | None = None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


def found(origin: dict[str, object] | None = None) -> Installation:
    return installed_from(Metadata(origin), "profile")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)


def test_a_release_is_installed_in_the_same_version() -> None:
    assert found() == Installation(command="pip install 'whichlora[profile]==1.2.3'")


def test_an_index_of_ones_own_holds_there_too_but_never_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://pypi.example.org/simple")
    assert shlex.split(found().command)[2:4] == ["--index-url", "https://pypi.example.org/simple"]
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:secret@pypi.example.org/simple")
    assert "secret" not in found().command


def test_a_commit_is_installed_from_its_repository() -> None:
    origin = {
        "url": "https://github.com/whichlora/whichlora",
        "vcs_info": {"vcs": "git", "commit_id": "0123abcd"},
    }
    address = "git+https://github.com/whichlora/whichlora@0123abcd"
    assert shlex.split(found(origin).command)[2] == f"whichlora[profile] @ {address}"


def test_a_wheel_of_the_web_is_named() -> None:
    origin = {"url": "https://example.org/whichlora-1.2.3-py3-none-any.whl", "archive_info": {}}
    assert shlex.split(found(origin).command)[2].endswith("@ " + str(origin["url"]))


@pytest.mark.parametrize("name", ["whichlora-1.2.3-py3-none-any.whl", "my wheel's.whl"])
def test_a_wheel_of_this_machine_goes_along(tmp_path: Path, name: str) -> None:
    wheel = tmp_path / name
    wheel.write_bytes(b"")
    install = found({"url": wheel.as_uri(), "archive_info": {}})
    assert install.uploads == {f"~/{name}": str(wheel)}
    assert words(install, home=tmp_path) == ["pip", "install", f"{wheel}[profile]"]


@pytest.mark.parametrize("editable", [True, False])
def test_a_checkout_goes_along(tmp_path: Path, editable: bool) -> None:
    install = found({"url": tmp_path.as_uri(), "dir_info": {"editable": editable}})
    assert install.uploads == {"~/whichlora-source": str(tmp_path)}
    there = Path("/home/cloud")
    assert words(install, home=there) == ["pip", "install", f"{there}/whichlora-source[profile]"]


def test_a_checkout_that_is_gone_is_the_release_of_its_version() -> None:
    assert "==1.2.3" in found({"url": "file:///not/there/any/more", "dir_info": {}}).command


def test_what_runs_from_a_checkout_is_that_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whichlora").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "whichlora/exports/installation.py"))
    assert installation("profile").uploads == {"~/whichlora-source": str(tmp_path)}


def words(install: Installation, *, home: Path) -> list[str]:
    """The command as a shell on the other machine reads it."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {install.command}"],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
