"""One `whichlora run`: both stages, the answer, the files it leaves and the job it hands out."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from whichlora.calibration.load import refit
from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.html import write_report
from whichlora.predict.coefficients import Calibration
from whichlora.predict.evaluation_and_saving import Besides
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.notes import UNVERIFIED
from whichlora.predict.predict import MEMORY_ONLY, predict
from whichlora.profiler.installed import installed_versions
from whichlora.search.acquisition import Decision, StoppedBy
from whichlora.search.feasibility import (
    LIKELY,
    Candidate,
    accepted,
    bolder_than,
    chance_to_serve,
    kept_models,
    least_chance,
    predicted_winner,
)
from whichlora.search.gpu_choice import GpuChoice, OnGpu, choose_gpu
from whichlora.search.grid import pareto
from whichlora.search.loop import SearchLoop
from whichlora.spec.data_format import TEXT_ROWS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.plan import Plan, Prefer
from whichlora.spec.results import SCHEMA_VERSION, Measurement, Prediction, Refused
from whichlora.spec.run import RunConfig
from whichlora.store.jsonfiles import read_object, write_object, write_text
from whichlora.store.locks import hold_folder
from whichlora.workflow.profiling import device_of, gpus_of, is_here, require_profiler
from whichlora.workflow.session import Progress, Session
from whichlora.workflow.training_data import Counted

Ending: TypeAlias = StoppedBy | Literal["everything measured", "not measured", "under way"]


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
class Search:
    """How sure the answer is, and what it cost.

    Args:
        confidence: that no other candidate beats the winner; without one, that nothing fits.
        stopped_by: why no further run was made; "not measured" in a dry run, "under way" where
            runs of a cluster are not back yet.
        chance_to_win: of fine-tuning candidates that may still beat the winner.
    """

    confidence: float
    stopped_by: Ending
    runs: int
    device_s: float
    chance_to_win: Mapping[RunConfig, float]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape."""
        return {
            "confidence": self.confidence,
            "stopped_by": self.stopped_by,
            "runs": self.runs,
            "device_s": self.device_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run found out, and where it wrote it.

    Args:
        inference, finetune: every candidate of the two stages, as it stands at the end.
        kept: models that meet the inference limits in a form in which they may be served, largest
            first.
        front: fine-tuning candidates that meet the limits and that no other beats in both time
            and memory, fastest first.
        compared: every candidate measured in this run, beside its predictions.
        may_fit: of a dry run: what would rank before the winner and meets every limit with less
            than the asked confidence, best first.
        side_by_side: the best candidate with every method and rank, whatever the plan asked for.
        refused: combinations of the plan that a model or the device lacks.
        choice: what every GPU of a list comes to; this is the answer of the recommended one.
        besides: what the winner's evaluations and checkpoints take.
        cautions: what must be known of the data and the winner before either is acted on.
        dataset: sequences, tokens and epochs that the total times are for.
        files: what was written, by purpose.
        training: what the winning job reported, where it was run, or the `error` it ended with.
    """

    plan: Plan
    gpu: GpuSpec
    basis: str
    inference: Sequence[Candidate]
    finetune: Sequence[Candidate]
    kept: Sequence[str]
    winner: Candidate | None
    front: Sequence[Candidate]
    search: Search
    compared: Sequence[Compared]
    tokens: str
    cautions: Sequence[str] = ()
    may_fit: Sequence[Candidate] = ()
    side_by_side: Sequence[Candidate] = ()
    besides: Besides | None = None
    refused: Sequence[Refused] = ()
    choice: GpuChoice | None = None
    dataset: Mapping[str, float] = field(default_factory=dict)
    calibration: Calibration | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The content of `answer.json`."""
        from whichlora.terminal import answer_facts, detailed_row

        return {
            "schema_version": SCHEMA_VERSION,
            "config": str(self.plan.source),
            "gpu": self.gpu.key,
            "basis": self.basis,
            "tokens": self.tokens,
            "cautions": list(self.cautions),
            "winner": None if self.winner is None else detailed_row(self.winner, self.plan),
            "objective": asdict(self.plan.objective),
            "search": self.search.to_dict(),
            "may_fit": [detailed_row(one, self.plan) for one in self.may_fit],
            "front": [detailed_row(one, self.plan) for one in self.front],
            "kept_models": list(self.kept),
            "refused": [combination.to_dict() for combination in self.refused],
            "inference": [detailed_row(one, self.plan) for one in self.inference],
            "finetune": [detailed_row(one, self.plan) for one in self.finetune],
            "files": {name: str(path) for name, path in self.files.items()},
            "training": None if self.training is None else dict(self.training),
            **({} if self.choice is None else {"gpus": self.choice.to_rows()}),
        } | answer_facts(self)


def run(
    config: Path, *, progress: Progress, fresh: bool = False, prefer: Prefer | None = None
) -> Answer:
    """Carry out the config file: predict, prune, profile, choose, write, and train if asked.

    Args:
        prefer: what ranks the candidates, in place of what the file says.

    Raises:
        ConfigError: a fault in the config, the data, a model or the device.
        DataFileError: a file that cannot be read or written, or another start in the same folder.
        MeasurementError: the profiler cannot start.
    """
    plan = load_plan(config)
    if prefer is not None:
        plan = replace(plan, objective=replace(plan.objective, prefer=prefer))
    gpus = gpus_of(plan)
    if plan.profile != "none" and not any(map(is_here, gpus)):
        device_of(gpus[0])  # says what this machine has
    if plan.train and len(gpus) > 1:
        raise ConfigError(
            f"{plan.source}: train: true needs one gpu, got {len(gpus)}; set train: false, and "
            "start the job of the recommended one there"
        )
    if plan.profile != "none" or plan.train:
        require_profiler()
    with hold_folder(plan.output_dir):
        if len(gpus) == 1:
            return _run(plan, gpus[0], progress, fresh=fresh, lengths={})
        return _run_on_each(plan, gpus, progress, fresh=fresh)


def _run_on_each(plan: Plan, gpus: Sequence[GpuSpec], progress: Progress, *, fresh: bool) -> Answer:
    """The answer of the recommended GPU, with what the others come to; one folder for each.

    Only a GPU of this machine is profiled.

    Raises:
        ConfigError: none of them can carry out the plan.
    """
    lengths: Counted = {}
    answers: dict[str, Answer] = {}
    refusals: dict[str, ConfigError] = {}
    here = {gpu.key for gpu in gpus if plan.profile != "none" and is_here(gpu)}
    for gpu in gpus:
        own = replace(
            plan,
            gpu=gpu.key,
            gpus=(gpu.key,),
            output_dir=plan.output_dir / gpu.key,
            profile=plan.profile if gpu.key in here else "none",
        )
        try:
            answers[gpu.key] = _run(own, gpu, progress, fresh=fresh, lengths=lengths)
        except ConfigError as error:
            progress.say(f"{gpu.key} left out: {error}")
            refusals[gpu.key] = error
    if not answers:
        raise next(iter(refusals.values()))
    choice = choose_gpu(
        [_on_gpu(gpu.key, answers, refusals, measured=gpu.key in here) for gpu in gpus],
        plan.objective,
    )
    nearest = max(choice.gpus, key=lambda on: (on.gpu in answers, on.best_chance))
    best = answers[(choice.best or nearest).gpu]
    files = {
        **best.files,
        "answer": plan.output_dir / "answer.json",
        "report": plan.output_dir / "report.html",
    }
    return _write_answer(plan.output_dir, replace(best, choice=choice, files=files))


def _on_gpu(
    key: str,
    answers: Mapping[str, Answer],
    refusals: Mapping[str, ConfigError],
    *,
    measured: bool,
) -> OnGpu:
    if key in refusals:
        return OnGpu(gpu=key, refusal=str(refusals[key]))
    answer = answers[key]
    return OnGpu(
        gpu=key,
        winner=answer.winner,
        finetune=answer.finetune,
        least_chance=least_chance(answer.plan),
        measured=measured,
        folder=str(answer.plan.output_dir),
    )


def _run(
    plan: Plan,
    gpu: GpuSpec,
    progress: Progress,
    *,
    fresh: bool,
    lengths: Counted,
) -> Answer:
    session = Session(plan, gpu, progress, fresh=fresh, lengths=lengths)
    try:
        answer = _search(session)
        answer = replace(answer, files=write_files(session, answer))
        if plan.train and answer.winner is not None:
            answer = replace(answer, training=_train(session, answer))
    finally:
        session.close()
    report = plan.output_dir / "report.html"
    answer = replace(answer, files={**answer.files, "report": report})
    return _write_answer(plan.output_dir, answer)


def _write_answer(folder: Path, answer: Answer) -> Answer:
    write_object(folder / "answer.json", answer.to_dict())
    write_report(folder, answer.files["report"])
    return answer


def _search(session: Session) -> Answer:
    plan = session.plan
    asked = session.asked.number()
    session.progress.say(
        f"{asked[0]} inference and {asked[1]} fine-tuning candidates of "
        f"{'1 model' if len(plan.models) == 1 else f'{len(plan.models)} models'} "
        f"on {session.gpu.key}"
    )
    runs = session.runs()
    if session.is_large:
        session.progress.say(f"{len(runs)} of them may win and are looked at one by one")
    search_loop, search, position = _run_loop(session, session.search_loop(runs))
    return conclude(session, search_loop, search, position)


def conclude(
    session: Session, search_loop: SearchLoop, search: Search, position: int | None
) -> Answer:
    """The answer as things stand; the stored fit takes in what was measured.

    Args:
        position: of the winner among the candidates of `search_loop`, where one was measured.
    """
    plan = session.plan
    candidates = session.candidates(search_loop)
    inference = [one for one in candidates if one.run.phase == "inference"]
    kept = kept_models(inference)
    serves = chance_to_serve(inference)
    candidates = [
        one
        if one.run.phase == "inference"
        else replace(one, chance_to_serve=serves.get(one.form, 0.0))
        for one in candidates
    ]
    training = (one for one in candidates if one.run.phase == "finetune")
    finetune = [one for one in training if one.chance_to_serve >= LIKELY]
    best = candidates[position] if position is not None else None
    may_fit: list[Candidate] = []
    least = least_chance(plan)
    if plan.profile == "none":
        best = predicted_winner(finetune, least)
        may_fit = bolder_than(best, finetune, least)
    if search_loop.measured:
        session.calibration = refit(session.gpu, plan.calibration_dir)
    compared = [
        Compared(
            measurement=measurement,
            cold=predict(session.models[one.model], one, session.gpu, session.cold),
            before=before,
            after=predict(session.models[one.model], one, session.gpu, session.calibration),
        )
        for measurement, one, before in session.compared
    ]
    shown = best or min(
        finetune, key=lambda one: (-one.chance_of_both_stages, one.rank), default=None
    )
    model = plan.models[0] if shown is None else shown.run.model
    lengths = session.data.lengths(model)
    return Answer(
        plan=plan,
        gpu=session.gpu,
        basis=session.calibration.basis(
            memory_runs=session.calibration.memory.num_runs,
            time_runs=session.calibration.time["finetune"].num_runs,
            phases=("finetune",) if session.gpu.is_timed else (),
        )
        + ("" if session.gpu.is_timed else MEMORY_ONLY),
        inference=inference,
        finetune=finetune,
        kept=kept,
        winner=best,
        may_fit=may_fit,
        front=_front(finetune, least),
        search=search,
        compared=compared,
        tokens=_describe_tokens(session, best, model),
        cautions=_cautions(session, best, model),
        refused=list(session.asked.refused.values()),
        side_by_side=[] if shown is None else session.side_by_side(search_loop, shown.run),
        besides=None if best is None else session.besides(best.run),
        dataset={
            "num_sequences": lengths.num_sequences(),
            "tokens_per_epoch": lengths.total_tokens(),
            "longest": lengths.longest(),
            "epochs": plan.epochs,
        },
        calibration=session.calibration,
    )


def _describe_tokens(session: Session, best: Candidate | None, model: str) -> str:
    """The lengths that `model` sees, and what the winner's batches make of them."""
    lengths = session.data.lengths(model)
    tokens = f"{lengths.describe()} (for {model})"
    if best is not None:
        load = session.data.workload(best.run.model, best.run.batch_size)
        tokens += (
            f"; {load.num_steps} steps over {load.padded_tokens} tokens, "
            f"{100 * load.padding_fraction:.1f} % of them padding ({load.collator}), longest batch "
            f"{best.run.batch_size} x {load.longest}"
        )
        if load.deviation:
            reach = math.exp(TWO_SIDED_Z[TIME_CONFIDENCE] * load.deviation)
            tokens += (
                f" at most; with other lengths {1 / reach:.2f} to {reach:.2f} times the tokens"
            )
    tokens += f"; lengths: {lengths.method}"
    if rows := session.data.dataset.describe():
        tokens += f"; rows: {rows}"
    methods = [session.data.lengths(name).method for name in session.plan.models if name != model]
    if guessed := sum(method.startswith("estimated") for method in methods):
        tokens += f"; estimated for {guessed} of the other models, too"
    return tokens


def _cautions(session: Session, best: Candidate | None, model: str) -> list[str]:
    """What must be known of the data of `model` and of the winner before either is acted on."""
    cautions = list(session.data.cautions(model))
    if best is not None:
        of_model = session.models[model].notes
        notes = (note for note in best.prediction.notes if note not in of_model)
        cautions += [note for note in notes if not note.startswith(UNVERIFIED)]
    return cautions


def _run_loop(session: Session, search_loop: SearchLoop) -> tuple[SearchLoop, Search, int | None]:
    """Measure as the plan asks; the position of the winner, where one was measured.

    The search loop is a longer one where what was measured has lengthened its shortlist.
    """
    from whichlora.terminal import describe

    plan = session.plan
    stopped_by: Ending

    def measure(position: int, decision: Decision | None) -> Measurement:
        return session.measure(search_loop, position, decision)

    if plan.profile != "none":
        recalled, refused = session.recall(search_loop, libraries=installed_versions())
        for run in recalled:
            session.progress.say(f"resumed: {describe(run)} was measured before")
        for difference, number in refused.items():
            runs = "1 run was" if number == 1 else f"{number} runs were"
            session.progress.say(f"{runs} measured before {difference}: measured again as needed")
    if plan.profile == "none":
        decision, stopped_by = search_loop.decide(), "not measured"
    elif plan.profile == "all":
        decision = search_loop.measure_all(measure, session.learn)
        stopped_by = "everything measured"
    else:
        decision, stopped_by = search_loop.measure_until_certain(
            measure, session.learn, plan.budget
        )
        while session.is_large and stopped_by in ("certain", "nothing left"):
            known = set(search_loop.runs)
            more = [run for run in session.runs() if run not in known]
            if not more:
                break
            session.progress.say(f"{len(more)} more candidates may win after these measurements")
            search_loop = session.lengthened(search_loop, more)
            decision, stopped_by = search_loop.measure_until_certain(
                measure, session.learn, plan.budget
            )
    return search_loop, summary(search_loop, decision, stopped_by), decision.best


def summary(
    search_loop: SearchLoop,
    decision: Decision,
    stopped_by: Ending,
) -> Search:
    """How sure `decision` is, and what it cost."""
    return Search(
        confidence=decision.confidence,
        stopped_by=stopped_by,
        runs=search_loop.spent.runs,
        device_s=search_loop.spent.device_s,
        chance_to_win={
            run: chance
            for run, chance in zip(search_loop.runs, decision.chance_to_win.tolist(), strict=True)
            if chance > 0
        },
    )


def _front(candidates: Sequence[Candidate], least: float) -> list[Candidate]:
    """Candidates that meet the limits and that no other beats in both time and memory.

    Args:
        least: chance to meet them.
    """
    import numpy as np

    meeting = [one for one in candidates if accepted(one, least) and one.prediction.time.is_known]
    time_s = np.array([(one.total_s or one.time_per_token_s).value for one in meeting])
    num_bytes = np.array([one.memory_bytes.value for one in meeting])
    return [meeting[i] for i in pareto(time_s, num_bytes).tolist()] if meeting else []


def write_files(session: Session, answer: Answer) -> dict[str, Path]:
    """The table as CSV, the comparison of predictions and measurements, and the job."""
    from whichlora import terminal as report

    folder = session.plan.output_dir
    files = {
        "table": report.write_candidates(folder / "candidates.csv", answer),
        "answer": folder / "answer.json",
        "summary": report.write_summary(folder / "answer.md", answer),
    }
    if answer.compared:
        comparison = folder / "predicted_vs_measured.csv"
        files["comparison"] = report.write_comparison(comparison, answer)
        files["measurements"] = session.log.path
    if answer.winner is not None:
        files |= _write_job(session, answer.winner.run)
    elif (folder / "train.py").is_file():
        session.progress.say(f"{folder / 'train.py'}: is of an earlier answer, not of this one")
    return files


def _write_job(session: Session, best: RunConfig) -> dict[str, Path]:
    """The training script of `best`, the recipe for other tools, and the data that both read."""
    from whichlora.dataset import data_format, write_jsonl
    from whichlora.exports import FORMATS, Recipe
    from whichlora.workflow.export import RECIPE_FILE

    plan, model = session.plan, session.models[best.model]
    folder = plan.output_dir
    data = {}
    rows = TEXT_ROWS
    if plan.dataset.kind != "counts":
        data = write_jsonl(session.data.dataset, folder)
        rows = data_format(session.data.dataset)
    run, longest = best, None
    if session.data.lengths(best.model).method.startswith("estimated"):
        # the longest row is a guess, and a row that is longer is not to lose its end for it
        run, longest = replace(best, seq_len=session.data.seq_len(best.model)), best.seq_len
    recipe = Recipe(
        run=run,
        gpu=session.gpu.key,
        target_modules=session.job(best).peft_targets,
        epochs=plan.epochs,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
        tokenizer=None if plan.weights == "random" else plan.tokenizers.get(best.model),
        weights=plan.weights,
        model_config=dict(model.config),
        longest=longest,
        batching=plan.collator,  # what the total time was summed over
        masked_lm=model.task == "encoder",
        trust_remote_code=plan.trust_remote_code,
        data_format=rows,
        train_on=plan.train_on,
        keeping=plan.keeping,
        validation="validation" in data,
    )
    write_object(folder / RECIPE_FILE, recipe.to_dict())
    script = FORMATS["transformers"](recipe)
    path = folder / "train.py"
    text = script.files[path.name]
    if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
        write_text(path, text)  # else checkpoints newer than the script are its own
    return {"job": path} | {f"data_{split}": file for split, file in data.items()}


def _train(session: Session, answer: Answer) -> dict[str, Any]:
    """Run the winning job: what it reported, or why it failed, which costs nobody the answer."""
    from whichlora.exports.train_script import train_command

    session.close()  # the job needs the device to itself
    folder = session.plan.output_dir
    job = answer.files["job"]
    result = folder / "output" / "result.json"
    if result.is_file() and result.stat().st_mtime > job.stat().st_mtime:
        session.progress.say(f"trained before: {result}")
        return read_object(result) | {"output": str(result.parent)}
    expected = answer.winner.total_s if answer.winner is not None else None
    session.progress.training(job, expected_s=None if expected is None else expected.value)
    again = ["--resume"] * _was_stopped(job)
    with (folder / "train.log").open("ab" if again else "wb") as log:
        done = subprocess.run([*train_command(job), *again], stdout=log, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        log_file = folder / "train.log"
        lines = log_file.read_text(encoding="utf-8", errors="replace").split("\n")
        raised = (line for line in reversed(lines) if "Error" in line.partition(":")[0])
        refused = next((line for line in lines if "is of an earlier start" in line), None)
        why = (refused or next(raised, "it says why at the end of its output"))[:300]
        return {
            "error": f"{job}: ended with exit code {done.returncode}: {why}; its whole output is "
            f"in {log_file}"
        }
    return read_object(result) | {"output": str(result.parent)}


def _was_stopped(job: Path) -> bool:
    """Whether a run of this very script wrote checkpoints, and was stopped or ended."""
    states = job.parent.glob("output/checkpoint-*/trainer_state.json")
    return any(state.stat().st_mtime > job.stat().st_mtime for state in states)
