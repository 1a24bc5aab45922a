"""Sweeps without a cluster: children of this machine, and the text of a cloud's task."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_on_fake_gpus
import sweep_config
from click.testing import CliRunner
from fake_profiler import FakeProfiler

from whichlora.cli import main
from whichlora.cluster import rounds, watch
from whichlora.cluster.merge import Recommendation
from whichlora.cluster.on_skypilot import SkyPilotEngine
from whichlora.cluster.on_this_machine import LocalEngine
from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.state import Sweep
from whichlora.cluster.tasks import profile_task
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.plan import Plan
from whichlora.store.locks import hold_folder
from whichlora.workflow.run import run_plan

TESTS = Path(__file__).parents[1]
H100, L40S = "h100-sxm-80gb", "l40s-48gb"
DOUBTFUL: dict[str, Any] = {  # what few runs leave open
    "profile": "frontier",
    "models": ["EleutherAI/pythia-160m", "Qwen/Qwen2.5-0.5B"],
    "methods": ["lora", "qlora", "dora"],
    "stage2_profile": {"batch_size": [1, 2, 4, 8], "total_time": "5s"},
}


class Silent:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.stands: list[Counter[str]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def profiling(self, *_: Any, **__: Any) -> None: ...

    def learned(self, *_: Any) -> None: ...

    def training(self, *_: Any, **__: Any) -> None: ...

    def tasks(self, statuses: Any) -> None:
        self.stands.append(Counter(one.stand for one in statuses))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three pretended GPUs, for us and for the children."""
    monkeypatch.setattr("whichlora.store.gpus.detect_gpus", run_on_fake_gpus.detect_gpus)
    monkeypatch.setattr("whichlora.profiler.profile.Profiler", FakeProfiler)
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    monkeypatch.setenv("WHICHLORA_TEST_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("WHICHLORA_TEST_AWAKE", str(tmp_path / "awake"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def write_config(folder: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "calibration_dir": str(folder / "calibration"),
        "slurm": {"command": run_on_fake_gpus.COMMAND},
    }
    return sweep_config.write_config(folder, **(settings | changes))


def plan(path: Path, engine: LocalEngine | SkyPilotEngine, *, name: str = "local") -> Sweep:
    return rounds.plan_sweep(path, engine, name=name, progress=Silent(), fresh=False)


def follow(sweep: Sweep, engine: LocalEngine, progress: Silent | None = None) -> Recommendation:
    return watch.follow(sweep, engine, progress or Silent(), wait=run_on_fake_gpus.wait_a_little)


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "calibration").glob("*/measurements/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def read_yaml(path: Path) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(path.read_text())


def wait_until(ready: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a sweep that is done; a test leaves it as it was."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whichlora.store.gpus.detect_gpus", run_on_fake_gpus.detect_gpus)
        patch.setenv("PYTHONPATH", str(TESTS.parent))
        engine = LocalEngine()
        follow(plan(write_config(folder), engine), engine)
        yield folder / "out"


def test_a_machine_without_gpu_profiles_on_its_cpu_only_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(write_config(tmp_path), LocalEngine())
    monkeypatch.setattr("whichlora.store.gpus.detect_gpus", tuple)
    array = next(array for array in planned.arrays if array.group == H100)
    with pytest.raises(ConfigError, match=f"its tasks are for {H100}, and .* has no GPU"):
        profile_task(tmp_path / "out" / array.tasks_file, [0])
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match="gpu: is not set, and this machine has no GPU"):
        plan(write_config(tmp_path / "again"), LocalEngine())
    assert not records(tmp_path)


def test_a_second_follower_of_a_sweep_is_refused(tmp_path: Path) -> None:
    sweep = plan(write_config(tmp_path), LocalEngine())
    with hold_folder(tmp_path / "out"):
        for act in (
            lambda: follow(sweep, LocalEngine()),
            lambda: watch.resume(sweep.run_dir, Silent()),
        ):
            with pytest.raises(DataFileError, match="another process is at work there"):
                act()


def test_each_gpu_of_this_machine_gets_a_child_of_its_own(tmp_path: Path) -> None:
    engine = LocalEngine()
    sweep = plan(write_config(tmp_path), engine)
    assert {(group.gpu, group.num_gpus) for group in sweep.groups} == {(H100, 2), (L40S, 1)}
    script = (tmp_path / "out" / H100 / "profile-1.sh").read_text()
    assert [line.split()[0] for line in script.splitlines() if line.endswith("&")] == [
        "CUDA_VISIBLE_DEVICES=GPU-aa",
        "CUDA_VISIBLE_DEVICES=GPU-cc",
    ]
    follow(sweep, engine)
    assert Counter((one["gpu"], one["outcome"]) for one in records(tmp_path)) == {
        (H100, "ok"): 4,
        (L40S, "ok"): 4,
    }
    saved = Sweep.load(tmp_path / "out")
    assert [[job.indices for job in array.jobs] for array in saved.arrays] == [
        [(0, 2), (1, 3)],
        [(0, 1, 2, 3)],
    ]


@pytest.mark.slow
def test_a_sweep_ends_as_a_plain_run_on_each_gpu_does(tmp_path: Path) -> None:
    engine = LocalEngine()
    found = follow(plan(write_config(tmp_path), engine), engine)
    winners = {one.judged.group.gpu: one.answer.winner for one in found.groups}
    for gpu, winner in winners.items():
        alone = tmp_path / gpu
        alone.mkdir()
        plain = run_plan(write_config(alone, gpu=gpu), progress=Silent()).winner
        assert winner is not None
        assert plain is not None
        assert winner.run == plain.run
        assert winner.memory_bytes.value == plain.memory_bytes.value
        assert winner.total_s is not None
        assert plain.total_s is not None
        assert winner.total_s.value == pytest.approx(plain.total_s.value, rel=1e-6)
    ranks = {gpu: winner.rank for gpu, winner in winners.items() if winner}
    assert found.best is not None
    assert found.best.judged.group.gpu == min(ranks, key=lambda gpu: ranks[gpu])


@pytest.mark.slow
def test_a_killed_child_is_a_result_and_takes_no_other_task_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHICHLORA_TEST_KILL", "finetune-2")
    engine, progress = LocalEngine(), Silent()
    found = follow(plan(write_config(tmp_path), engine), engine, progress)
    assert Counter((one["gpu"], one["outcome"]) for one in records(tmp_path)) == {
        (H100, "ok"): 3,
        (H100, "killed"): 1,
        (L40S, "ok"): 3,
        (L40S, "killed"): 1,
    }
    [detail] = {one["detail"] for one in records(tmp_path) if one["outcome"] == "killed"}
    assert detail == "ended without a record: ENDED, signal 9"
    assert any("submitted again: 1 task" in line for line in progress.said)
    assert {one.answer.winner.run.batch_size for one in found.groups if one.answer.winner} == {4}


def test_a_follower_that_is_gone_leaves_its_children_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHICHLORA_TEST_SLEEP", "finetune-4")
    engine = LocalEngine()
    sweep = plan(write_config(tmp_path), engine)
    watch.submit(sweep, engine, watch.statuses(sweep, engine))
    wait_until(lambda: len(records(tmp_path)) == 6)
    stands = Counter(one.stand for one in watch.status(tmp_path / "out"))
    assert stands == {"done": 6, "running": 2}
    (tmp_path / "awake").touch()
    follow(Sweep.load(tmp_path / "out"), LocalEngine())
    assert len((tmp_path / "calls").read_text().splitlines()) == 8  # nothing ran twice


@pytest.mark.slow
def test_children_that_are_gone_run_again_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHICHLORA_TEST_SLEEP", "finetune-2")
    engine = LocalEngine()
    sweep = plan(write_config(tmp_path), engine)
    watch.submit(sweep, engine, watch.statuses(sweep, engine))
    begun = tmp_path / "out" / L40S / "started" / "1-2.json"
    wait_until(begun.exists)
    for array in Sweep.load(tmp_path / "out").arrays:
        for job in array.jobs:
            os.kill(int(job.id.partition("-")[0]), signal.SIGKILL)
    engine_of_later = LocalEngine()
    wait_until(
        lambda: (
            "running"
            not in {one.stand for one in watch.statuses(Sweep.load(sweep.run_dir), engine_of_later)}
        )
    )
    assert "cancelled" in {one.stand for one in watch.status(sweep.run_dir)}
    (tmp_path / "awake").touch()
    follow(Sweep.load(sweep.run_dir), LocalEngine())
    assert Counter(one["outcome"] for one in records(tmp_path)) == {"ok": 8}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("sweep.json", '"local"', '"pigeons"', "engine is 'pigeons', this release has"),
        ("sweep.json", '"config"', '"konfig"', "is not the state of a sweep"),
        (f"{L40S}/started/1-0.json", '"gpu"', '"cpu"', "has no 'gpu'; remove it, and the task"),
        (f"{L40S}/started/1-0.json", '{', '', "is not valid JSON"),
        (f"{L40S}/tasks-1.json", '"tasks"', '"jobs"', "is not a list of tasks"),
        (f"{L40S}/run.json", '"run_id"', '"id"', "run_id: is missing; start over"),
    ],
)  # fmt: skip
def test_broken_state_is_told_in_one_line_that_names_the_file(
    finished: Path, file: str, old: str, new: str, message: str
) -> None:
    path = finished / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        with pytest.raises(DataFileError, match=f"{re.escape(file)}: {re.escape(message)}"):
            watch.join(finished, Silent())
    finally:
        path.write_text(text)


def test_a_budget_of_runs_holds_on_each_gpu_type_and_the_answer_says_so(tmp_path: Path) -> None:
    path = write_config(tmp_path, **DOUBTFUL, max_profile_runs=1)
    engine = LocalEngine()
    found = follow(plan(path, engine), engine)
    assert Counter(one["gpu"] for one in records(tmp_path)) == {H100: 1, L40S: 1}
    assert {one.answer.search.stopped_by for one in found.groups} == {"runs"}
    told = json.loads((tmp_path / "out" / "recommendation.json").read_text())
    assert {row["search"]["runs"] for row in told["groups"]} == {1}
    assert all(row["search"]["confidence"] < 0.95 for row in told["groups"])
    assert "the budget of runs is spent" in (tmp_path / "out" / H100 / "answer.md").read_text()


def test_a_budget_of_time_ends_with_the_run_that_uses_it_up(tmp_path: Path) -> None:
    path = write_config(tmp_path, **DOUBTFUL, max_profile_time="1ms")
    engine = LocalEngine()
    found = follow(plan(path, engine), engine)
    assert Counter(one["gpu"] for one in records(tmp_path)) == {H100: 1, L40S: 1}
    assert {one.answer.search.stopped_by for one in found.groups} == {"device_s"}


def test_less_confidence_asks_for_fewer_runs(tmp_path: Path) -> None:
    asked = []
    for confidence in (0.5, 0.99):
        folder = tmp_path / str(confidence)
        folder.mkdir()
        sweep = plan(write_config(folder, **DOUBTFUL, confidence=confidence), LocalEngine())
        asked.append(sum(array.num_tasks for array in sweep.arrays))
    assert asked[0] < asked[1]


SKY = {"gpus": {"one": H100, "two": L40S}, "environment": {"HF_HOME": "/data/it's: here #1"}}


def test_a_cloud_task_says_in_yaml_what_skypilot_is_to_do(tmp_path: Path) -> None:
    engine = SkyPilotEngine()
    sweep = plan(write_config(tmp_path, slurm=SKY), engine, name="skypilot")
    for array, accelerator in zip(sweep.arrays, ("H100:1", "L40S:1"), strict=True):
        file = sweep.run_dir / array.script
        task = read_yaml(file)
        assert set(task) == {"name", "resources", "file_mounts", "envs", "setup", "run"}
        assert task["resources"] == {"accelerators": accelerator}
        assert task["envs"] == SKY["environment"]
        assert Path(task["file_mounts"]["~/whichlora/tasks"]) == sweep.run_dir / array.group
    with pytest.raises(ConfigError, match="start it yourself with 'sky launch"):
        engine.submit(sweep, sweep.arrays[0], [0])


def test_an_own_setup_takes_the_place_of_the_installation(tmp_path: Path) -> None:
    own = SKY | {"setup": ["pip install ./wheels/*.whl", "export HF_TOKEN"]}
    sweep = plan(write_config(tmp_path, slurm=own), SkyPilotEngine(), name="skypilot")
    task = read_yaml(sweep.run_dir / sweep.arrays[0].script)
    assert task["setup"].splitlines() == own["setup"]
    assert list(task["file_mounts"]) == ["~/whichlora/tasks"]


def test_a_cloud_task_installs_what_its_candidates_need(tmp_path: Path) -> None:
    path = write_config(tmp_path, slurm=SKY, attn="flash_attention_2")
    sweep = plan(path, SkyPilotEngine(), name="skypilot")
    task = read_yaml(sweep.run_dir / sweep.arrays[0].script)
    assert task["setup"].splitlines()[-1] == "pip install --no-build-isolation flash-attn"


def test_what_a_cloud_task_measured_joins_into_the_recommendation(tmp_path: Path) -> None:
    sweep = plan(write_config(tmp_path, slurm=SKY), SkyPilotEngine(), name="skypilot")
    home, commands = tmp_path / "home", tmp_path / "bin"
    commands.mkdir()
    program = commands / "whichlora"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {TESTS}/run_on_fake_gpus.py "$@"\n')
    program.chmod(0o755)
    for array, gpu in zip(sweep.arrays, ("GPU-cc", "GPU-bb"), strict=True):
        task = read_yaml(sweep.run_dir / array.script)
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(task["file_mounts"]["~/whichlora/tasks"], home / "whichlora" / "tasks")
        environment = {"HOME": str(home), "PATH": f"{commands}:{os.environ['PATH']}"}
        environment |= {"CUDA_VISIBLE_DEVICES": gpu}
        subprocess.run(["bash", "-ec", task["run"]], env=os.environ | environment, check=True)
        records = home / "whichlora" / "records"  # rsync
        shutil.copytree(records, tmp_path / "calibration", dirs_exist_ok=True)
    found = watch.join(sweep.run_dir, Silent())
    assert {(one.judged.group.gpu, len(one.answer.compared)) for one in found.groups} == {
        (H100, 4),
        (L40S, 4),
    }
    assert found.best is not None
    assert found.open_candidates == 0


@pytest.mark.oracle
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    sweep = plan(write_config(tmp_path, slurm=SKY), SkyPilotEngine(), name="skypilot")
    task = sky.Task.from_yaml(str(sweep.run_dir / sweep.arrays[0].script))
    [resources] = task.resources
    assert resources.accelerators == {"H100": 1}
    assert task.envs == SKY["environment"]


def test_a_gpu_that_the_cloud_has_no_name_for_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, slurm={"gpus": {"one": "rtx-2080-ti-11gb"}})
    with pytest.raises(ConfigError, match="no name for 'rtx-2080-ti-11gb'; known are a10-24gb"):
        plan(path, SkyPilotEngine(), name="skypilot")


def test_auto_names_no_gpu_of_a_cloud(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpu: auto names no GPU of a cloud; write gpu: h100"):
        plan(write_config(tmp_path), SkyPilotEngine(), name="skypilot")


def test_runs_over_several_gpus_are_predicted_where_there_are_as_many(tmp_path: Path) -> None:
    engine = LocalEngine()
    spread = {"gpus": [2], "parallel": ["ddp", "fsdp"]}
    with pytest.raises(ConfigError, match="gpus: a sweep profiles on one GPU so far"):
        plan(write_config(tmp_path, **spread), engine)
    sweep = plan(write_config(tmp_path, profile="none", **spread), engine)
    assert not sweep.arrays  # nothing is measured
    assert [group.most_on_a_node for group in sweep.groups] == [2, 1]
    answers = follow(sweep, engine)
    (answer,) = answers.groups  # the other type has one GPU
    assert answer.judged.group.gpu == H100
    assert answer.answer.winner is not None
    assert answer.answer.winner.run.parallel.gpus == 2


class Nodes(LocalEngine):
    """Two nodes of eight GPUs, as `sinfo` tells them."""

    def __init__(self, gpu: str, *others: str) -> None:
        super().__init__()
        sizes = {"num_nodes": 2, "num_gpus": 16, "most_on_a_node": 8}
        self.group = GpuGroup(name="h100", gpu=gpu, others=others, gres_type="h100", **sizes)

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        return [self.group], []


def test_more_gpus_than_a_node_has_are_over_as_many_nodes_as_they_need(tmp_path: Path) -> None:
    spread = {"profile": "none", "gpus": 16, "parallel": "zero1"}
    engine = Nodes(H100)
    answers = follow(plan(write_config(tmp_path, **spread), engine), engine)
    assert answers.best is not None
    assert answers.best.answer.winner is not None
    assert answers.best.answer.winner.run.parallel.nodes == 2
    with pytest.raises(ConfigError, match="needs more than the 8 on each of 2 nodes"):
        plan(write_config(tmp_path, **spread | {"gpus": 32, "output_dir": "more"}), engine)


def test_a_type_that_may_be_another_gpu_says_where_to_name_it(tmp_path: Path) -> None:
    spread = {"profile": "none", "gpus": 16, "parallel": "zero1"}
    hint = r"may be h100-sxm-80gb: name it, as slurm.gpus: {h100: h100-sxm-80gb}"
    with pytest.raises(ConfigError, match=f"no network to other nodes.*{hint}"):
        plan(write_config(tmp_path, **spread), Nodes("h100-pcie-80gb", H100))


@pytest.mark.parametrize(
    ("engine", "start"), [("local", "python"), ("skypilot", "whichlora export .* --to skypilot")]
)
def test_a_sweep_without_runs_ends_with_its_answer(engine: str, start: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, profile="none", gpu=H100)
    result = CliRunner().invoke(main, ["slurm", str(config), "--engine", engine])
    assert result.exit_code == 0, result.output
    assert re.search("predicted, 100% chance to meet every limit", result.output)
    assert re.search(f"Recommended, queue wait aside: .*{start}", result.output, re.DOTALL)
    assert (tmp_path / "out" / "recommendation.json").is_file()
