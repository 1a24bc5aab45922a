"""Which matrices of a model get an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec, layers_in_order, parts_of
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.module_paths import LINEAR_PATHS
from whichlora.spec.name_pattern import whole
from whichlora.spec.run import ALL_LINEAR, ATTENTION, DEFAULT_TARGETS

# What PEFT adapts of each type of model where nobody names layers.
# Source: peft 0.21.2 `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`, utils/constants.py.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("bart", "opt", "gptj", "gpt_neo", "llama", "llama4"), ("q_proj", "v_proj")),
    **dict.fromkeys(("mistral", "mixtral", "stablelm", "gemma", "gemma2"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gemma3_text", "qwen2", "qwen3"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bloom", "gpt_neox", "chatglm", "falcon"), ("query_key_value",)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), ("query", "value")),
    "deberta-v2": ("query_proj", "value_proj"),
    "mpt": ("Wqkv",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


def all_linears(model: ModelSpec) -> Iterator[Linear]:
    """The matrices of each distinct layer."""
    return (linear for layer, _ in model.layers() for linear in layer.linears)


def tower_linears(model: ModelSpec) -> tuple[Linear, ...]:
    """The matrices that images pass, `count` of each; none where no image does."""
    return () if model.tower is None else model.tower.linears


def _language_head(model: ModelSpec) -> tuple[Linear, ...]:
    """The matrix that makes logits of the vocabulary; none where a model has another head.

    bitsandbytes leaves it as it is: transformers 5.23 `get_keys_to_not_convert`.
    """
    return () if model.head is None else (replace(model.head, quantisable=False),)


def token_table(model: ModelSpec) -> Linear:
    """The token table as the matrix that PEFT's adapter of it makes: from ids to a row.

    Source: peft 0.21.2 `lora.Embedding.update_layer`: A is [r, rows], B is [width, r].
    """
    table = model.embeddings[0]
    return Linear(
        name=table.name,
        in_features=table.rows,
        out_features=table.width,
        reads="input_ids",
        quantisable=False,
        looked_up=True,
    )


def _taken_by_name(model: ModelSpec) -> tuple[Linear, ...]:
    """What "all-linear" leaves out."""
    return (*_language_head(model), token_table(model))


def linears_around(model: ModelSpec) -> tuple[Linear, ...]:
    """What is outside of the layers and can take an adapter."""
    return (*model.outer_linears, *_taken_by_name(model), *tower_linears(model))


def adapts_head(model: ModelSpec, targets: tuple[str, ...]) -> bool:
    """Whether what makes logits of the vocabulary gets an adapter."""
    return any(head.name in targets for head in _language_head(model))


def adapts_table(model: ModelSpec, targets: tuple[str, ...]) -> bool:
    """Whether the token table gets an adapter."""
    return model.embeddings[0].name in targets


def resolve_targets(
    model: ModelSpec, target_modules: tuple[str, ...], *, modules_only: bool = False
) -> tuple[str, ...]:
    """Leaf names that `target_modules` means for `model`, sorted.

    "all-linear" is every matrix that PEFT adapts, but for the output head and the token table,
    which are adapted where their names are given; "attention" is the projections of the attention
    blocks; "default" is what PEFT adapts where nobody names any.
    Names that no layer has are passed over beside others, as PEFT does (`unmatched_targets`). A
    pattern of whole names begins with "re:".

    Args:
        modules_only: bare parameters, such as those of experts, can get no adapter.

    Raises:
        ConfigError: no name that a layer of the model has, or one that means a part of its layers.
    """
    candidates = _candidates(model, modules_only=modules_only)
    if not candidates:
        raise ConfigError(
            f"target_modules: {model.name} has no linear layer that can be adapted; use method full"
        )
    names: set[str] = set()
    for target in target_modules:
        if target == DEFAULT_TARGETS:
            names |= set(_defaults_of(model))
        elif target == ALL_LINEAR:
            names |= candidates.keys() - {each.name for each in _taken_by_name(model)}
        elif target == ATTENTION:
            names |= _of_attention(model)
        elif target.startswith(PATTERN):
            names |= _of_pattern(model, target.removeprefix(PATTERN), candidates)
        elif found := _named(model, target, candidates):
            _check_parts(target, found, target_modules)
            names.add(found.name)
        elif _is_elsewhere(model, target, candidates):
            raise ConfigError(
                f"target_modules: an adapter of {target!r} is not predicted; leave it out, or "
                "train it as a whole with modules_to_save"
            )
    if not names:
        listed = ", ".join(repr(target) for target in target_modules)
        what = "is no linear layer" if len(target_modules) == 1 else "are no linear layers"
        accepted = {each for linear in candidates.values() for each in linear.asked_as} | {
            linear.name for linear in candidates.values() if not linear.asked_as
        }
        raise ConfigError(
            f"target_modules: {listed} {what} of {model.name}; accepted are "
            f"{', '.join(sorted(accepted))}, all-linear, attention and default"
        )
    return tuple(sorted(names))


def _is_elsewhere(model: ModelSpec, target: str, candidates: Mapping[str, Linear]) -> bool:
    """Whether `target` is a linear module of that type of model, and none that is predicted."""
    paths = (path for path in _paths(model.model_type) if f".{path}".endswith(f".{target}"))
    return any(path.rpartition(".")[2] not in candidates for path in paths)


def unmatched_targets(
    model: ModelSpec, target_modules: tuple[str, ...], *, modules_only: bool = False
) -> tuple[str, ...]:
    """The names among `target_modules` that no layer has.

    Source: peft 0.21.2 `BaseTuner.inject_adapter`, which stops where no name has a match.
    """
    candidates = _candidates(model, modules_only=modules_only)
    keywords = (ALL_LINEAR, ATTENTION, DEFAULT_TARGETS)
    return tuple(
        target
        for target in target_modules
        if target not in keywords
        and not target.startswith(PATTERN)
        and _named(model, target, candidates) is None
    )


def asked_names(model: ModelSpec, targets: tuple[str, ...]) -> tuple[str, ...]:
    """What PEFT is told for the layers `targets`: parameters of experts by their older names."""
    parts = {linear.name: linear.asked_as for linear in all_linears(model) if linear.asked_as}
    names = {name for target in targets for name in parts.get(target, (target,))}
    return tuple(sorted(names))


def _candidates(model: ModelSpec, *, modules_only: bool) -> dict[str, Linear]:
    """Matrices that can get an adapter, one of each name."""
    adaptable = [
        linear for linear in (*all_linears(model), *linears_around(model)) if linear.rank_multiple
    ]
    bare = {linear.name for linear in adaptable if modules_only and not linear.is_module}
    return {linear.name: linear for linear in adaptable if linear.name not in bare}


def _of_attention(model: ModelSpec) -> set[str]:
    return {
        linear.name
        for layer, _ in model.layers()
        for attention in layer.attentions
        for linear in attention.linears
        if linear.rank_multiple
    }


# What is around a matrix in models of transformers, of types that `LINEAR_PATHS` lacks.
_ATTENTION_MODULES = frozenset(
    {"self_attn", "self_attention", "attention", "attn", "self", "attention.self", "linear_attn"}
    | {"encoder_attn", "crossattention", "mamba", "mixer"}
)
_MLP_MODULES = frozenset(
    {"mlp", "feed_forward", "ffn", "shared_expert", "shared_experts", "shared_mlp", "mixer"}
    | {"mlp.shared_expert", "mlp.shared_experts"}
)

PATTERN = "re:"  # how a target begins that PEFT is told as a text: a pattern of whole names


@cache
def _paths(model_type: str) -> tuple[str, ...]:
    """Names of the linear modules of a type, numbers as "{}"; none of a type not known."""
    paths = []
    for line in LINEAR_PATHS.get(model_type, ()):
        parent, _, leaves = line.partition(": ")
        paths += [f"{parent}.{leaf}".lstrip(".") for leaf in leaves.split()]
    return tuple(paths)


def _whole_names(model: ModelSpec, path: str) -> list[str]:
    """`path` as each layer that has it spells it."""
    if "{}" not in path:
        return [path]
    return [
        path.replace("{}", str(number), 1).replace("{}", "0") for number in _numbers_of(model, path)
    ]


def _numbers_of(model: ModelSpec, path: str) -> Sequence[int]:
    """Numbers of the layers that have the matrix at `path`, in its own stack or tower."""
    stack, tower = _stack_of(model, path), model.tower
    if tower is not None and "deepstack_merger_list" in path:
        return range(tower.deep)
    if all(group.shared for group in stack.groups):
        return (0,)
    layers, leaf = layers_in_order(stack), path.rpartition(".")[2]
    having = [
        number
        for number, layer in enumerate(layers)
        if any(linear.name == leaf for linear in layer.linears)
    ]
    return having or range(len(layers))


def _stack_of(model: ModelSpec, path: str) -> ModelSpec:
    """The layers among which `path` is: those of the text, of a tower, or one of two stacks."""
    of_tower = any(word in path for word in ("visual", "vision", "audio_tower"))
    in_encoder = "encoder" in path.split(".")[:2]
    parts = {part.groups[0].stack: part for part in parts_of(model)}
    if model.tower is not None and (of_tower or (in_encoder and model.tower.transcribes)):
        return model.tower.stack
    if len(parts) > 1:
        return parts["encoder" if in_encoder else "decoder"]
    return model


def _of_pattern(model: ModelSpec, text: str, candidates: Mapping[str, Linear]) -> set[str]:
    """Leaf names of the layers whose whole names match a pattern.

    Source: peft 0.21.2 `match_target_against_key`: `re.fullmatch`.

    Raises:
        ConfigError: a pattern that can't be read, or that means a part of the layers of a name.
    """
    try:
        is_match = whole(text)
    except ValueError as error:
        raise ConfigError(
            f"target_modules: the pattern {text!r} can't be read: {error}; name layers"
        ) from None
    paths = _paths(model.model_type)
    if not paths:
        raise ConfigError(
            f"target_modules: the names of a {model.model_type} are not known, which {text!r} is "
            "asked for; name layers"
        )
    places: dict[str, list[bool]] = {}
    for path in paths:
        matches = [is_match(each) for each in _whole_names(model, path)]
        places.setdefault(path.rpartition(".")[2], []).extend(matches)
    names = {leaf for leaf, matches in places.items() if any(matches)}
    for leaf in sorted(names):
        if not all(places[leaf]):
            raise ConfigError(
                f"target_modules: {text!r} is a part of the layers called {leaf!r}, which is not "
                f"predicted; give {leaf!r}, for all of them"
            )
        if leaf not in candidates:
            raise ConfigError(
                f"target_modules: {text!r} asks for an adapter of {leaf!r}, which is not predicted"
            )
    return names


def _named(model: ModelSpec, target: str, candidates: Mapping[str, Linear]) -> Linear | None:
    """The matrices called `target`, or which end so after a dot.

    Source: peft 0.21.2 `check_target_module_exists`, and `_convert_peft_config_moe` for the names
    that parts of a parameter had.

    Raises:
        ConfigError: a module before the dot is one of several around such a matrix.
    """
    parent, _, leaf = target.rpartition(".")
    of_parts = {part: each for each in candidates.values() for part in each.asked_as}
    if leaf in of_parts:
        return of_parts[leaf]
    candidate = candidates.get(leaf)
    if candidate is None or candidate.asked_as:
        return None
    if not parent:
        return candidate
    if any(name.isdecimal() for name in parent.split(".")):
        raise ConfigError(
            f"target_modules: {target!r} is of one layer, which is not predicted; give {leaf!r}, "
            "for every layer"
        )
    if paths := [path for path in _paths(model.model_type) if path.rpartition(".")[2] == leaf]:
        ends = [f".{path}".endswith(f".{target}") for path in paths]
        if any(ends) and not all(ends):
            _refuse_part(target, leaf)
        return candidate if all(ends) else None
    around = _ATTENTION_MODULES if leaf in _of_attention(model) else _MLP_MODULES
    if parent not in around:
        if parent in _ATTENTION_MODULES | _MLP_MODULES:
            return None
        raise ConfigError(
            f"target_modules: {target!r}: whether {parent} is around {leaf} is not known; give "
            f"{leaf!r}"
        )
    places = [
        sum(linear.name == leaf for linear in layer.linears) for layer, _ in model.layers()
    ] + [sum(linear.name == leaf for linear in tower_linears(model)) * 2]
    if max(places) > 1:
        _refuse_part(target, leaf)
    return candidate


def _refuse_part(target: str, leaf: str) -> None:
    raise ConfigError(
        f"target_modules: {target!r} is a part of the layers called {leaf!r}, which is not "
        f"predicted; give {leaf!r}, for all of them"
    )


def _check_parts(target: str, linear: Linear, target_modules: tuple[str, ...]) -> None:
    """Whether all parts of a parameter are asked for, where one is.

    Raises:
        ConfigError: PEFT refuses it.
    """
    if not linear.needs_all:
        return
    leaves = {each.rpartition(".")[2] for each in target_modules}
    missing = [part for part in linear.asked_as if part not in leaves]
    if missing:
        raise ConfigError(
            f"target_modules: PEFT refuses {target!r} without {', '.join(missing)}: it takes them "
            f"for the experts' {linear.name}; give both, or leave both out"
        )


def _defaults_of(model: ModelSpec) -> tuple[str, ...]:
    if model.model_type not in _DEFAULTS:
        raise ConfigError(
            f"target_modules: PEFT has no default for models of type {model.model_type}; name "
            "layers, or give all-linear"
        )
    return _DEFAULTS[model.model_type]


def _outside(model: ModelSpec) -> tuple[str, ...]:
    """The token embedding and the head, which lie outside the layers."""
    head = () if model.head is None else (model.head.name,)
    return (model.embeddings[0].name, *head)


def check_saved_modules(model: ModelSpec, modules_to_save: tuple[str, ...]) -> None:
    """Whether `model` has every module that is to be trained as a whole.

    Raises:
        ConfigError: a name that is neither the token embedding nor the head.
    """
    accepted = _outside(model)
    for name in modules_to_save:
        if name not in accepted:
            raise ConfigError(
                f"modules_to_save: {name!r} is neither the token embedding nor the head of "
                f"{model.name}; accepted are {', '.join(accepted)}"
            )


def adapted(layer: Layer, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """The matrices of `layer` that get an adapter."""
    return tuple(
        linear for linear in layer.linears if linear.rank_multiple and linear.name in targets
    )


def adapted_linears(model: ModelSpec, targets: tuple[str, ...]) -> tuple[tuple[Linear, int], ...]:
    """Every matrix of `model` that gets an adapter, and the number of layers that have it."""
    in_layers = [
        (linear, 1 if group.shared else group.count)
        for group in model.groups
        for linear in adapted(group.layer, targets)
    ]
    around = [
        (linear, 1)
        for linear in linears_around(model)
        if linear.rank_multiple and linear.name in targets
    ]
    return (*in_layers, *around)
