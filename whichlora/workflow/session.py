"""What one run knows while it works: candidates, records, predictors and the device."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from whichlora.calibration.load import (
    calibration_roots,
    ids_elsewhere,
    load_calibration,
    model_of,
    stale_note,
)
from whichlora.dataset.workload import Workload
from whichlora.errors import ConfigError, DataFileError
from whichlora.methods import COMPARED, get_method, with_method
from whichlora.predict.alike import Predictor
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.counted import CountedRun, count_run
from whichlora.predict.defaults import with_precision
from whichlora.predict.evaluation_and_saving import Besides, besides, evaluation_seconds
from whichlora.predict.judged import judge_moments, step_s
from whichlora.predict.life import Life, life_of
from whichlora.predict.predict import predict_counted
from whichlora.predict.quantities import num_tokens, step_features
from whichlora.predict.rank_time import over_nodes
from whichlora.predict.repeated_times import Repeatability, repeatability, run_deviation
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.early_stop import MOST_TIMES
from whichlora.search.acquisition import Decision, SearchProblem, tiers
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.candidates import Candidates
from whichlora.search.counted_candidate import CountedCandidate, count_inference, count_training
from whichlora.search.feasibility import (
    LIKELY,
    Candidate,
    Quantity,
    chance_to_serve,
    dominated,
    judge,
    least_chance,
)
from whichlora.search.loop import SearchLoop
from whichlora.search.shortlist import MANY, CountedPlan, Requirements
from whichlora.search.total import profiled_total
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.life import LifeConfig
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Plan
from whichlora.spec.results import SCHEMA_VERSION, Measurement, Prediction, Refused
from whichlora.spec.run import RunConfig
from whichlora.store import written
from whichlora.store.hub import load_model, with_drafter
from whichlora.store.jsonfiles import read_object, write_object
from whichlora.store.measurements import MeasurementLog, read_measurements
from whichlora.store.models import is_known_model
from whichlora.store.reuse import Circumstances, other_circumstances, other_model
from whichlora.timing.model import seconds
from whichlora.trainers import get_trainer
from whichlora.workflow.profiling import busy, open_profiler
from whichlora.workflow.training_data import Counted, TrainingData

if TYPE_CHECKING:
    from whichlora.profiler.profile import Profiler

SIDE_BY_SIDE_RANKS = (4, 8, 16, 32, 64)
_MOST_UNREAD = 3  # broken records that are told one by one


class Progress(Protocol):
    """What the workflow tells while it works; `terminal.progress.Progress` shows it."""

    def say(self, text: str) -> None: ...

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None: ...

    def learned(self, measurement: Measurement, prediction: Prediction) -> None: ...

    def training(self, job: Path, *, expected_s: float | None) -> None: ...


class Session:
    """The state of one run: what was measured, and what the predictors made of it."""

    def __init__(
        self,
        plan: Plan,
        gpu: GpuSpec,
        progress: Progress,
        *,
        fresh: bool,
        lengths: Counted | None = None,
    ) -> None:
        objective = plan.objective
        if objective.prefer == "price" and objective.offer(gpu.key) is None:
            raise ConfigError(
                f"prefer: price needs the price of an hour on {gpu.key}, which the price table "
                "lacks; add it to gpu_prices"
            )
        if objective.prefer == "quality" and not objective.scores:
            raise ConfigError("prefer: quality needs quality, a CSV file of scores by model")
        _check_time_limits(plan, gpu)
        rate = plan.limits_on(gpu.key).requests_per_s
        plan = replace(
            plan,
            inference=replace(with_precision(plan.inference, gpu), request_rate=rate),
            finetune=with_precision(plan.finetune, gpu),
        )
        self.gpu = gpu
        self.limits = plan.limits_on(gpu.key)
        self.progress = progress
        self.models: dict[str, ModelSpec] = {name: _loaded(name, plan) for name in plan.models}
        self.data = TrainingData(plan, self.models, lengths)
        unread = {name: self.data.unread(name) for name in plan.models}
        readers = tuple(name for name in plan.models if not unread[name]) or plan.models
        self.plan = plan = replace(plan, models=readers)
        for name in plan.models:
            most = self.data.seq_len(name)
            if most < plan.finetune.seq_len and self.data.lengths(name).longest() >= most:
                progress.say(f"{name}: rows are cut to {most} tokens, all its positions")
        self._features: dict[tuple[RunConfig, int], dict[str, float]] = {}
        self._jobs: dict[RunConfig, ResolvedRun] = {}
        self._predictor = Predictor()
        self._counted_runs: dict[RunConfig, CountedRun] = {}
        self._counted: dict[RunConfig, CountedCandidate] = {}
        self.compared: list[tuple[Measurement, RunConfig, Prediction]] = []
        self.roots = calibration_roots(plan.calibration_dir)
        self.run_id = _run_id(plan.output_dir, fresh=fresh)
        self.log = MeasurementLog(self.roots[0], gpu.key, self.run_id)
        self.calibration: Calibration = load_calibration(gpu, plan.calibration_dir)
        self._of_host: dict[str, Any] = {
            "machines": self.calibration.machines,
            "this_host_bytes": self.calibration.this_host_bytes,
        }
        self.plan = plan = self._over_nodes(plan)
        self.space = Candidates(
            plan,
            self.models,
            gpu,
            self._workload,
            trains_tower=lambda model: bool(self.data.media(model)),
            **self._of_host,
        )
        for name, reason in unread.items():
            if name not in readers:
                self.space.refused[name] = Refused(
                    model=name, gpu=gpu.key, settings={"phase": "finetune"}, reason=reason
                )
        self.cold = replace(prior_calibration(gpu), **self._of_host)
        # read once: a shared database holds more records than a run adds
        self._records = self._read_records()
        self._elsewhere = ids_elsewhere(self.roots, self.gpu.key)
        self._resumed: dict[RunConfig, list[Measurement]] = {}
        for record in self._records:
            if record.provenance.get("run_id") == self.run_id:
                self._resumed.setdefault(record.run, []).append(record)
        self._run_deviation = run_deviation(self._records)
        self._profiler: Profiler | None = None
        self._told_busy = False

    def _over_nodes(self, plan: Plan) -> Plan:
        """`plan` with each number of GPUs over the nodes that it needs."""
        spreads: dict[ParallelConfig, None] = {}
        for config in plan.spreads:
            spread, note = over_nodes(config, self.gpu, self.calibration.machines)
            spreads[spread] = None
            if note:
                self.progress.say(note)
        return replace(plan, spreads=tuple(spreads))

    def _read_records(self) -> list[Measurement]:
        unread: list[str] = []

        def leave_out(where: str, reason: str) -> None:
            unread.append(f"left out: {where}: {reason}")

        records = read_measurements(self.roots, self.gpu.key, leave_out=leave_out)
        for line in unread[:_MOST_UNREAD]:
            self.progress.say(line)
        if len(unread) > _MOST_UNREAD:
            self.progress.say(f"… and {len(unread) - _MOST_UNREAD} more records are left out")
        if self.calibration.fallback:
            self.progress.say(stale_note(self.calibration, self.plan.calibration_dir)[2:])
        return list(records)

    # --- candidates

    @cached_property
    def is_large(self) -> bool:
        """Whether there are too many candidates to decide on all of them at once.

        A shortlist knows no time of answers that are written within a step.
        """
        writes = get_trainer(self.plan.finetune.trainer).writes_answers
        return self.plan.profile != "all" and not writes and sum(self.space.number()) > MANY

    def runs(self) -> list[RunConfig]:
        """The candidates to decide on: all, or of many a shortlist and what was measured."""
        if not self.is_large:
            return self.measurable_runs()
        runs = self._shortlist()
        if not any(run.phase == "finetune" for run in runs):
            self.space.finetune_runs()  # says why all are refused
        resumed = () if self.plan.is_spread else self._resumed  # profiled for runs of several GPUs
        return list(dict.fromkeys([*runs, *resumed]))

    def measurable_runs(self) -> list[RunConfig]:
        """Every candidate; of stage 1 none where a serving engine answers."""
        serving = [] if self.space.is_answered else self.space.inference_runs()
        return [*serving, *self.space.finetune_runs()]

    def _shortlist(self) -> list[RunConfig]:
        limits, objective = self.limits, self.plan.objective
        device = float(self.gpu.memory_bytes)
        serving = self.plan.most_gpus * device
        readers = self.plan.models
        places = [objective.place(name, self.models[name].num_params) for name in readers]
        requirements = Requirements(
            inference_s=limits.time_per_token_s or math.inf,
            inference_bytes=min(serving, limits.inference_bytes or serving),
            total_s=limits.total_time_s or math.inf,
            finetune_bytes=min(device, limits.finetune_bytes or device),
            tier=dict(zip(readers, tiers(places), strict=True)),
            prefer=objective.prefer,
            confidence=least_chance(self.plan),
        )
        return self._counted_plan.shortlist(self.calibration, requirements)

    @cached_property
    def _counted_plan(self) -> CountedPlan:
        space = self.space
        return CountedPlan(
            lambda model: () if space.is_answered else space.serving_of((model,)),
            lambda model: space.training_of((model,)),
            space.form,
            self.answered.get,
        )

    @cached_property
    def served(self) -> list[Candidate]:
        """Stage 1 where a serving engine answers: every candidate, as predicted; else none."""
        if not self.space.is_answered:
            return []
        return [
            judge(
                self.predict(run),
                self.limits,
                form=self.space.form(run),
                objective=self.plan.objective,
            )
            for run in self.space.inference_runs()
        ]

    @cached_property
    def answered(self) -> dict[RunConfig, bool]:
        """Whether a serving engine meets the limits in each form; False where it refuses it."""
        if not self.space.is_answered:
            return {}
        chances = chance_to_serve(self.served)
        forms = self.space.forms(self.plan.models)
        return {form: chances.get(form, 0.0) >= LIKELY for form in forms}

    def side_by_side(self, search_loop: SearchLoop, run: RunConfig) -> list[Candidate]:
        """`run` with every method and rank; what its model or its libraries refuse is left out."""
        position = {each: i for i, each in enumerate(search_loop.runs)}
        rows = []
        for method in dict.fromkeys((*COMPARED, *self.plan.methods)):
            has_ranks = "r" not in get_method(method).ignores
            for r in SIDE_BY_SIDE_RANKS if has_ranks else SIDE_BY_SIDE_RANKS[:1]:
                changed = replace(
                    with_method(self.plan.finetune, method),
                    model=run.model,
                    r=r,
                    lora_alpha=self.plan.lora_alpha or 2 * r,
                    batch_size=run.batch_size,
                    seq_len=run.seq_len,
                    padding=run.padding,
                    parallel=run.parallel,
                    gradient_accumulation_steps=run.gradient_accumulation_steps,
                )
                with contextlib.suppress(ConfigError):
                    variant = self.job(changed).run
                    in_search = variant in position
                    alone = search_loop if in_search else self.search_loop([variant])
                    rows.append(self._judge(alone, position[variant] if in_search else 0))
        return rows

    def job(self, run: RunConfig) -> ResolvedRun:
        """A run resolved against its model, method and device."""
        if run not in self._jobs:
            self._jobs[run] = resolve(self.models[run.model], run, self.gpu)
        return self._jobs[run]

    def _workload(self, model: str, batch_size: int, at_once: int, accumulation: int) -> Workload:
        return self.data.workload(model, batch_size, at_once=at_once, accumulation=accumulation)

    def workload(self, run: RunConfig) -> Workload:
        """The batches of a whole training of `run`, by a GPU where it has several."""
        return self.data.workload(run.model, run.batch_size, **self._micro_steps(run))

    def evaluation(self, run: RunConfig) -> dict[int, float]:
        """Padded length to the number of evaluation batches, by a GPU where it has several."""
        return self.data.evaluation(run.model, run.batch_size, **self._micro_steps(run))

    def _micro_steps(self, run: RunConfig) -> dict[str, int]:
        job = self.job(run)
        return {"at_once": job.at_once, "accumulation": job.run.gradient_accumulation_steps}

    # --- judging

    def predict(self, run: RunConfig, calibration: Calibration | None = None) -> Prediction:
        """Judge a candidate, by what is known now or by `calibration`; it is counted once."""
        counted = self._counted_run(run)
        return predict_counted(counted, calibration or self.calibration, by_rank=False)

    def _counted_run(self, run: RunConfig) -> CountedRun:
        if run not in self._counted_runs:
            self._counted_runs[run] = self._count_run(run)
        return self._counted_runs[run]

    def _count_run(self, run: RunConfig) -> CountedRun:
        """Of many candidates only those are replayed whose limit lies within their interval."""
        if run.phase == "inference" and self.space.is_answered:
            return self._predictor.count(self.models[run.model], run, self.gpu)
        job = self.job(run)
        if not self.is_large:
            return count_run(job)
        counted = count_run(job, replayed=False)
        least, _, high = judge_moments(job, counted.moments, self.calibration).bounds()
        training = run.phase == "finetune"
        limit = self.limits.finetune_bytes if training else self.limits.inference_bytes
        bounds = [job.gpu.memory_bytes, *([limit] if limit else [])]
        near = any(least <= bound < high for bound in bounds)
        return count_run(job) if near else counted

    def replay(self, run: RunConfig) -> Candidate:
        """The candidate `run` with what its replayed requests say, as a prediction alone has it."""
        self._counted_runs[run] = count_run(self.job(run))
        self._counted.pop(run, None)
        return self._judge(self.search_loop([run]), 0)

    def _price_per_hour(self, num_gpus: int) -> float:
        """Of so many GPUs; where no price is known, as if an hour of each cost one."""
        offer = self.plan.objective.offer(self.gpu.key, num_gpus)
        return float(num_gpus) if offer is None else offer.per_hour(num_gpus)

    def search_loop(self, runs: Sequence[RunConfig]) -> SearchLoop:
        """The search over `runs`, which are of both stages."""
        import numpy as np

        plan, limits = self.plan, self.limits
        counted_candidates = [self._counted_candidate(run) for run in runs]
        training = np.array([run.phase == "finetune" for run in runs])
        names = [run.model for run in runs]
        forms = [self.space.form(run) for run in runs]
        numbers = {form: number for number, form in enumerate(dict.fromkeys(forms))}
        device = float(self.gpu.memory_bytes)

        def per_stage(finetune: float | None, inference: float | None, most: float) -> Any:
            bounds = (most if each is None else float(each) for each in (finetune, inference))
            return np.where(training, *bounds)

        problem = SearchProblem(
            training=training,
            form=np.array([numbers[form] for form in forms]),
            tier=np.array(
                tiers([plan.objective.place(n, self.models[n].num_params) for n in names])
            ),
            price=np.array([self._price_per_hour(run.parallel.gpus) for run in runs]),
            most_bytes=np.minimum(
                np.where(training, device, plan.most_gpus * device),
                per_stage(limits.finetune_bytes, limits.inference_bytes, np.inf),
            ),
            most_s=per_stage(limits.total_time_s, limits.time_per_token_s, np.inf),
            prefer=plan.objective.prefer,
            answered={
                n: self.answered[form] for form, n in numbers.items() if form in self.answered
            },
        )
        return SearchLoop(problem, CandidatePosterior(counted_candidates), self.calibration)

    def lengthened(self, search_loop: SearchLoop, more: Sequence[RunConfig]) -> SearchLoop:
        """`search_loop` with further candidates; what it measured and spent stays."""
        longer = self.search_loop([*search_loop.runs, *more])
        longer.measured, longer.spent = search_loop.measured, search_loop.spent
        longer.before = search_loop.before
        return longer

    def _counted_candidate(self, run: RunConfig) -> CountedCandidate:
        if run not in self._counted:
            self._counted[run] = self._count(run)
        return self._counted[run]

    def _count(self, run: RunConfig) -> CountedCandidate:
        counted = self._counted_run(run)
        if run.phase == "inference":
            return count_inference(counted, num_runs=self.plan.num_runs)
        load = self.workload(run)
        steps = {width: n / run.gradient_accumulation_steps for width, n in load.widths.items()}
        return count_training(
            counted,
            steps,
            profiled=load.profile_lengths(self.plan.num_batches),
            evaluated=self.evaluation(run),
        )

    def candidates(self, search_loop: SearchLoop) -> list[Candidate]:
        """Every candidate in the light of what is known now, in the order of `search_loop`."""
        return [self._judge(search_loop, position) for position in range(len(search_loop.runs))]

    def _judge(self, search_loop: SearchLoop, position: int) -> Candidate:
        run = search_loop.runs[position]
        prediction = self.predict(run)
        measurement = search_loop.measured.get(position)
        time, memory = search_loop.quantities(position)
        training = run.phase == "finetune"
        failure = ""
        if measurement is None:
            smaller = dominated(run, search_loop.out_of_memory())
            if smaller is not None:
                failure = f"batch size {smaller.batch_size} already ran out of memory"
        elif training and measurement.step_s:
            time = self._measured_total(run, measurement)
        if training and measurement is None:
            time, memory = self._with_assumed_lengths(run, time, memory)
        tokens = self.workload(run).padded_tokens if training else None
        return judge(
            prediction,
            self.limits,
            memory=memory,
            time_per_token_s=None if training else time,
            total_s=time if training else None,
            total_tokens=tokens,
            measurement=measurement,
            failure=failure,
            form=self.space.form(run),
            objective=self.plan.objective,
            serving_gpus=self.plan.most_gpus,
        )

    def _with_assumed_lengths(
        self, run: RunConfig, time: Quantity, memory: Quantity
    ) -> tuple[Quantity, Quantity]:
        """Time and memory with what is not known of lengths that are assumed or estimated."""
        load = self.workload(run)
        if load.least_longest < run.seq_len:
            shorter = replace(run, seq_len=load.least_longest)
            least = self.predict(shorter)
            low = min(memory.low, least.memory.interval_bytes[0])
            memory = replace(memory, low=low)
        return time.widened(load.deviation), memory

    def _seconds(self, run: RunConfig, width: int) -> float:
        """Predicted seconds of one optimizer step at `width`; its features are kept."""
        if self.job(run).layout is not None:
            return step_s(self.job(run), self.calibration, width)
        key = (run, width)
        if key not in self._features:
            self._features[key] = step_features(self.job(run), seq_len=width)
        total, _ = seconds(self.calibration.time["finetune"], self._features[key])
        return float(total)

    def _measured_total(self, run: RunConfig, measurement: Measurement) -> Quantity:
        """Seconds of the whole training: every width's step time, times how often it comes."""
        load = self.workload(run)
        profile = list(zip(measurement.batch_seq_len, measurement.step_s, strict=True))
        widths = {*load.widths, *measurement.batch_seq_len}
        evaluated = self.evaluation(run)
        return profiled_total(
            {width: n / run.gradient_accumulation_steps for width, n in load.widths.items()},
            {width: self._seconds(run, width) for width in widths},
            profile,
            warm_up_s=measurement.warm_up_s,
            evaluation_s=evaluation_seconds(self.job(run), self.calibration, evaluated),
            deviation=load.deviation,
            repeatability=self._run_deviation[0],
        )

    def besides(self, run: RunConfig) -> Besides:
        """What `run` takes besides its steps."""
        load = self.workload(run)
        widths = self.evaluation(run)
        return besides(
            self.job(run),
            self.calibration,
            self.plan.keeping,
            widths=widths,
            num_steps=load.num_steps,
            epochs=self.plan.epochs,
        )

    def life(self, run: RunConfig) -> Life | None:
        """The stages of `run`, as the plan saves and evaluates; None on several GPUs."""
        job = self.job(run)
        if job.layout is not None or not job.trainer.library_class:
            return None
        settings = LifeConfig(
            keeping=self.plan.keeping, eval_seq_len=max(self.evaluation(run), default=0)
        )
        return life_of(job.model, run, self.gpu, self.calibration, settings)

    # --- measuring

    def measure(
        self, search_loop: SearchLoop, position: int, decision: Decision | None
    ) -> Measurement:
        """Profile a candidate."""
        run = search_loop.runs[position]
        load_now = self._busy()
        num_open = len(search_loop.runs) - len(search_loop.measured)
        if decision is not None:
            num_open = int((decision.chance_to_win > 0).sum())
        self.progress.profiling(run, number=len(search_loop.measured) + 1, open_candidates=num_open)
        load = self.workload(run) if run.phase == "finetune" else None
        circumstances = self._circumstances(run)
        number = circumstances.num_batches
        further = 0 if decision is None else (MOST_TIMES - 1) * number
        lengths = (run.prompt_len,) * (number + further)
        if load:
            lengths = load.profile_lengths(number) + load.further_lengths(further)
        decisive_s: Sequence[float] = ()
        predicted_s: Sequence[float] = ()
        if decision is not None:
            decisive_s = self._per_batch(run, lengths, search_loop.decisive_s(position, decision))
            predicted_s = [self._batch_s(run, length) for length in lengths]
        measurement = self.profiler().measure(
            run,
            model_config=circumstances.model_config,
            target_modules=self.job(run).peft_targets,
            seq_lens=lengths,
            num_batches=number,
            decisive_s=decisive_s,
            predicted_s=predicted_s,
            timeout_s=circumstances.timeout_s,
        )
        in_database = is_known_model(run.model)
        measurement = replace(
            measurement,
            model_config=None if in_database else dict(circumstances.model_config),
            provenance={
                **measurement.provenance,
                **circumstances.noted(),
                **({"busy": load_now} if load_now else {}),
            },
        )
        self.log.append(measurement)
        self._records.append(measurement)
        self._run_deviation = run_deviation(self._records)
        return measurement

    def _busy(self) -> str:
        """What else the device works on, told the first time."""
        load_now = busy(self.gpu)
        if load_now and not self._told_busy:
            self.progress.say(f"{load_now}: times measured now may be too long; records say so")
            self._told_busy = True
        return load_now

    def _batch_s(self, run: RunConfig, length: int) -> float:
        """Predicted seconds of one batch of a profile; of a generation one for all."""
        return self._seconds(run, length) if run.phase == "finetune" else 1.0

    def repeatability(self, run: RunConfig, measurement: Measurement) -> Repeatability:
        """What the profile of `run` knows of its time, and what more batches would cost."""
        times_s = measurement.step_s or measurement.generate_s
        lengths = measurement.step_lengths or (run.prompt_len,) * len(times_s)
        predicted_s = [self._batch_s(run, length) for length in lengths]
        return repeatability(times_s, predicted_s, *self._run_deviation)

    def _per_batch(self, run: RunConfig, lengths: Sequence[int], whole_s: float) -> list[float]:
        """What each batch of a profile takes of a training, or a generation, of `whole_s`.

        Args:
            whole_s: seconds of the whole training, or of one generated token.
        """
        if run.phase == "inference":
            return [whole_s * num_tokens(self.job(run))] * len(lengths)
        widths = self.workload(run).widths
        number = {width: n / run.gradient_accumulation_steps for width, n in widths.items()}
        predicted_s = sum(n * self._seconds(run, width) for width, n in number.items())
        return [whole_s * self._seconds(run, width) / predicted_s for width in lengths]

    def recall(
        self, search_loop: SearchLoop, *, libraries: Mapping[str, str] | None = None
    ) -> tuple[list[RunConfig], Counter[str]]:
        """Let `search_loop` take in what this run has recorded so far and would measure alike now.

        Args:
            libraries: version by library that would measure now; None takes what the nodes of a
                cluster measured with whatever they have, and as their task lists asked for it.

        Returns:
            The runs taken in, and how many others differ in which way.
        """
        recalled, refused = [], Counter[str]()
        for position, run in enumerate(search_loop.runs):
            records = self._resumed.pop(run, [])
            differences = [self._difference(record, libraries) for record in records]
            alike = [record for record, text in zip(records, differences, strict=True) if not text]
            if alike:
                search_loop.take(position, alike[-1], self.learn)
                recalled.append(run)
            elif records:
                refused[differences[-1]] += 1
        return recalled, refused

    def _difference(self, record: Measurement, libraries: Mapping[str, str] | None) -> str:
        run, config = record.run, self.models[record.run.model].config
        in_database = is_known_model(run.model)
        model = other_model(record, config, in_database=in_database)
        if model or libraries is None:
            return model
        return other_circumstances(record, self._circumstances(run), libraries)

    def _circumstances(self, run: RunConfig) -> Circumstances:
        training = run.phase == "finetune"
        return Circumstances(
            model_config=self.models[run.model].config,
            num_batches=self.plan.num_batches if training else self.plan.num_runs,
            timeout_s=self.plan.timeout_s,
            memory_bytes=self.gpu.memory_bytes,
        )

    def learn(self, measurement: Measurement) -> Calibration:
        """Take a measurement in and refit; the fit sees all records of this device."""
        from whichlora.calibration.fit import fit

        run = RunConfig.from_dict(measurement.config)
        before = self.predict(run)
        self.compared.append((measurement, run, before))
        self.progress.learned(measurement, before)
        launch_s = self.calibration.launch_s
        fitted = fit(self._records, self.gpu, model_of, held_out=False, elsewhere=self._elsewhere)
        fitted = replace(fitted, **self._of_host)
        if launch_s is not None:
            fitted = fitted.with_launch(launch_s, other_host=False)
        self.calibration = fitted
        return self.calibration

    def profiler(self) -> Profiler:
        if self._profiler is None:
            self.log.prepare()
            self._profiler = open_profiler(self.plan, self.gpu, self.run_id)
        return self._profiler

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None


def _loaded(name: str, plan: Plan) -> ModelSpec:
    """The model of that name, with what drafts for it where the engine is asked to."""
    model = load_model(name, trust_remote_code=plan.trust_remote_code)
    return with_drafter(model, plan.inference.serving, plan.inference.serving_options)


def _check_time_limits(plan: Plan, gpu: GpuSpec) -> None:
    """Refuse limits on times that the engine of `plan` has not.

    Raises:
        ConfigError: one line.
    """
    limits, engine = plan.limits_on(gpu.key), get_engine(plan.inference.serving)
    if engine.start is None or engine.stepping is not None:
        return
    for key, limit in (
        ("time_per_token", limits.time_per_token_s),
        ("ttft", limits.ttft_s),
        ("tpot", limits.tpot_s),
        ("requests_per_s", limits.requests_per_s),
    ):
        if limit is not None:
            raise ConfigError(
                f"stage1_profile.{key}: no times are predicted of serving {engine.name}; leave it "
                "out, or give another engine"
            )


def _run_id(folder: Path, *, fresh: bool) -> str:
    """Name of this run's records; the same again when the folder's run is resumed.

    Raises:
        DataFileError: the folder can't be written, or its state is broken.
    """
    state = folder / "run.json"
    if os.path.exists(state) and not fresh:
        run_id = read_object(state).get("run_id")
        if not isinstance(run_id, str):
            raise DataFileError(f"{state}: run_id: is missing; start over with --fresh")
        written.begin(folder)
        return run_id
    run_id = uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataFileError(
            f"{folder}: can't be made ({error.strerror}); set output_dir to a folder of yours"
        ) from None
    written.begin(folder)  # an empty one says that what is put there later is not its own
    write_object(state, {"schema_version": SCHEMA_VERSION, "run_id": run_id})
    return run_id
