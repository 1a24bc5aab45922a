"""The versions of the libraries that a profile runs, read without importing them."""

from __future__ import annotations

from importlib import metadata

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel")


def installed_versions() -> dict[str, str]:
    """Version by library, of those that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
