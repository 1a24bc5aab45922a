"""The versions of the libraries that a profile runs, read without importing them."""

from __future__ import annotations

from functools import cache
from importlib import metadata

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel")


def installed_versions() -> dict[str, str]:
    """Version by library, of those that are installed."""
    versions = {name: _version(name) for name in LIBRARIES}
    return {name: version for name, version in versions.items() if version}


@cache  # a search asks after every run, and each answer takes 10 ms
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
