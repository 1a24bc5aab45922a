"""Sweeps on a real Slurm: its daemons, its states, its refusals; pretended GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import Bench, wait_until
from cluster import Cluster

pytestmark = pytest.mark.slurm

MakeBench = Callable[[Cluster], Bench]


def test_every_kind_of_gpu_is_found_and_told_apart(plain: Cluster, bench: MakeBench) -> None:
    sweep = bench(plain)
    said = sweep.whichlora(sweep.write())
    state = json.loads((sweep.run_dir / "sweep.json").read_text())
    found = {group["name"]: (group["gpu"], group["constraint"]) for group in state["groups"]}
    assert found == {
        "a100": ("a100-sxm-80gb", ""),
        "gpu-l40s": ("l40s-48gb", "L40S"),
        "h100": ("h100-pcie-80gb", ""),
        "v100-v100-16gb": ("v100-pcie-16gb", "V100-16GB"),
        "v100-v100-32gb": ("v100-pcie-32gb", "V100-32GB"),
    }
    assert "slurm.gpus: {1g.10gb: KEY}" in " ".join(said.split())
    assert not any(array["jobs"] for array in state["arrays"])
    for array in state["arrays"]:  # every script is one that the cluster would take
        script = sweep.run_dir / array["script"]
        assert sweep.cluster.ok("sbatch", "--test-only", "--array=0", str(script))


def test_a_slice_of_a_gpu_that_the_user_names_is_used(plain: Cluster, bench: MakeBench) -> None:
    sweep = bench(plain)
    sweep.whichlora(sweep.write(gpus={"1g.10gb": "rtx-3080-10gb"}, partition="gpu"))
    state = json.loads((sweep.run_dir / "sweep.json").read_text())
    assert "1g-10gb" in {group["name"] for group in state["groups"]}
    script = (sweep.run_dir / "1g-10gb" / "profile-1.sbatch").read_text()
    assert "#SBATCH --gres=gpu:1g.10gb:1\n" in script
    assert "#SBATCH --partition=gpu\n" in script


def test_a_sweep_over_five_types_survives_kills_and_a_closed_follower(
    plain: Cluster, bench: MakeBench
) -> None:
    sweep = bench(plain)
    mischief = {
        "h100": {"1": "kill"},
        "a100": {"1": "memory", "3": "sleep"},
        "v100-v100-16gb": {"2": "sleep"},
    }
    follower = sweep.start(sweep.write(mischief=mischief), "--submit")
    wait_until(lambda: len(sweep.records()) >= 10)
    sweep.close(follower)
    before = json.loads((sweep.run_dir / "sweep.json").read_text())
    assert "running" in sweep.whichlora("status", sweep.run_dir)
    sweep.wake()
    said = sweep.whichlora("resume", sweep.run_dir)
    assert json.loads((sweep.run_dir / "sweep.json").read_text()) == before  # nothing ran twice
    outcomes = Counter((record["gpu"], record["outcome"]) for record in sweep.records())
    assert outcomes == {
        ("a100-sxm-80gb", "ok"): 3,
        ("a100-sxm-80gb", "killed"): 1,
        ("h100-sxm-80gb", "ok"): 3,  # as the driver says, where the type alone said PCIe or SXM
        ("h100-sxm-80gb", "killed"): 1,
        ("l40s-48gb", "ok"): 4,
        ("v100-sxm2-16gb", "ok"): 4,
        ("v100-sxm2-32gb", "ok"): 4,
    }
    ended = {record["gpu"]: record["detail"] for record in sweep.records() if record["detail"]}
    assert ended["h100-sxm-80gb"] == "ended without a record: FAILED, signal 9"
    assert ended["a100-sxm-80gb"].startswith("ended without a record: ")
    assert "exceeded memory limit" in sweep.logs()  # Slurm, not the task, ended it
    answer = sweep.recommendation()
    totals = {one["group"]: one["winner"]["total_time_s"] for one in answer["groups"]}
    assert totals[answer["best"]] == min(totals.values())  # the same model fits them all
    assert {one["open_candidates"] for one in answer["groups"]} == {0}
    assert {one["winner"]["batch_size"] for one in answer["groups"]} == {4}
    assert said.count("to start at") == 5  # what sbatch --test-only says of the five scripts


def test_the_example_runs_to_its_recommendation(plain: Cluster, bench: MakeBench) -> None:
    sweep = bench(plain)
    said = sweep.whichlora(sweep.write_example(), "--submit")
    run_dir = sweep.folder / "runs" / "slurm"
    answer = json.loads((run_dir / "recommendation.json").read_text())
    assert len(answer["groups"]) == 5
    assert {row["search"]["stopped_by"] for row in answer["groups"]} == {"certain"}
    assert all(row["winner"]["source"] == "measured" for row in answer["groups"])
    assert f"start it with: sbatch {run_dir}/{answer['best']}/train.sbatch" in said


def test_arrays_keep_to_the_size_that_the_cluster_takes(plain: Cluster, bench: MakeBench) -> None:
    sweep = bench(plain)
    sweep.settings = {"stage2_profile": {"batch_size": [1, 2, 3, 4, 6, 8, 12]}}
    sweep.whichlora(sweep.write(partition="old", max_parallel=2), "--submit")
    state = json.loads((sweep.run_dir / "sweep.json").read_text())
    for array in state["arrays"]:
        parts = [(job["offset"], job["indices"]) for job in array["jobs"]]
        assert parts == [(0, [0, 1, 2]), (3, [3, 4, 5]), (6, [6, 7])]
    assert Counter(record["outcome"] for record in sweep.records()) == {"ok": 16}


def test_the_merge_job_answers_where_nobody_follows(plain: Cluster, bench: MakeBench) -> None:
    sweep = bench(plain)
    path = sweep.write(partition="gpu", mischief={"h100": {"0": "sleep"}})
    follower = sweep.start(path, "--submit")
    ours = f"whichlora-merge {sweep.folder}"
    wait_until(lambda: ours in sweep.cluster.run("squeue", "-h", "-o", "%j %Z"))
    sweep.close(follower)
    sweep.wake()
    wait_until(lambda: (sweep.run_dir / "recommendation.json").exists())
    assert {one["measured"] for one in sweep.recommendation()["groups"]} == {4}


def test_a_job_that_cannot_start_is_no_result_and_runs_on_resume(
    plain: Cluster, bench: MakeBench
) -> None:
    sweep = bench(plain)
    path = sweep.write(partition="gpu", mischief={"h100": {"2": "crash"}})
    said = sweep.whichlora(path, "--submit")
    assert "h100 1-2: pythia-160m lora r=8, batch 2, 64 tokens: not started" in said
    assert len(sweep.records()) == 11
    sweep.write(partition="gpu")  # the module exists by now
    sweep.whichlora("resume", sweep.run_dir)
    assert Counter(record["outcome"] for record in sweep.records()) == {"ok": 12}


def test_what_is_preempted_is_submitted_again(accounted: Cluster, bench: MakeBench) -> None:
    sweep = bench(accounted)
    path = sweep.write(partition="spare", mischief={"h100": {"0": "sleep"}})
    follower = sweep.start(path, "--submit")
    started = sweep.run_dir / "h100" / "started" / "1-0.json"
    wait_until(started.exists)
    started.unlink()
    urgent = [
        "sbatch",
        "--parsable",
        "-p",
        "urgent",
        "--gres=gpu:h100:1",
        "--mem=1000",
        "--output=/dev/null",
        "--wrap",
    ]
    accounted.run(*urgent, "sleep 5")
    wait_until(lambda: "urgent" in accounted.run("squeue", "-h", "-t", "R", "-o", "%P"))
    sweep.wake()
    said, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0, said
    assert "taken away by the cluster and submitted again: 1 task" in said
    assert Counter(record["outcome"] for record in sweep.records()) == {"ok": 4}


def test_a_requeued_task_measures_once(accounted: Cluster, bench: MakeBench) -> None:
    sweep = bench(accounted)
    path = sweep.write(partition="all", mischief={"h100": {"1": "sleep"}})
    follower = sweep.start(path, "--submit")
    started = sweep.run_dir / "h100" / "started" / "1-1.json"
    wait_until(started.exists)
    job = json.loads(started.read_text())["job"]
    accounted.run("scontrol", "requeue", job)
    sweep.wake()
    wait_until(lambda: accounted.run("squeue", "-h", "-t", "PD", "-o", "%i").count(job))
    accounted.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # not in two minutes
    said, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0, said
    assert Counter(record["outcome"] for record in sweep.records()) == {"ok": 4}


def test_accounting_remembers_what_the_queue_forgot(accounted: Cluster, bench: MakeBench) -> None:
    sweep = bench(accounted)
    mischief = {"h100": {"1": "kill", "2": "memory"}}
    sweep.whichlora(sweep.write(partition="all", mischief=mischief), "--submit")
    details = sorted(one["detail"] for one in sweep.records() if one["outcome"] == "killed")
    assert len(details) == 2
    assert any("signal 9" in detail for detail in details)
    assert "exceeded memory limit" in sweep.logs()


def test_two_clusters_are_one_sweep(accounted: Cluster, second: Cluster, bench: MakeBench) -> None:
    sweep = bench(accounted)
    sweep.whichlora(sweep.write(clusters=["test", "second"], partition="all"), "--submit")
    answer = sweep.recommendation()
    assert {one["group"]: one["cluster"] for one in answer["groups"]} == {
        "second-a100": "second",
        "test-h100": "test",
    }
    assert {one["measured"] for one in answer["groups"]} == {4}
    assert answer["best"] in ("second-a100", "test-h100")


@pytest.mark.oracle
def test_real_profiles_of_small_models_end_in_a_recommendation(
    plain: Cluster, bench: MakeBench
) -> None:
    """On the CPU, as the config says and every record repeats."""
    sweep = bench(plain)
    sweep.settings = {
        "models": "EleutherAI/pythia-14m",
        "stage2_profile": {"batch_size": [1, 64]},
        "precision": "fp32",
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
    }
    path = sweep.write(
        command=None, memory="3GiB", partition="old", pretend_memory="800MiB", max_parallel=1
    )
    sweep.whichlora(path, "--submit")
    answer = sweep.recommendation()
    outcomes = {
        (record["gpu"], record["config"]["phase"], record["config"]["batch_size"]): record[
            "outcome"
        ]
        for record in sweep.records()
    }
    for one in answer["groups"]:
        assert outcomes[one["gpu"], "inference", 1] == "ok"
        assert outcomes[one["gpu"], "finetune", 1] == "ok"
        assert outcomes[one["gpu"], "finetune", 64] == "oom"
        assert one["winner"]["batch_size"] == 1
    assert all("pretended" in record["provenance"] for record in sweep.records())


TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _tiny_model(folder: Path) -> None:
    from oracle_tokenizer import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@pytest.mark.oracle
@pytest.mark.parametrize(("nodes", "num_steps"), [(2, 4), (1, 8)])
def test_a_job_trains_on_all_gpus_of_its_nodes(
    plain: Cluster, bench: MakeBench, nodes: int, num_steps: int
) -> None:
    """By gloo, since the GPUs are pretended: 32 rows, two for each of two ranks of a node."""
    job = bench(plain)
    _tiny_model(job.folder / "model")
    settings = (
        f"--gpu v100-pcie-16gb --gpus {2 * nodes} --nodes {nodes} --parallel ddp "
        "--batch-size 2 --seq-len 64 --precision fp32 --no-gradient-checkpointing"
    )
    command = [sys.executable, "-m", "whichlora", "export", "./model", "--to", "slurm"]
    subprocess.run([*command, *settings.split()], cwd=job.folder, env=job.env, check=True)
    rows = "".join(json.dumps({"text": f"row {number} " * 9}) + "\n" for number in range(32))
    (job.folder / "train.jsonl").write_text(rows)
    environment = job.env | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{job.env['PATH']}"}
    submit = ["sbatch", "--wait", "--partition=old", "--time=5", "--mem=6000", "train.sbatch"]
    done = subprocess.run(submit, cwd=job.folder, env=environment, capture_output=True, text=True)
    log = "".join(path.read_text() for path in job.folder.glob("train-*.log"))
    assert done.returncode == 0, done.stderr + log[-3000:]
    result = json.loads((job.folder / "output" / "result.json").read_text())
    assert result["num_steps"] == num_steps
    assert log.count("final_loss: ") == 1
    assert (job.folder / "output" / "adapter_model.safetensors").stat().st_size > 1000


def test_runs_over_several_gpus_are_predicted_for_every_type_that_has_as_many(
    plain: Cluster, bench: MakeBench
) -> None:
    sweep = bench(plain)
    sweep.settings = {"profile": "none", "gpus": [2, 4], "parallel": ["ddp", "fsdp", "zero2"]}
    said = sweep.whichlora(sweep.write(partition="gpu"), "--submit")
    answer = sweep.recommendation()
    winners = {row["group"]: row["winner"] for row in answer["groups"]}
    assert set(winners) == {"h100", "a100", "gpu-l40s"}
    # the node of the H100 has two of them
    gpus = {name: winner["gpus"] for name, winner in winners.items()}
    assert gpus["h100"] == 2
    for row in answer["groups"]:
        script = Path(row["files"]["script"])
        text = script.read_text()
        assert f":{gpus[row['group']]}\n" in text  # --gres
        assert f"--nproc-per-node={gpus[row['group']]}" in text
        assert sweep.cluster.ok("sbatch", "--test-only", str(script))
    assert not sweep.records()
    assert "train.sbatch" in said
