"""Every file under examples/ is run, or read by what it is for."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_on_fake_gpus
from click.testing import CliRunner
from fake_profiler import pretend_device
from ruamel.yaml import YAML

from whichlora.cli import main
from whichlora.cluster import rounds, watch
from whichlora.cluster.on_this_machine import LocalEngine
from whichlora.spec.results import Measurement, Prediction
from whichlora.spec.run import RunConfig
from whichlora.workflow.run import run_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
HERE = {
    *("dpo.jsonl", "dpo.yaml", "github-action.yml", "quickstart.jsonl", "quickstart.yaml"),
    *("report.yaml", "slurm.yaml"),
}
ELSEWHERE = {"tour.ipynb": "test_api.py"}

Example = Callable[..., Path]


class Silent:
    def say(self, text: str) -> None: ...

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None: ...

    def learned(self, measurement: Measurement, prediction: Prediction) -> None: ...

    def training(self, job: Path, *, expected_s: float | None) -> None: ...

    def tasks(self, statuses: Any) -> None: ...


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """A copy of an example, with lines of its own in place of what this machine can't do."""
    pretend_device(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, tmp_path / "examples")

    def make(name: str, lines: str = "", **replaced: str) -> Path:
        path = tmp_path / "examples" / name
        text = path.read_text(encoding="utf-8")
        for old, new in replaced.items():
            assert text.count(f"\n{old}: ") == 1
            text = "\n".join(
                f"{old}: {new}" if line.startswith(f"{old}: ") else line
                for line in text.splitlines()
            )
        path.write_text(f"{text}\n{lines}", encoding="utf-8")
        return path

    return make


def test_no_example_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == HERE | set(ELSEWHERE)
    for name, test in ELSEWHERE.items():
        assert name in Path(__file__).with_name(test).read_text(encoding="utf-8")


def test_the_quickstart_ends_with_a_measured_winner(example: Example, tmp_path: Path) -> None:
    path = example("quickstart.yaml", f"calibration_dir: {tmp_path / 'records'}\n", train="false")
    answer = run_plan(path, progress=Silent())
    assert answer.winner is not None
    assert answer.winner.measured
    assert (tmp_path / "runs" / "quickstart" / "train.py").is_file()


@pytest.mark.parametrize(("tokens", "code"), [(2048, 0), (32768, 1)])
def test_the_action_fails_where_the_file_does_not_fit(
    tokens: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = YAML(typ="safe", pure=True).load(EXAMPLES / "github-action.yml")
    assert list(action) == ["name", "on", "jobs"]
    (command,) = (
        step["run"] for step in action["jobs"]["fits"]["steps"] if "estimate" in step.get("run", "")
    )
    command, _, target = command.partition(" >> ")
    assert target == '"$GITHUB_STEP_SUMMARY"'
    monkeypatch.chdir(tmp_path)
    settings = {"base_model": "Qwen/Qwen2.5-7B", "adapter": "qlora", "load_in_4bit": "true"}
    settings |= {"gradient_checkpointing": "true", "sequence_len": str(tokens)}
    lines = [f"{name}: {value}" for name, value in settings.items()]
    Path("axolotl.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert CliRunner().invoke(main, shlex.split(command)[1:]).exit_code == code


def test_pairs_of_answers_lead_to_a_job_of_trl(example: Example, tmp_path: Path) -> None:
    answer = run_plan(example("dpo.yaml"), progress=Silent())
    assert answer.winner is not None
    assert dict(answer.winner.run.trainer_options)["beta"] == 0.1
    script = (tmp_path / "runs" / "dpo" / "train.py").read_text(encoding="utf-8")
    assert "trainer = DPOTrainer(" in script
    assert "from trl import DPOConfig, DPOTrainer" in script


@pytest.mark.slow
def test_the_keys_of_the_original_report_lead_to_an_answer(example: Example) -> None:
    dry = "gpu: a100-sxm-80gb\nprofile: none\nweights: random\n"
    answer = run_plan(example("report.yaml", dry), progress=Silent())
    assert answer.winner is not None
    assert answer.winner.run.model == "meta-llama/Llama-3.1-8B"


@pytest.mark.slow
def test_the_example_of_a_cluster_runs_on_the_gpus_of_one_machine(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.store.gpus.detect_gpus", run_on_fake_gpus.detect_gpus)
    path = example("slurm.yaml", f"  command: {run_on_fake_gpus.COMMAND}\n")
    engine = LocalEngine()
    sweep = rounds.plan_sweep(path, engine, name="local", progress=Silent(), fresh=False)
    found = watch.follow(sweep, engine, Silent(), wait=run_on_fake_gpus.wait_a_little)
    assert found.best is not None
    assert (tmp_path / "runs" / "slurm" / "recommendation.json").is_file()
