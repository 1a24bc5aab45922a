"""The whole life of a run: its stages on the GPU, on the host and on disk, and which is largest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory import allocator, life
from whichlora.memory.entries import Entry
from whichlora.memory.life import Held, Place, Stage
from whichlora.memory.training import PARTS
from whichlora.methods import weight_dtype
from whichlora.predict.coefficients import Calibration
from whichlora.predict.evaluation_and_saving import bytes_of_checkpoint
from whichlora.predict.judged import judge_moments
from whichlora.predict.ledger_lines import Line, entry_line
from whichlora.predict.predict import verdict
from whichlora.predict.quantities import ledger, run_moments, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.life import LifeConfig
from whichlora.spec.numeric import Count
from whichlora.spec.rendering import Rendered
from whichlora.spec.results import Verdict
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes

TRAINING = "training"
_WORST: tuple[Verdict, ...] = ("fits", "undecided", "fails")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLine:
    """One tensor of a stage, or a group, and the setting that lowers it."""

    place: Place
    line: Line
    setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """One stage.

    Args:
        lines: the largest first.
        gpu_bytes, host_bytes, disk_bytes: live tensors; on disk what the stage adds.
        device_used_bytes: on the GPU with its context and, in training, what the allocator keeps.
        interval_bytes: 95 % of that.
    """

    name: str
    lines: tuple[StageLine, ...]
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    device_used_bytes: int
    interval_bytes: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Life(Rendered):
    """Every stage of a fine-tuning on one GPU.

    Args:
        usable_bytes: of the GPU.
        host_memory_bytes: what the run states of it; None where it does not.
        notes: what is left out.
    """

    run: RunConfig
    gpu: str
    usable_bytes: int
    host_memory_bytes: int | None
    stages: tuple[StageUse, ...]
    notes: tuple[str, ...]

    @property
    def largest(self) -> StageUse:
        """The stage that decides whether the run fits the GPU."""
        return max(
            self.stages,
            key=lambda stage: (_WORST.index(stage.verdict), stage.device_used_bytes),
        )

    @property
    def exceeds_host(self) -> bool:
        """Whether a stage holds more on the host than the run states that it has."""
        host_bytes = self.largest_on_host.host_bytes
        return self.host_memory_bytes is not None and host_bytes > self.host_memory_bytes

    @property
    def verdict(self) -> Verdict:
        return "fails" if self.exceeds_host else self.largest.verdict

    @property
    def largest_on_host(self) -> StageUse:
        return max(self.stages, key=lambda stage: stage.host_bytes)

    def faults(self) -> list[str]:
        """Stages beside training that are less sure to fit than it, and what lowers each."""
        training = next(stage for stage in self.stages if stage.name == TRAINING)
        lines = []
        for stage in self.stages:
            if _WORST.index(stage.verdict) <= _WORST.index(training.verdict):
                continue
            than = "more than" if stage.verdict == "fails" else "close to"
            setting = next((held.setting for held in stage.lines if held.setting), "")
            lines.append(
                f"{stage.name} needs {format_bytes(stage.device_used_bytes)}, {than} "
                f"{format_bytes(self.usable_bytes)}{way_to_lower(setting)}"
            )
        if self.exceeds_host and self.host_memory_bytes is not None:
            most = self.largest_on_host
            lines.append(
                f"{most.name} takes {format_bytes(most.host_bytes)} of host memory, more than the "
                f"{format_bytes(self.host_memory_bytes)} stated"
            )
        return lines

    @property
    def disk_bytes(self) -> int:
        """What all stages leave on disk."""
        return sum(stage.disk_bytes for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `whichlora explain --life --json`: extended but never broken."""
        return {
            "run": self.run.to_dict(),
            "gpu": self.gpu,
            "usable_bytes": self.usable_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "verdict": self.verdict,
            "largest_stage": self.largest.name,
            "largest_stage_on_host": self.largest_on_host.name,
            "host_bytes": self.largest_on_host.host_bytes,
            "disk_bytes": self.disk_bytes,
            "stages": [
                asdict(replace(stage, lines=()))
                | {
                    "lines": [
                        {"place": held.place, "setting": held.setting} | asdict(held.line)
                        for held in stage.lines
                    ]
                }
                for stage in self.stages
            ],
            "notes": list(self.notes),
        }


def stages_of(job: ResolvedRun, settings: LifeConfig) -> tuple[Stage, ...]:
    """Every stage of `job`, which runs on one GPU.

    Raises:
        ConfigError: an inference, or a trainer that saves nothing.
    """
    if job.run.phase != "finetune":
        raise ConfigError("life: is that of a fine-tuning; give phase finetune, or leave it out")
    if not job.trainer.library_class:
        raise ConfigError(
            f"life: trainer {job.trainer.name} neither saves nor evaluates; use transformers"
        )
    run = replace(job.run, gradient_checkpointing=True, lora_dropout=0.0)
    seq_len = job.run.seq_len if settings.eval_seq_len is None else settings.eval_seq_len
    evaluated = training_step(replace(job, run=run), seq_len=seq_len) if seq_len else None
    return life.stages(
        training_step(job),
        ledger(job),
        evaluated,
        bytes_of_checkpoint(job),
        settings,
        merged_base_bytes=4 if weight_dtype(job.run) == "float32" else 2,
    )


def life_of(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    settings: LifeConfig,
) -> Life:
    """The stages of `run` on `gpu`, each judged as a prediction is.

    Raises:
        ConfigError: settings that exclude each other, or a run whose life is not known.
    """
    if not run.parallel.is_one_device:
        raise ConfigError("life: is known of one GPU; leave gpus and parallel out")
    job = resolve(model, run, gpu)
    return Life(
        run=job.run,
        gpu=gpu.key,
        usable_bytes=gpu.memory_bytes,
        host_memory_bytes=job.run.parallel.host_memory_bytes,
        stages=tuple(_use(job, stage, calibration) for stage in stages_of(job, settings)),
        notes=_notes(job),
    )


def _notes(job: ResolvedRun) -> tuple[str, ...]:
    notes = [
        "host memory of Python, libraries and data is left out, and so are tokenizers on disk",
        "on the GPU, stages beside training are live tensors and the context",
    ]
    if job.trainer.rows != "texts":
        notes.append(f"trainer {job.trainer.name}: its evaluation is counted as the Trainer's")
    return tuple(notes)


def _use(job: ResolvedRun, stage: Stage, calibration: Calibration) -> StageUse:
    if stage.name == TRAINING:
        moments, is_replayed = run_moments(job)
        moments.pop("loading", None)
    else:
        moments, is_replayed = {stage.name: _parts(job, stage)}, False
    judged = judge_moments(job, moments, calibration, is_replayed=is_replayed)
    least, low, high = (int(bound) for bound in judged.bounds())
    lines = [_line(job, held) for held in stage.held]
    if stage.workspace_bytes:
        workspace = Entry(allocator.WORKSPACE, stage.workspace_bytes)
        lines.append(_line(job, Held("gpu", workspace)))
    return StageUse(
        name=stage.name,
        lines=tuple(sorted((held for held in lines if held.line.num_bytes), key=_largest_first)),
        gpu_bytes=stage.num_bytes("gpu"),
        host_bytes=stage.num_bytes("host"),
        disk_bytes=stage.num_bytes("disk"),
        device_used_bytes=int(judged.device_used_bytes) if stage.num_bytes("gpu") else 0,
        interval_bytes=(low, high) if stage.num_bytes("gpu") else (0, 0),
        verdict=verdict(least, high, job.gpu.memory_bytes),
    )


def way_to_lower(setting: str) -> str:
    """The end of a sentence on what a setting lowers; empty where there is none."""
    if "merge_on" in setting:
        return "; merge on the CPU instead"
    return f"; lower it by {setting}" if setting else ""


def _largest_first(held: StageLine) -> tuple[int, int]:
    return ("gpu", "host", "disk").index(held.place), -held.line.num_bytes


def _line(job: ResolvedRun, held: Held) -> StageLine:
    line = entry_line(job, held.entry)
    return StageLine(place=held.place, line=line, setting=held.setting)


def _parts(job: ResolvedRun, stage: Stage) -> dict[str, Count]:
    """Bytes by part on the GPU, as `part_bytes` of a ledger."""
    parts: dict[str, Count] = dict.fromkeys(PARTS, 0)
    for held in stage.held:
        if held.place == "gpu":
            parts[held.entry.part] = parts[held.entry.part] + int(held.entry.num_bytes)
    parts["temporary"] = parts["temporary"] + stage.workspace_bytes
    if stage.num_bytes("gpu"):
        parts["context"] = allocator.context_bytes(job.gpu, job.dtypes.libraries)
    return parts
