"""The life of a small run on a CPU: live bytes of each stage, and what lies on disk after it."""

from __future__ import annotations

import gc
import os
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from oracle_memory import LiveBytes
from small_models import CONFIGS
from torch._subclasses import FakeTensor

from whichlora import families
from whichlora.memory.life import Stage
from whichlora.methods import weight_dtype
from whichlora.predict.evaluation_and_saving import bytes_of_checkpoint
from whichlora.predict.life import stages_of
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.build import without_cpu_packing
from whichlora.spec.life import LifeConfig
from whichlora.spec.run import BNB_QUANTS, RunConfig
from whichlora.store.gpus import find_gpu

EVAL_ROWS = 8
ON_DEVICE = ("loading", "evaluating", "saving", "resuming", "merging")
TO_THE_BYTE = ("downloaded", "checkpoint weights", "merged model")
ON_DISK = ("checkpoint optimizer", "checkpoint")


def job_of(case: Mapping[str, Any]) -> ResolvedRun:
    config = CONFIGS[case["family"]] | case.get("config", {}) | {"model_type": case["family"]}
    model = families.build(config | {"dtype": _stored(case)}, name="x")
    return resolve(model, RunConfig(model="x", **case["run"]), find_gpu("cpu"))


def _stored(case: Mapping[str, Any]) -> str:
    return str(case.get("stored", "float32"))


class Alive(LiveBytes):
    """As `LiveBytes`, with the tensors that are there at the start."""

    def __enter__(self) -> Alive:
        gc.collect()
        for candidate in gc.get_objects():
            kind = type(candidate)
            if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):
                self._born(candidate, "before")
        super().__enter__()
        return self

    def _born(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.device.type == "cpu":  # a model is built on the meta device before it is loaded
            super()._born(tensor, op)


def peak(call: Callable[[], Any]) -> int:
    """Most bytes of tensors that are alive during `call`."""
    with Alive() as alive:
        call()
    return alive.peak_bytes


def tensor_bytes(folder: Path) -> int:
    """Bytes of tensors in the safetensors files of `folder`, without their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - header
    return total


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def predicted(case: Mapping[str, Any]) -> dict[str, int]:
    """What `reading` measures, as it is predicted."""
    job = job_of(case)
    checkpoint = bytes_of_checkpoint(job)
    plain = _stages(job)
    kept = _stages(job, eval_rows=EVAL_ROWS)["evaluating"]
    moved = _stages(job, eval_rows=EVAL_ROWS, eval_accumulation_steps=1)["evaluating"]
    sizes = {name: plain[name].num_bytes("gpu") for name in ON_DEVICE if name in plain}
    sizes |= {
        "downloaded": plain["downloading"].num_bytes("disk"),
        "checkpoint weights": int(checkpoint.tensors),
        "checkpoint optimizer": int(checkpoint.optimizer_states),
        "checkpoint": int(checkpoint.total) + _small_files_bytes(job),
        "evaluating, logits kept": kept.num_bytes("gpu"),
        "evaluating, logits moved": moved.num_bytes("gpu"),
        "evaluating, logits moved, on the host": moved.num_bytes("host"),
    }
    if "merging" in plain:
        sizes["merged model"] = plain["merging"].num_bytes("disk")
    return sizes


def _small_files_bytes(job: ResolvedRun) -> int:
    """Random states, settings and the card of a checkpoint, which no prediction counts.

    Of `_save_rng_state` 14.5 kB, `training_args.bin` 5.3, `scheduler.pt` 1.5, configs 1 to 2,
    `trainer_state.json` from 0.8 on; the README.md that peft writes beside an adapter 5.2.
    """
    return 23_000 + 5_200 * bool(job.method.peft_class)


def _stages(job: ResolvedRun, **settings: Any) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages_of(job, LifeConfig(**settings))}


def reading(case: Mapping[str, Any]) -> dict[str, int]:
    """What each stage of `case` takes, in bytes."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # threads of a loader are not seen
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
        warnings.simplefilter("ignore")
        with redirect_stdout(StringIO()):
            return _reading(case, Path(name))


def _reading(case: Mapping[str, Any], folder: Path) -> dict[str, int]:
    from transformers import AutoConfig, AutoModelForCausalLM

    job = job_of(case)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        case["family"], **(CONFIGS[case["family"]] | case.get("config", {}))
    )
    base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, _stored(case)))
    base.save_pretrained(folder / "base")
    del base
    gc.collect()
    found = {"downloaded": tensor_bytes(folder / "base")}
    held = _held_bytes()
    found["loading"] = peak(lambda: _loaded(job, folder)) - held
    gc.collect()
    trainer = _trainer(job, folder)
    trainer.train()
    checkpoint = folder / "out" / "checkpoint-2"
    found["checkpoint weights"] = tensor_bytes(checkpoint)
    found["checkpoint optimizer"] = (checkpoint / "optimizer.pt").stat().st_size
    found["checkpoint"] = folder_bytes(checkpoint)
    trainer.model.zero_grad()
    gc.collect()
    found["evaluating"] = peak(trainer.evaluate) - held
    found |= _kept_logits(trainer, held)
    found["saving"] = peak(lambda: trainer._save_checkpoint(trainer.model, None)) - held
    trainer = None
    gc.collect()
    found["resuming"] = _resumed(job, folder, checkpoint) - held
    gc.collect()
    if not job.method.trains_base:
        found["merging"] = peak(lambda: _merge(job, folder, checkpoint)) - held
        found["merged model"] = tensor_bytes(folder / "merged")
    return found


def _held_bytes() -> int:
    with Alive() as alive:
        pass
    return alive.num_bytes


def _kept_logits(trainer: Any, held: int) -> dict[str, int]:
    """Of evaluations that keep every logit for a metric, without and with moving them away."""
    found = {}
    trainer.compute_metrics = lambda evaluated: {"rows": len(evaluated.predictions)}
    trainer.args.prediction_loss_only = False
    found["evaluating, logits kept"] = peak(trainer.evaluate) - held
    trainer.args.eval_accumulation_steps = 1
    found["evaluating, logits moved"] = peak(trainer.evaluate) - held
    tracemalloc.start()
    trainer.evaluate()
    found["evaluating, logits moved, on the host"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def _base(job: ResolvedRun, folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, weight_dtype(job.run))
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, **options)


def _loaded(job: ResolvedRun, folder: Path) -> Any:
    """The base as it is before PEFT adds adapters to it."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    options: dict[str, Any] = {}
    if job.run.quant in BNB_QUANTS:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=str(job.run.quant).removesuffix("-dq"),
            bnb_4bit_use_double_quant=str(job.run.quant).endswith("-dq"),
            bnb_4bit_compute_dtype=getattr(torch, weight_dtype(job.run)),
        )
    model = _base(job, folder, **options)
    if job.run.prepare_kbit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def _model(job: ResolvedRun, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    model = _loaded(job, folder)
    if job.method.peft_class:
        settings = job.method.peft_config(job.run) | {"target_modules": job.peft_targets}
        model = get_peft_model(model, LoraConfig(**settings))
    return model


def _trainer(job: ResolvedRun, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    run = job.run
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(3, job.model.vocab_size, (run.seq_len,), generator=generator).tolist()
        for _ in range(EVAL_ROWS)
    ]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size,
        max_steps=2,
        save_steps=2,
        optim=run.trainer_optim,
        bf16=run.precision == "bf16",
        gradient_checkpointing=bool(run.gradient_checkpointing),
        prediction_loss_only=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    model = without_cpu_packing(_model(job, folder))
    return Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)


class _LoadedError(Exception):
    pass


def _resumed(job: ResolvedRun, folder: Path, checkpoint: Path) -> int:
    """Most bytes from the start of a resumed training to its first step."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            raise _LoadedError

    trainer = _trainer(job, folder)
    trainer.add_callback(Stop())

    def resume() -> None:
        with suppress(_LoadedError):
            trainer.train(resume_from_checkpoint=str(checkpoint))

    return peak(resume)


def _merge(job: ResolvedRun, folder: Path, checkpoint: Path) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(_base(job, folder), checkpoint)
    model.merge_and_unload().save_pretrained(folder / "merged")
