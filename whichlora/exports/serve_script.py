"""`serve.sh`: starts the engine that stage 1 judged on the model that `train.py` leaves."""

from __future__ import annotations

from dataclasses import replace

from whichlora.methods import get_method
from whichlora.predict.resolve import ResolvedRun
from whichlora.serving.vllm_towers import has_tower
from whichlora.spec.checkpoint import is_made_before

TRAINED, MERGED, QUANTISED = "./output", "./merged", "./quantised"

_HEAD = """#!/bin/sh
# {model} by {engine}, {form}, as whichlora judged it: \
room for {concurrency} sequences of {context} tokens
set -e
cd "$(dirname "$0")"
"""
# The tokenizer is written last: a stopped merge has none, one before the last training an old one.
_MERGE = """adapter=output/adapter_model.safetensors
if [ ! -f merged/tokenizer_config.json ] || [ $adapter -nt merged/tokenizer_config.json ]; then
  rm -rf merged.partial
  python - <<'END'
from peft import PeftModel
from transformers import {names}

base = {model_class}.from_pretrained({model!r}, dtype={dtype!r})
PeftModel.from_pretrained(base, "output").merge_and_unload().save_pretrained("merged.partial")
{processor}AutoTokenizer.from_pretrained("output").save_pretrained("merged.partial")
END
  rm -rf merged
  mv merged.partial merged
fi
"""
# What the engine reads images with, which a training on texts alone does not write.
_PROCESSOR = 'AutoProcessor.from_pretrained({model!r}).save_pretrained("{folder}")\n'
_COMPLETE = """if [ ! -f output/processor_config.json ] &&
  [ ! -f output/preprocessor_config.json ]; then
  python - <<'END'
from transformers import AutoProcessor, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("output")
{processor}tokenizer.save_pretrained("output")
END
fi
"""
_QUANTISE = """if [ ! -d quantised ] || [ {source}/config.json -nt quantised ]; then
  echo "{source}/ is to be stored as {quant} in quantised/ first" >&2
  exit 1
fi
"""


def serve_script(
    job: ResolvedRun,
    method: str,
    *,
    form: str,
    concurrency: int,
    model_class: str = "AutoModelForCausalLM",
) -> str:
    """The text of `serve.sh`; empty where the engine has no command for it.

    Args:
        job: the inference, as it was judged.
        method: that the model is trained with.
        form: of weights and adapter, in words.
        concurrency: sequences that the GPU has room for.
        model_class: of transformers, that trains the model.
    """
    run, served = job.run, job.served
    quant = run.quant or "none"
    text = _HEAD.format(
        model=job.model.name,
        engine=served.release,
        form=form,
        concurrency=concurrency,
        context=served.context,
    )
    weights = ""  # of the base, by its name
    if run.serve == "merged":
        weights = TRAINED if get_method(method).trains_base else MERGED
        text += _merge(job, model_class) if weights == MERGED else _completed(job)
        if is_made_before(quant):
            text += _QUANTISE.format(quant=quant, source=weights.removeprefix("./"))
            weights = QUANTISED
    placed = replace(served, weights=weights, adapter=TRAINED)
    text += job.engine.prepare(placed)
    command = job.engine.command(placed)
    return f'{text}exec {command} "$@"\n' if command else ""


def _merge(job: ResolvedRun, model_class: str) -> str:
    """The lines that merge the adapter, with what the engine starts the model's tower with."""
    sees = has_tower(job.model)
    return _MERGE.format(
        names=", ".join(sorted({model_class, "AutoTokenizer", *["AutoProcessor"] * sees})),
        model_class=model_class,
        model=job.model.name,
        dtype={"fp16": "float16", "fp32": "float32"}.get(job.dtype, "bfloat16"),
        processor=_PROCESSOR.format(model=job.model.name, folder="merged.partial") * sees,
    )


def _completed(job: ResolvedRun) -> str:
    """The lines that add the processor to a whole model; none where no tower is started."""
    processor = _PROCESSOR.format(model=job.model.name, folder="output")
    return _COMPLETE.format(processor=processor) * has_tower(job.model)
