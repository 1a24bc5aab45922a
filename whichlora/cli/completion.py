"""`whichlora completion`, and what the shells are told about models, accelerators and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import get_args

import click
from click.shell_completion import CompletionItem, get_completion_class

from whichlora.spec import run as specs

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_WHICHLORA_COMPLETE"
_HINTS = {
    "bash": 'add to ~/.bashrc: eval "$(whichlora completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(whichlora completion zsh)"',
    "fish": "write to ~/.config/fish/completions/whichlora.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> None:
    """Print what makes SHELL complete commands and values.

    bash: add eval "$(whichlora completion bash)" to ~/.bashrc; zsh: the same in ~/.zshrc;
    fish: write it to ~/.config/fish/completions/whichlora.fish.

    \b
    Example:
      whichlora completion bash
    """
    script = get_completion_class(shell)
    assert script is not None
    root = ctx.find_root().command
    click.echo(f"# whichlora: {_HINTS[shell]}")
    click.echo(script(root, {}, "whichlora", _VARIABLE).source())


def add_completion(group: click.Group) -> None:
    """Give every parameter of every command below `group` the names that it takes."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            add_completion(command)
        for param in command.params:
            names = _NAMES.get(param.name or "")
            if names is not None:
                param.shell_complete = _completer(names)  # type: ignore[method-assign, assignment]


def with_completion(option: click.Option, names: Callable[[], Iterable[str]]) -> click.Option:
    """`option`, which completes the last of `names` with commas."""
    option.shell_complete = _completer(names)  # type: ignore[method-assign, assignment]
    return option


def _completer(
    names: Callable[[], Iterable[str]],
) -> Callable[[click.Context, str], list[CompletionItem]]:
    """Completes the last word of a list with commas, in any case."""

    def complete(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(f"{before}{comma}{name}")
            for name in names()
            if name.lower().startswith(last.lower())
        ]

    return complete


def _models() -> list[str]:
    """From the file names alone: no file is read."""
    from whichlora.store.paths import data_folder

    stems = (path.stem for path in data_folder("models_db").glob("*--*.json"))
    return sorted(stem.replace("--", "/", 1) for stem in stems)


def _gpus() -> list[str]:
    from whichlora.store.paths import data_folder, user_calibration_folder

    roots = (data_folder("calibration"), user_calibration_folder())
    keys = {path.parent.name for root in roots for path in root.glob("*/gpu.json")}
    return ["auto", "cpu", *sorted(keys)]


def _methods() -> Iterable[str]:
    from whichlora.methods import list_methods

    return list_methods()


def _tasks() -> Iterable[str]:
    from whichlora.tasks import list_tasks

    return list_tasks()


def _trainers() -> Iterable[str]:
    from whichlora.trainers import list_trainers

    return list_trainers()


def _words(choice: object) -> Callable[[], Iterable[str]]:
    return lambda: get_args(choice)


_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "model": _models,
    "models": _models,
    "listed": _models,
    "pattern": _models,
    "source": _models,
    "gpu": _gpus,
    "method": _methods,
    "phase": _words(specs.Phase),
    "precision": _words(specs.Precision),
    "bias": _words(specs.Bias),
    "base_dtype": _words(specs.BaseDtype),
    "adapter_dtype": _words(specs.AdapterDtype),
    "compute_dtype": _words(specs.ComputeDtype),
    "optimizer": _words(specs.Optimizer),
    "attn": _words(specs.AttentionKernel),
    "padding": _words(specs.Padding),
    "loss_head": _words(specs.LossHead),
    "task": _tasks,
    "trainer": _trainers,
    "quant": _words(specs.Quant),
    "kv_cache": _words(specs.KvCache),
    "cache_backend": _words(specs.CacheBackend),
}
