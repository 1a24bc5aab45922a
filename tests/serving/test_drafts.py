"""Drafts: what they take of a GPU, what a step with them takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora import families
from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import drafts, sglang, vllm_settings
from whichlora.serving.base import Served
from whichlora.serving.marlin_scales import repeated_bytes
from whichlora.serving.vllm_memory import captures_steps, start
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.units import GiB

DEEPSEEK, H200 = "deepseek-ai/DeepSeek-V3", "h200-sxm-141gb"
QWEN, LLAMA = "Qwen/Qwen3.5-27B", "meta-llama/Llama-3.1-8B"
MTP = '{"method": "mtp", "num_speculative_tokens": 1}'
THREE = '{"method": "mtp", "num_speculative_tokens": 3}'
EAGLE3 = '{"method": "eagle3", "model": "eagle", "num_speculative_tokens": 3}'
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


def run_of(model: str = DEEPSEEK, **options: object) -> RunConfig:
    options = {"tensor_parallel_size": 8 if model == DEEPSEEK else 1} | options
    return RunConfig(
        model=model,
        phase="inference",
        serving="vllm",
        context=8192,
        serving_options=tuple(sorted(options.items())),  # type: ignore[arg-type]
    )


def asked(model: str = DEEPSEEK, **options: object) -> Served:
    options = {"tensor_parallel_size": 8} | options
    return resolve(load_model(model), run_of(model, **options), find_target(H200)).served


def answer(model: ModelSpec, run: RunConfig, gpu: str = H200) -> ServingPrediction:
    device = find_target(gpu)
    serving = predict(model, run, device, load_calibration(device)).serving
    assert serving is not None
    return serving


def eagle3_of_llama() -> ModelSpec:
    """Llama-3.1-8B with a drafter in the shapes of its own layers, and a head of 32,000 tokens."""
    config = load_model(LLAMA).config
    drafter = families.build(
        {
            **{name: config[name] for name in config if name != "rope_scaling"},
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": 32000,
        },
        name="eagle",
    )
    return replace(load_model(LLAMA), drafter=drafter)


def test_a_draft_layer_has_as_many_parameters_as_published() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 11.5B of its own, beside the shared table and head."""
    plain, served = asked(), asked(speculative_config=MTP)
    asks = vllm_settings.asked_drafts(served)
    assert asks is not None
    drafting = drafts.with_drafts(served, asks)
    (joint,) = drafts.draft_entries(drafting, asks, 8)
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


def test_its_time_is_unknown_without_a_length_and_the_command_drafts() -> None:
    gpu = find_target(H200)
    found = predict(
        load_model(DEEPSEEK), run_of(speculative_config=MTP), gpu, load_calibration(gpu)
    )
    assert found.serving is not None
    assert found.serving.time is None
    assert any("give acceptance_length" in note for note in found.notes)
    assert drafts.NOTE in found.notes
    assert f"--speculative-config '{MTP}'" in found.serving.command


def test_blocks_of_a_hybrid_with_three_drafts_are_those_of_its_log() -> None:
    """An RTX PRO 6000 has 939 and 556 blocks of Qwen3.8-27B in fp8 and 16 bit.

    Source: github.com/vllm-project/recipes/pull/831, a build of the 0.27 range.
    """
    gpu = replace(find_target("rtx-pro-6000-blackwell-max-q-96gb"), memory_bytes=round(95.03 * GiB))

    def blocks(quant: str, **options: object) -> int:
        run = replace(run_of(QWEN, speculative_config=THREE, **options), context=262144)
        run = replace(run, quant=quant, libraries=(("vllm", "0.27.0"),))  # type: ignore[arg-type]
        serving = predict(load_model(QWEN), run, gpu, load_calibration(gpu)).serving
        assert serving is not None
        assert not serving.starts
        return serving.num_blocks

    assert blocks("fp8") == pytest.approx(939, rel=0.01)
    assert blocks("none", gpu_memory_utilization=0.95) == pytest.approx(556, rel=0.01)


def test_a_state_is_kept_for_every_draft() -> None:
    options = {"max_num_seqs": 16, "language_model_only": True}
    plain = start(asked(QWEN, tensor_parallel_size=1, **options)).pool
    three = start(asked(QWEN, tensor_parallel_size=1, speculative_config=THREE, **options)).pool
    assert three.blocks_of(1) - plain.blocks_of(1) == 3 * 3  # of three groups of layers
    assert three.block_bytes * 16 > plain.block_bytes * 17  # one more layer, and longer states


def test_files_in_4_bit_leave_a_draft_layer_wide() -> None:
    def layer_bytes(quant: str) -> int:
        run = replace(run_of(QWEN, speculative_config=MTP, max_num_seqs=16), quant=quant)  # type: ignore[arg-type]
        served = resolve(load_model(QWEN), run, find_target(H200)).served
        asks = vllm_settings.asked_drafts(served)
        assert asks is not None
        drafting = drafts.drafting_model(served, asks)
        assert drafting is not None
        return all(not each.quantisable for each in drafting.groups[0].layer.linears)

    assert layer_bytes("awq-int4")
    assert not layer_bytes("fp8")


def test_a_length_that_is_stated_makes_answers_faster_and_prompts_no_faster() -> None:
    options = {"max_num_seqs": 16, "language_model_only": True}
    model = load_model(QWEN)
    run = replace(run_of(QWEN, **options), prompt_len=1000, max_new_tokens=400, length_spread=0.0)
    asks = dict(run.serving_options) | {"speculative_config": THREE}

    def timed(accepted: float) -> tuple[float, float, float]:
        stated = tuple(sorted((asks | {"acceptance_length": accepted}).items()))
        time = answer(model, replace(run, serving_options=stated)).time  # type: ignore[arg-type]
        assert time is not None
        assert sum(time.step_parts_s.values()) > time.step_parts_s["drafts"] > 0
        return time.ttft_s, time.tpot_s, time.output_tokens_per_s

    plain = answer(model, run).time
    assert plain is not None
    one, two, four = timed(1.0), timed(2.0), timed(4.0)
    assert one[1] > plain.tpot_s  # drafts that are never accepted cost time
    assert two[1] == pytest.approx(one[1] / 2, rel=0.02)
    assert four[1] == pytest.approx(one[1] / 4, rel=0.02)
    assert two[1] < plain.tpot_s
    assert four[0] == pytest.approx(one[0], rel=0.01)
    assert one[0] > plain.ttft_s
    assert four[2] > two[2] > plain.output_tokens_per_s


@pytest.mark.parametrize(("how", "is_counted"), [(MTP, True), (NGRAM, False), ("", False)])
def test_a_model_says_that_its_draft_layer_is_not_counted_where_that_is_so(
    how: str, is_counted: bool
) -> None:
    run = run_of(QWEN, **({"speculative_config": how} if how else {}))
    device = find_target(H200)
    notes = predict(load_model(QWEN), run, device, load_calibration(device)).notes
    assert (drafts.NOTE in notes) is is_counted
    assert any("not built and not counted" in note for note in notes) is not is_counted


def test_copies_of_texts_take_no_layer() -> None:
    model, options = load_model(LLAMA), {"acceptance_length": 1.5, "speculative_config": NGRAM}
    plain, copied = answer(model, run_of(LLAMA)), answer(model, run_of(LLAMA, **options))
    assert copied.block_bytes == plain.block_bytes
    assert copied.time is not None
    assert copied.time.step_parts_s["drafts"] == 0


def test_a_drafter_of_eagle3_has_its_matrices_and_one_layer_of_cache() -> None:
    model, gpu = eagle3_of_llama(), find_target(H200)
    run = run_of(LLAMA, speculative_config=EAGLE3, acceptance_length=2.5)
    served = resolve(model, run, gpu).served
    plain, drafting = start(resolve(model, run_of(LLAMA), gpu).served), start(served)

    def weights(entries: object) -> int:
        return sum(each.num_bytes for each in entries if each.part == "weights")  # type: ignore[attr-defined]

    hidden, keys, width = 4096, 1024, 14336
    attention = 2 * hidden * (hidden + 2 * keys) + hidden * hidden
    joint, head = 3 * hidden * hidden, 32000 * hidden
    expected = 2 * (attention + 3 * hidden * width + joint + head)
    assert weights(drafting.entries) - weights(plain.entries) == pytest.approx(expected, rel=0.01)
    assert drafting.pool.block_bytes * 32 == plain.pool.block_bytes * 33
    assert answer(model, run).time is not None


def test_a_draft_model_has_its_table_head_and_all_its_layers() -> None:
    model = replace(load_model("Qwen/Qwen3-32B"), drafter=load_model("Qwen/Qwen3-0.6B"))
    config = '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 4}'
    run, gpu = run_of("Qwen/Qwen3-32B", speculative_config=config), find_target(H200)
    plain = start(resolve(model, run_of("Qwen/Qwen3-32B"), gpu).served)
    drafting = start(resolve(model, run, gpu).served)
    assert drafting.pool.block_bytes * 64 == plain.pool.block_bytes * (64 + 28)

    def weights(entries: object) -> int:
        return sum(each.num_bytes for each in entries if each.part == "weights")  # type: ignore[attr-defined]

    more = weights(drafting.entries) - weights(plain.entries)
    assert 2 * 0.596e9 < more < 1.06 * 2 * 0.596e9  # its parameters, head tied, in whole blocks


def taken(model: str, release: str, **options: object) -> tuple[int, int, int]:
    """Weights, a block and sequences of a start of SGLang."""
    run = replace(run_of(model), serving="sglang", libraries=(("sglang", release),))
    run = replace(run, serving_options=tuple(sorted({"tp_size": 8, **options}.items())))  # type: ignore[arg-type]
    start = sglang.start(resolve(load_model(model), run, find_target(H200)).served)
    weights = sum(entry.num_bytes for entry in start.entries if entry.part == "weights")
    return weights, start.pool.block_bytes, start.max_num_seqs(8192)


def test_sglang_takes_the_layer_before_its_pool() -> None:
    plain = taken(DEEPSEEK, "0.5.23")
    drafting = taken(DEEPSEEK, "0.5.23", speculative_algorithm="EAGLE")
    table_and_head = 2 * 2 * 129280 * 7168 // 8  # until they are those of the model
    more = drafting[0] - plain[0] - table_and_head
    assert 11.5e9 / 8 < more < 1.2 * 11.5e9 / 8  # 8 bits, and the joint whole
    assert drafting[1] - plain[1] == 1152
    assert drafting[2] == 48 < plain[2]


def test_older_sglang_leaves_the_layer_no_room() -> None:
    plain = taken(DEEPSEEK, "0.5.13")
    assert taken(DEEPSEEK, "0.5.13", speculative_algorithm="EAGLE")[:2] == plain[:2]


def test_states_of_drafts_are_those_of_a_log() -> None:
    """43 states of Qwen3.6-27B and 30 of drafts take 5.36 GiB (SGLang 0.5.17, a public log)."""
    options = {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": 5,
        "speculative_num_draft_tokens": 6,
        "max_mamba_cache_size": 43,
        "max_running_requests": 4,
        "mamba_ssm_dtype": "bfloat16",
        "mem_fraction_static": 0.92,
    }
    run = replace(run_of(QWEN), serving="sglang", libraries=(("sglang", "0.5.17"),))
    run = replace(run, serving_options=tuple(sorted(options.items())))
    start = sglang.start(resolve(load_model(QWEN), run, find_target("a100-sxm-80gb")).served)
    (states,) = (each for each in start.entries if each.fact is sglang.RECURRENT_STATES)
    assert states.num_bytes / GiB == pytest.approx(0.12 + 3.09 + 2.11 + 0.04, abs=0.05)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (DEEPSEEK, {"speculative_config": '{"method": "dflash"}'}, "accepted are the methods"),
        (DEEPSEEK, {"speculative_config": "mtp"}, "'mtp' is no JSON object"),
        (LLAMA, {"speculative_config": '{"method": "ngram"}'}, "num_speculative_tokens is None"),
        (LLAMA, {"speculative_config": EAGLE3}, "names no model that drafts"),
        (LLAMA, {"acceptance_length": 2.0}, "nothing drafts"),
        (
            QWEN,
            {"speculative_config": MTP, "acceptance_length": 2.5},
            "a step gives 1 to 2 tokens, .* got 2.5",
        ),
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


def test_a_draft_model_needs_as_many_tokens() -> None:
    model = replace(load_model(LLAMA), drafter=load_model("Qwen/Qwen3-0.6B"))
    config = '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 4}'
    with pytest.raises(ConfigError, match="a draft model needs as many"):
        answer(model, run_of(LLAMA, speculative_config=config))


def test_flashinfer_captures_no_step_that_verifies_drafts() -> None:
    options = {
        "speculative_config": THREE,
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2,
        "tensor_parallel_size": 2,
    }
    run = replace(
        run_of(QWEN, **options), quant="fp8", context=262144, libraries=(("vllm", "0.25.1"),)
    )
    served = {
        gpu: resolve(load_model(QWEN), run, find_target(gpu)).served
        for gpu in ("rtx-5090-32gb", H200, "b200-180gb")
    }
    assert {gpu: captures_steps(each) for gpu, each in served.items()} == {
        "rtx-5090-32gb": False,  # FlashInfer's own kernels
        H200: True,  # FlashAttention's
        "b200-180gb": True,  # TensorRT-LLM's
    }
    plain = replace(
        run, serving_options=tuple(sorted({**options, "kv_cache_dtype": "auto"}.items()))
    )
    assert captures_steps(resolve(load_model(QWEN), plain, find_target("5090")).served)


@pytest.mark.parametrize(
    ("gpu", "version", "expandable", "pool_gib", "tokens"),
    [  # github.com/noonghunna/club-3090: issues/998, pull/594
        ("rtx-5090-32gb", "0.25.1", False, 12.52, 705_884),
        ("rtx-3090-24gb", "0.24.0", True, 5.33, 300_220),
    ],
)
def test_pools_beside_drafts_are_those_of_logs(
    gpu: str, version: str, expandable: bool, pool_gib: float, tokens: int
) -> None:
    model = load_model("Qwen/Qwen3.6-27B-FP8")
    options = {
        "enable_prefix_caching": True,
        "kv_cache_dtype": "fp8",
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2,
        "speculative_config": THREE,
        "tensor_parallel_size": 2,
    }
    run = replace(
        run_of(model.name, **options),
        quant="fp8",
        context=262_144,
        libraries=(("vllm", version),),
        expandable_segments=expandable,
    )
    logged = answer(model, run, gpu)
    assert logged.kv_pool_bytes / GiB == pytest.approx(pool_gib, rel=0.015)
    assert logged.max_concurrency * 262_144 == pytest.approx(tokens, rel=0.015)


def test_marlin_has_a_scale_for_every_row_of_a_square() -> None:
    model = load_model("Qwen/Qwen3.6-27B-FP8")
    run = replace(run_of(model.name, tensor_parallel_size=1), quant="fp8")
    on_old, on_new = (
        repeated_bytes(served, served.model)
        for served in (resolve(model, run, find_target(gpu)).served for gpu in ("a100-80gb", H200))
    )
    assert on_new == 0
    weights = sum(
        count * linear.num_weights for layer, count in model.layers() for linear in layer.linears
    )
    assert on_old == pytest.approx(weights * (2 / 128 - 4 / 128**2), rel=0.02)
