"""A layer for drafts: its weights and cache, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import drafts, sglang
from whichlora.serving.base import Served
from whichlora.serving.vllm_memory import start
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

DEEPSEEK, H200 = "deepseek-ai/DeepSeek-V3", "h200-sxm-141gb"
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'


def run_of(model: str = DEEPSEEK, **options: object) -> RunConfig:
    options = {"tensor_parallel_size": 8} | options
    return RunConfig(
        model=model,
        phase="inference",
        serving="vllm",
        context=8192,
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )


def asked(model: str = DEEPSEEK, **options: object) -> Served:
    return resolve(load_model(model), run_of(model, **options), find_target(H200)).served


def test_a_draft_layer_has_as_many_parameters_as_published() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B of its own, beside the shared table and head."""
    plain, drafting = asked(), drafts.with_draft_layers(asked(speculative_config=MTP))
    joint = drafts.joint_entry(drafting)
    more = sum(group.num_params for group in drafting.model.groups)
    more -= sum(group.num_params for group in plain.model.groups)
    assert more + joint.num_bytes // 2 == pytest.approx(11.5e9, rel=0.015)
    assert drafts.num_layers(plain.model) == 1


@pytest.mark.parametrize(
    ("model", "layers", "indexers"),
    [(DEEPSEEK, 61, 0), ("deepseek-ai/DeepSeek-V3.2", 61, 61), ("zai-org/GLM-5.2", 78, 21)],
)
def test_its_cache_is_that_of_one_more_layer(model: str, layers: int, indexers: int) -> None:
    plain, drafting = start(asked(model)), start(asked(model, speculative_config=MTP))
    block_size = 64 if indexers else 16
    each = block_size * 1152, block_size * 132
    assert plain.pool.block_bytes == layers * each[0] + indexers * each[1]
    assert drafting.pool.block_bytes - plain.pool.block_bytes == each[0] + bool(indexers) * each[1]
    assert drafting.pool.num_bytes < plain.pool.num_bytes


def test_its_time_is_unknown_and_the_command_drafts() -> None:
    gpu = find_target(H200)
    answer = predict(
        load_model(DEEPSEEK), run_of(speculative_config=MTP), gpu, load_calibration(gpu)
    )
    assert answer.serving is not None
    assert answer.serving.time is None
    assert any("how many are accepted" in note for note in answer.notes)
    assert drafts.NOTE in answer.notes
    assert f"--speculative-config '{MTP}'" in answer.serving.command


def test_sglang_takes_the_layer_before_its_pool() -> None:
    def taken(**options: object) -> tuple[int, int, int]:
        run = replace(run_of(), serving="sglang", serving_options=())
        run = replace(run, serving_options=tuple(sorted({"tp_size": 8, **options}.items())))  # type: ignore[arg-type]
        start = sglang.start(resolve(load_model(DEEPSEEK), run, find_target(H200)).served)
        weights = sum(entry.num_bytes for entry in start.entries if entry.part == "weights")
        return weights, start.pool.block_bytes, start.max_num_seqs(8192)

    plain, drafting = taken(), taken(speculative_algorithm="EAGLE")
    assert 11.5e9 / 8 < drafting[0] - plain[0] < 1.2 * 11.5e9 / 8  # 8 bits, and the joint whole
    assert drafting[1] - plain[1] == 1152
    assert drafting[2] == 48 < plain[2]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (DEEPSEEK, {"speculative_config": '{"method": "ngram"}'}, "is not predicted; accepted is"),
        (DEEPSEEK, {"speculative_config": "mtp"}, "'mtp' is not predicted; accepted is"),
        ("Qwen/Qwen3-30B-A3B", {"speculative_config": MTP, "tp": 4}, "Qwen3-30B-A3B is none of"),
        (DEEPSEEK, {"speculative_config": MTP, "pp": 2}, "beside stages of a pipeline"),
    ],
)
def test_other_drafts_are_refused_in_one_line(
    model: str, options: dict[str, object], message: str
) -> None:
    gpu = find_target(H200)
    with pytest.raises(ConfigError, match=message):
        predict(load_model(model), run_of(model, **options), gpu, load_calibration(gpu))
