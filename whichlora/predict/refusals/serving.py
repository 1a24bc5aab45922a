"""What is refused of an inference, and of an engine that serves it."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.methods import Method
from whichlora.serving import list_engines
from whichlora.serving.base import Engine, Served
from whichlora.serving.scheduler import MOST_CLIENTS
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.backends import backend_of
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import TRANSFORMERS, USUAL_SPREAD, RunConfig
from whichlora.tasks import Task

DYNAMIC = "dynamic"  # the cache of a run that names none


def check_form(run: RunConfig, method: Method) -> None:
    """Refuse a form in which the method's model can't be served, or is not predicted."""
    if run.serve == "merged" and not (method.merges or method.trains_base):
        raise ConfigError(
            f"serve: what {method.name} trains can't be merged into weights; use as-trained"
        )
    if run.serve == "as-trained" and method.copies_table:
        raise ConfigError(
            f"serve: {method.name} copies the token table in every forward, which is not "
            "predicted; use merged"
        )


def check_scoring(run: RunConfig, task: Task) -> None:
    """Refuse what is there for the writing of texts beside a model that only reads them."""
    for setting, usual in (("serving", TRANSFORMERS), ("kv_cache", DYNAMIC)):
        if getattr(run, setting) != usual:
            raise ConfigError(
                f"{setting}: {getattr(run, setting)} is for models that write texts, and task "
                f"{task.name} has one that reads them; leave {setting} out"
            )


def check_serving(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, method: Method, engine: Engine
) -> None:
    """Refuse an engine beside what it does not read."""
    has_pool = run.phase == "inference" and engine.start is not None
    if run.request_rate is not None and not has_pool:
        raise ConfigError(
            "request_rate: is of an engine that serves; give phase inference and serving vllm, or "
            "leave it out"
        )
    if run.length_spread != USUAL_SPREAD and not has_pool:
        raise ConfigError(
            "length_spread: is of an engine that serves; give phase inference and serving vllm, or "
            "leave it out"
        )
    if run.phase == "finetune":
        if run.has_engine:
            raise ConfigError(f"serving: {run.serving} is of inference; give phase inference")
        return
    if run.has_engine and model.streams is not None:
        raise ConfigError(
            f"serving: {engine.name} is not predicted for {model.name}, whose stream has "
            f"{model.streams.num_states} states; leave serving out"
        )
    if run.kv_cache in ("vllm", "paged") and model.chooses_keys:
        raise ConfigError(
            f"kv_cache: {run.kv_cache} is not predicted for {model.name}, whose indexers have "
            "keys of their own; use dynamic or static"
        )
    if has_pool:
        if run.kv_cache != DYNAMIC:
            raise ConfigError(
                f"kv_cache: {run.kv_cache} is a cache of transformers; leave it out beside serving "
                f"{engine.name}, which has its own"
            )
        if run.batch_size > MOST_CLIENTS:
            raise ConfigError(
                f"concurrency: at most {MOST_CLIENTS} clients are simulated, got {run.batch_size}; "
                "give fewer, or request_rate in its place"
            )
        for card in gpu.beside or (gpu,):
            if card.kind not in engine.device_kinds:
                raise ConfigError(
                    f"serving: {engine.name} is predicted for {_predicted_for(engine)}, not "
                    f"{card.key}{_engine_for(card)}"
                )
            _check_card(card, engine)
    on_linears = method.find_targets is None
    if run.serve == "as-trained" and not on_linears and run.has_engine:
        instead = "serve merged" if method.merges else f"serving {TRANSFORMERS}"
        raise ConfigError(
            f"serving: {engine.name} serves adapters of linear layers, not what {method.name} "
            f"trains; use {instead}"
        )


def check_engine(served: Served) -> None:
    """Refuse what the engine refuses."""
    served.engine.check_flags(served)
    served.engine.check_nodes(served.run)
    served.engine.check(served)


def _predicted_for(engine: Engine) -> str:
    """The kinds of device that an engine is predicted for."""
    *others, last = (backend_of(kind).called for kind in engine.device_kinds)
    return f"{', '.join(others)} and {last}" if others else last


def _engine_for(card: GpuSpec) -> str:
    """Which engine is predicted for it, as an end of a sentence; nothing where none is."""
    names = [
        each.name
        for each in list_engines().values()
        if each.start is not None and card.kind in each.device_kinds
    ]
    return f"; use {' or '.join(names)}" if names else ""


def _check_card(gpu: GpuSpec, engine: Engine) -> None:
    """Refuse a card that is older than an engine's kernels."""
    capability = gpu.compute_capability if gpu.kind == "cuda" else None
    if capability is not None and float(capability) < engine.least_capability:
        raise ConfigError(
            f"serving: {engine.name} does not run on {gpu.key}: it needs compute capability "
            f"{engine.least_capability} or newer; leave serving out"
        )
