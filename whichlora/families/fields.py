"""A Hugging Face config read with the defaults of its class; every wrong value names its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from whichlora.errors import ConfigError

MAX_LAYERS = 10_000  # the deepest model of the database has 126
MAX_SIZE = 10**9  # of anything else: a thousand times the largest vocabulary
MAX_NUMBER = 1e30  # of a factor or a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One `config.json`.

    Args:
        name: hub id or path, for the messages and for the `ModelSpec`.
        values: the file, verbatim.
        defaults: what transformers assumes for a key that the file leaves out.
        synonyms: other spellings of a key that the config class accepts.
    """

    name: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    synonyms: Mapping[str, tuple[str, ...]]

    def without(self, *keys: str) -> Self:
        """The config without `keys`, which its class does not read."""
        kept = {key: value for key, value in self.values.items() if key not in keys}
        return replace(self, values=kept)

    def get(self, key: str) -> Any:
        """The value of `key` under any of its spellings, else its default, else None.

        A null in the file is a value: `"sliding_window": null` means no window.
        """
        for spelling in (key, *self.synonyms.get(key, ())):
            if spelling in self.values:
                return self.values[spelling]
        return self.defaults.get(key)

    def size(self, key: str, *, fallback: int | None = None) -> int:
        """A count or width of 1 or more.

        Raises:
            ConfigError: missing without a default, or not a whole number of 1 or more.
        """
        value = self.get(key)
        if value is None:
            value = fallback
        if value is None:
            raise ConfigError(f"{self.name}: {key} is missing from the config; add it")
        # Some configs write 4.0; bool is an int in Python and never a size.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.name}: {key} is {value!r}, not a whole number of 1 or more")
        if value > MAX_SIZE:
            raise ConfigError(f"{self.name}: {key} is more than {MAX_SIZE}; correct it")
        return value

    def layers(self, key: str = "num_hidden_layers", *, fallback: int | None = None) -> int:
        """How many layers there are; a number no model has is a typing mistake, not a long wait.

        Raises:
            ConfigError: as `size`, or more than MAX_LAYERS.
        """
        value = self.size(key, fallback=fallback)
        if value > MAX_LAYERS:
            raise ConfigError(f"{self.name}: {key} is {value}, more than {MAX_LAYERS}; correct it")
        return value

    def count(self, key: str) -> int:
        """A number that may be 0; absent is 0 too."""
        return self.size_or_none(key) or 0

    def size_or_none(self, key: str) -> int | None:
        """A size that may be absent; 0 and -1, with which configs say so too, count as absent."""
        value = self.get(key)
        return None if value in (None, 0, -1) else self.size(key)

    def flag(self, key: str) -> bool:
        return bool(self.get(key))

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.name}: {key} is {value!r}, not a text")
        return value

    def number_or_none(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        # compared, since neither NaN nor an integer beyond every float passes that
        if type(value) in (int, float) and -MAX_NUMBER <= value <= MAX_NUMBER:
            return value  # type: ignore[no-any-return]
        raise ConfigError(f"{self.name}: {key} is {value!r}, not a number")

    def probability(self, *keys: str) -> float:
        """The first of `keys` that is set: a share of values to drop; 0 where none is."""
        numbers = (self.number_or_none(key) for key in keys)
        return next((value for value in numbers if value is not None), 0.0)

    def items(self, key: str, *, length: int) -> list[Any] | None:
        """A list with one value per layer, or None.

        Raises:
            ConfigError: not a list, or a list of another length.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise ConfigError(
                f"{self.name}: {key} does not list one value for each of {length} layers"
            )
        return value[:length]

    def indices(self, key: str) -> frozenset[int]:
        """A list of layer numbers, empty when absent."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(x, int) for x in value):
            raise ConfigError(f"{self.name}: {key} is {value!r}, not a list of layer numbers")
        return frozenset(value)

    def part(self, key: str, *, defaults: Mapping[str, Any] | None = None) -> Self:
        """The config nested under `key` (a text or vision tower), empty when absent."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.name}: {key} is {value!r}, not an object")
        return type(self)(name=self.name, values=value, defaults=defaults or {}, synonyms={})

    @property
    def dtype(self) -> str:
        """The dtype the checkpoint is stored in; transformers loads fp32 where nothing is said."""
        value = self.get("dtype") or self.get("torch_dtype") or "float32"
        return str(value).removeprefix("torch.")

    @property
    def rotary_fraction(self) -> float:
        """Part of each head that rotates; its place in the config moved over the years.

        Raises:
            ConfigError: not a number from 0 to 1.
        """
        rope = self.get("rope_parameters")
        nested = isinstance(rope, Mapping) and rope.get("partial_rotary_factor") is not None
        fields = self.part("rope_parameters") if nested else self
        value = fields.number_or_none("partial_rotary_factor")
        if value is None:
            return 1.0
        if not 0.0 <= value <= 1.0:
            raise ConfigError(
                f"{self.name}: partial_rotary_factor is {value!r}, not a number from 0 to 1"
            )
        return value
