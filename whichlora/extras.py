"""Optional libraries: a feature that needs one says so in one line, before it starts."""

from __future__ import annotations

import importlib.util

from whichlora.errors import ConfigError


def require(asker: str, *modules: str, extra: str, otherwise: str = "") -> None:
    """Refuse the request of `asker` where one of `modules` is not installed.

    Args:
        asker: the setting, command or function that needs them, as the user wrote it.
        extra: of this package, which installs them.
        otherwise: what the user can do instead; empty for nothing.

    Raises:
        ConfigError: a module is missing; the message has the install command.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{asker}: needs {', '.join(missing)}: pip install 'whichlora[{extra}]'"
            + (f", or {otherwise}" if otherwise else "")
        )
