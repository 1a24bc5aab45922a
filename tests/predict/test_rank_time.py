"""Time of a step on several GPUs: it adds up, is the same in blocks, and NaN without links."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from whichlora.errors import ConfigError
from whichlora.parallel import ddp
from whichlora.parallel.base import Message, RankKind, Spread, Strategy
from whichlora.parallel.layout import Layout
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.counted import count_block
from whichlora.predict.judged import judge_block
from whichlora.predict.predict import predict
from whichlora.predict.quantities import rank_kinds
from whichlora.predict.rank_time import count_ranks, judge_ranks, link_notes, links_of, over_nodes
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.links import LinkSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.links import LinkFiles
from whichlora.store.paths import data_folder

GPU = find_gpu("a100-sxm-80gb")
MODEL = load_model("meta-llama/Llama-3.2-1B")
MACHINES = LinkFiles((data_folder("calibration"),))


def calibration(gpu: Any = GPU) -> Calibration:
    return replace(prior_calibration(gpu), machines=MACHINES)


def run_of(method: str = "full", *, gpus: int = 4, **fields: Any) -> RunConfig:
    strategy = "none" if gpus == 1 else "ddp"
    config = ParallelConfig(strategy=strategy, gpus=gpus, **fields)
    return RunConfig(model=MODEL.name, method=method, batch_size=4, seq_len=512, parallel=config)


def predicted(method: str = "full", **fields: Any) -> Prediction:
    return predict(MODEL, run_of(method, **fields), GPU, calibration())


def communication_s(prediction: Prediction) -> float:
    assert prediction.several_gpus is not None
    return prediction.several_gpus.communication.exposed_s


def test_what_is_waited_for_comes_on_top_and_the_parts_add_up() -> None:
    alone, several = predicted(gpus=1).time, predicted()
    assert several.time.step_s is not None
    assert alone.step_s is not None
    slowdown_s = several.time.breakdown["contention"]
    waits_s = communication_s(several) + slowdown_s
    assert several.time.step_s == pytest.approx(alone.step_s + waits_s)
    assert several.several_gpus is not None
    assert slowdown_s == pytest.approx(several.several_gpus.communication.overlapped_s)
    assert several.time.breakdown["communication"] == pytest.approx(communication_s(several))
    assert sum(several.time.breakdown.values()) == pytest.approx(several.time.step_s)
    assert several.time.tokens_per_s == pytest.approx(4 * 4 * 512 / several.time.step_s)
    assert several.time.interval_s[0] < several.time.step_s < several.time.interval_s[1]


def test_each_message_has_its_seconds() -> None:
    several = predicted().several_gpus
    assert several is not None
    sent = several.communication
    assert sum(message.seconds for message in sent.messages) == pytest.approx(
        sent.exposed_s + sent.overlapped_s
    )


def test_a_machine_over_pcie_that_nobody_measured_is_less_certain() -> None:
    gpu = find_gpu("rtx-4090-24gb")
    prior = prior_calibration(gpu)
    usual, even = MACHINES["pcie-4-no-peer"], replace(MACHINES["pcie-4-no-peer"], interval_scale=1)
    assert usual.interval_scale > 1

    def reach(links: LinkSpec, num_runs: int) -> float:
        model = replace(prior.time["finetune"], num_runs=num_runs)
        machines = {links.key: replace(links, gpus=(gpu.key,))}
        found = replace(
            prior, machines=machines, time={**prior.time, "finetune": model}
        )  # of the same coefficients, measured or not
        time = predict(MODEL, run_of(gpus=2), gpu, found).time
        assert time.step_s is not None
        return math.log(time.interval_s[1] / time.step_s)

    assert reach(usual, 0) == pytest.approx(usual.interval_scale * reach(even, 0))
    assert reach(usual, 20) == reach(even, 20)


def test_slower_links_take_longer_and_are_less_certain() -> None:
    fast, slow = predicted(), predicted(interconnect="2GB/s")
    assert communication_s(slow) > 20 * communication_s(fast)
    bits = predicted(interconnect="16 Gb/s")
    assert bits.time.step_s == slow.time.step_s
    assert slow.time.step_s is not None
    assert fast.time.step_s is not None
    assert slow.time.interval_s[1] / slow.time.step_s > 1


def test_nodes_share_a_network() -> None:
    one, two = predicted(gpus=8), predicted(gpus=16, nodes=2)
    assert communication_s(two) > communication_s(one)
    assert any("InfiniBand" in note for note in two.notes)
    assert any("hgx-a100" in note for note in one.notes)


@pytest.mark.parametrize(("gpus", "machine"), [(2, "h100-nvl"), (4, "pcie-5-peer")])
def test_more_cards_than_a_bridge_joins_send_over_pcie(gpus: int, machine: str) -> None:
    device = find_gpu("h200-nvl-141gb")
    prediction = predict(MODEL, run_of(gpus=gpus), device, calibration(device))
    assert prediction.time.is_known
    assert any(f"links of {machine}:" in note for note in prediction.notes)


@pytest.mark.parametrize(
    ("gpu", "fields", "line"),
    [
        ("gb10-128gb", {}, "no links of machines with gb10-128gb are known"),
        ("rtx-4090-24gb", {"nodes": 2}, "pcie-4-no-peer has no network to other nodes"),
        ("rtx-3090-24gb", {"interconnect": "rtx-3090-bridge"}, "has 2 GPUs at most, not 4"),
    ],
)
def test_without_links_the_time_is_not_known_and_memory_is(
    gpu: str, fields: dict[str, Any], line: str
) -> None:
    device = find_gpu(gpu)
    prediction = predict(MODEL, run_of("lora", **fields), device, calibration(device))
    assert not prediction.time.is_known
    assert prediction.memory.peak_allocated_bytes > 0
    assert math.isnan(communication_s(prediction))
    assert any(line in note for note in prediction.notes)
    job = resolve(MODEL, run_of("lora", **fields), device)
    block = judge_block(count_block(job, {"batch_size": np.array([1, 2])}), calibration(device))
    assert np.isnan(block.time_s).all()


def test_an_interconnect_that_is_neither_machine_nor_bandwidth_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'hgx-a10' is not known; give a bandwidth .*hgx-a100"):
        predicted(interconnect="hgx-a10")


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("interconnect", ["auto", "1GB/s"])
def test_a_block_says_what_each_run_says(method: str, interconnect: str) -> None:
    job = resolve(MODEL, run_of(method, interconnect=interconnect), GPU)
    batches = np.array([1, 3, 16])
    block = judge_block(count_block(job, {"batch_size": batches}), calibration())
    for index, batch in enumerate(batches):
        run = replace(run_of(method, interconnect=interconnect), batch_size=int(batch))
        time = predict(MODEL, run, GPU, calibration()).time
        assert block.time_s[index] == pytest.approx(time.step_s, rel=1e-9)
        assert block.low_s[index] == pytest.approx(time.interval_s[0], rel=1e-9)
        assert block.high_s[index] == pytest.approx(time.interval_s[1], rel=1e-9)


def halves(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    """The first ranks read twice the tokens of the others."""
    larger = replace(rank.step, batch_size=2 * rank.step.batch_size)
    return (
        replace(rank, name="first", ranks=(0,), step=larger),
        replace(rank, name="others", ranks=tuple(range(1, spread.size))),
    )


def gathers(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    return (
        Message(
            what="blocks",
            collective="all_gather",
            num_bytes=10**8,
            count=16,
            size=spread.size,
            hidden_by="forward",
        ),
    )


def resolved(strategy: Strategy, gpus: int = 4) -> ResolvedRun:
    job = resolve(MODEL, run_of(gpus=gpus), GPU)
    config = ParallelConfig(strategy="ddp", gpus=gpus)
    return replace(job, layout=Layout.of(config, [strategy]))


def judged(strategy: Strategy, links: LinkSpec = MACHINES["hgx-a100"]) -> Any:
    job = resolved(strategy)
    assert job.layout is not None
    counted = count_ranks(job.layout, job.run, rank_kinds(job))
    return judge_ranks(counted, calibration().time["finetune"], links)


def stages(order: Any) -> Strategy:
    return Strategy(
        name="halves",
        summary="invented",
        divides="model",
        order=order,
        split=halves,
        messages=gathers,
    )


def test_the_rank_that_takes_longest_decides() -> None:
    together = judged(stages("at once"))
    alone = predict(MODEL, replace(run_of(gpus=1), batch_size=8), GPU, calibration()).time.step_s
    assert alone is not None
    first, _ = together.communication
    waits_s = first.exposed_s + first.slowdown_s
    assert together.time.total_s == pytest.approx(alone + waits_s, rel=1e-6)


def test_stages_wait_for_each_other() -> None:
    together, piped, alone = (
        judged(stages(order)).time for order in ("at once", "pipelined", "one after the other")
    )
    assert piped.total_s > together.total_s
    assert alone.total_s == pytest.approx(piped.total_s)  # one micro-batch fills nothing
    parts = alone.breakdown
    assert parts["pipeline_idle"] > 0
    assert sum(parts.values()) == pytest.approx(alone.total_s)


def test_an_optimizer_updates_its_share() -> None:
    quarter = replace(ddp.STRATEGY, update_share=lambda spread: 1 / spread.size)
    whole, shared = judged(ddp.STRATEGY).time, judged(quarter).time
    assert shared.breakdown["optimizer"] == pytest.approx(whole.breakdown["optimizer"] / 4)


def test_notes_name_the_machine_and_what_was_not_measured() -> None:
    config = ParallelConfig(strategy="ddp", gpus=4)
    links, line = links_of(config, GPU, MACHINES)
    large = Message(what="x", collective="all_reduce", num_bytes=10**10, count=1, size=4)
    assert link_notes(links, line, [[]], config) == (line,)
    (note,) = link_notes(links, line, [[large]], config)
    assert "512 MiB at most were measured" in note


@pytest.mark.parametrize(
    ("gpu", "gpus", "settings", "nodes"),
    [
        ("h100-sxm-80gb", 8, {}, 1),
        ("h100-sxm-80gb", 16, {}, 2),
        ("h100-sxm-80gb", 12, {}, 2),
        ("h100-sxm-80gb", 17, {}, 1),
        ("h100-sxm-80gb", 16, {"nodes": 4}, 4),
        ("h100-sxm-80gb", 16, {"interconnect": "25GB/s"}, 1),
        ("rtx-4090-24gb", 16, {}, 1),  # nothing is known of networks between them
        ("rtx-4090-24gb", 16, {"interconnect": "aws-g5.48xlarge"}, 2),
    ],
)
def test_more_gpus_than_a_machine_has_are_over_several(
    gpu: str, gpus: int, settings: dict[str, Any], nodes: int
) -> None:
    config = ParallelConfig(strategy="fsdp", gpus=gpus, **settings)
    spread, note = over_nodes(config, find_gpu(gpu), MACHINES)
    assert spread == replace(config, nodes=nodes)
    assert bool(note) == (spread != config)


def test_parts_add_up_where_the_last_stage_updates_longest() -> None:
    config = ParallelConfig(strategy="device-map", gpus=3)
    run = RunConfig(model=MODEL.name, method="full", seq_len=8, parallel=config)
    time = predict(MODEL, run, GPU, calibration()).time
    assert sum(time.breakdown.values()) == pytest.approx(time.step_s, rel=1e-9)


def test_one_gpu_reads_no_links() -> None:
    class Unread(dict[str, LinkSpec]):
        def values(self) -> Any:
            raise AssertionError("links are read")

    assert over_nodes(ParallelConfig(), GPU, Unread()) == (ParallelConfig(), "")
    with pytest.raises(AssertionError, match="links are read"):
        over_nodes(ParallelConfig(strategy="ddp", gpus=2), GPU, Unread())
