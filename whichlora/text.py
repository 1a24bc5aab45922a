"""Text of a user on its way into a file that something else reads: code, YAML, a shell script."""

from __future__ import annotations

import json

from whichlora.errors import ConfigError


def require_printable(setting: str, text: str) -> str:
    """`text`, if every character of it can be seen: no line ends, controls or bidi overrides.

    Raises:
        ConfigError: it is no text, is blank, or has such a character.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{setting}: must be text, got {type(text).__name__}")
    if not text.strip():
        raise ConfigError(f"{setting}: is blank; give a name")
    if not text.isprintable():
        hidden = next(character for character in text if not character.isprintable())
        raise ConfigError(
            f"{setting}: {text!a} holds the character U+{ord(hidden):04X}, which can't be "
            "seen; rename it"
        )
    return text


def quoted(text: str) -> str:
    """`text` in double quotes, as Python and YAML 1.2 both read it back; all of it can be seen."""
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}"
        for character in json.dumps(text, ensure_ascii=False)
    )
