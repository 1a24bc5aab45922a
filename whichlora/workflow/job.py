"""The winning job: the files that describe it, and its training."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports import DATA_FILE, transformers
from whichlora.exports.launch import ACCELERATE_FILE
from whichlora.exports.recipe import VALIDATION_FILE
from whichlora.exports.train_script.lines import DEEPSPEED_FILE
from whichlora.search.feasibility import Candidate
from whichlora.serving.form import form_in_words
from whichlora.spec.data_format import KINDS, DataFormat
from whichlora.spec.plan import Plan
from whichlora.spec.run import RunConfig
from whichlora.store import written
from whichlora.store.jsonfiles import object_bytes, read_object
from whichlora.tasks import rows_of, task_of
from whichlora.workflow.answer import Answer
from whichlora.workflow.session import Session

SERVE_FILE = "serve.sh"
COMPARISON_FILE = "predicted_vs_measured.csv"
_ANSWER = ("answer.json", "answer.md", "candidates.csv", "report.html")
_DATA = (DATA_FILE, VALIDATION_FILE)
_SPREAD = (ACCELERATE_FILE, DEEPSPEED_FILE)


def files_of(plan: Plan) -> list[Path]:
    """Every file that the answer to a plan for one GPU may replace."""
    from whichlora.workflow.export import RECIPE_FILE

    names = [*_ANSWER, RECIPE_FILE, transformers.FILE]
    names += [COMPARISON_FILE] * (plan.profile != "none")
    names += _DATA * (plan.dataset.kind != "counts")
    names += _SPREAD * plan.is_spread
    names += [SERVE_FILE] * plan.inference.has_engine
    return [plan.output_dir / name for name in names]


def write_files(session: Session, answer: Answer) -> dict[str, Path]:
    """The table as CSV, the comparison of predictions and measurements, and the job.

    What an earlier answer left beside the job, and this one does not have, is removed: the new
    script would read old rows.

    Raises:
        DataFileError: a file can't be written, or is not as WhichLoRA wrote it.
    """
    from whichlora import terminal

    folder = session.plan.output_dir
    files = {
        "table": terminal.write_candidates(folder / "candidates.csv", answer),
        "answer": folder / "answer.json",
        "summary": terminal.write_summary(folder / "answer.md", answer),
    }
    if answer.compared:
        comparison = folder / COMPARISON_FILE
        files["comparison"] = terminal.write_comparison(comparison, answer)
        files["measurements"] = session.log.path
    of_job = [folder / name for name in (transformers.FILE, SERVE_FILE, *_SPREAD, *_DATA)]
    if answer.winner is None:
        for path in filter(written.is_own, of_job):
            session.progress.say(f"{path}: is of an earlier answer, not of this one")
        return files
    job, beside = _write_job(session, answer.winner.run)
    files |= job
    if "job" in files and answer.serving is not None:
        files |= _write_serving(session, answer.winner.run, answer.serving)
    new = {*files.values(), *beside}
    for path in written.remove_own(path for path in of_job if path not in new):
        session.progress.say(f"{path}: was of an earlier answer and is removed")
    return files


def _write_job(session: Session, best: RunConfig) -> tuple[dict[str, Path], list[Path]]:
    """The training script of `best`, the recipe for other tools, and the data that both read.

    Also what the script has beside it.
    """
    from whichlora.dataset import write_jsonl
    from whichlora.exports import FORMATS, Recipe
    from whichlora.workflow.export import RECIPE_FILE

    plan, model = session.plan, session.models[best.model]
    folder = plan.output_dir
    data = {}
    rows = _rows(session, best)
    if plan.dataset.kind != "counts":
        data = write_jsonl(session.data.dataset_of(best.model), folder)
    run, longest = best, None
    if rows.media or session.data.lengths(best.model).method.startswith("estimated"):
        # the longest row is a guess, and a row that is longer is not to lose its end for it; one
        # of the validation split with images or clips would be left out
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
    contents = {folder / RECIPE_FILE: object_bytes(recipe.to_dict())}
    job = {f"data_{split}": file for split, file in data.items()}
    try:
        script = FORMATS["transformers"](recipe)
    except ConfigError as refusal:  # such as a strategy that the Trainer has no key for
        session.progress.say(f"no train.py: {str(refusal).removeprefix('train.py: ')}")
        written.write_files(contents, instead=written.OTHER_FOLDER)
        return job, []
    contents |= {folder / name: text.encode() for name, text in script.files.items()}
    written.write_files(contents, instead=written.OTHER_FOLDER)
    return {"job": folder / transformers.FILE} | job, list(contents)


def _rows(session: Session, best: RunConfig) -> DataFormat:
    """What the rows look like that `best` learns from."""
    from whichlora.dataset import data_format

    if session.plan.dataset.kind == "counts":
        return DataFormat(kind=KINDS[rows_of(best)][0])
    return data_format(session.data.dataset_of(best.model))


def _write_serving(session: Session, best: RunConfig, judged: Candidate) -> dict[str, Path]:
    """The script that starts the engine on the trained model; none where nothing can load it."""
    from whichlora.exports.serve_script import serve_script
    from whichlora.exports.train_script import class_of

    serving = judged.prediction.serving
    assert serving is not None  # an engine's answer
    if session.plan.weights == "random":
        return {}
    text = serve_script(
        session.job(judged.run),
        best.method,
        form=form_in_words(judged.run),
        concurrency=serving.max_running,
        model_class=class_of(
            task_of(best), session.models[best.model].config, _rows(session, best)
        ),
    )
    path = session.plan.output_dir / SERVE_FILE
    if not text:
        session.progress.say(f"no serve.sh: {serving.engine} has no command for {best.method}")
        return {}
    written.write_files({path: text.encode()}, instead=written.OTHER_FOLDER)
    return {"serving": path}


def train(session: Session, answer: Answer) -> dict[str, Any]:
    """Run the winning job: what it reported, or why it failed, which costs nobody the answer."""
    from whichlora.exports.launch import train_command

    assert answer.winner is not None  # whose job it is
    session.close()  # the job needs the device to itself
    folder = session.plan.output_dir
    job = answer.files.get("job")
    if job is None:
        return {
            "error": f"{folder}: has no train.py, for the reason that was said as it was written"
        }
    result = folder / "output" / "result.json"
    if result.is_file() and result.stat().st_mtime > job.stat().st_mtime:
        session.progress.say(f"trained before: {result}")
        return read_object(result) | {"output": str(result.parent)}
    expected = answer.winner.total_s
    session.progress.training(job, expected_s=None if expected is None else expected.value)
    try:
        command = train_command(job, answer.winner.run)
    except ConfigError as refusal:
        return {"error": str(refusal)}
    again = ["--resume"] * _was_stopped(job)
    with (folder / "train.log").open("ab" if again else "wb") as log:
        done = subprocess.run([*command, *again], stdout=log, stderr=subprocess.STDOUT)
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
