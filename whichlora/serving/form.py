"""In which form the model that a candidate trains is served, and so judged in stage 1."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from whichlora.methods import get_method, with_defaults
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import ADAPTER_SETTINGS, FP32_PRECISIONS, Quant, RunConfig, Serve

ServeAs: TypeAlias = Serve | Quant

_OF_BASE = ("quant", "compute_dtype")  # under an unmerged adapter
# What the candidates of one form differ in.
_SHAPE = ("batch_size", "seq_len", "prompt_len", "max_new_tokens", "attn")


def serving_run(inference: RunConfig, trained: RunConfig, serve: ServeAs | None) -> RunConfig:
    """`inference` of the model that `trained` makes, in the form in which it is served.

    Args:
        serve: with its adapter unmerged, merged, or merged and quantised that way; None: as the
            method says.
    """
    method = get_method(trained.method)
    chosen = serve or method.serve
    if chosen == "as-trained" and not method.trains_base:
        adapter = {name: getattr(trained, name) for name in (*ADAPTER_SETTINGS, *_OF_BASE)}
        return replace(inference, model=trained.model, serve="as-trained", **adapter)
    quant = inference.quant
    if chosen != "as-trained" and chosen != "merged":
        quant = chosen
    return replace(inference, model=trained.model, serve="merged", quant=quant)


def with_text_alone(inference: RunConfig, model: ModelSpec) -> RunConfig:
    """`inference` of a model whose files are those of its text: the engine is told so."""
    engine = get_engine(inference.serving)
    alone = engine.text_options(engine.libraries(inference), model)
    options = {**dict(inference.serving_options), **alone}
    return replace(inference, serving_options=tuple(sorted(options.items())))


@lru_cache(maxsize=1024)  # a large plan asks for each form of each of its groups
def serving_form(inference: RunConfig) -> RunConfig:
    """What all shapes of `inference` have in common: equal for what is served in one form."""
    any_shape = RunConfig(model=inference.model)
    shape = {name: getattr(any_shape, name) for name in _SHAPE}
    return replace(with_defaults(inference), **shape)


def form_in_words(form: RunConfig) -> str:
    """How weights and adapter are stored; of an inference, its defaults filled in."""
    width = "32-bit" if form.precision in FP32_PRECISIONS else "16-bit"
    stored = width if (form.quant or "none") == "none" else str(form.quant)
    option = get_engine(form.serving).stored_by
    stored = str(dict(form.serving_options).get(option, stored))
    if form.serve == "as-trained":
        return f"{stored} + {form.method} r={form.r}"
    return f"merged {stored}"
