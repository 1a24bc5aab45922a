"""A few calls of the real `model.generate`, with the time of each token."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
)

from whichlora.errors import MeasurementError
from whichlora.profiler.images import has_fields, prompt_fields
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig

_IMPLEMENTATIONS = {"dynamic": None, "static": "static", "quantized": "quantized"}
_BACKENDS = {"quanto": ("optimum", "optimum-quanto"), "hqq": ("hqq", "hqq")}  # module, package


@torch.no_grad()  # type: ignore[untyped-decorator]
def measure_inference(
    model: Any,
    run: RunConfig,
    meter: Meter,
    num_batches: int,
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time `num_batches` generations after a warm-up; one that has none runs its forward only.

    The warm-up has the full length, since a static cache is compiled for it. A device without
    memory counters generates once more under the profiler, after bitsandbytes has repacked 4-bit
    weights for its CPU kernels, which it does in the first forward.

    No generation is cut: its length belongs to the peak of the cache and to the mean time of a
    token. But its tokens are many timings, so that one generation may settle the run.

    Args:
        is_done: of the times of the generations so far, whether the run ends; without it every
            generation is made.
        tell: takes the current stage, in words.

    Raises:
        MeasurementError: a serving engine that is not part of transformers, or a quantiser that
            is not installed.
    """
    if run.kv_cache == "vllm":
        raise MeasurementError(
            "kv_cache: vllm can't be profiled; profile dynamic or static instead"
        )
    _check_backend(run)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    shape = (run.batch_size, run.prompt_len)
    input_ids = torch.randint(vocab_size, shape, generator=generator).to(model.device)
    fields: dict[str, torch.Tensor] = {}
    if has_fields(model.config, run):
        fields = prompt_fields(model.config, run, input_ids)
        input_ids = fields.pop("input_ids", input_ids)
    generate: Callable[[], dict[str, float]]
    if not model.can_generate():
        generate = _Forward(model, meter, input_ids)
    elif run.kv_cache == "paged":
        generate = _PagedGeneration(model, run, meter, input_ids)
    else:
        generate = _Generation(model, run, meter, input_ids, fields)

    tell("warming up")
    generate()
    timings: list[dict[str, float]] = []
    while len(timings) < num_batches:
        tell(f"in generation {len(timings) + 1} of {num_batches}")
        timings.append(generate())
        if is_done([timing["generate_s"] for timing in timings]):
            break
    if meter.needs_extra_run:
        tell("counting memory")
        meter.extra_run(generate)
    return {
        field: [timing[field] for timing in timings if field in timing]
        for field in ("generate_s", "prefill_s", "decode_s_per_token")
    } | meter.peaks()


class _Forward:
    """One pass of a model without a decoder: all of it is prefill."""

    def __init__(self, model: Any, meter: Meter, input_ids: torch.Tensor) -> None:
        self._model, self._meter, self._input_ids = model, meter, input_ids
        self._mask = torch.ones_like(input_ids)
        text = model.config.get_text_config()
        if text.pad_token_id is None:  # `GenericForSequenceClassification` scores no batch without
            text.pad_token_id = 0
        # transformers 5.23 `TextClassificationPipeline._forward` turns the cache of a decoder off
        keeps = getattr(text, "use_cache", False)
        self._options = {"use_cache": False} if keeps else {}

    def __call__(self) -> dict[str, float]:
        start_s = self._meter.now()
        self._model(input_ids=self._input_ids, attention_mask=self._mask, **self._options)
        elapsed_s = self._meter.now() - start_s
        return {"generate_s": elapsed_s, "prefill_s": elapsed_s}


class _Generation:
    """Greedy generation of exactly `max_new_tokens` for every sequence."""

    def __init__(
        self,
        model: Any,
        run: RunConfig,
        meter: Meter,
        input_ids: torch.Tensor,
        fields: dict[str, torch.Tensor],
    ) -> None:
        self._model, self._meter = model, meter
        # of images or sound; a model that hears has no other prompt than the decoder's
        if "decoder_input_ids" in fields:
            self._fields = fields
            # of one clip; Whisper's own function calls it for each part of a longer record
            unwrapped = getattr(model, "get_base_model", lambda: model)()
            self._generate = partial(GenerationMixin.generate, unwrapped)
        else:
            mask = torch.ones_like(input_ids)
            self._fields = {"inputs": input_ids, "attention_mask": mask, **fields}
            self._generate = model.generate
        self._clock = _TokenClock(meter)
        # `generate` takes missing arguments from this config, so it is set here.
        model.generation_config = _generation_config(model, run)

    def __call__(self) -> dict[str, float]:
        self._clock.token_s.clear()
        self._meter.enter("prefill")
        start_s = self._meter.now()
        self._generate(logits_processor=LogitsProcessorList([self._clock]), **self._fields)
        end_s = self._meter.now()
        first_s, *later_s = self._clock.token_s
        timing = {"generate_s": end_s - start_s, "prefill_s": first_s - start_s}
        if later_s:
            timing["decode_s_per_token"] = (later_s[-1] - first_s) / len(later_s)
        return timing


class _PagedGeneration:
    """Continuous batching over a paged cache; it reports no time of single tokens."""

    def __init__(self, model: Any, run: RunConfig, meter: Meter, input_ids: torch.Tensor) -> None:
        self._model, self._meter, self._prompts = model, meter, input_ids.tolist()
        self._config = _generation_config(model, run)
        self._config.eos_token_id = -1  # never produced: the scheduler wants a number

    def __call__(self) -> dict[str, float]:
        start_s = self._meter.now()
        outputs = self._model.generate_batch(
            inputs=self._prompts, generation_config=self._config, progress_bar=False
        )
        if len(outputs) < len(self._prompts):  # it logs the errors of its thread, and goes on
            raise MeasurementError("kv_cache: paged generation failed; see the log of the profile")
        return {"generate_s": self._meter.now() - start_s}


class _TokenClock(LogitsProcessor):  # type: ignore[misc]
    """Records when the logits of each token exist; streamers only take a batch of one."""

    def __init__(self, meter: Meter) -> None:
        self.token_s: list[float] = []
        self._meter = meter

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.token_s.append(self._meter.now())
        self._meter.enter("decode")
        return scores


def _generation_config(model: Any, run: RunConfig) -> GenerationConfig:
    config = GenerationConfig.from_model_config(model.config)
    config.update(
        max_new_tokens=run.max_new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,  # nothing ends early
        forced_eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        cache_implementation=_IMPLEMENTATIONS.get(run.kv_cache),
        cache_config=_cache_config(run),
    )
    return config


def _check_backend(run: RunConfig) -> None:
    if run.cache_format is None or run.cache_format.backend not in _BACKENDS:
        return
    module, package = _BACKENDS[run.cache_format.backend]
    if importlib.util.find_spec(module) is None:
        raise MeasurementError(
            f"cache_backend: {run.cache_backend} needs {package}, which is not installed: "
            f"pip install {package}, or use fp8"
        )


def _cache_config(run: RunConfig) -> dict[str, Any] | None:
    """Arguments of `QuantizedCache`; its axes stay at their default of 0."""
    stored = run.cache_format
    if stored is None:
        return None
    if stored.group_size is None:  # fp8 has no settings
        return {"backend": stored.backend}
    return {
        "backend": stored.backend,
        "nbits": stored.nbits,
        "q_group_size": stored.group_size,
        "residual_length": stored.residual_length,
    }
