"""Where this WhichLoRA was installed from, so that another machine can install the same."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from whichlora import __version__

PACKAGE = "whichlora"
_NO_CREDENTIALS = re.compile(r"https?://[^@\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """How another machine installs this package.

    Args:
        command: a line of shell.
        uploads: folders and files of this machine that the command needs, by their path there.
    """

    command: str
    uploads: Mapping[str, str] = field(default_factory=dict)


def installation(extra: str) -> Installation:
    """How to install the running WhichLoRA, with `extra`.

    A checkout or a wheel of this machine is uploaded; a release, a commit or a URL is named.
    `$PIP_INDEX_URL` is passed on, unless it has a password.
    """
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return _from_this_machine(checkout, extra)
    try:
        return installed_from(distribution(PACKAGE), extra)
    except PackageNotFoundError:
        return _from_index(__version__, extra)


def installed_from(metadata: Distribution, extra: str) -> Installation:
    """The installation that the metadata describe (PEP 610)."""
    origin: dict[str, Any] = json.loads(metadata.read_text("direct_url.json") or "{}")
    address = str(origin.get("url", ""))
    if address.startswith("file:"):
        path = Path(unquote(urlsplit(address).path))
        if path.exists():
            return _from_this_machine(path, extra)
    elif "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return _from_address(f"{vcs['vcs']}+{address}@{vcs['commit_id']}", extra)
    elif address:
        return _from_address(address, extra)
    return _from_index(metadata.version, extra)


def _from_this_machine(path: Path, extra: str) -> Installation:
    there = f"~/{path.name if path.is_file() else f'{PACKAGE}-source'}"
    # the shell expands ~ only outside quotes
    command = f"pip install ~/{shlex.quote(there[2:] + f'[{extra}]')}"
    return Installation(command=command, uploads={there: str(path)})


def _from_address(address: str, extra: str) -> Installation:
    return Installation(command=f"pip install {shlex.quote(f'{PACKAGE}[{extra}] @ {address}')}")


def _from_index(version: str, extra: str) -> Installation:
    index = os.environ.get("PIP_INDEX_URL", "")
    option = f"--index-url {shlex.quote(index)} " if _NO_CREDENTIALS.fullmatch(index) else ""
    return Installation(
        command=f"pip install {option}{shlex.quote(f'{PACKAGE}[{extra}]=={version}')}"
    )
