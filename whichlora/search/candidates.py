"""The candidates that a plan asks for: groups of them, or each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from whichlora.dataset.workload import Workload
from whichlora.errors import ConfigError
from whichlora.methods import get_method
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.search.shortlist import Group
from whichlora.serving.form import serving_form, serving_run
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.plan import Plan
from whichlora.spec.results import Answers, Refused
from whichlora.spec.run import Padding, Phase, RunConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidates:
    """What `plan` asks for on one device.

    Args:
        workload: the training that a model has at a batch size.
        refused: combinations that the model or the device lacks, as they were met.
    """

    plan: Plan
    models: Mapping[str, ModelSpec]
    gpu: GpuSpec
    workload: Callable[[str, int], Workload]
    refused: dict[RunConfig, Refused] = field(default_factory=dict)

    def inference_runs(self) -> list[RunConfig]:
        """Every candidate of stage 1, its defaults filled in.

        Raises:
            ConfigError: all of them are refused.
        """
        return self._some([run for group in self.serving() for run in group.runs()], "inference")

    def finetune_runs(self) -> list[RunConfig]:
        """Every candidate of stage 2, its defaults filled in.

        Raises:
            ConfigError: all of them are refused.
        """
        return self._some([run for group in self.training() for run in group.runs()], "finetune")

    def number(self) -> tuple[int, int]:
        """How many there are in each stage.

        Raises:
            ConfigError: all of one stage are refused.
        """
        serving = self._some([group.size for group in self.serving()], "inference")
        training = self._some([group.size for group in self.training()], "finetune")
        return sum(serving), sum(training)

    def _some(self, candidates: list[T], phase: Phase) -> list[T]:
        refused = [refusal for run, refusal in self.refused.items() if run.phase == phase]
        return list(Answers(candidates, refused))

    def serving(self) -> Iterator[Group]:
        """Stage 1, one group for each form in which a model is served, and attention kernel."""
        import numpy as np

        plan = self.plan
        lists = (plan.prompt_lens, plan.max_new_tokens, plan.inference_batch_sizes)
        prompt_len, new_tokens, batch_size = np.ix_(*lists)
        axes = {"batch_size": batch_size, "prompt_len": prompt_len, "max_new_tokens": new_tokens}
        forms = dict.fromkeys(self.form(run) for run in self._variants())
        for form in forms:
            for job in self._jobs(form, {"attn": plan.attn}):
                yield Group(job=job, axes=axes)

    def form(self, run: RunConfig) -> RunConfig:
        """In which form the model of `run`, a candidate of either stage, is served."""
        if run.phase == "finetune":
            run = serving_run(self.plan.inference, run, self.plan.serve)
        return serving_form(run)

    def _variants(self) -> Iterator[RunConfig]:
        """A fine-tuning of every model, method and rank."""
        plan = self.plan
        for name, method, r in itertools.product(plan.models, plan.methods, plan.ranks):
            yield replace(plan.finetune, model=name, method=method, r=r)

    def training(self) -> Iterator[Group]:
        """Stage 2, one group for each model, method, stack and kind of padding."""
        import numpy as np

        plan = self.plan
        stacks = {
            "gradient_checkpointing": plan.gradient_checkpointing,
            "attn": plan.attn,
            "optimizer": plan.optimizers,
        }
        for name, method in itertools.product(plan.models, plan.methods):
            ranks = plan.ranks[:1] if get_method(method).trains_base else plan.ranks
            loads = {size: self.workload(name, size) for size in plan.finetune_batch_sizes}
            sizes_by_padding: dict[Padding, list[int]] = {}
            for size, load in loads.items():
                sizes_by_padding.setdefault(_padding(load, plan.finetune.padding), []).append(size)
            for padding, sizes in sizes_by_padding.items():
                base = replace(plan.finetune, model=name, method=method, padding=padding)
                axes = {
                    "batch_size": np.array([sizes]),
                    "seq_len": np.array([[loads[size].longest for size in sizes]]),
                    "r": np.array(ranks)[:, None],
                }
                micro_steps = plan.finetune.gradient_accumulation_steps
                steps = tuple(
                    {width: n / micro_steps for width, n in loads[size].widths.items()}
                    for size in sizes
                )
                for job in self._jobs(base, stacks):
                    yield Group(job=job, axes=axes, steps=steps, lora_alpha=plan.lora_alpha)

    def _jobs(self, base: RunConfig, lists: Mapping[str, Sequence[Any]]) -> Iterator[ResolvedRun]:
        """`base` with every combination of `lists`; what does not run is noted in `refused`."""
        for values in itertools.product(*lists.values()):
            run = replace(base, **dict(zip(lists, values, strict=True)))
            try:
                yield resolve(self.models[base.model], run, self.gpu)
            except ConfigError as error:
                settings = {"phase": run.phase, "method": run.method} | dict(
                    zip(lists, values, strict=True)
                )
                self.refused[run] = Refused(
                    model=run.model, gpu=self.gpu.key, settings=settings, reason=str(error)
                )


def _padding(load: Workload, stated: Padding) -> Padding:
    """Whether batches hold padding; `stated` decides where their lengths do not tell."""
    if load.varied:
        return "padded"
    return "none" if load.collator == "packed" else stated
