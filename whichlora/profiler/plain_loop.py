"""A few optimizer steps of a loop that a script writes out, timed one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from whichlora.errors import MeasurementError
from whichlora.methods import get_method
from whichlora.profiler.finetune import (
    collator,
    own_optimizer,
    random_rows,
    steps_of,
    watch_moments,
)
from whichlora.profiler.meter import Meter
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.run import AUTOCAST_PRECISIONS, RunConfig
from whichlora.trainers import get_trainer

_HEADS = ("hf", "raw")


def measure_loop(
    model: Any,
    run: RunConfig,
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """As `finetune.measure_finetune`, of the loop that the body of this function spells out.

    `outputs` and `loss` are local variables, as in a script: what they hold lives until the next
    step gives them another value, or until the step is done where it is a function of its own.

    Raises:
        MeasurementError: a loss head that is not the model's own, nor that of the loop.
    """
    if run.loss_head not in _HEADS:
        raise MeasurementError(
            f"loss_head: {run.loss_head} is not in the plain loop; profile {' or '.join(_HEADS)}"
        )
    # two are counted: what a step leaves behind is in the second alone
    steps = steps_of(meter, seq_lens, num_counted=2)
    lengths = [step.seq_len for step in steps]
    counted = [number for number, step in enumerate(steps) if step.is_counted]
    watch_moments(model, meter)
    # where it is on, the outputs hold keys and values, too
    model.config.use_cache = bool(run.trainer_option("use_cache"))
    _enable_checkpointing(model, run)
    optimizer = own_optimizer(model, run) or _optimizer(model, run)
    device = next(model.parameters()).device
    scaler = torch.amp.GradScaler(device.type, enabled=run.precision == "fp16" and meter.is_cuda)
    is_function = get_trainer(run.trainer).outputs_held(run) == "until_step_ends"
    rows, collate = iter(random_rows(model.config, run, lengths)), collator(model.config, run)
    told = get_method(run.method).after_update
    step_s: list[float] = []
    warm_up_s = 0.0
    end_s = meter.now()
    for number, step in enumerate(steps):
        tell(step.what)
        if number in counted[:1]:
            outputs = loss = None  # a profiler does not see the release of what was there before
            meter.start_extra_run()
        for _ in range(run.gradient_accumulation_steps):
            if is_function:
                outputs = loss = None  # its variables went when it returned
            meter.enter("layer_forward")
            batch = collate([next(rows) for _ in range(run.batch_size)])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with _autocast(run, device.type):
                if LOSS_HEADS[run.loss_head].is_outside:
                    del batch["labels"]
                    outputs = model(**batch)
                    loss = outputs.logits.mean()
                else:
                    outputs = model(**batch)
                    loss = outputs.loss
            scaler.scale(loss / run.gradient_accumulation_steps).backward()
        meter.enter("optimizer_step")
        scaler.step(optimizer)
        scaler.update()
        if told:
            attrgetter(told)(model)(number)
        optimizer.zero_grad()
        meter.enter("")
        now = meter.now()
        if number == 0:
            warm_up_s = now - end_s
        elif number in counted[-1:]:
            meter.stop_extra_run()
            now = meter.now()  # reading the profile takes a while
        elif step.is_timed:
            step_s.append(now - end_s)
            if is_done(step_s):
                break
        end_s = now
    timed = {"step_s": step_s, "batch_seq_len": list(seq_lens[: len(step_s)])}
    return timed | {"warm_up_s": warm_up_s} | meter.peaks()


def _autocast(run: RunConfig, device_type: str) -> AbstractContextManager[Any]:
    if run.precision not in AUTOCAST_PRECISIONS:
        return nullcontext()
    dtype = torch.float16 if run.precision == "fp16" else torch.bfloat16
    context: AbstractContextManager[Any] = torch.autocast(device_type, dtype=dtype)
    return context


def _enable_checkpointing(model: Any, run: RunConfig) -> None:
    if run.gradient_checkpointing:
        kind = {} if run.use_reentrant is None else {"use_reentrant": run.use_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)


def _optimizer(model: Any, run: RunConfig) -> Any:
    """The class that the Trainer makes of the name, over one group of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, optim=run.trainer_optim, report_to=[])
        made, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    return made([p for p in model.parameters() if p.requires_grad], **options)
