"""The device boundary against the real libraries, on CPU with models of a few kilobytes."""

import gc
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_runs import run_ranks, run_script
from written_job import train_script_of

from whichlora.calibration.load import load_calibration
from whichlora.families import build
from whichlora.predict.predict import predict
from whichlora.profiler import ranks
from whichlora.profiler.profile import Profiler
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Measurement, Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB, MiB

pytestmark = pytest.mark.oracle

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
WIDE_VOCAB = LLAMA | {"vocab_size": 32_000}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 320,
    "decoder_start_token_id": 0,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT2 |= {"vocab_size": 320, "n_positions": 256}
QWEN_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": LLAMA
    | {
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
    },
    "vision_config": {
        "hidden_size": 64,
        "out_hidden_size": 64,
        "depth": 2,
        "num_heads": 4,
        "intermediate_size": 128,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": 5,
}


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    log_path = tmp_path_factory.mktemp("profile") / "profile.log"
    with Profiler(
        gpu="cpu", provenance={}, memory_limit_bytes=2 * GiB, log_path=log_path
    ) as profiler:
        yield profiler


def measure(
    profiler: Profiler, model_config: dict[str, Any] = LLAMA, **settings: Any
) -> Measurement:
    run = RunConfig(**({"model": "tiny", "precision": "fp32", "seq_len": 32} | settings))
    return profiler.measure(
        run,
        model_config=model_config,
        target_modules="all-linear",
        seq_lens=[run.seq_len, run.seq_len // 2],
        num_batches=2,
        timeout_s=300,
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora"},
        {"method": "lora", "precision": "bf16", "padding": "padded", "batch_size": 2},
        {"method": "lora", "precision": "bf16-pure", "gradient_checkpointing": False},
        {"method": "lora", "precision": "bf16-no-autocast", "gradient_accumulation_steps": 2},
        {"method": "lora", "quant": "int8", "optimizer": "adamw_8bit"},
        {"method": "qlora", "precision": "bf16", "optimizer": "paged_adamw_8bit"},
        {"method": "lora", "precision": "bf16-pure", "optimizer": "paged_adamw_32bit"},
        {"method": "qlora", "precision": "bf16-pure", "quant": "fp4", "prepare_kbit": False},
        {"method": "dora", "lora_dropout": 0.1, "attn": "eager"},
        {"method": "qdora"},
        {"method": "full", "optimizer": "adamw_torch", "loss_head": "raw"},
        {"trainer": "loop", "precision": "bf16", "gradient_accumulation_steps": 2},
        {"trainer": "loop", "method": "qlora", "optimizer": "adamw_8bit", "loss_head": "raw"},
        {"trainer": "loop-function", "precision": "bf16", "gradient_accumulation_steps": 2},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_each_method_is_measured(profiler: Profiler, settings: dict[str, Any]) -> None:
    record = measure(profiler, **settings)
    assert (record.outcome, record.detail) == ("ok", "")
    assert record.batch_seq_len == (32, 16)
    assert len(record.step_s) == 2
    assert min(record.step_s) > 0
    assert record.warm_up_s > 0
    assert record.peak_allocated_bytes is not None
    assert record.peak_allocated_bytes > 50_000
    assert profiler._worker is not None, "the worker was not clean"


@pytest.mark.parametrize("model_config", [T5, BERT, GPT2], ids=["t5", "bert", "gpt2"])
@pytest.mark.parametrize("phase", ["finetune", "inference"])
def test_other_architectures_are_measured(
    profiler: Profiler, model_config: dict[str, Any], phase: str
) -> None:
    record = measure(profiler, model_config, phase=phase, prompt_len=8, max_new_tokens=4)
    assert (record.outcome, record.detail) == ("ok", "")


@pytest.mark.parametrize("images", [0, 1])
def test_a_model_that_sees_is_measured_with_texts_alone_and_with_images(
    profiler: Profiler, images: int
) -> None:
    record = measure(profiler, QWEN_VL, images=images, image_size=(84, 84))
    assert (record.outcome, record.detail) == ("ok", "")


@pytest.mark.parametrize("kv_cache", ["dynamic", "static", "quantized"])
def test_generation_is_timed_token_by_token(profiler: Profiler, kv_cache: str) -> None:
    record = measure(
        profiler,
        phase="inference",
        kv_cache=kv_cache,
        cache_backend="fp8",
        batch_size=3,
        prompt_len=16,
        max_new_tokens=9,
    )
    assert (record.outcome, record.detail) == ("ok", "")
    assert len(record.generate_s) == len(record.prefill_s) == len(record.decode_s_per_token) == 2
    for whole, prefill, decode in zip(
        record.generate_s, record.prefill_s, record.decode_s_per_token, strict=True
    ):
        assert min(prefill, decode) > 0
        assert prefill + 8 * decode <= whole * (1 + 1e-9)  # what follows the last token is beside


def test_a_generation_is_divided_at_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from whichlora.profiler.inference import measure_inference
    from whichlora.profiler.meter import Meter

    readings = itertools.count()  # a second passes from each to the next
    monkeypatch.setattr(Meter, "now", lambda _: float(next(readings)))
    times = measure_inference(
        LlamaForCausalLM(LlamaConfig(**LLAMA)).eval(),
        RunConfig(model="tiny", phase="inference", batch_size=3, prompt_len=16, max_new_tokens=9),
        Meter("cpu"),
        num_batches=2,
    )
    # at the start, as each of the nine tokens is chosen, and at the end
    assert times["generate_s"] == [10.0, 10.0]
    assert times["prefill_s"] == times["decode_s_per_token"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"quant": "gptq-int4"}, "needs a calibrated checkpoint"),
        ({"loss_head": "trl-fused"}, "runs inside TRL's own trainer"),
        ({"phase": "inference", "kv_cache": "vllm"}, "vllm can't be profiled"),
        ({"phase": "inference", "kv_cache": "quantized"}, "pip install optimum-quanto"),
    ],
)
def test_what_cannot_be_profiled_is_an_error_with_a_reason(
    profiler: Profiler, settings: dict[str, Any], detail: str
) -> None:
    record = measure(profiler, **settings)
    assert record.outcome == "error"
    assert detail in record.detail


def test_a_run_that_is_clearly_too_slow_ends_early_with_its_whole_peak(profiler: Profiler) -> None:
    settings: dict[str, Any] = {
        "model_config": LLAMA,
        "target_modules": "all-linear",
        "num_batches": 5,
        "timeout_s": 300,
    }
    run = RunConfig(model="tiny", precision="fp32", seq_len=64)
    whole, hopeless, promising = (
        profiler.measure(run, seq_lens=[64, 32], decisive_s=decisive_s, **settings)
        for decisive_s in ((), (1e-6, 1e-6), (1e3, 1e3))
    )
    assert [len(record.step_s) for record in (whole, hopeless, promising)] == [5, 2, 5]
    assert hopeless.batch_seq_len == (64, 32)
    assert hopeless.peak_allocated_bytes == whole.peak_allocated_bytes

    serving = RunConfig(
        model="tiny", precision="fp32", phase="inference", prompt_len=8, max_new_tokens=4
    )
    whole, hopeless, promising = (
        profiler.measure(serving, seq_lens=[8], decisive_s=decisive_s, **settings)
        for decisive_s in ((), (1e-6,), (1e3,))
    )
    assert [len(record.generate_s) for record in (whole, hopeless, promising)] == [5, 1, 1]
    assert hopeless.peak_allocated_bytes == whole.peak_allocated_bytes


def test_out_of_memory_is_a_result_and_the_next_run_works(profiler: Profiler) -> None:
    record = measure(profiler, WIDE_VOCAB, batch_size=256, seq_len=128)
    assert record.outcome == "oom"
    assert "can't allocate memory" in record.detail
    assert measure(profiler).outcome == "ok"


def test_the_peak_of_the_loss_is_the_predicted_one(profiler: Profiler) -> None:
    """Cross-entropy's backward holds three fp32 tensors of [tokens, vocab_size]."""
    peaks = [
        measure(profiler, WIDE_VOCAB, seq_len=64, batch_size=batch_size).peak_allocated_bytes
        for batch_size in (2, 4)
    ]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert (peaks[1] - peaks[0]) / (12 * 32_000 * 2 * 64) == pytest.approx(1, rel=0.01)


def test_the_cpu_peak_of_a_hand_computed_case() -> None:
    import torch

    from whichlora.profiler.cpu_peak import CpuPeak, live_tensor_bytes

    gc.collect()
    before = live_tensor_bytes()
    weight = torch.ones(MiB)  # 4 MiB, alive throughout
    view = weight[10:]  # shares it
    assert live_tensor_bytes() - before == 4 * MiB
    peak = CpuPeak()
    peak.start()
    first = weight + 1  # 8
    second = first * 2  # 12: the peak
    del first  # 8
    third = second[: MiB // 2] + 1  # 10
    del second, third, view
    assert peak.stop() - before == pytest.approx(12 * MiB, abs=64)  # the constants 1 and 2


def test_the_cpu_peak_ignores_the_release_of_older_blocks() -> None:
    import torch

    from whichlora.profiler.cpu_peak import CpuPeak, live_tensor_bytes

    gc.collect()
    old = torch.ones(MiB)
    before = live_tensor_bytes()
    peak = CpuPeak()
    peak.start()
    del old
    new = torch.ones(MiB // 2)
    assert peak.stop() - before == pytest.approx(2 * MiB, abs=64)
    del new


def test_a_block_that_another_thread_released_counts_until_its_address_is_used_again() -> None:
    from whichlora.profiler.cpu_peak import peak_of

    time, first, second = iter(range(4)), 4096, 8192
    events = [(next(time), 0, address, 100) for address in (first, second, first, first)]
    assert peak_of(events) == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": False},
        {"method": "full", "gradient_checkpointing": True},
    ],
)
def test_a_step_passes_the_moments_of_the_ledger_in_their_order(settings: dict[str, Any]) -> None:
    from whichlora.profiler.build import build_model
    from whichlora.profiler.finetune import measure_finetune
    from whichlora.profiler.meter import Meter

    entered: list[str] = []

    class Listening(Meter):
        def enter(self, moment: str) -> None:
            entered.append(moment)

    run = RunConfig(
        model="tiny", precision="fp32", seq_len=16, gradient_accumulation_steps=2, **settings
    )
    model = build_model(run, LLAMA, device="cpu", target_modules="all-linear")
    meter = Listening("cpu")
    meter.needs_extra_run = False
    measure_finetune(model, run, meter, [16])

    micro = ["layer_forward", "loss_forward", "loss_backward", "layer_backward"]
    assert entered == [*micro, *micro, "optimizer_step", ""] * 2


def test_where_libraries_load_kernels_a_length_is_warmed_before_it_is_timed() -> None:
    from whichlora.profiler.build import build_model
    from whichlora.profiler.finetune import measure_finetune
    from whichlora.profiler.meter import Meter

    run = RunConfig(model="tiny", precision="fp32", seq_len=16)
    meter = Meter("cpu")
    meter.needs_extra_run, meter.warms_lengths = False, True
    told: list[str] = []
    model = build_model(run, LLAMA, device="cpu", target_modules="all-linear")
    found = measure_finetune(model, run, meter, [16, 8, 8], tell=told.append)
    assert told[:4] == ["warming up", "in batch 1 of 3", "warming up", "in batch 2 of 3"]
    assert found["batch_seq_len"] == [16, 8, 8]
    assert len(found["step_s"]) == 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_weights_stay_tied_and_buffers_are_right(method: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from whichlora.profiler.build import build_model

    config = LLAMA | {"tie_word_embeddings": tied}
    run = RunConfig(model="tiny", method=method, precision="bf16-pure", prepare_kbit=False)
    model = build_model(run, config, device="cpu", target_modules=["q_proj"])
    base = model.get_base_model()
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert (base.lm_head.weight is base.model.embed_tokens.weight) is tied
    assert torch.equal(base.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert torch.equal(base.model.norm.weight.float(), reference.model.norm.weight)
    assert base.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.bfloat16}
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    down = base.model.layers[0].mlp.down_proj.weight
    assert down.dtype == (torch.uint8 if method == "qlora" else torch.bfloat16)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("method", "padding", "saved"),
    [
        ("lora", "padded", "adapter_model.safetensors"),
        ("qlora", "none", "adapter_model.safetensors"),
        ("full", "padded", "model.safetensors"),
    ],
)
def test_the_written_job_really_trains(
    tmp_path: Path, method: str, padding: str, saved: str
) -> None:
    run = RunConfig(
        model="tiny", method=method, padding=padding, seq_len=32, batch_size=2, precision="bf16"
    )
    path = tmp_path / "train.py"
    path.write_text(
        train_script_of(
            run,
            target_modules=["q_proj", "v_proj"],
            weights="random",
            model_config=LLAMA,
            epochs=1.5,
        )
    )
    rows = [json.dumps({"text": "to be or not to be, " * n}) for n in (1, 2, 3, 4)]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    assert result["num_steps"] >= 3
    assert result["final_loss"] > 0
    assert result["validation_loss"] > 0
    assert (tmp_path / "output" / saved).exists()


def test_fake_tensors_hold_no_bytes() -> None:
    import torch
    from torch._subclasses import FakeTensorMode

    from whichlora.profiler.cpu_peak import live_tensor_bytes

    gc.collect()  # what earlier tests left
    before = live_tensor_bytes()
    with FakeTensorMode():
        fake = torch.empty(1000)
    assert live_tensor_bytes() == before
    real = torch.empty(1000)
    assert live_tensor_bytes() == before + 4000
    del fake, real


# --- several ranks


def on_two_ranks(**settings: Any) -> RunConfig:
    spread = ParallelConfig(**({"strategy": "ddp", "gpus": 2} | settings))
    return RunConfig(model="m", method="lora", precision="fp32", batch_size=2, parallel=spread)


def test_two_ranks_measure_and_one_record_has_the_largest() -> None:
    with Profiler(gpu="cpu", provenance={}) as profiler:
        measured = profiler.measure(
            on_two_ranks(),
            model_config=LLAMA,
            target_modules="all-linear",
            seq_lens=(64, 32),
            num_batches=3,
            timeout_s=240,
        )
    assert measured.outcome == "ok", measured.detail
    assert len(measured.step_s) == len(measured.batch_seq_len) == 3
    assert measured.environment["libraries"]["torch"]
    prediction = predicted(on_two_ranks(), seq_len=64)
    # DDP's buckets are as large as the gradients. C++ alone holds them when the counted step
    # begins, and the counter of a CPU lists the tensors of Python.
    buckets = 4 * prediction.num_trainable_params
    assert measured.peak_allocated_bytes == pytest.approx(
        prediction.memory.peak_allocated_bytes - buckets, rel=0.03
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "limit_bytes", "outcome", "detail"),
    [
        ({}, 20 * MiB, "oom", "of 2: MemoryError"),
        ({"strategy": "fsdp"}, None, "error", "of 2: MeasurementError: parallel: accelerate runs"),
    ],
)
def test_a_rank_that_fails_is_a_result(
    settings: dict[str, Any], limit_bytes: int | None, outcome: str, detail: str
) -> None:
    with Profiler(gpu="cpu", provenance={}, memory_limit_bytes=limit_bytes) as profiler:
        measured = profiler.measure(
            on_two_ranks(**settings),
            model_config=WIDE_VOCAB,
            target_modules="all-linear",
            seq_lens=(64,),
            num_batches=2,
            timeout_s=240,
        )
    assert measured.outcome == outcome
    assert detail in str(measured.detail)


@pytest.mark.parametrize(
    ("method", "quant", "most"),
    [("full", None, 0.03), ("lora", None, 0.08), ("qlora", "nf4", 0.06)],
)
def test_ranks_divide_a_model_of_stage_3_while_they_make_it(
    tmp_path: Path, method: str, quant: Any, most: float
) -> None:
    """The bounds are wide: formulas are held to `benchmarks/zero_on_cpu.py`, whose counter differs.

    A CPU's profiler counts what gloo's thread has yet to free, of models of some 100 kB.
    """
    pytest.importorskip("deepspeed", reason="needs deepspeed 0.19.8, which is no dependency")
    spread = ParallelConfig(strategy="zero3", gpus=2)
    run = RunConfig(
        model="m",
        method=method,
        quant=quant,
        precision="bf16",
        batch_size=2,
        gradient_checkpointing=True,
        parallel=spread,
    )
    request = {
        "run": run.to_dict(),
        "model_config": LLAMA,
        "target_modules": "all-linear",
        "seq_lens": [64, 64],
        "num_batches": 2,
        "memory_limit_bytes": None,
        "extra_until_s": 0.0,
        "decisive_s": None,
        "predicted_s": None,
    }
    (tmp_path / ranks.REQUEST).write_text(json.dumps(request))
    on_cpu, program = Path(__file__).parents[1] / "spread_on_cpu.py", str(ranks.__file__)
    run_ranks(on_cpu, program, "cpu", str(tmp_path), world_size=2, logs_folder=tmp_path)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    record = ranks.merged(told, {})
    assert record["outcome"] == "ok", record["detail"]
    assert len(record["step_s"]) == 2
    expected = predicted(run, seq_len=64).memory.peak_allocated_bytes
    assert record["peak_allocated_bytes"] == pytest.approx(expected, rel=most)


def predicted(run: RunConfig, *, seq_len: int) -> Prediction:
    gpu = find_gpu("cpu")
    run = replace(run, seq_len=seq_len)
    return predict(build(LLAMA, name="m"), run, gpu, load_calibration(gpu, None))
