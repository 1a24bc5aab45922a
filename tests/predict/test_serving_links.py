"""GPUs of a serving engine: one node or several, and what they send each other."""

from dataclasses import replace

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.predict.serving_links import (
    host_bytes_per_s,
    nodes_note,
    reduction_s,
    sends_s,
    unlinked,
)
from whichlora.spec.links import LEAST_HOST_BYTES_PER_S
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.links import LinkFiles
from whichlora.store.paths import data_folder
from whichlora.timing.links import collective_s, group_of
from whichlora.units import KiB, MiB
from whichlora.workflow.combinations import grid

SERVED = {"phase": ["inference"], "serving": ["vllm"]}
H100, RTX_4090 = find_gpu("h100-sxm-80gb"), find_gpu("rtx-4090-24gb")
MACHINES = LinkFiles((data_folder("calibration"),))


def test_an_all_reduce_on_one_node_is_the_engines_own_and_between_nodes_it_is_nccls() -> None:
    here, there = reduction_s(8, H100, MACHINES), reduction_s(16, H100, MACHINES)
    assert here is not None
    assert there is not None
    group = group_of(16, 1, 8)
    assert there(32 * KiB) == collective_s(MACHINES["hgx-h100"], "all_reduce", 32 * KiB, group)
    assert here(32 * KiB) < 10e-6 < 40e-6 < there(32 * KiB)
    assert there(64 * MiB) > here(64 * MiB)


def test_nothing_is_known_of_a_network_that_nobody_described() -> None:
    assert reduction_s(16, RTX_4090, MACHINES) is None
    assert nodes_note(16, RTX_4090, MACHINES) == ""
    assert "have 8 GPUs at most, and no network is known" in unlinked(16, RTX_4090, MACHINES)
    assert "17 GPUs are not equally many on nodes of 8" in unlinked(17, H100, MACHINES)
    said = unlinked(2, RTX_4090, MACHINES, stated=2)
    assert said == "no network between machines with rtx-4090-24gb is known"
    alone = {"own": replace(MACHINES["hgx-h100"], gpus_per_node=1, network=None)}
    assert unlinked(2, H100, alone).startswith("machines with h100-sxm-80gb have 1 GPU at most")
    assert "no links of machines with" in unlinked(2, find_gpu("gb10-128gb"), MACHINES)


def test_one_gpu_sends_nothing() -> None:
    seconds = reduction_s(1, find_gpu("gb10-128gb"), MACHINES)
    assert seconds is not None
    assert seconds(MiB) == 0


@pytest.mark.parametrize(("ranks", "nodes"), [(8, False), (16, True)])
def test_ranks_of_two_nodes_wait_for_the_network_and_a_note_names_it(
    ranks: int, nodes: bool
) -> None:
    run = RunConfig(
        model="meta-llama/Llama-3.1-70B",
        phase="inference",
        serving="vllm",
        serving_options=(("tensor_parallel_size", ranks),),
        context=4096,
    )
    answer = predict(load_model(run.model), run, H100, load_calibration(H100))
    assert answer.serving is not None
    assert answer.serving.time is not None
    assert (answer.serving.time.step_parts_s["communication"] > 5e-3) == nodes
    assert any("2 nodes of 8" in note for note in answer.notes) == nodes


def test_stages_send_their_share_over_the_links_that_are_between_them() -> None:
    one_node, two_nodes = sends_s(4, 2, H100, MACHINES), sends_s(8, 2, H100, MACHINES)
    four_nodes = sends_s(8, 4, H100, MACHINES)
    assert one_node is not None
    assert two_nodes is not None
    assert four_nodes is not None
    assert one_node(MiB) < two_nodes(MiB) < four_nodes(MiB)
    assert four_nodes(MiB) == pytest.approx(3 * two_nodes(MiB))
    assert sends_s(8, 2, RTX_4090, MACHINES) is None
    alone = sends_s(2, 1, RTX_4090, MACHINES)
    assert alone is not None
    assert alone(MiB) == 0


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (4, 1)])
def test_gpus_can_be_on_more_machines_than_they_need(nodes: int, each: int) -> None:
    run = RunConfig(
        model="meta-llama/Llama-3.1-8B",
        phase="inference",
        serving="vllm",
        context=4096,
        serving_options=(("tensor_parallel_size", 4),),
    )
    spread = replace(run, serving_options=(("nnodes", nodes), *run.serving_options))
    calibration, model = load_calibration(H100), load_model(run.model)
    answers = [predict(model, asked, H100, calibration) for asked in (run, spread)]
    usual, slow = (answer.serving for answer in answers)
    assert usual is not None
    assert slow is not None
    assert usual.kv_pool_bytes == slow.kv_pool_bytes
    assert usual.time is not None
    assert slow.time is not None
    assert slow.time.tpot_s > usual.time.tpot_s
    assert any(f"{nodes} nodes of {each}" in note for note in answers[1].notes)
    assert f"--nnodes {nodes} --node-rank 0" in slow.command
    wrong = replace(run, serving_options=(("nnodes", 3), *run.serving_options))
    with pytest.raises(
        ConfigError,
        match="nnodes: 3 machines cannot have equally many of 4 GPUs; give a divisor of 4",
    ):
        predict(model, wrong, H100, calibration)


@pytest.mark.parametrize(("gpus", "given"), [(1, "1"), (4, "a divisor of 4")])
def test_machines_without_equally_many_gpus_are_told_how_many_may_be(gpus: int, given: str) -> None:
    with pytest.raises(ConfigError, match=f"of {gpus} GPUs?; give {given}, or more gpus"):
        next(grid({"model": ["any"], **SERVED, "gpus": [gpus], "nodes": [3]}))
    assert next(grid({"model": ["any"], **SERVED, "gpus": [gpus], "nodes": [1]}))


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "tensor_parallel_size"), ("sglang", "tp_size")]
)
def test_a_gpu_whose_memory_is_its_machines_is_alone_there(engine: str, option: str) -> None:
    spark, model = find_gpu("gb10-128gb"), "Qwen/Qwen3-0.6B"
    run = RunConfig(model=model, phase="inference", serving=engine, context=4096)
    calibration = load_calibration(spark)
    one = predict(load_model(model), run, spark, calibration).serving
    run = replace(run, serving_options=((option, 2),))
    two = predict(load_model(model), run, spark, calibration).serving
    assert one is not None
    assert two is not None
    assert "--nnodes" not in one.command
    assert "--nnodes 2 --node-rank 0" in two.command


def test_copies_from_a_host_are_those_of_machines_with_the_card() -> None:
    usual = {bytes_per_s for each in MACHINES.values() if (bytes_per_s := each.host_bytes_per_s)}
    assert LEAST_HOST_BYTES_PER_S < host_bytes_per_s(RTX_4090, MACHINES) <= max(usual)
    assert host_bytes_per_s(RTX_4090, {}) == LEAST_HOST_BYTES_PER_S
