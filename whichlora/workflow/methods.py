"""Every fine-tuning method on one model: what it trains, and what it takes against LoRA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.methods import get_method, list_methods
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import list_engines
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import TRANSFORMERS, RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

COMMON_MODEL = "meta-llama/Llama-3.1-8B"
COMMON_GPU = "a100-sxm-80gb"
_LORA = "lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """What one method trains on a model, and takes of a GPU against LoRA.

    Args:
        options: names of its own settings.
        peak_share, step_share: of LoRA's peak and step; None where LoRA's is not known.
        merges: its update becomes part of the weights.
        quantised: a 4-bit base may be under it.
        engines: who serves its adapter unmerged.
        refusal: why it does not run on this model; then no number is there.
    """

    name: str
    summary: str
    options: tuple[str, ...]
    merges: bool
    num_trainable_params: int | None = None
    peak_bytes: int | None = None
    peak_share: float | None = None
    step_share: float | None = None
    quantised: bool = False
    engines: tuple[str, ...] = ()
    refusal: str = ""


def method_rows(
    model: str = COMMON_MODEL,
    gpu: str = COMMON_GPU,
    *,
    calibration_dir: Path | None = None,
) -> list[MethodRow]:
    """One row for each method with the usual settings, in the order of registration.

    Raises:
        ConfigError: an unknown model or accelerator, or LoRA itself does not run.
    """
    spec, device = load_model(model), find_target(gpu)
    plain = RunConfig(model=spec.name, gradient_checkpointing=None)
    calibration = load_calibration(device, calibration_dir)
    base = predict(spec, replace(plain, method=_LORA), device, calibration)
    rows = []
    for name, method in list_methods().items():
        unfilled = MethodRow(
            name=name,
            summary=method.summary,
            options=tuple(option.name for option in method.options),
            merges=method.merges,
        )
        try:
            prediction = predict(spec, replace(plain, method=name), device, calibration)
        except ConfigError as error:
            rows.append(replace(unfilled, refusal=str(error)))
            continue
        rows.append(_filled(unfilled, prediction, base, spec, device))
    return rows


def _filled(
    row: MethodRow, prediction: Prediction, base: Prediction, model: ModelSpec, gpu: GpuSpec
) -> MethodRow:
    peak, of_lora = (each.memory.device_used_bytes for each in (prediction, base))
    step_share: float | None = None
    times = [each.time.step_s for each in (prediction, base)]
    if times[0] and times[1]:
        step_share = times[0] / times[1]
    return replace(
        row,
        num_trainable_params=prediction.num_trainable_params,
        peak_bytes=peak,
        peak_share=peak / of_lora,
        step_share=step_share,
        quantised=_trains_on_4_bit(model, row.name, gpu),
        engines=tuple(name for name in list_engines() if _serves(model, row.name, name, gpu)),
    )


def _trains_on_4_bit(model: ModelSpec, method: str, gpu: GpuSpec) -> bool:
    run = RunConfig(model=model.name, method=method, quant="nf4-dq", gradient_checkpointing=None)
    return _is_accepted(model, run, gpu)


def _serves(model: ModelSpec, method: str, engine: str, gpu: GpuSpec) -> bool:
    if get_method(method).trains_base:
        return False
    quant = "none" if engine != TRANSFORMERS else get_method(method).base_quant
    run = RunConfig(
        model=model.name,
        phase="inference",
        method=method,
        serving=engine,
        serve="as-trained",
        quant=quant,
    )
    return _is_accepted(model, run, gpu)


def _is_accepted(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> bool:
    try:
        resolve(model, run, gpu)
    except ConfigError:
        return False
    return True
