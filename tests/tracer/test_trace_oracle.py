"""The tracer against itself, the ledger and the figures of docs/memory.md; needs torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("torch")

import memory_samples as samples
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from traced import live_bytes

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory.allocator_simulator import replay
from whichlora.methods import with_defaults
from whichlora.predict import quantities, resolve
from whichlora.profiler.build import finished_model, meta_model
from whichlora.profiler.finetune import collate, random_rows, steps_of
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.store import models
from whichlora.store.gpus import find_gpu
from whichlora.symbolic.kernels import attention_kernel
from whichlora.tracer.client import trace_peaks
from whichlora.tracer.extrapolate import TracedEvent, stretch, with_warm_up
from whichlora.tracer.fake_weights import place_fake
from whichlora.tracer.like_cuda import Device, like_cuda
from whichlora.tracer.recorder import Recorder
from whichlora.tracer.trace import trace
from whichlora.units import GiB, MiB
from whichlora.workflow import estimates

pytestmark = pytest.mark.oracle

TINY = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
TWO_LAYERS = TINY | {"num_hidden_layers": 2}
GPU = find_gpu("a100-sxm-80gb")


def config_of(name: str) -> dict[str, Any]:
    model = models.find_model(name)
    assert model is not None
    return dict(model.config)


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_narrow_adapters_of_a_quantised_base_have_the_bytes_of_the_ledger(quant: str) -> None:
    run = RunConfig(model="x", method="qdora", quant=quant, adapter_dtype="bfloat16", seq_len=16)
    job = resolve.resolve(families.build(TINY, name="x"), run, GPU)
    events = trace(job.run, TINY, target_modules="all-linear", num_layers=2)
    traced = sum(event.num_bytes or 0 for event in events if event.moment == "adapters")
    entries = quantities.ledger(job).moments["optimizer_step"]
    (adapters,) = (entry for entry in entries if entry.what == "adapter weights")
    assert traced * 7 == adapters.num_bytes * 2  # of its seven layers two are traced


@lru_cache(maxsize=40)  # three of these runs are read by two tests
def four_layers(name: str, run: RunConfig) -> list[TracedEvent]:
    return trace(run, config_of(name), target_modules="all-linear", num_layers=4)


def stretched_trace(name: str, run: RunConfig) -> list[TracedEvent]:
    """All layers of a model of the database."""
    return stretch(four_layers(name, run), num_layers=config_of(name)["num_hidden_layers"])


def traced_activations(name: str, run: RunConfig) -> float:
    """GiB at the peak that are neither weights, adapters nor optimizer states."""
    stretched = stretched_trace(name, run)
    static = {
        event.storage for event in stretched if event.moment in ("load", "adapters", "optimizer")
    }
    sizes = {event.storage: event.num_bytes for event in stretched if event.num_bytes is not None}
    peak = max(live_bytes(stretched), key=lambda live: live[1])[0]
    total = 0
    for event in stretched:
        if event.storage not in static:
            total += sizes[event.storage] if event.num_bytes is not None else -sizes[event.storage]
        if event is peak:
            break
    return total / GiB


@pytest.mark.sampled(4)
# Live-bytes traces that `docs/memory.md` derives its closed forms from: r = 16, all-linear, B = 1,
# S = 2048, SDPA without a mask; GiB of activations.
@pytest.mark.parametrize(
    ("name", "settings", "reference"),
    [
        ("meta-llama/Llama-3.1-8B", {"gradient_checkpointing": False}, 16.286),
        ("meta-llama/Llama-3.1-8B", {}, 3.468),
        (
            "meta-llama/Llama-3.1-8B",
            {"gradient_checkpointing": False, "precision": "bf16-pure"},
            14.208,
        ),
        ("meta-llama/Llama-2-7b-hf", {"gradient_checkpointing": False}, 13.204),
        ("meta-llama/Llama-2-7b-hf", {}, 1.265),
        ("Qwen/Qwen2.5-1.5B", {"gradient_checkpointing": False}, 9.379),
        ("google/gemma-2b", {}, 6.018),
        ("mistralai/Mistral-7B-v0.1", {"gradient_checkpointing": False}, 14.083),
    ],
)
def test_activations_agree_with_the_reference_traces(
    name: str, settings: dict[str, Any], reference: float
) -> None:
    run = RunConfig(model="x", **settings)
    assert traced_activations(name, run) == pytest.approx(reference, rel=1e-3)


# Reserved over allocated, without the loading warm-up, as in `docs/memory.md`.
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("batch_size", "checkpointing", "reference"),
    [(1, True, 1.070), (4, True, 1.130), (16, True, 1.196), (1, False, 1.034), (2, False, 1.038)],
)
def test_reserved_over_allocated_agrees_with_the_reference_replays(
    batch_size: int, checkpointing: bool, reference: float
) -> None:
    run = RunConfig(model="x", batch_size=batch_size, gradient_checkpointing=checkpointing)
    stretched = stretched_trace("meta-llama/Llama-3.1-8B", run)
    allocator = replay(event.event for event in stretched)
    ratio = allocator.peak_reserved_bytes / allocator.peak_allocated_bytes
    assert ratio == pytest.approx(reference, rel=0.01)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": False, "lora_dropout": 0.1},
        {"method": "dora"},
        {"method": "qlora"},
        {"optimizer": "adamw_torch"},
        {"use_reentrant": True},
        {"padding": "padded", "batch_size": 2},
        {"phase": "inference", "prompt_len": 64, "max_new_tokens": 6},
        {"phase": "inference", "prompt_len": 64, "max_new_tokens": 3, "method": "qlora"},
    ],
    ids=str,
)
def test_four_layers_stretched_agree_with_all_layers(settings: dict[str, Any]) -> None:
    run = RunConfig(model="x", **({"seq_len": 256} | settings))
    few = trace(run, TINY, target_modules="all-linear", num_layers=4)
    stretched = with_warm_up(stretch(few, num_layers=7))
    full = with_warm_up(trace(run, TINY, target_modules="all-linear"))
    short, whole = (replay(event.event for event in events) for events in (stretched, full))
    assert short.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert short.peak_reserved_bytes == pytest.approx(whole.peak_reserved_bytes, rel=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("index", range(len(samples.SETTINGS)))
def test_a_setting_is_traced_as_its_record_says(index: int) -> None:
    now = json.loads(json.dumps(samples.traced(samples.setting_runs()[index])))
    (kept,) = (
        line for line in samples.read_lines(samples.SETTING_TRACES) if line["run"] == now["run"]
    )
    assert now | {"seconds": 0} == kept | {"seconds": 0}


def test_loop_function_is_traced_as_a_step_that_is_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def written_out(model: Any, run: RunConfig, meter: Meter, seq_lens: list[int]) -> None:
        model.config.use_cache = False
        optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)

        def train_step(batch: dict[str, torch.Tensor]) -> None:
            outputs = model(**batch)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        lengths = [step.seq_len for step in steps_of(meter, seq_lens, num_counted=2)]
        for row in random_rows(model.config, run, lengths):
            train_step(collate([row]))

    by_loop, by_function = (reserved_by_tiny(name) for name in ("loop", "loop-function"))
    monkeypatch.setattr("whichlora.tracer.trace.resolve_name", lambda _: written_out)
    assert by_function == reserved_by_tiny("loop-function") < by_loop


def reserved_by_tiny(trainer: str) -> int:
    run = RunConfig(
        model="x",
        trainer=trainer,
        seq_len=1024,
        precision="bf16-pure",
        optimizer="sgd",
        gradient_checkpointing=False,
    )
    job = resolve.resolve(families.build(TWO_LAYERS, name="x"), run, GPU)
    events = trace(job.run, TWO_LAYERS, target_modules="all-linear")
    return replay(event.event for event in events).peak_reserved_bytes


GEMMA_4 = {
    "model_type": "gemma4_text",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "global_head_dim": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 256,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}

INPUTS = {  # of each layer, and keys that the second half borrows
    "hidden_size_per_layer_input": 128,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {"gradient_checkpointing": False}),
        ({}, {"method": "qlora"}),
        ({}, {"precision": "bf16-pure", "attn": "eager"}),
        (EXPERTS, {}),
        (INPUTS, {}),
        (INPUTS, {"gradient_checkpointing": False}),
        (INPUTS, {"phase": "inference", "prompt_len": 512, "max_new_tokens": 2}),
    ],
    ids=str,
)
def test_gemma_4_agrees_with_the_trace(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    config = GEMMA_4 | fields
    # in expandable segments every block is as large as its tensor
    run = RunConfig(model="x", batch_size=4, seq_len=512, expandable_segments=True, **settings)
    job = resolve.resolve(families.build(config, name="x"), run, GPU)
    # what an eager softmax's backward makes inside its kernel on CUDA no trace sees
    job = replace(job, dtypes=replace(job.dtypes, kernel_buffers=False))
    ledger = quantities.ledger(job)
    events = trace(job.run, config, target_modules="all-linear")
    traced = replay(
        (event.event for event in events), expandable_segments=True
    ).peak_allocated_bytes
    predicted = int(ledger.peak_allocated_bytes) - ledger.workspace_bytes
    assert predicted == pytest.approx(traced, rel=0.005)


SPARSE = {
    "model_type": "deepseek_v32",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 128,
}
SHARED = {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fields", [{}, SHARED], ids=["own", "shared"])
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": False},
        {"method": "qlora", "precision": "bf16-pure", "gradient_checkpointing": False},
        {"method": "qlora"},
        {"method": "full", "seq_len": 96},
        {"precision": "bf16-pure", "attn": "eager"},
        {"batch_size": 1, "gradient_checkpointing": False},
        {"phase": "inference", "prompt_len": 512, "max_new_tokens": 3},
        {"phase": "inference", "prompt_len": 512, "max_new_tokens": 3, "kv_cache": "static"},
    ],
    ids=str,
)
def test_chosen_keys_agree_with_the_trace(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    config = SPARSE | fields
    sizes = {"batch_size": 3, "seq_len": 384, "expandable_segments": True}
    run = RunConfig(model="x", **(sizes | settings))
    job = resolve.resolve(families.build(config, name="x"), run, GPU)
    job = replace(job, dtypes=replace(job.dtypes, kernel_buffers=False))
    ledger = quantities.ledger(job)
    events = trace(job.run, config, target_modules=job.peft_targets)
    traced = replay(
        (event.event for event in events), expandable_segments=True
    ).peak_allocated_bytes
    predicted = int(ledger.peak_allocated_bytes) - ledger.workspace_bytes
    assert predicted == pytest.approx(traced, rel=0.01)


GEMMA_3N = {
    "model_type": "gemma3n_text",
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 64,
    "laurel_rank": 16,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    "tie_word_embeddings": True,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": False},
        {"use_reentrant": True, "target_modules": ("attention",)},
        {"method": "full", "precision": "bf16-pure"},
        {"method": "dora", "precision": "fp32", "gradient_checkpointing": False},
        {"gradient_checkpointing": False, "attn": "eager", "padding": "padded"},
        {"phase": "inference", "prompt_len": 256, "max_new_tokens": 2, "quant": "nf4"},
    ],
    ids=str,
)
def test_gemma_3n_agrees_with_the_trace(settings: dict[str, Any]) -> None:
    run = RunConfig(model="x", batch_size=4, seq_len=512, expandable_segments=True, **settings)
    job = resolve.resolve(families.build(GEMMA_3N, name="x"), run, GPU)
    job = replace(job, dtypes=replace(job.dtypes, kernel_buffers=False))
    ledger = quantities.ledger(job)
    events = trace(job.run, GEMMA_3N, target_modules=job.peft_targets)
    traced = replay(
        (event.event for event in events), expandable_segments=True
    ).peak_allocated_bytes
    # of the loading of 4-bit weights a trace sees nothing
    moments = [name for name in ledger.moments if name != "loading"]
    predicted = max(map(ledger.moment_bytes, moments)) - ledger.workspace_bytes
    assert predicted == pytest.approx(traced, rel=0.004)


def test_autograd_sums_in_place_where_the_gradient_that_waits_is_no_view() -> None:
    def sums(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        recorder = Recorder([], RunConfig(model="x"))
        with FakeTensorMode(), recorder:
            run(torch.empty(2, 8, 64, requires_grad=True).tanh()).sum().backward()
        born = [event for event in recorder.events if event.num_bytes is not None]
        return sum(event.operator == "aten.add.Tensor" for event in born)

    def product(h: torch.Tensor) -> torch.Tensor:
        return h @ torch.empty(64, 64)

    assert sums(lambda h: h.sin() * h.exp() * h.cos()) == 0
    # the first sum starts from a view of a product's rows, the second from the first
    assert sums(lambda h: product(h) * product(h) * product(h)) == 1


def test_a_tied_embedding_waits_for_the_sum_of_its_gradients() -> None:
    config = TINY | {"tie_word_embeddings": True, "num_hidden_layers": 2}
    run = RunConfig(
        model="x", method="full", precision="fp32", optimizer="sgd", batch_size=1, seq_len=64
    )
    job = resolve.resolve(families.build(config, name="x"), run, GPU)
    live = max(
        num_bytes
        for _, num_bytes in live_bytes(trace(job.run, config, target_modules="all-linear"))
    )
    ledger = quantities.ledger(job)
    expected = ledger.peak_allocated_bytes - ledger.workspace_bytes
    assert live == pytest.approx(expected, rel=0.005)
    embedding = 4 * 32_000 * 512
    assert live > 4 * embedding  # itself, both parts of its gradient and their sum


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("gpu", "settings", "kernel"),
    [
        ("a100-sxm-80gb", {"precision": "fp32"}, "math"),
        ("a100-sxm-80gb", {"precision": "fp32", "padding": "padded"}, "efficient"),
        ("t4-16gb", {"precision": "fp16"}, "math"),
        ("t4-16gb", {"precision": "bf16-pure"}, "math"),
        ("t4-16gb", {"precision": "fp16", "attn": "sdpa-efficient"}, "efficient"),
        ("t4-16gb", {"precision": "fp16", "gradient_checkpointing": False}, "math"),
        ("t4-16gb", {"precision": "fp16", "phase": "inference", "prompt_len": 1024}, "math"),
    ],
)
def test_grouped_keys_have_the_kernel_of_the_card_in_trace_and_ledger(
    gpu: str, settings: dict[str, Any], kernel: str
) -> None:
    grouped = TWO_LAYERS | {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024}
    usual = {"model": "tiny", "batch_size": 2, "seq_len": 1024, "max_new_tokens": 2}
    device = find_gpu(gpu)
    job = resolve.resolve(
        families.build(grouped, name="tiny"), RunConfig(**usual | settings), device
    )
    (attention,) = job.model.groups[0].layer.attentions
    assert attention_kernel(attention, job.dtypes, masked=job.dtypes.padded) == kernel
    events = trace(
        job.run,
        grouped,
        target_modules=job.peft_targets,
        device_kind=device.kind,
        compute_capability=device.compute_capability,
    )
    ledger = quantities.ledger(job)
    live = max(num_bytes for _, num_bytes in live_bytes(events))
    assert ledger.peak_allocated_bytes - ledger.workspace_bytes == pytest.approx(live, rel=0.01)


def test_a_family_that_the_ledger_does_not_know_is_traced_and_says_so(tmp_path: Any) -> None:
    unknown = TINY | {"model_type": "diffllama"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(unknown))
    run = RunConfig(model=str(path), seq_len=128)
    with pytest.raises(ConfigError, match="diffllama"):
        estimates.estimate([run], [GPU.key], engine="ledger")
    (estimate,) = estimates.estimate([run], [GPU.key])
    assert "traced" in estimate.basis
    assert any("diffllama" in note for note in estimate.notes)
    assert sum(estimate.memory.breakdown.values()) == estimate.memory.device_used_bytes


def test_a_config_that_transformers_does_not_know_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"can't be traced: transformers .* has no model_type"):
        trace_peaks(
            RunConfig(model="x"),
            model_config=TINY | {"model_type": "no-such-type"},
            target_modules="all-linear",
        )


@pytest.mark.parametrize("shape", [(8, 512, 2), (32, 64, 40)], ids=["prompt", "decoding"])
def test_a_quantised_cache_is_traced_as_the_ledger_has_it(shape: tuple[int, int, int]) -> None:
    batch_size, prompt_len, max_new_tokens = shape
    run = RunConfig(
        model="tiny",
        phase="inference",
        kv_cache="quantized",
        cache_backend="fp8",
        batch_size=batch_size,
        prompt_len=prompt_len,
        max_new_tokens=max_new_tokens,
    )
    events = trace(run, TWO_LAYERS, target_modules="all-linear")
    ledger = quantities.ledger(resolve.resolve(families.build(TWO_LAYERS, name="tiny"), run, GPU))
    predicted = ledger.peak_allocated_bytes - ledger.workspace_bytes
    traced = replay(event.event for event in events).peak_allocated_bytes
    # an unsplit remainder of 1 MiB is 1 %
    assert predicted == pytest.approx(traced, rel=0.015)


def test_a_quantiser_that_looks_at_values_is_not_traced() -> None:
    run = RunConfig(model="tiny", phase="inference", kv_cache="quantized", cache_backend="hqq")
    with pytest.raises(ConfigError, match="cache_backend: hqq can't be traced"):
        trace(run, TINY, target_modules="all-linear")


@pytest.mark.parametrize(("caches", "mib"), [(True, 65.0), (False, 62.75)])
def test_a_forward_beside_the_last_output_of_gemma_2b(caches: bool, mib: float) -> None:
    """The stack behind the report's 62.5 MB per sequence: fp32, a prompt of 32, a held output."""
    run = with_defaults(RunConfig(model="google/gemma-2b", phase="inference", precision="fp32"))
    model = meta_model(run, config_of(run.model), device="cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), like_cuda(Device()), torch.no_grad():
        place_fake(model, torch.float32)
        model = finished_model(model, run, "all-linear")
        model.config.use_cache = caches
        recorder = Recorder([], run)
        recorder.note_loaded(model)
        loaded = sum(event.num_bytes or 0 for event in recorder.events)
        recorder.watch(model)
        with recorder:
            for _ in range(2):
                outputs = model(input_ids=torch.zeros(1, 32, dtype=torch.long))
        recorder.close()
    sizes: dict[int, int] = {}
    peak = 0
    for event in recorder.events:  # live bytes: blocks that are not split would count whole
        if event.num_bytes is None:
            del sizes[event.storage]
            continue
        sizes[event.storage] = event.num_bytes
        peak = max(peak, sum(sizes.values()))
    assert outputs.logits.shape == (1, 32, 256_000)
    assert (peak - loaded) / MiB == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize(("capacity", "rows"), [(64, 16), (8, 8)])
def test_experts_are_chosen_in_turn_up_to_their_capacity(capacity: int, rows: int) -> None:
    config = {
        "model_type": "switch_transformers",
        "vocab_size": 128,
        "d_model": 64,
        "d_ff": 64,
        "num_heads": 2,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
        "expert_capacity": capacity,
        "decoder_start_token_id": 0,
    }
    run = RunConfig(model="m", seq_len=64, attn="eager", gradient_checkpointing=False)
    places = [
        event.num_bytes
        for event in trace(run, config, target_modules=("wi", "wo"))
        if event.operator == "aten.nonzero.default"
    ]
    assert len(places) == 2 * 2 * (1 + 4)  # two steps, two stacks: who is chosen, and by whom
    assert places.count(2 * 8 * rows) == 2 * 2 * 4
