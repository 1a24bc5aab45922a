"""What `--override-tensor` of llama.cpp leaves on the host: tensors by patterns of their names.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36): common/arg.cpp parse_tensor_buffer_overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from whichlora.errors import ConfigError
from whichlora.serving.llama_cpp_split import MOVED_NAMES, Moved
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.name_pattern import search

OVERRIDES = "override_tensor"
_ACCEPTED = "give exps=CPU, another pattern of whole experts or MLPs, n_cpu_moe or n_gpu_layers"


def overridden(
    model: ModelSpec, names: Iterable[tuple[int | None, str]], text: str
) -> tuple[Moved, ...]:
    """What of each layer lies on the host, of a file whose matrices have such layers and `names`.

    Kind: exact, of matrices; norms and biases beside them are not told apart.
    Source: llama.cpp 0c1e570 src/llama-model-loader.cpp:1239, which searches in whole names.

    Raises:
        ConfigError: one line, of patterns that are not predicted.
    """
    patterns = [_pattern(text, each) for each in text.split(",")]

    def is_matched(layer: int | None, name: str) -> bool:
        prefix = "" if layer is None else f"blk.{layer}."
        return any(found(f"{prefix}{name}.weight") for found in patterns)

    moved = []
    by_layer: dict[int | None, list[str]] = {}
    for layer, name in names:
        by_layer.setdefault(layer, []).append(name)
    for layer, of_layer in by_layer.items():
        matched = {name for name in of_layer if is_matched(layer, name)}
        if not matched:
            continue
        kind = _kind(matched, of_layer)
        if layer is None or kind is None:
            place = "outside of layers" if layer is None else f"of layer {layer}"
            raise ConfigError(
                f"{OVERRIDES}: {text!r} moves {', '.join(sorted(matched))} {place}, which is not "
                f"predicted; {_ACCEPTED}"
            )
        moved.append(Moved(layer=layer, kind=kind))
    if not moved:
        raise ConfigError(
            f"{OVERRIDES}: {text!r} matches no matrix of a layer of {model.name}; {_ACCEPTED}"
        )
    return tuple(moved)


def _pattern(text: str, override: str) -> Callable[[str], bool]:
    """Of one `pattern=CPU`."""
    pattern, _, place = override.rpartition("=")
    if not pattern or place != "CPU":
        raise ConfigError(
            f"{OVERRIDES}: {text!r} is no pattern=CPU; other places are not predicted; {_ACCEPTED}"
        )
    try:
        return search(pattern)
    except ValueError as error:
        raise ConfigError(f"{OVERRIDES}: the pattern {pattern!r}: {error}; {_ACCEPTED}") from None


def _kind(matched: set[str], of_layer: Iterable[str]) -> str | None:
    """Of `MOVED_NAMES`, which has just those that are matched."""
    for kind, prefixes in MOVED_NAMES.items():
        if matched == {name for name in of_layer if name.startswith(prefixes)}:
            return kind
    return None
