"""The candidates that a plan asks for: groups of them, or each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from whichlora.dataset.workload import Workload
from whichlora.errors import ConfigError
from whichlora.methods import get_method
from whichlora.predict import parallel_choice
from whichlora.predict.predict import check_layout
from whichlora.predict.rank_time import links_of
from whichlora.predict.resolve import ResolvedRun, resolve, spread
from whichlora.search.shortlist import Group
from whichlora.serving.form import serving_form, serving_run
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LinkSpec
from whichlora.spec.parallel import AUTO, ONE_GPU, ParallelConfig
from whichlora.spec.plan import Plan
from whichlora.spec.results import MAX_REASONS, Answers, Refused
from whichlora.spec.run import Padding, Phase, RunConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidates:
    """What `plan` asks for on one device.

    Args:
        workload: the training that a model has at a batch size, with so many micro-batches at the
            same time and so many in an optimizer step.
        machines: links of known machines, by name.
        refused: combinations that the model or the device lacks, as they were met.
    """

    plan: Plan
    models: Mapping[str, ModelSpec]
    gpu: GpuSpec
    workload: Callable[[str, int, int, int], Workload]
    machines: Mapping[str, LinkSpec] = field(default_factory=dict)
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
            for job in self._jobs(form, {"attn": plan.attn}, self.refused):
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
        """Stage 2, one group for each model, method, stack, strategy and kind of padding."""
        for name, method in itertools.product(self.plan.models, self.plan.methods):
            base = replace(self.plan.finetune, model=name, method=method)
            for config in self.plan.spreads:
                if config.strategy == AUTO:
                    yield from self._under_any_strategy(base, config)
                else:
                    yield from self._under(replace(base, parallel=config), self.refused)

    def _under_any_strategy(self, base: RunConfig, config: ParallelConfig) -> Iterator[Group]:
        """`base` under every strategy that accepts it and that a job can be written for.

        It is refused only where there is none.
        """
        refused: dict[RunConfig, Refused] = {}
        accepted = False
        for spread_by in parallel_choice.every(config):
            for group in self._under(replace(base, parallel=spread_by), refused):
                try:
                    group.job.check_job()
                except ConfigError as error:
                    refused[group.job.run] = self._refusal(group.job.run, {}, str(error))
                    continue
                accepted = True
                yield group
        if not accepted:
            reasons = dict.fromkeys(refusal.reason for refusal in refused.values())
            run = replace(base, parallel=config)
            self.refused[run] = self._refusal(run, {}, "; ".join(list(reasons)[:MAX_REASONS]))

    def _under(self, base: RunConfig, refused: dict[RunConfig, Refused]) -> Iterator[Group]:
        """The groups of one model, method and strategy; what does not run is noted in `refused`."""
        import numpy as np

        plan = self.plan
        stacks = {
            "gradient_checkpointing": plan.gradient_checkpointing,
            "attn": plan.attn,
            "optimizer": plan.optimizers,
        }
        ranks = plan.ranks[:1] if get_method(base.method).trains_base else plan.ranks
        for run, loads in self._loads(base, refused).items():
            sizes = list(loads)
            axes = {
                "batch_size": np.array([sizes]),
                "seq_len": np.array([[load.longest for load in loads.values()]]),
                "r": np.array(ranks)[:, None],
            }
            micro_steps = run.gradient_accumulation_steps
            steps = tuple(
                {width: n / micro_steps for width, n in load.widths.items()}
                for load in loads.values()
            )
            for job in self._jobs(run, stacks, refused):
                yield Group(job=job, axes=axes, steps=steps, lora_alpha=plan.lora_alpha)

    def _loads(
        self, base: RunConfig, refused: dict[RunConfig, Refused]
    ) -> dict[RunConfig, dict[int, Workload]]:
        """The training at each batch size, by what of `base` depends on it.

        A batch size that does not divide the global batch is no candidate.
        """
        loads: dict[RunConfig, dict[int, Workload]] = {}
        for size in self.plan.finetune_batch_sizes:
            try:
                run, layout = spread(replace(base, batch_size=size))
            except ConfigError as error:
                reason = str(error)
                continue
            micro_steps = run.gradient_accumulation_steps
            at_once = 1 if layout is None else layout.data_parallel_size
            load = self.workload(run.model, size, at_once, micro_steps)
            padding = _padding(load, base.padding)
            run = replace(run, padding=padding, batch_size=base.batch_size)
            loads.setdefault(run, {})[size] = load
        if not loads:
            refused[base] = self._refusal(base, {}, reason)
        return loads

    def _jobs(
        self,
        base: RunConfig,
        lists: Mapping[str, Sequence[Any]],
        refused: dict[RunConfig, Refused],
    ) -> Iterator[ResolvedRun]:
        """`base` with every combination of `lists`; what does not run is noted in `refused`."""
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            run = replace(base, **chosen)
            try:
                job = resolve(self.models[base.model], run, self.gpu)
                check_layout(job)
                self._check_links(job)
            except ConfigError as error:
                refused[run] = self._refusal(run, chosen, str(error))
                continue
            yield job

    def _check_links(self, job: ResolvedRun) -> None:
        """Refuse what has no time, by which candidates are compared."""
        if job.layout is not None and self.gpu.is_timed:
            links, line = links_of(job.layout.config, self.gpu, self.machines)
            if links is None:
                raise ConfigError(line)

    def _refusal(self, run: RunConfig, chosen: Mapping[str, Any], reason: str) -> Refused:
        settings: dict[str, Any] = {"phase": run.phase, "method": run.method, **chosen}
        if run.parallel != ONE_GPU:
            settings["parallel"] = run.parallel.to_dict()
        return Refused(model=run.model, gpu=self.gpu.key, settings=settings, reason=reason)


def _padding(load: Workload, stated: Padding) -> Padding:
    """Whether batches hold padding; `stated` decides where their lengths do not tell."""
    if load.varied:
        return "padded"
    return "none" if load.collator == "packed" else stated
