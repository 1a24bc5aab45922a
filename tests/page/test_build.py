"""The files of the site."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from whichlora.cli import main
from whichlora.errors import ConfigError, DataFileError
from whichlora.html.marks import PART_COLOURS
from whichlora.page import pyodide
from whichlora.page.build import build, bundle, site_files


@pytest.fixture(scope="module")
def site() -> dict[str, bytes]:
    return site_files(has_snapshot=False)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with the names of Pyodide's files."""
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in pyodide.FILES:
        (folder / name).write_text("{}" if name == pyodide.LOCK else name)
    return folder


def packed(folder: Path, names: tuple[str, ...] = pyodide.FILES) -> bytes:
    """`folder` as npm packs a package."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as package:
        for name in names:
            package.add(folder / name, f"package/{name}")
    return data.getvalue()


def test_the_command_writes_a_site_from_a_folder_or_a_package(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Node.js
    package = tmp_path / "pyodide.tgz"
    package.write_bytes(packed(stand_in))
    for source in (stand_in, package):
        target = tmp_path / f"from-{source.name}"
        done = CliRunner().invoke(main, ["page", str(target), "--pyodide", str(source)])
        assert done.exit_code == 0, done.output
        assert f"page: {target / 'index.html'}" in done.output
        assert "if Node.js is on the path" in done.output
        names = {path.name for path in target.glob("[!.]*")}
        assert names == {
            "index.html", "page.css", "page.js", "theme.js", "worker.js", "whichlora.zip",
            *pyodide.FILES,
        }  # fmt: skip


def test_what_is_pinned_is_downloaded_once_and_checked(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []

    def opened(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(packed(stand_in))

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    with pytest.raises(ConfigError, match=r"is not release 3.* \(its SHA-512 differs\)"):
        pyodide.pyodide_files()
    assert not pyodide.cached().exists()
    monkeypatch.setattr(pyodide, "SHA512", hashlib.sha512(packed(stand_in)).hexdigest())
    assert pyodide.pyodide_files()["pyodide.mjs"] == b"pyodide.mjs"
    assert pyodide.pyodide_files()["pyodide.mjs"] == b"pyodide.mjs"
    assert asked == [pyodide.URL, pyodide.URL]  # refused, then kept
    pyodide.cached().write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="remove it and try again"):
        pyodide.pyodide_files()


def test_without_network_the_error_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refused(url: str, timeout: float) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", refused)
    done = CliRunner().invoke(main, ["page", str(tmp_path / "site")])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert "can't be downloaded (Name or service not known)" in done.output
    assert "--pyodide FILE" in done.output
    assert not (tmp_path / "site").exists()


def test_a_node_that_cannot_run_pyodide_is_refused_with_its_last_words(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "node"
    said = ("first", "SyntaxError: await", "Node.js v1")
    lines = [f"echo '{line}' >&2" for line in said]
    program.write_text("\n".join(["#!/bin/sh", *lines, "exit 1"]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match=r"node: .*can't run Pyodide \(SyntaxError: await\)"):
        build(tmp_path / "site", stand_in)
    assert not (tmp_path / "site").exists()


def test_a_source_without_pyodide_is_refused(tmp_path: Path, stand_in: Path) -> None:
    (stand_in / "python_stdlib.zip").unlink()
    with pytest.raises(DataFileError, match=r"python_stdlib.zip: can't be read"):
        pyodide.pyodide_files(stand_in)
    package = tmp_path / "package.tgz"
    package.write_bytes(packed(stand_in, pyodide.FILES[:2]))
    with pytest.raises(DataFileError, match="is not pyodide as npm packs it"):
        pyodide.pyodide_files(package)
    package.write_bytes(b"no package")
    with pytest.raises(DataFileError, match="is not pyodide as npm packs it"):
        pyodide.pyodide_files(package)


def test_the_page_asks_its_own_host_alone_and_has_no_code_of_its_own(
    site: dict[str, bytes],
) -> None:
    html = site["index.html"].decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert rules["style-src"] == "'self'"
    assert not re.search(r"\son\w+=|style=|<style|javascript:", html)
    for attributes, body in re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL):
        assert "src=" in attributes or ('application/json"' in attributes and body)
    addresses = re.findall(r'(?:src|href)="(https?:[^"]*)"', html)
    assert all(
        address.startswith(("https://pyodide.org", "https://github.com")) for address in addresses
    )
    assert "{{" not in html


def test_no_script_makes_html_of_text(site: dict[str, bytes]) -> None:
    for name in ("page.js", "theme.js", "worker.js"):
        code = site[name].decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", code
        )
        assert not re.search(r"https?://", code)


def test_every_control_has_a_label_and_every_part_its_colour(site: dict[str, bytes]) -> None:
    html, style = site["index.html"].decode(), site["page.css"].decode()
    controls = re.findall(r'<(?:input|select) id="([^"]*)"', html)
    assert len(controls) > 20
    assert set(controls) == set(re.findall(r'<label for="([^"]*)"', html))
    for part, colour in PART_COLOURS.items():
        assert f".part-{part} {{ background: {colour}; }}" in style
    assert style.index("--accent") < style.index(".bytes")


def test_the_bundle_is_the_same_every_time() -> None:
    assert bundle() == bundle()
