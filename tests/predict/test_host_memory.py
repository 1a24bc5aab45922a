"""Host memory as a limit: what is offloaded must fit in a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.memory.layer_passes import offloaded_bytes
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.host_memory import HostUse, host_fault, memory_of_node, pinned_bytes
from whichlora.predict.life import Life, life_of
from whichlora.predict.parallel_choice import best_spread
from whichlora.predict.predict import predict
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.life import LifeConfig
from whichlora.spec.parallel import AUTO, ParallelConfig, requested
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.store.links import LinkFiles
from whichlora.store.paths import data_folder
from whichlora.units import GiB

MODEL = load_model("meta-llama/Llama-3.2-1B")
MACHINES = LinkFiles((data_folder("calibration"),))
OFFLOAD = (("offload", ("optimizer",)),)


def config_of(strategy: str = "zero2", **settings: Any) -> ParallelConfig:
    return ParallelConfig(strategy=strategy, **({"gpus": 8, "options": OFFLOAD} | settings))


def predicted(config: ParallelConfig, this_host_bytes: int | None = None) -> Prediction:
    calibration = replace(
        prior_calibration(A100), machines=MACHINES, this_host_bytes=lambda: this_host_bytes
    )
    run = RunConfig(model=MODEL.name, method="full", seq_len=512, parallel=config)
    if config.strategy == AUTO:
        return best_spread(run, lambda each: predict(MODEL, each, A100, calibration))
    return predict(MODEL, run, A100, calibration)


def test_all_ranks_of_a_node_pin_together() -> None:
    run = RunConfig(model=MODEL.name, method="full", seq_len=512, parallel=config_of(nodes=2))
    job = resolve(MODEL, run, A100)
    assert job.layout is not None
    step = training_step(job)
    (kind,) = job.layout.rank_kinds(step)
    of_rank = sum(int(entry.num_bytes) for entry in job.layout.on_host(kind))
    assert pinned_bytes(job.layout, job.layout.rank_kinds(step)) == 4 * of_rank > 0


def test_what_a_node_lacks_makes_the_run_fail_with_one_line() -> None:
    several = predicted(config_of("zero3")).several_gpus
    assert several is not None
    needed = several.host_bytes
    just = predicted(config_of("zero3", host_memory_bytes=needed))
    less = predicted(config_of("zero3", host_memory_bytes=needed - 1))
    assert (just.verdict, less.verdict) == ("fits", "fails")
    assert not less.fits
    assert less.memory == just.memory
    assert [note for note in less.notes if note.startswith("host memory: ")] == [less.notes[0]]
    assert "pinned on each node do not fit" in less.notes[0]
    assert less.to_dict()["host_memory_bytes"] == needed - 1


def test_whose_memory_it_is() -> None:
    def node(**settings: Any) -> tuple[int | None, str]:
        return memory_of_node(config_of(**settings), MACHINES, lambda: 5 * GiB)

    instance = "aws-p4d.24xlarge"
    assert node(host_memory_bytes=GiB, interconnect=instance) == (GiB, "stated")
    assert node(interconnect=instance) == (1152 * GiB, f"of {instance}")
    assert node() == (5 * GiB, "of this machine")
    assert predicted(config_of(), this_host_bytes=GiB).verdict == "fails"
    unknown = predicted(config_of())
    assert unknown.verdict == "fits"
    assert unknown.several_gpus is not None
    assert unknown.several_gpus.host_memory_bytes is None


def test_what_nobody_knows_is_no_fault() -> None:
    use = HostUse(pinned_bytes=GiB)
    assert host_fault(HostUse(pinned_bytes=10**15), (None, "")) == ""
    assert host_fault(use, (GiB, "stated")) == ""
    assert "1.00 GiB pinned" in host_fault(use, (GiB - 2**20, "stated"))


BIG = load_model("meta-llama/Llama-3.1-70B")


def on_two(method: str, strategy: str, **settings: Any) -> Prediction:
    parallel = config_of(strategy, **({"gpus": 2, "options": ()} | settings))
    run = RunConfig(model=BIG.name, method=method, seq_len=512, parallel=parallel)
    return predict(BIG, run, A100, prior_calibration(A100))


def test_all_processes_of_a_node_load_4_bit_codes_at_once() -> None:
    several = on_two("qlora", "fsdp").several_gpus
    assert several is not None
    assert several.loading_host_bytes == pytest.approx(2 * 40.72 * GiB, rel=1e-3)
    just = on_two("qlora", "fsdp", host_memory_bytes=several.loading_host_bytes)
    less = on_two("qlora", "fsdp", host_memory_bytes=several.loading_host_bytes - 1)
    assert (just.verdict, less.verdict) == ("fits", "fails")
    assert "81.44 GiB, which the processes of each node load at once" in less.notes[0]
    assert less.exceeds_host


@pytest.mark.parametrize(
    ("method", "strategy", "options", "of_a_process"),
    [
        ("lora", "fsdp", {}, 0),  # pages of the mapped file
        ("lora", "ddp", {}, 0),
        ("full", "ddp", {}, 0),
        ("full", "zero3", {}, 0),
        ("full", "device-map", {}, 0),
        ("qlora", "zero3", {}, 0),  # on its GPU
        ("full", "fsdp", {}, 4),  # widened before it is divided
        ("full", "fsdp", {"fsdp_version": "1"}, 0),  # after it
    ],
)
def test_what_a_process_loads_of_its_own(
    method: str, strategy: str, options: dict[str, str], of_a_process: int
) -> None:
    several = on_two(method, strategy, options=tuple(options.items())).several_gpus
    assert several is not None
    trained = BIG.num_params
    loaded = several.loading_host_bytes
    if of_a_process:
        assert loaded == pytest.approx(2 * of_a_process * trained, rel=1e-3)
    else:
        assert loaded < 10 * GiB  # adapters alone, in fp32


def test_what_is_cast_is_loaded_by_every_process() -> None:
    """`loads_on_host`; weights that keep their dtype are mapped."""
    run = RunConfig(
        model=BIG.name,
        method="lora",
        precision="fp32",
        seq_len=512,
        parallel=config_of("ddp", options=(), nodes=2),
    )
    several = predict(BIG, run, A100, prior_calibration(A100)).several_gpus
    assert several is not None
    assert several.loading_host_bytes == pytest.approx(4 * 4 * BIG.num_params, rel=1e-3)


def test_saving_is_a_fault_only_where_no_setting_writes_shares() -> None:
    room = on_two("lora", "zero2", host_memory_bytes=1024 * GiB)
    tight = on_two("lora", "zero2", host_memory_bytes=200 * GiB)
    assert not room.exceeds_host
    assert tight.exceeds_host
    assert "saving fails, since each rank copies all weights" in tight.notes[0]
    shared = on_two("lora", "fsdp", host_memory_bytes=100 * GiB)
    assert not shared.exceeds_host
    (note,) = [note for note in shared.notes if "saving fails" in note]
    assert "SHARDED_STATE_DICT in fsdp_config writes shares instead" in note


def test_auto_passes_over_what_the_host_cannot_hold() -> None:
    asked = {"options": (), "gpus": 2}
    small = replace(A100, memory_bytes=6 * GiB)
    run = RunConfig(model=MODEL.name, method="full", seq_len=512, parallel=config_of(AUTO, **asked))

    def best(host_bytes: int) -> Prediction:
        calibration = replace(prior_calibration(small), machines=MACHINES)
        parallel = replace(run.parallel, host_memory_bytes=host_bytes)
        return best_spread(
            replace(run, parallel=parallel), lambda each: predict(MODEL, each, small, calibration)
        )

    roomy, tight = best(1024 * GiB), best(GiB)
    assert "offload" in roomy.run.parallel.in_words
    assert "offload" not in tight.run.parallel.in_words
    assert any(note.endswith("does not fit in host memory") for note in tight.notes)


def test_what_a_trainer_keeps_on_the_host_is_a_limit_on_one_gpu() -> None:
    run = RunConfig(
        model="meta-llama/Llama-3.1-8B", method="qlora", trainer="unsloth", seq_len=32768
    )
    model = load_model(run.model)

    def verdict(host_bytes: int) -> str:
        stated = requested({"host_memory_bytes": host_bytes})
        at = replace(run, parallel=stated)
        return predict(model, at, A100, prior_calibration(A100)).verdict

    needed = offloaded_bytes(model, tokens=32768)
    assert verdict(needed) == "fits"
    assert verdict(needed - 1) == "fails"


def test_a_life_fails_where_a_stage_holds_more_than_the_stated_host() -> None:
    run = RunConfig(model="Qwen/Qwen2.5-0.5B")

    def lived(host_bytes: int) -> Life:
        at = replace(run, parallel=requested({"host_memory_bytes": host_bytes}))
        settings = LifeConfig()
        return life_of(load_model(run.model), at, A100, prior_calibration(A100), settings)

    needed = lived(2**40).largest_on_host.host_bytes
    assert lived(needed).verdict == "fits"
    assert lived(needed - 1).verdict == "fails"


OLDER = (("transformers", "4.57.1"),)


def loading_of(method: str, *, version: str = "1", once: bool, libraries: Any = OLDER) -> int:
    options = (("cpu_ram_efficient_loading", once), ("fsdp_version", version))
    parallel = config_of("fsdp", gpus=8, options=options)
    settings = {"method": method, "precision": "bf16", "libraries": libraries}
    run = RunConfig(model=BIG.name, seq_len=512, parallel=parallel, **settings)
    several = predict(BIG, run, A100, prior_calibration(A100)).several_gpus
    assert several is not None
    return several.loading_host_bytes


def test_one_process_of_a_node_loads_alone_before_transformers_5() -> None:
    for version in ("1", "2"):
        all_load = loading_of("qlora", version=version, once=False)
        assert loading_of("qlora", version=version, once=True) == all_load / 8
        # version 2 widens what is trained, of empty weights too
        of_full = [loading_of("full", version=version, once=once) for once in (False, True)]
        assert of_full[0] == of_full[1]
        assert (of_full[0] > 0) == (version == "2")


def test_every_process_loads_from_transformers_5_on_and_a_note_says_so() -> None:
    both = [loading_of("qlora", once=once, libraries=()) for once in (False, True)]
    assert both[0] == both[1]
    options = (("cpu_ram_efficient_loading", True),)
    notes = on_two("lora", "fsdp", options=options).notes
    assert any("cpu_ram_efficient_loading has no effect" in note for note in notes)
