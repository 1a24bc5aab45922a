"""A few optimizer steps of the real `transformers.Trainer`, timed one by one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from whichlora.errors import MeasurementError
from whichlora.methods import get_method
from whichlora.profiler.images import has_fields, image_span, with_fields
from whichlora.profiler.meter import Meter
from whichlora.profiler.spread import spreading
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.profile_steps import ProfileStep, profile_steps
from whichlora.spec.run import RunConfig
from whichlora.tasks import Task, task_of
from whichlora.trainers import get_trainer

_IGNORED_LABEL = -100
_SHORTEST_ROW = 0.5  # of the padded length; rows of a padded batch lie between this and 1


def measure_finetune(
    model: Any,
    run: RunConfig,
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time one optimizer step per length in `seq_lens`, after a warm-up at the longest.

    The steps are those of `profile_steps`; the first one is timed on its own. On a device without
    memory counters the second one counts the bytes.

    Args:
        is_done: of the times of the steps so far, whether the run ends; without it every step is
            made.
        tell: takes the current stage, in words.

    Raises:
        MeasurementError: a loss head that can't be profiled.
    """
    own_trainer = LOSS_HEADS[run.loss_head].own_trainer
    if own_trainer:
        raise MeasurementError(
            f"loss_head: {run.loss_head} runs inside {own_trainer}'s own "
            "trainer and can't be profiled; profile hf, liger or raw instead"
        )
    lengths, timer = timed_steps(meter, seq_lens, is_done, tell)
    watch_moments(model, meter)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = _Trainer(
            run=run,
            model=model,
            args=training_arguments(run, meter, output_dir, max_steps=len(lengths)),
            train_dataset=random_rows(model.config, run, lengths),
            data_collator=collator(model.config, run),
            callbacks=[timer, *updating(run)],
            optimizers=(own_optimizer(model, run), None),
        )
        if "fsdp" in spreading(run).training and not trainer.is_fsdp_enabled:
            raise MeasurementError("parallel: accelerate runs no FSDP on a CPU, it takes DDP")
        trainer.train()
    return measured(trainer, timer, meter, seq_lens)


def own_optimizer(model: Any, run: RunConfig) -> Any:
    """The optimizer that the method is; None where the Trainer makes one by its name."""
    maker = get_method(run.method).makes_optimizer
    if not maker:
        return None
    return resolve_name(maker)(model, r=run.r, lora_alpha=run.lora_alpha, lr=1e-4)


class AfterUpdate(TrainerCallback):  # type: ignore[misc]
    """Calls what the method's PEFT model must be told between an update and `zero_grad`."""

    def __init__(self, name: str) -> None:
        self._told = attrgetter(name)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._told(named["model"])(state.global_step)


def updating(run: RunConfig) -> list[TrainerCallback]:
    """The callback that the method of `run` needs, if any."""
    name = get_method(run.method).after_update
    return [AfterUpdate(name)] if name else []


def steps_of(meter: Meter, seq_lens: Sequence[int], *, num_counted: int = 1) -> list[ProfileStep]:
    """The steps that `meter` needs to time each of `seq_lens`.

    Args:
        num_counted: steps under the memory profiler of a device without counters.
    """
    counted = num_counted if meter.needs_extra_run else 0
    return [*profile_steps(seq_lens, num_counted=counted, warms_lengths=meter.warms_lengths)]


def timed_steps(
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool],
    tell: Callable[[str], None],
) -> tuple[list[int], StepTimer]:
    """Length of every step of `steps_of`, and the callback that times those of `seq_lens`."""
    steps = steps_of(meter, seq_lens)
    lengths = [step.seq_len for step in steps]
    return lengths, StepTimer(meter, steps=steps, is_done=is_done, tell=tell)


def measured(
    trainer: Any, timer: StepTimer, meter: Meter, seq_lens: Sequence[int]
) -> dict[str, Any]:
    """The fields of a `Measurement`, once `trainer` has freed what it holds."""
    peaks = meter.peaks()
    trainer.accelerator.free_memory()
    timed = {"step_s": timer.step_s, "batch_seq_len": list(seq_lens[: len(timer.step_s)])}
    return timed | {"warm_up_s": timer.warm_up_s} | peaks


def in_given_order(library_class: Any) -> Any:
    """`library_class` without shuffled rows."""

    class InGivenOrder(library_class):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return InGivenOrder


class _Trainer(in_given_order(Trainer)):  # type: ignore[misc]
    """The Trainer, with batches in the given order and the loss head `raw`.

    `raw` is a loop that asks the model for logits, keeps its outputs, and computes its own loss.
    """

    def __init__(self, *, run: RunConfig, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._raw_loss = LOSS_HEADS[run.loss_head].is_outside
        self._outputs: Any = None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        if not self._raw_loss:
            return super().compute_loss(model, inputs, *args, **keywords)
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        self._outputs = model(**inputs)
        return self._outputs.logits.mean()

    def training_step(self, *args: Any, **keywords: Any) -> Any:
        loss = super().training_step(*args, **keywords)
        self._outputs = None
        return loss


class StepTimer(TrainerCallback):  # type: ignore[misc]
    """Seconds from the end of one optimizer step to the end of the next, fetching included.

    Ends the training once `is_done` says so of the timed steps.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        steps: Sequence[ProfileStep],
        is_done: Callable[[Sequence[float]], bool],
        tell: Callable[[str], None],
    ) -> None:
        self.step_s: list[float] = []
        self.warm_up_s = 0.0
        self._meter = meter
        self._steps = steps
        self._is_done, self._tell = is_done, tell
        self._end_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_s = self._meter.now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = self._steps[state.global_step]  # steps completed so far
        self._tell(step.what)
        if step.is_counted:
            self._meter.start_extra_run()
        self._meter.enter("layer_forward")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.enter("layer_forward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.enter("optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meter.enter("")
        now = self._meter.now()
        step = self._steps[state.global_step - 1]
        if step.is_timed:
            self.step_s.append(now - self._end_s)
            control.should_training_stop |= self._is_done(self.step_s)
        elif state.global_step == 1:
            self.warm_up_s = now - self._end_s
        elif step.is_counted:
            self._meter.stop_extra_run()
            now = self._meter.now()  # reading the profile takes a while
        self._end_s = now


def watch_moments(model: Any, meter: Meter) -> None:
    """Tell `meter` when `model` passes from its layers to the loss, and back through both.

    A fused loss head reads the head's weight without calling its module; then loss and layers
    cannot be told apart in the backward, and both are "backward".
    """
    head = model.get_output_embeddings()
    seen = {"head": False}

    def head_entered(_: Any, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or not args[0].requires_grad:
            return
        seen["head"] = True
        meter.enter("loss_forward")
        args[0].register_hook(lambda _: meter.enter("layer_backward"))

    def model_left(*_: Any) -> None:
        meter.enter("loss_backward" if seen["head"] else "backward")

    if head is not None:
        head.register_forward_pre_hook(head_entered)
    model.register_forward_hook(model_left)


def training_arguments(
    run: RunConfig, meter: Meter, output_dir: str, *, max_steps: int
) -> TrainingArguments:
    """Those of the Trainer. While they are alive, transformers loads as their `deepspeed` says."""
    return TrainingArguments(
        **training_options(run, meter, output_dir, max_steps=max_steps),
        **spreading(run).training,
        remove_unused_columns=False,
    )


def training_options(
    run: RunConfig, meter: Meter, output_dir: str, *, max_steps: int
) -> dict[str, Any]:
    """Arguments of `TrainingArguments`, or of a class that adds to them."""
    arguments = {field.name for field in dataclasses.fields(TrainingArguments)}
    # Renamed in the course of transformers 5; version 6 drops the old name.
    new, old = "activation_checkpointing", "gradient_checkpointing"
    checkpointing = new if new in arguments else old
    options: dict[str, Any] = {checkpointing: run.gradient_checkpointing}
    if run.use_reentrant is not None:
        options[f"{checkpointing}_kwargs"] = {"use_reentrant": run.use_reentrant}
    return options | {
        "output_dir": output_dir,
        "max_steps": max_steps,
        "per_device_train_batch_size": run.batch_size,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "optim": run.trainer_optim,
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        **{
            name: value
            for name, value in get_trainer(run.trainer).arguments(run).items()
            if name in arguments
        },
        "use_cpu": not meter.is_cuda,
        "dataloader_num_workers": 0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def random_rows(config: Any, run: RunConfig, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of all batches in order; each knows the padded length of its batch."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = config.get_text_config().vocab_size
    least = image_span(config, run) if run.images or run.audios else 1
    rows = []
    for seq_len in lengths:
        at_once = run.batch_size * spreading(run).micro_batches
        for index in range(at_once * run.gradient_accumulation_steps):
            num_tokens = seq_len
            # The first row sets the length of its batch. A batch of one is shorter than its
            # padded length, as with padding to a fixed length: else it would have no padding.
            if run.padding == "padded" and (index % run.batch_size or run.batch_size == 1):
                fraction = _SHORTEST_ROW + (1 - _SHORTEST_ROW) * torch.rand(1, generator=generator)
                num_tokens = max(1, min(max(int(seq_len * fraction), least), seq_len - 1))
            ids = torch.randint(vocab_size, (num_tokens,), generator=generator)
            row = {"input_ids": ids, "seq_len": seq_len}
            if run.target_len is not None:
                row["labels"] = torch.randint(vocab_size, (run.target_len,), generator=generator)
            rows.append(row)
    return rows


def collator(config: Any, run: RunConfig) -> Callable[[list[Mapping[str, Any]]], dict[str, Any]]:
    """What makes a batch of rows: `collate`, with the task's labels, or with fields of images."""
    task = task_of(run)
    if task is not None:
        return partial(_with_labels, task, config.num_labels)
    if not has_fields(config, run):
        return collate
    return lambda rows: with_fields(config, run, collate(rows))


def _with_labels(task: Task, number: int, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of `rows` with labels of `task`, of which there are `number`."""
    batch = collate(rows)
    tokens = batch.pop("labels")
    size = len(rows)
    if task.labels == "per_token":
        return {**batch, "labels": torch.where(tokens < 0, tokens, tokens % number)}
    if task.labels == "span":
        ends = torch.zeros(size, dtype=torch.long)
        return {**batch, "start_positions": ends, "end_positions": ends.clone()}
    if task.labels == "number":
        return {**batch, "labels": torch.zeros(size, 1)}
    if number == 1:
        return {**batch, "labels": torch.zeros(size)}
    return {**batch, "labels": torch.arange(size) % number}


def collate(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors of shape [batch_size, seq_len], padded on the right.

    Labels of a decoder are [batch_size, target_len], where rows have them: all of one length.
    """
    # A row of the full length, dropped again, makes `pad_sequence` pad to it.
    ruler = torch.empty(rows[0]["seq_len"], dtype=torch.long)
    ids = [row["input_ids"] for row in rows]
    padded = {
        "input_ids": (ids, 0),
        "attention_mask": ([torch.ones_like(row) for row in ids], 0),
        "labels": (ids, _IGNORED_LABEL),
    }
    batch = {
        name: pad_sequence([*tensors, ruler], batch_first=True, padding_value=value)[:-1].clone()
        for name, (tensors, value) in padded.items()
    }
    if "labels" in rows[0]:
        batch["labels"] = torch.stack([row["labels"] for row in rows])
    return batch
