"""Fine-tuning methods by name; one small file each, also from other packages.

A package adds its own method with an entry point in the group `whichlora.methods` that loads a
`Method`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import Literal

from whichlora.errors import ConfigError
from whichlora.methods import dora, full, lora, qdora, qlora
from whichlora.methods.base import Method
from whichlora.spec.dtypes import has_master_weights
from whichlora.spec.run import BNB_QUANTS, FP32_PRECISIONS, RunConfig

ENTRY_POINT_GROUP = "whichlora.methods"
WeightDtype = Literal["bfloat16", "float16", "float32"]

BUILT_IN: dict[str, Method] = {
    module.METHOD.name: module.METHOD for module in (full, lora, qlora, dora, qdora)
}


def list_methods() -> dict[str, Method]:
    """Every method by name: the built-in ones, then those of installed packages.

    Raises:
        ConfigError: an entry point that does not load a `Method`, or takes a built-in name.
    """
    methods = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        method = point.load()
        if not isinstance(method, Method):
            raise ConfigError(
                f"entry point {point.value!r}: is not a whichlora.methods.Method; uninstall it"
            )
        if method.name in methods:
            raise ConfigError(
                f"entry point {point.value!r}: method {method.name!r} exists already; rename it"
            )
        methods[method.name] = method
    return methods


def get_method(name: str) -> Method:
    """The method called `name`.

    Raises:
        ConfigError: no such method.
    """
    method = BUILT_IN.get(name)
    if method is None:  # installed packages are asked only now: scanning them takes time
        methods = list_methods()
        if name not in methods:
            raise ConfigError(f"method: {name!r} is not known; accepted are {', '.join(methods)}")
        method = methods[name]
    return method


def with_defaults(run: RunConfig) -> RunConfig:
    """`run` with what its method and its libraries decide filled in.

    The method knows its storage, and how its model is served. Merged weights are stored in 16 bit
    where `quant` does not say otherwise; a model without adapters has nothing to merge.
    PEFT's recipes prepare a bitsandbytes base for training, TRL 1.16 never does.

    Raises:
        ConfigError: no such method.
    """
    method = get_method(run.method)
    training = run.phase == "finetune"
    serve = run.serve or method.serve
    if training or method.trains_base:  # which do not ask
        serve = "merged"
    quant = run.quant
    if quant is None:
        quant = method.base_quant if training or serve == "as-trained" else "none"
    prepare_kbit = run.prepare_kbit
    if prepare_kbit is None:
        prepare_kbit = quant in BNB_QUANTS and run.loss_head != "trl-fused"
    use_reentrant = run.use_reentrant
    if use_reentrant is None:
        use_reentrant = run.versions.checkpoints_reentrant
    return replace(
        run, quant=quant, serve=serve, prepare_kbit=prepare_kbit, use_reentrant=use_reentrant
    )


def weight_dtype(run: RunConfig) -> WeightDtype:
    """Dtype of the weights of `run` that are not quantised.

    Raises:
        ConfigError: no such method.
    """
    trains_base = get_method(run.method).trains_base
    if run.precision in FP32_PRECISIONS or has_master_weights(run, trains_base=trains_base):
        return "float32"
    return "float16" if run.precision == "fp16" else "bfloat16"


__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Method",
    "get_method",
    "list_methods",
    "weight_dtype",
    "with_defaults",
]
