"""Text in, values out: what Slurm prints, and the scripts that are written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from whichlora.cluster.slurm.discovery import (
    GpuGroup,
    GpuNode,
    gpu_groups,
    matching_gpus,
    parse_nodes,
)
from whichlora.cluster.slurm.scripts import (
    array_script,
    format_limit,
    merge_script,
    training_script,
)
from whichlora.cluster.slurm.states import TaskState, parse_sacct, parse_scontrol, parse_squeue
from whichlora.cluster.state import chunks
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import SlurmConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import list_gpus

GOLDEN = Path(__file__).parents[1] / "golden"
SINFO = """\
gpu|up|h0|idle|gpu:h100:2(S:0-1)|H100-80GB,ib
all|up|h0|idle|gpu:h100:2(S:0-1)|H100-80GB,ib
old|up|big|mix|gpu:v100:2|V100-32GB,rack1
old|up|small|idle|gpu:v100:2|V100-16GB,rack2
old|up|small2|idle|gpu:v100:2|V100-16GB,rack3
all|up|l0|idle|gpu:4|L40S,icelake
all|up|m0|idle|gpu:1g.10gb:7|A100,mig
all|up|c0|idle|(null)|(null)
all|up|gone|down*|gpu:h200:8|(null)
off|down|closed|idle|gpu:h200:8|(null)
"""
CONFIG = SlurmConfig(
    account="lab",
    qos="normal",
    memory_bytes=32 << 30,
    modules=("python/3.11", "cuda"),
    environment={"HF_HOME": "/scratch/my cache"},
    setup=("source venv/bin/activate",),
    options=("--reservation=class of 26",),
    max_parallel=4,
)
GROUP = GpuGroup(
    name="v100-v100-32gb",
    gpu="v100-sxm2-32gb",
    partitions=("all", "old"),
    gres_type="v100",
    constraint="V100-32GB",
)


def test_sinfo_names_every_gpu_once_and_leaves_out_what_is_down() -> None:
    nodes = parse_nodes(SINFO)
    assert [node.name for node in nodes] == ["h0", "big", "small", "small2", "l0", "m0"]
    assert nodes[0].partitions == {"gpu", "all"}
    assert nodes[0].num_gpus == 2
    assert nodes[4].gres_type is None


def test_one_type_with_two_memory_sizes_is_two_groups_that_a_feature_tells_apart() -> None:
    groups, unknown = gpu_groups(parse_nodes(SINFO), list_gpus(), {})
    told = {group.name: (group.gres(), group.constraint, group.num_nodes) for group in groups}
    assert told == {
        "gpu-l40s": ("gpu:1", "L40S", 1),
        "h100": ("gpu:h100:1", "", 1),
        "v100-v100-16gb": ("gpu:v100:1", "V100-16GB", 2),  # the racks do not matter
        "v100-v100-32gb": ("gpu:v100:1", "V100-32GB", 1),
    }
    assert len(unknown) == 1
    assert "is a slice of a GPU (MIG)" in unknown[0]


def test_what_the_user_names_goes_before_any_guess() -> None:
    named = {"1g.10gb": "rtx-3080-10gb", "V100-16GB": "v100-sxm2-16gb"}
    groups, unknown = gpu_groups(parse_nodes(SINFO), list_gpus(), named)
    found = {group.name: group.gpu for group in groups}
    assert found["1g-10gb"] == "rtx-3080-10gb"
    assert found["v100-v100-16gb"] == "v100-sxm2-16gb"
    assert not unknown


@pytest.mark.parametrize(
    ("gres_type", "features", "expected"),
    [
        ("nvidia_a100-sxm4-40gb", "", "a100-sxm-40gb"),
        ("nvidia_h100_80gb_hbm3", "", "h100-sxm-80gb"),
        ("tesla_t4", "", "t4-16gb"),
        ("quadro_rtx_6000", "", "rtx-6000-turing-24gb"),
        ("geforce_rtx_2080_ti", "", "rtx-2080-ti-11gb"),
        ("a100", "a100-40g,pcie", "a100-pcie-40gb"),
        (None, "l4,zen3", "l4-24gb"),
        ("nonsense", "", None),
        (None, "rack12,ib", None),
    ],
)
def test_types_and_features_are_read_as_administrators_write_them(
    gres_type: str | None, features: str, expected: str | None
) -> None:
    node = GpuNode(
        name="n",
        gres_type=gres_type,
        num_gpus=1,
        features=frozenset(features.split(",")) - {""},
        partitions=frozenset({"all"}),
    )
    assert next(iter(matching_gpus(node, list_gpus(), {})), None) == expected


def test_the_scripts_are_these() -> None:
    tasks, logs = Path("/work dir/h/tasks-1.json"), Path("/runs/logs")
    written = [
        array_script(
            GROUP,
            CONFIG,
            tasks=tasks,
            num_tasks=7,
            max_array_size=3,
            limit_s=61.0,
            logs=logs,
            command="whichlora",
        ),
        merge_script(
            CONFIG,
            run_dir=Path("/runs"),
            cluster="two",
            limit_s=1200.0,
            logs=logs,
            command="whichlora",
        ),
        training_script(
            GROUP,
            CONFIG,
            job=Path("/runs/h/train.py"),
            run=RunConfig(model="m"),
            limit_s=100_000.0,
            python="/env/bin/python",
        ),
        training_script(
            GROUP,
            CONFIG,
            job=Path("/runs/my h/train.py"),
            run=RunConfig(model="m", parallel=ParallelConfig(strategy="fsdp", gpus=8, nodes=2)),
            limit_s=100_000.0,
            python="/env/bin/python",
        ),
    ]
    assert "=====\n".join(written) == (GOLDEN / "slurm_scripts.txt").read_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0:01:00"), (60, "0:01:00"), (61, "0:02:00"), (86_400, "1-00:00:00")],
)
def test_limits_are_whole_minutes_rounded_up(seconds: float, text: str) -> None:
    assert format_limit(seconds) == text


def test_states_are_read_from_each_command() -> None:
    assert parse_squeue("12|3|RUNNING|None\n12|N/A|PENDING|x\n") == {
        ("12", 3): TaskState("RUNNING")
    }
    told = "12_0|CANCELLED by 0|0:15\n12_[1-5]|PENDING|0:0\n12_6|OUT_OF_MEMORY|0:125\n"
    assert parse_sacct(told) == {
        ("12", 0): TaskState("CANCELLED", 0, 15),
        ("12", 6): TaskState("OUT_OF_MEMORY", 0, 125),
    }
    line = "JobId=14 ArrayJobId=12 ArrayTaskId=1 JobState=FAILED Reason=x ExitCode=0:9\n"
    assert parse_scontrol(line) == {("12", 1): TaskState("FAILED", 0, 9)}


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        (TaskState("OUT_OF_MEMORY"), "killed"),
        (TaskState("FAILED", 0, 9), "killed"),
        (TaskState("FAILED", 137, 0), "killed"),
        (TaskState("FAILED", 1, 0), "crashed"),
        (TaskState("TIMEOUT"), "timeout"),
        (TaskState("PREEMPTED"), None),
        (TaskState("NODE_FAIL"), None),
        (TaskState("CANCELLED"), None),
        (TaskState("RUNNING"), None),
    ],
)
def test_only_what_the_candidate_did_is_a_result(state: TaskState, outcome: str | None) -> None:
    assert state.outcome == outcome


def test_long_lists_are_cut_where_the_array_indices_would_end() -> None:
    assert chunks([0, 1, 3, 4, 8], 3) == [(0, [0, 1]), (3, [3, 4]), (6, [8])]
