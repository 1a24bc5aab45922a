"""Paths of the data folders: in a wheel, in a checkout, or the user's own."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def data_folder(name: str) -> Path:
    """The folder `models_db`, `calibration` or `costs` that came with this installation.

    Raises:
        FileNotFoundError: the installation is broken (neither wheel data nor checkout).
    """
    for folder in (_PACKAGE / "data" / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}: not found beside {_PACKAGE}; reinstall whichlora")


def user_calibration_folder() -> Path:
    """Folder of this user's own measurements: `$WHICHLORA_CALIBRATION`, or the XDG data folder."""
    return _user_folder("WHICHLORA_CALIBRATION", "calibration")


def user_models_folder() -> Path:
    """Folder of the models that this user added: `$WHICHLORA_MODELS`, or the XDG data folder."""
    return _user_folder("WHICHLORA_MODELS", "models_db")


def _user_folder(variable: str, name: str) -> Path:
    chosen = os.environ.get(variable)
    if chosen:
        return Path(os.path.expanduser(chosen))
    data_home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.path.expanduser(data_home)) / "whichlora" / name


def cache_folder() -> Path:
    """Folder of what was downloaded and can be again: the XDG cache folder."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache_home)) / "whichlora"
