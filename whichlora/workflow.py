"""One `whichlora run`: both stages, the answer, the files it leaves and the job it hands out."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from whichlora import api, timing
from whichlora.architecture import ModelSpec
from whichlora.calibration import Calibration, prior_calibration
from whichlora.config import load_plan
from whichlora.dataset import (
    BYTE_LEVEL,
    BaseDataset,
    TokenLengths,
    Workload,
    count_tokens,
    open_dataset,
    workload,
)
from whichlora.errors import ConfigError, DataFileError, MeasurementError
from whichlora.html_report import write_report
from whichlora.methods import get_method, list_methods
from whichlora.plan import Plan
from whichlora.prediction import Job, predict, resolve, step_features, time_interval
from whichlora.results import SCHEMA_VERSION, Measurement, Prediction
from whichlora.search import (
    CHOOSE_FINETUNE,
    CHOOSE_INFERENCE,
    Candidate,
    Quantity,
    dominated,
    judge,
    kept_models,
    winner,
)
from whichlora.specs import GpuSpec, Padding, RunConfig
from whichlora.store.jsonfiles import read_object, write_object
from whichlora.store.measurements import MeasurementLog, read_measurements
from whichlora.validation import check

SIDE_BY_SIDE_RANKS = (4, 8, 16, 32, 64)


class Progress(Protocol):
    """What the workflow tells while it works; `report.Progress` shows it."""

    def say(self, text: str) -> None: ...

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None: ...

    def learned(self, measurement: Measurement, prediction: Prediction) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured candidate beside its predictions.

    Args:
        cold: from datasheet priors; `before`: when it was chosen; `after`: from the final refit.
    """

    measurement: Measurement
    cold: Prediction
    before: Prediction
    after: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run found out, and where it wrote it.

    Args:
        inference, finetune: every candidate of the two stages, as it stands at the end.
        kept: models that meet the inference limits, largest first.
        compared: every candidate measured in this run, beside its predictions.
        side_by_side: the best candidate with every method and rank, whatever the plan asked for.
        dataset: sequences, tokens and epochs that the total times are for.
        files: what was written, by purpose.
        training: what the winning job reported, where it was run.
    """

    plan: Plan
    gpu: GpuSpec
    basis: str
    inference: Sequence[Candidate]
    finetune: Sequence[Candidate]
    kept: Sequence[str]
    winner: Candidate | None
    compared: Sequence[Compared]
    tokens: str
    side_by_side: Sequence[Candidate] = ()
    dataset: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The content of `answer.json`."""
        from whichlora.report import answer_facts, detailed_row

        return {
            "schema_version": SCHEMA_VERSION,
            "config": str(self.plan.source),
            "gpu": self.gpu.key,
            "basis": self.basis,
            "tokens": self.tokens,
            "winner": None if self.winner is None else detailed_row(self.winner),
            "kept_models": list(self.kept),
            "inference": [detailed_row(one) for one in self.inference],
            "finetune": [detailed_row(one) for one in self.finetune],
            "files": {name: str(path) for name, path in self.files.items()},
            "training": None if self.training is None else dict(self.training),
        } | answer_facts(self)


_UNCUT = 10**9  # tokens, more than any text has


def _padding(load: Workload, stated: Padding) -> Padding:
    """Whether batches hold padding; `stated` decides where their lengths do not tell."""
    if load.varied:
        return "padded"
    return "none" if load.collator == "packed" else stated


class Session:
    """The state of one run: what was measured, and what the predictors made of it."""

    def __init__(self, plan: Plan, gpu: GpuSpec, progress: Progress, *, fresh: bool) -> None:
        self.plan = plan
        self.gpu = gpu
        self.progress = progress
        self.models: dict[str, ModelSpec] = {
            name: api.load_model(name, trust_remote_code=plan.trust_remote_code)
            for name in plan.models
        }
        self.dataset: BaseDataset = open_dataset(plan.dataset)
        self._lengths: dict[str, TokenLengths] = {}
        self._workloads: dict[tuple[str, int], Workload] = {}
        self._features: dict[tuple[RunConfig, int], dict[str, float]] = {}
        self._jobs: dict[RunConfig, Job] = {}
        self.measured: dict[RunConfig, Measurement] = {}
        self.compared: list[tuple[Measurement, RunConfig, Prediction]] = []
        self.roots = api.calibration_roots(plan.calibration_dir)
        self.run_id = _run_id(plan.output_dir, fresh=fresh)
        self.log = MeasurementLog(self.roots[0], gpu.key, self.run_id)
        self.cold = prior_calibration(gpu)
        self.calibration: Calibration = api.load_calibration(gpu, plan.calibration_dir)
        # read once: a shared database holds more records than a run adds
        self._records = list(read_measurements(self.roots, gpu.key))
        self._resumed = {
            RunConfig.from_dict(record.config): record
            for record in self._records
            if record.provenance.get("run_id") == self.run_id
        }
        self._profiler: Any = None

    # --- candidates

    def tokenizer(self, model: str) -> str:
        if self.plan.weights == "random":
            return BYTE_LEVEL
        return self.plan.tokenizers.get(model, model)

    def lengths(self, model: str) -> TokenLengths:
        """Token lengths of the data as the tokenizer of `model` cuts them."""
        tokenizer = self.tokenizer(model)
        joins = self.plan.collator == "packed"  # before it cuts
        if tokenizer not in self._lengths:
            self._lengths[tokenizer] = count_tokens(
                self.dataset,
                tokenizer=tokenizer,
                offline=self.plan.weights == "random",
                max_length=_UNCUT if joins else self.plan.finetune.seq_len,
            )
        return self._lengths[tokenizer]

    def workload(self, model: str, batch_size: int) -> Workload:
        key = (self.tokenizer(model), batch_size)
        if key not in self._workloads:
            self._workloads[key] = workload(
                self.lengths(model),
                collator=self.plan.collator,
                batch_size=batch_size,
                seq_len=self.plan.finetune.seq_len,
                accumulation=self.plan.finetune.gradient_accumulation_steps,
                epochs=self.plan.epochs,
                seed=self.plan.seed,
            )
        return self._workloads[key]

    def inference_runs(self) -> list[RunConfig]:
        plan = self.plan
        return [
            self._resolved(
                replace(
                    plan.inference,
                    model=model,
                    batch_size=batch_size,
                    prompt_len=prompt_len,
                    max_new_tokens=new_tokens,
                )
            )
            for model in plan.models
            for prompt_len in plan.prompt_lens
            for new_tokens in plan.max_new_tokens
            for batch_size in plan.inference_batch_sizes
        ]

    def finetune_runs(self, models: Sequence[str]) -> list[RunConfig]:
        plan = self.plan
        runs = []
        for model in models:
            for method in plan.methods:
                trains_base = get_method(method).trains_base
                for r in plan.ranks[:1] if trains_base else plan.ranks:
                    for batch_size in plan.finetune_batch_sizes:
                        load = self.workload(model, batch_size)
                        run = replace(
                            plan.finetune,
                            model=model,
                            method=method,
                            r=r,
                            lora_alpha=plan.lora_alpha or 2 * r,
                            batch_size=batch_size,
                            seq_len=load.longest,
                            padding=_padding(load, plan.finetune.padding),
                        )
                        runs.append(self._resolved(run))
        return runs

    def side_by_side(self, run: RunConfig) -> list[Candidate]:
        """`run` with every method and rank; what its model or its libraries refuse is left out."""
        found = []
        for method, kind in list_methods().items():
            for r in SIDE_BY_SIDE_RANKS[:1] if kind.trains_base else SIDE_BY_SIDE_RANKS:
                changed = replace(
                    self.plan.finetune,
                    model=run.model,
                    method=method,
                    r=r,
                    lora_alpha=self.plan.lora_alpha or 2 * r,
                    batch_size=run.batch_size,
                    seq_len=run.seq_len,
                    padding=run.padding,
                )
                with contextlib.suppress(ConfigError):
                    found.append(self.judge(self._resolved(changed)))
        return found

    def _resolved(self, run: RunConfig) -> RunConfig:
        """`run` with every default filled in, as predictions and records name it."""
        job = resolve(self.models[run.model], run, self.gpu)
        self._jobs[job.run] = job
        return job.run

    def job(self, run: RunConfig) -> Job:
        """A candidate resolved against its model, method and device."""
        return self._jobs[run]

    # --- judging

    def judge(self, run: RunConfig) -> Candidate:
        prediction = predict(self.models[run.model], run, self.gpu, self.calibration)
        measurement = self.measured.get(run)
        total = self._total(run, measurement) if run.phase == "finetune" else None
        failure = ""
        if measurement is None:
            out_of_memory = [
                other for other, found in self.measured.items() if found.outcome == "oom"
            ]
            smaller = dominated(run, out_of_memory)
            if smaller is not None:
                failure = f"batch size {smaller.batch_size} already ran out of memory"
        return judge(
            prediction,
            self.plan.limits,
            total_s=total,
            measurement=measurement,
            failure=failure,
        )

    def _seconds(self, run: RunConfig, width: int) -> float:
        """Predicted seconds of one optimizer step at `width`; its features are kept."""
        key = (run, width)
        if key not in self._features:
            self._features[key] = step_features(self.job(run), seq_len=width)
        total, _ = timing.seconds(self.calibration.time["finetune"], self._features[key])
        return float(total)

    def _total(self, run: RunConfig, measurement: Measurement | None) -> Quantity:
        """Seconds of the whole training: every width's step time, times how often it comes."""
        load = self.workload(run.model, run.batch_size)
        micro_steps = run.gradient_accumulation_steps
        total = sum(
            count / micro_steps * self._seconds(run, width) for width, count in load.widths.items()
        )
        if measurement is not None and measurement.step_s:
            pairs = zip(measurement.batch_seq_len, measurement.step_s, strict=True)
            predicted = sum(self._seconds(run, width) for width, _ in pairs)
            total *= sum(measurement.step_s) / predicted
            return Quantity(value=total, low=total, high=total, measured=True)
        model = self.calibration.time["finetune"]
        widest = self._features[(run, max(load.widths))]
        seconds, _ = timing.seconds(model, widest)
        low, high = time_interval(total, timing.log_deviation(model, widest, float(seconds)))
        return Quantity(value=total, low=low, high=high, measured=False)

    # --- measuring

    def measure(self, run: RunConfig) -> Measurement:
        """Profile `run`, or take it from the records of the interrupted run."""
        resumed = self._resumed.pop(run, None)
        if resumed is not None:
            from whichlora.report import describe

            self.progress.say(f"resumed: {describe(run)} was measured before")
            return resumed
        load = self.workload(run.model, run.batch_size) if run.phase == "finetune" else None
        training = load is not None
        number = self.plan.num_batches if training else self.plan.num_runs
        measurement: Measurement = self._device().measure(
            run,
            model_config=self.models[run.model].config,
            target_modules=self.job(run).peft_targets,
            seq_lens=load.profile_lengths(number) if load else (run.prompt_len,),
            num_batches=number,
            timeout_s=self.plan.timeout_s,
        )
        known = api.is_known_model(run.model)
        config = None if known else dict(self.models[run.model].config)
        measurement = replace(measurement, model_config=config)
        self.log.append(measurement)
        self._records.append(measurement)
        return measurement

    def learn(self, measurement: Measurement) -> None:
        """Take a measurement in and refit; the fit sees all records of this device."""
        from whichlora.fitting import fit

        run = RunConfig.from_dict(measurement.config)
        before = predict(self.models[run.model], run, self.gpu, self.calibration)
        self.measured[run] = measurement
        self.compared.append((measurement, run, before))
        self.progress.learned(measurement, before)
        self.calibration = fit(self._records, self.gpu, api.model_of, held_out=False)

    def _device(self) -> Any:
        if self._profiler is None:
            from whichlora.device.profile import Profiler

            self._profiler = Profiler(
                gpu=self.gpu.key,
                device=_device_of(self.gpu),
                provenance={
                    "run_id": self.run_id,
                    "command": " ".join(["whichlora", *sys.argv[1:]]),
                    "config": str(self.plan.source),
                },
                memory_limit_bytes=self.gpu.memory_bytes if self.gpu.kind == "cpu" else None,
                log_path=self.plan.output_dir / "profile.log",
            )
        return self._profiler

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    # --- the two stages

    def stage(self, runs: Sequence[RunConfig], choose: Any) -> list[Candidate]:
        def measure(run: RunConfig) -> Measurement:
            left = sum(not one.measured and one.verdict != "misses" for one in judge_all())
            self.progress.profiling(run, number=len(self.measured) + 1, open_candidates=left)
            return self.measure(run)

        def judge_all() -> list[Candidate]:
            return [self.judge(run) for run in runs]

        return check(judge_all, choose, measure, self.learn)


def run(config: Path, *, progress: Progress, fresh: bool = False) -> Answer:
    """Carry out the config file: predict, prune, profile, choose, write, and train if asked.

    Raises:
        ConfigError: a fault in the config, the data, a model or the device.
        DataFileError: a file that cannot be read or written.
        MeasurementError: the profiler cannot start.
    """
    plan = load_plan(config)
    gpu = api.find_gpu(plan.gpu)
    if plan.profile != "none":
        _device_of(gpu)
    session = Session(plan, gpu, progress, fresh=fresh)
    try:
        answer = _search(session)
        answer = replace(answer, files=_write(session, answer))
        if plan.train and answer.winner is not None:
            answer = replace(answer, training=_train(session, answer))
    finally:
        session.close()
    report = plan.output_dir / "report.html"
    answer = replace(answer, files={**answer.files, "report": report})
    write_object(plan.output_dir / "answer.json", answer.to_dict())
    write_report(plan.output_dir, report)
    return answer


def _search(session: Session) -> Answer:
    plan = session.plan
    policy = plan.profile
    inference_runs = session.inference_runs()
    while True:
        session.progress.say(f"stage 1: inference of {len(plan.models)} models, {session.gpu.key}")
        inference = session.stage(inference_runs, CHOOSE_INFERENCE[policy])
        kept = kept_models(inference, policy)
        session.progress.say(f"stage 2: fine-tuning of {len(kept)} models that meet the limits")
        finetune_runs = session.finetune_runs(kept)
        finetune = session.stage(finetune_runs, CHOOSE_FINETUNE[policy])
        best = winner(finetune, policy)
        if policy == "none":
            break
        if best is not None:  # its serving must have been measured, too
            _confirm_serving(session, best.run.model, inference_runs)
        inference = [session.judge(run) for run in inference_runs]
        # what was learned since may have reopened stage 1, or refuted a model it had kept
        reopened = CHOOSE_INFERENCE[policy](inference) is not None
        if not reopened and kept_models(inference, policy) == kept:
            break
    finetune = [session.judge(run) for run in finetune_runs]
    best = winner(finetune, policy)
    if session.measured:
        session.calibration = api.refit(session.gpu, plan.calibration_dir)
    compared = [
        Compared(
            measurement=measurement,
            cold=predict(session.models[one.model], one, session.gpu, session.cold),
            before=before,
            after=predict(session.models[one.model], one, session.gpu, session.calibration),
        )
        for measurement, one, before in session.compared
    ]
    methods = dict.fromkeys(session.lengths(model).method for model in plan.models)
    lengths = session.lengths(plan.models[0])
    tokens = (
        f"{lengths.num_sequences()} sequences, {lengths.total_tokens()} tokens an epoch, "
        f"longest {lengths.longest()} (for {plan.models[0]}), counted by {'; '.join(methods)}"
    )
    shown = best or min(finetune, key=lambda one: (-one.chance, one.rank), default=None)
    if best is not None:
        load = session.workload(best.run.model, best.run.batch_size)
        tokens += (
            f"; {load.num_steps} steps over {load.padded_tokens} tokens, "
            f"{100 * load.padding_fraction:.1f} % of them padding ({load.collator}), longest batch "
            f"{best.run.batch_size} x {load.longest}"
        )
    return Answer(
        plan=plan,
        gpu=session.gpu,
        basis=session.calibration.basis(
            memory_runs=session.calibration.memory.num_runs,
            time_runs=session.calibration.time["finetune"].num_runs,
        ),
        inference=inference,
        finetune=finetune,
        kept=kept_models(inference, policy),
        winner=best,
        compared=compared,
        tokens=tokens,
        side_by_side=[] if shown is None else session.side_by_side(shown.run),
        dataset={
            "num_sequences": lengths.num_sequences(),
            "tokens_per_epoch": lengths.total_tokens(),
            "longest": lengths.longest(),
            "epochs": plan.epochs,
        },
        calibration=session.calibration,
    )


def _confirm_serving(session: Session, model: str, runs: Sequence[RunConfig]) -> None:
    """Measure what `model` is only predicted to serve, until one configuration meets."""

    def choose(candidates: Sequence[Candidate]) -> Candidate | None:
        if any(one.measured and one.verdict == "meets" for one in candidates):
            return None
        left = [one for one in candidates if not one.measured and one.verdict != "misses"]
        return max(left, key=lambda one: one.chance, default=None)

    session.stage([run for run in runs if run.model == model], choose)


def _write(session: Session, answer: Answer) -> dict[str, Path]:
    """The table as CSV, the comparison of predictions and measurements, and the job."""
    from whichlora import report
    from whichlora.dataset import write_jsonl

    plan = session.plan
    folder = plan.output_dir
    files = {
        "table": report.write_candidates(folder / "candidates.csv", answer),
        "answer": folder / "answer.json",
        "summary": report.write_summary(folder / "answer.md", answer),
    }
    if answer.compared:
        comparison = folder / "predicted_vs_measured.csv"
        files["comparison"] = report.write_comparison(comparison, answer)
        files["measurements"] = session.log.path
    if answer.winner is None:
        return files
    from whichlora.exports import FORMATS, Recipe
    from whichlora.handover import RECIPE_FILE

    best = answer.winner.run
    job = session.job(best)
    data = (
        write_jsonl(
            session.dataset,
            folder,
            tokenizer=session.tokenizer(best.model),
            offline=plan.weights == "random",
        )
        if plan.dataset.kind != "counts"
        else {}
    )
    recipe = Recipe(
        run=best,
        gpu=session.gpu.key,
        target_modules=job.peft_targets,
        epochs=plan.epochs,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
        tokenizer=None if plan.weights == "random" else plan.tokenizers.get(best.model),
        weights=plan.weights,
        model_config=dict(session.models[best.model].config),
        batching=plan.collator,  # what the total time was summed over
        masked_lm=session.models[best.model].task == "encoder",
        trust_remote_code=plan.trust_remote_code,
    )
    write_object(folder / RECIPE_FILE, recipe.to_dict())
    script = FORMATS["transformers"](recipe)
    path = folder / "train.py"
    path.write_text(script.files[path.name], encoding="utf-8")
    return files | {"job": path} | {f"data_{split}": file for split, file in data.items()}


def _train(session: Session, answer: Answer) -> dict[str, Any]:
    """Run the winning job and say what it measured beside what was predicted."""
    from whichlora.job import train_command

    session.close()  # the job needs the device to itself
    folder = session.plan.output_dir
    job = answer.files["job"]
    session.progress.say(f"training: {job}")
    with (folder / "train.log").open("wb") as log:
        done = subprocess.run(train_command(job), stdout=log, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise MeasurementError(
            f"{job}: ended with exit code {done.returncode}; its output is in {folder}/train.log"
        )
    return read_object(folder / "output" / "result.json") | {"output": str(folder / "output")}


def _device_of(gpu: GpuSpec) -> str:
    """The framework's device for `gpu`, if this machine has it.

    Raises:
        ConfigError: it has not; profiling is impossible here.
    """
    if gpu.kind == "cpu":
        return "cpu"
    from whichlora.device.detect import detect_gpus

    here = detect_gpus()
    for index, device in enumerate(here):
        if api.find_gpu(device.name).key == gpu.key:
            return f"cuda:{index}"
    found = ", ".join(device.name for device in here) or "no GPU"
    raise ConfigError(
        f"gpu: {gpu.key} is not in this machine (it has {found}), so nothing can be profiled; "
        "run this on a machine that has it, or set profile: none for predictions alone"
    )


def _run_id(folder: Path, *, fresh: bool) -> str:
    """Name of this run's records; the same again when the folder's run is resumed.

    Raises:
        DataFileError: the folder can't be written, or its state is broken.
    """
    state = folder / "run.json"
    if state.exists() and not fresh:
        run_id = read_object(state).get("run_id")
        if not isinstance(run_id, str):
            raise DataFileError(f"{state}: run_id: is missing; start over with --fresh")
        return run_id
    run_id = uuid.uuid4().hex
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataFileError(f"{folder}: can't be made ({error.strerror})") from None
    write_object(state, {"schema_version": SCHEMA_VERSION, "run_id": run_id})
    return run_id
