"""Add the config of a model to this user's database, checked against the real module."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.store.hub import load_config
from whichlora.store.models import add_model, is_known_model
from whichlora.text import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModel:
    """What was added.

    Args:
        is_checked: the count of parameters is that of the module of transformers.
    """

    name: str
    model_type: str
    num_params: int
    is_checked: bool
    path: Path


def add(name: str, config_path: Path | None = None) -> AddedModel:
    """Keep the `config.json` of the model called `name`, of the hub or at `config_path`.

    Where torch and transformers are installed, the parameters that the formulas count must be
    those of the module, which is built without weights.

    Raises:
        ConfigError: the database has it, the config is of no known family, or the counts differ.
        DataFileError: a config that is no JSON object, or the disk refused.
    """
    organisation, slash, repository = name.partition("/")
    if not slash or not organisation or not repository or "/" in repository or name[0] in ".~/":
        raise ConfigError(
            f"model: {visible(name)!r} is no hub id; give organisation/name, and a file with "
            "--config"
        )
    if is_known_model(name):
        raise ConfigError(f"model: {name} is in the database already; nothing to add")
    config = load_config(str(config_path or name))
    model = families.build(config, name=name)
    is_checked = all(map(find_spec, ("torch", "transformers", "peft")))
    if is_checked:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its kernels are not needed
        from whichlora.profiler.count import count_parameters

        counted = count_parameters(config)
        if counted != model.num_params:
            raise ConfigError(
                f"model: {name} has {counted} parameters in transformers and {model.num_params} "
                "in the formulas; it was not added: please report it"
            )
    path = add_model(
        model,
        check="module" if is_checked else "none",
        source="config.json" if config_path else f"https://huggingface.co/{name}",
    )
    return AddedModel(
        name=name,
        model_type=model.model_type,
        num_params=model.num_params,
        is_checked=is_checked,
        path=path,
    )
