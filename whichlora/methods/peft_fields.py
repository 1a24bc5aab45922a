"""Fields of a PEFT config that say what a run says: stated once, to write a config and read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whichlora.methods.base import adapted_modules, read_options, stated_options
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFields:
    """Fields of one config class.

    Args:
        r, alpha, dropout: its names for those settings of a run; empty where it has none.
        options: the method's own settings, which have its names.
        plain: fields that are not modelled, and the values that mean so.
    """

    r: str = ""
    alpha: str = ""
    dropout: str = ""
    options: tuple[Option, ...] = ()
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def config(self, run: RunConfig) -> dict[str, Any]:
        """Keyword arguments of the class, as `Method.peft_config` has them."""
        values = (self.r, run.r), (self.alpha, run.lora_alpha), (self.dropout, run.lora_dropout)
        named = {name: value for name, value in values if name}
        return named | stated_options(run, self.options) | adapted_modules(run)

    def read(self, config: Any) -> dict[str, Any]:
        """The settings of a run that a config means.

        Raises:
            ConfigError: one of `plain` has another value.
        """
        settings = dict(read_options(config, self.options, plain=self.plain))
        if self.r:
            settings["r"] = getattr(config, self.r)
        if self.alpha:
            settings["lora_alpha"] = max(1, round(getattr(config, self.alpha)))
        if self.dropout:
            settings["lora_dropout"] = float(getattr(config, self.dropout))
        return settings
