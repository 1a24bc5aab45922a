"""The candidates that a plan asks for: groups of them, or each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from whichlora.dataset.workload import Workload
from whichlora.errors import ConfigError
from whichlora.methods import get_method, with_method
from whichlora.parallel.layout import Layout
from whichlora.predict import parallel_choice
from whichlora.predict.counted import check_layout, host_of
from whichlora.predict.host_memory import host_fault, memory_of_node, most_of_a_node
from whichlora.predict.rank_time import links_of
from whichlora.predict.resolve import ResolvedRun, as_stored, layout_of, resolve
from whichlora.predict.serving import bounded
from whichlora.search.shortlist import Group
from whichlora.serving import get_engine
from whichlora.serving.form import ServeAs, serving_form, serving_run, with_text_alone
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import is_loaded_as_stored
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LinkSpec
from whichlora.spec.parallel import AUTO, ONE_GPU, ParallelConfig, micro_steps
from whichlora.spec.plan import Plan
from whichlora.spec.results import MAX_REASONS, Answers, Refused
from whichlora.spec.run import Padding, Phase, RunConfig
from whichlora.symbolic.llama4 import check_experts
from whichlora.trainers import get_trainer, with_trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Candidates:
    """What `plan` asks for on one device.

    Args:
        workload: the training that a model has at a batch size, with so many micro-batches at the
            same time and so many in an optimizer step.
        machines: links of known machines, by name.
        this_host_bytes: memory of this machine's host, where it has the device.
        trains_tower: whether the rows of a model need the class that has its tower.
        refused: combinations that the model or the device lacks, as they were met.
    """

    plan: Plan
    models: Mapping[str, ModelSpec]
    gpu: GpuSpec
    workload: Callable[[str, int, int, int], Workload]
    machines: Mapping[str, LinkSpec] = field(default_factory=dict)
    this_host_bytes: Callable[[], int | None] = lambda: None
    trains_tower: Callable[[str], bool] = lambda model: False
    refused: dict[object, Refused] = field(default_factory=dict)
    _expanded: dict[ParallelConfig, Sequence[ParallelConfig]] = field(default_factory=dict)
    _layouts: dict[ParallelConfig, Layout | None] = field(default_factory=dict)
    _alone: dict[object, ResolvedRun] = field(default_factory=dict)
    _refusals: dict[RunConfig, str] = field(default_factory=dict)

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
        """How many there are in each stage; of several GPUs those that are refused count, too.

        Raises:
            ConfigError: all of one stage are refused.
        """
        serving = self._some([group.size for group in self.serving()], "inference")
        if self.plan.is_spread:
            return sum(serving), self._number_asked()
        training = self._some([group.size for group in self.training()], "finetune")
        return sum(serving), sum(training)

    def _number_asked(self) -> int:
        plan = self.plan
        ranks = (len(self._ranks(name)) for name in plan.methods)
        spreads = sum(len(self._strategies(config)) for config in plan.spreads)
        lists = (plan.models, plan.finetune_batch_sizes, *self._stacks.values())
        return sum(ranks) * spreads * math.prod(map(len, lists))

    def _some(self, candidates: list[T], phase: Phase) -> list[T]:
        refused = [each for each in self.refused.values() if each.settings["phase"] == phase]
        return list(Answers(candidates, refused))

    def serving(self) -> Iterator[Group]:
        """Stage 1 of all models."""
        return self.serving_of(self.plan.models)

    def serving_of(self, models: Sequence[str]) -> Iterator[Group]:
        """Stage 1: a group for each form, number of GPUs that serve it, and attention kernel."""
        import numpy as np

        plan = self.plan
        lists = (plan.prompt_lens, plan.max_new_tokens, plan.inference_batch_sizes)
        prompt_len, new_tokens, batch_size = np.ix_(*lists)
        axes = {"batch_size": batch_size, "prompt_len": prompt_len, "max_new_tokens": new_tokens}
        for divided in itertools.chain.from_iterable(map(self._divided, self.forms(models))):
            for job in self._jobs(divided, ONE_GPU, {"attn": plan.attn}, self.refused):
                yield Group(job=job, axes=axes)

    def forms(self, models: Sequence[str]) -> list[RunConfig]:
        """In which forms `models` are served, each once."""
        return list(dict.fromkeys(self.form(run) for run in self._variants(models)))

    def form(self, run: RunConfig) -> RunConfig:
        """In which form the model of `run`, a candidate of either stage, is served.

        A serving engine that refuses a method's weights or adapter has them merged, unless the
        plan asks for the form. Into weights that are loaded as they are stored nothing is merged.
        The number of GPUs that an engine divides a model over, and of sequences that it starts
        with, is no part of the form, unless the plan states it.
        """
        if run.phase != "finetune":
            form, stated = serving_form(run), dict(self.plan.inference.serving_options)
            engine = get_engine(run.serving)
            own = {engine.divided_by, engine.bounded_by} - stated.keys()
            kept = (pair for pair in form.serving_options if pair[0] not in own)
            return replace(form, serving_options=tuple(kept))
        form = self.asked_form(run)
        if self.plan.serve is None and self.why_merged(form):
            form = self._form(run, "merged")
        return form

    def asked_form(self, run: RunConfig) -> RunConfig:
        """In which form the plan, or else the method and the checkpoint, have the model served."""
        serve = self.plan.serve
        if serve is None and is_loaded_as_stored(self.models[run.model].config):
            serve = "as-trained"
        return self._form(run, serve)

    def _form(self, run: RunConfig, serve: ServeAs | None) -> RunConfig:
        model = self.models[run.model]
        served = as_stored(model, serving_run(self.plan.inference, run, serve))
        if served.serve == "merged" and model.unloaded_params and not self.trains_tower(run.model):
            served = with_text_alone(served, model)
        return serving_form(served)

    def _divided(self, form: RunConfig) -> Iterable[RunConfig]:
        """`form` on each number of GPUs of the plan that its engine can divide the model over."""
        numbers = sorted({config.gpus // config.nodes for config in self.plan.spreads})
        return dict.fromkeys(self._bounded(self._shared(form, most)) for most in numbers)

    def _bounded(self, form: RunConfig) -> RunConfig:
        """`form` with so few sequences at once that its engine starts."""
        if self._refusal(form):
            return form
        return bounded(self._resolved(form, {"attn": self.plan.attn[0]}))[0]

    def _shared(self, form: RunConfig, most: int) -> RunConfig:
        """`form` on as many GPUs of a machine as its engine can divide the model over.

        They are `most`, or fewer; powers of two are tried where heads are divided.
        """
        engine, options = get_engine(form.serving), dict(form.serving_options)
        option = engine.divided_by
        if not option or option in options:
            return form
        most //= engine.num_copies(form)
        powers = (2**exponent for exponent in reversed(range(1, most.bit_length())))
        for gpus in powers if engine.shared_by else range(most, 1, -1):
            stated = tuple(sorted((options | {option: gpus}).items()))
            shared = replace(form, serving_options=stated)
            if not self._refusal(shared):
                return shared
        return form

    def why_merged(self, form: RunConfig) -> str:
        """Why a serving engine does not take `form`, an unmerged one; empty where it does."""
        if not self.is_answered or form.serve != "as-trained":
            return ""
        return self._refusal(form)

    def _refusal(self, form: RunConfig) -> str:
        """Why `form` is not served; empty where it is."""
        if form not in self._refusals:
            try:
                self._resolved(form, {"attn": self.plan.attn[0]})
                self._refusals[form] = ""
            except ConfigError as error:
                self._refusals[form] = str(error)
        return self._refusals[form]

    @cached_property
    def is_answered(self) -> bool:
        """Whether a serving engine says what stage 1 asks, so that nothing of it is measured."""
        return get_engine(self.plan.inference.serving).start is not None

    def _variants(self, models: Sequence[str]) -> Iterator[RunConfig]:
        """A fine-tuning of every model, method and rank."""
        plan = self.plan
        for name, method, r in itertools.product(models, plan.methods, plan.ranks):
            yield replace(with_method(plan.finetune, method), model=name, r=r)

    def training(self) -> Iterator[Group]:
        """Stage 2 of all models."""
        return self.training_of(self.plan.models)

    def training_of(self, models: Sequence[str]) -> Iterator[Group]:
        """Stage 2, one group for each model, method, stack, strategy and kind of padding."""
        for name, method in itertools.product(models, self.plan.methods):
            base = replace(with_method(self.plan.finetune, method), model=name)
            for config in self.plan.spreads:
                if config.strategy == AUTO:
                    yield from self._under_any_strategy(base, config)
                else:
                    yield from self._under(base, config, self.refused)

    def _under_any_strategy(self, base: RunConfig, config: ParallelConfig) -> Iterator[Group]:
        """`base` under every strategy that accepts it and that a job can be written for.

        It is refused only where there is none.
        """
        refused: dict[object, Refused] = {}
        accepted = False
        for spread_by in self._strategies(config):
            for group in self._under(base, spread_by, refused):
                accepted = True
                yield group
        if not accepted:
            reasons = dict.fromkeys(refusal.reason for refusal in refused.values())
            reason = "; ".join(list(reasons)[:MAX_REASONS])
            self._refuse(self.refused, base, config, {}, reason)

    def _strategies(self, config: ParallelConfig) -> Sequence[ParallelConfig]:
        """`config`, or in the place of "auto" every strategy that a job can be written for."""
        if config.strategy != AUTO:
            return (config,)
        if config not in self._expanded:
            self._expanded[config] = [
                spread_by
                for spread_by in parallel_choice.every(config)
                if parallel_choice.is_in_the_trainer(spread_by)
            ]
        return self._expanded[config]

    @cached_property
    def _stacks(self) -> dict[str, Sequence[Any]]:
        plan = self.plan
        return {
            "gradient_checkpointing": plan.gradient_checkpointing,
            "attn": plan.attn,
            "optimizer": plan.optimizers,
        }

    def _under(
        self, base: RunConfig, config: ParallelConfig, refused: dict[object, Refused]
    ) -> Iterator[Group]:
        """The groups of one model, method and strategy; what does not run is noted in `refused`."""
        import numpy as np

        plan = self.plan
        ranks = self._ranks(base.method)
        together = [(rank,) for rank in ranks] if get_method(base.method).one_rank else [ranks]
        for (accumulation, padding), loads in self._loads(base, config, refused).items():
            axes = {
                "batch_size": np.array([list(loads)]),
                "seq_len": np.array([[load.longest for load in loads.values()]]),
            }
            steps = tuple(
                {width: n / accumulation for width, n in load.widths.items()}
                for load in loads.values()
            )
            stacks = self._stacks | {
                "padding": (padding,),
                "gradient_accumulation_steps": (accumulation,),
            }
            shown = {load.images for load in loads.values()} - {None}
            for images in shown:  # one, of the model
                assert images is not None
                base = images.shown(base)
            for target_len in {load.target_len for load in loads.values()} - {None}:
                base = replace(base, target_len=target_len)  # one, of the model
            for some in together:
                of_ranks = axes | {"r": np.array(some)[:, None]}
                for job in self._jobs(replace(base, r=some[0]), config, stacks, refused):
                    yield Group(job=job, axes=of_ranks, steps=steps, lora_alpha=plan.lora_alpha)

    def _ranks(self, method: str) -> tuple[int, ...]:
        """The ranks to compare: one of a method without a rank."""
        return self.plan.ranks[:1] if "r" in get_method(method).ignores else self.plan.ranks

    def _loads(
        self, base: RunConfig, config: ParallelConfig, refused: dict[object, Refused]
    ) -> dict[tuple[int, Padding], dict[int, Workload]]:
        """The training at each batch size, by micro-steps and padding, which a group shares.

        A batch size that does not divide the global batch, or that the trainer refuses, is no
        candidate.
        """
        loads: dict[tuple[int, Padding], dict[int, Workload]] = {}
        reason = ""
        try:
            layout = self._layout(config)
        except ConfigError as error:
            self._refuse(refused, base, config, {}, str(error))
            return loads
        at_once = 1 if layout is None else layout.data_parallel_size
        for size in self.plan.finetune_batch_sizes:
            accumulation = base.gradient_accumulation_steps
            try:
                if config.global_batch_size is not None:
                    accumulation = micro_steps(
                        config.global_batch_size,
                        batch_size=size,
                        at_once=at_once,
                        accumulation=accumulation,
                    )
                run = replace(
                    base,
                    batch_size=size,
                    gradient_accumulation_steps=accumulation,
                    parallel=config,
                )
                get_trainer(run.trainer).check(with_trainer(run))
            except ConfigError as error:
                reason = str(error)
                continue
            load = self.workload(base.model, size, at_once, accumulation)
            loads.setdefault((accumulation, _padding(load, base.padding)), {})[size] = load
        if not loads:
            self._refuse(refused, base, config, {}, reason)
        return loads

    def _layout(self, config: ParallelConfig) -> Layout | None:
        """The layout of `config`, which is the same for all models.

        Raises:
            ConfigError: an option or a size that it does not accept.
        """
        if config not in self._layouts:
            self._layouts[config] = layout_of(replace(self.plan.finetune, parallel=config))
        return self._layouts[config]

    def _jobs(
        self,
        base: RunConfig,
        config: ParallelConfig,
        lists: Mapping[str, Sequence[Any]],
        refused: dict[object, Refused],
    ) -> Iterator[ResolvedRun]:
        """`base` under `config` with every combination of `lists`.

        What does not run is noted in `refused`.
        """
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            try:
                job = self._spread(self._resolved(base, chosen), config)
                check_layout(job)
                self._check_links(job)
                fault, of_host = self._host_fault(job)
            except ConfigError as error:
                fault, of_host = str(error), False
            if not fault:
                yield job
                continue
            shown = {name: chosen[name] for name in chosen if len(lists[name]) > 1}
            self._refuse(refused, base, config, shown, fault)
            if of_host:  # more memory is more easily had than another strategy
                self._refuse(self.refused, base, config, shown, fault)

    def _resolved(self, base: RunConfig, chosen: Mapping[str, Any]) -> ResolvedRun:
        """`base` with the settings in `chosen`, resolved on one GPU, once for all strategies.

        Raises:
            ConfigError: settings that exclude each other.
        """
        key = base, *chosen.values()
        if key not in self._alone:
            run = replace(base, **chosen)
            job = resolve(self.models[run.model], run, self.gpu)
            for layer, _ in job.model.layers():
                if layer.moe is not None:
                    check_experts(layer.moe, job.dtypes.quant)
            self._alone[key] = job
        return self._alone[key]

    def _spread(self, job: ResolvedRun, config: ParallelConfig) -> ResolvedRun:
        """`job` of one GPU on those of `config`, whose micro-steps it has."""
        layout = self._layout(config)
        if layout is None:
            return job
        config = replace(layout.config, global_batch_size=None)
        return replace(job, run=replace(job.run, parallel=config), layout=layout)

    def _check_links(self, job: ResolvedRun) -> None:
        """Refuse what has no time, by which candidates are compared."""
        if job.layout is not None and self.gpu.is_timed:
            links, line = links_of(job.layout.config, self.gpu, self.machines)
            if links is None:
                raise ConfigError(line)

    def _host_fault(self, job: ResolvedRun) -> tuple[str, bool]:
        """Why a node has too little memory, whatever the rank of the adapters; empty: it has.

        Returns:
            The fault, and whether it is of a node that is known; else it is of the largest machine
            that is, which nobody who has more needs to read.
        """
        if job.layout is None:
            return "", False
        node = memory_of_node(job.run.parallel, self.machines, self.this_host_bytes)
        is_known = node[0] is not None
        node = node if is_known else most_of_a_node(self.machines)
        fault = host_fault(host_of(job, r=min(self.plan.ranks)), node)
        return fault, bool(fault) and is_known

    def _refuse(
        self,
        refused: dict[object, Refused],
        base: RunConfig,
        config: ParallelConfig,
        chosen: Mapping[str, Any],
        reason: str,
    ) -> None:
        settings: dict[str, Any] = {"phase": base.phase, "method": base.method, **chosen}
        if not config.is_one_device:
            settings["parallel"] = config.to_dict()
        refused[base, config, *chosen.values()] = Refused(
            model=base.model, gpu=self.gpu.key, settings=settings, reason=reason
        )


def _padding(load: Workload, stated: Padding) -> Padding:
    """Whether batches hold padding; `stated` decides where their lengths need none."""
    if load.is_padded:
        return "padded"
    return "none" if load.collator == "packed" else stated
