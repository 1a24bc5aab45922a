"""`calibrate --from-log`: a start of an engine as a record, beside what is predicted of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from whichlora.calibration.database import calibrate_all, export_records, import_table
from whichlora.calibration.load import load_calibration, stale_note
from whichlora.cli import main
from whichlora.errors import ConfigError, DataFileError
from whichlora.predict.predict import predict
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import record_ids
from whichlora.store.paths import data_folder
from whichlora.units import GiB
from whichlora.workflow.engine_log import LogRecord, record_log

# Qwen3-8B on one H100 by vLLM 0.11, as LMCache's questions and answers print it.
QWEN = """\
INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B', \
dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=1, quantization=None, \
enforce_eager=False, kv_cache_dtype=auto
INFO [gpu_worker.py:298] Available KV cache memory: 50.32 GiB
INFO [kv_cache_utils.py:1087] GPU KV cache size: 366,480 tokens
INFO [kv_cache_utils.py:1091] Maximum concurrency for 40,960 tokens per request: 8.95x
INFO [other.py:1] the host has memory
"""
# Meta-Llama-3-8B on one H100 by vLLM 0.6.4 and 0.6.5, as its pull request 10511 prints it.
LLAMA = """\
INFO vLLM API server version 0.6.5
INFO args: Namespace(model='meta-llama/Meta-Llama-3-8B', max_model_len=8192, max_num_seqs=256, \
max_num_batched_tokens=8192, gpu_memory_utilization=0.9, quantization=None)
INFO worker.py:240] the current vLLM instance can use total_gpu_memory (79.22GiB) x \
gpu_memory_utilization (0.90) = 71.30GiB
INFO worker.py:240] model weights take 14.96GiB; non_torch_memory takes 0.10GiB; PyTorch \
activation peak memory takes 1.26GiB; the rest of the memory reserved for KV Cache is 54.98GiB.
"""
# Llama-3.1-8B on one A100 by SGLang 0.4.1.
SGLANG = """\
server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B', mem_fraction_static=0.88, tp_size=1)
Load weight begin. avail mem=78.81 GB
Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.72 GB, mem usage=15.09 GB.
KV Cache is allocated. #tokens: 444500, K size: 27.13 GB, V size: 27.13 GB
max_total_num_tokens=444500, chunked_prefill_size=8192, context_len=131072
"""  # noqa: E501


# Llama-3.1-8B in Q4_K_M, in the words of llama.cpp 0c1e570; sizes as published of that file.
LLAMA_CPP = """\
print_info: file type   = Q4_K - Medium
print_info: general.name          = Llama 3.1 8B
load_tensors: offloaded 33/33 layers to GPU
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
load_tensors:   CPU_Mapped model buffer size =   281.81 MiB
llama_context: n_seq_max             = 2
llama_context: n_ctx                 = 8192
llama_context: n_ctx_seq             = 4096
llama_context: n_batch               = 2048
llama_context: n_ubatch              = 512
llama_context: kv_unified            = false
llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB
llama_kv_cache: size = 1024.00 MiB (  4096 cells,  32 layers,  2/2 seqs), K (f16):  512.00 MiB, \
V (f16):  512.00 MiB
"""


def record(
    folder: Path, text: str, gpu: str = "h100-sxm-80gb", model: str | None = None
) -> LogRecord:
    path = folder / "engine.log"
    path.write_text(text)
    os.utime(path, (1_760_000_000, 1_760_000_000))
    return record_log(path, gpu, model=model, calibration_dir=folder / "calibration")


def test_a_log_becomes_a_record_beside_its_prediction(tmp_path: Path) -> None:
    found = record(tmp_path, QWEN)
    run = found.record.run
    assert (run.model, run.serving, run.context) == ("Qwen/Qwen3-8B", "vllm", 40_960)
    assert dict(run.libraries) == {"vllm": "0.11.0"}
    assert run.serving_options == ()  # all are at their defaults
    assert found.record.engine_log == {
        "kv_pool_bytes": 50.32 * GiB,
        "kv_pool_tokens": 366_480.0,
        "max_concurrency": 8.95,
        "context_tokens": 40_960.0,
    }
    for name in ("kv_pool_bytes", "kv_pool_tokens", "max_concurrency"):
        assert found.predicted[name] == pytest.approx(found.record.engine_log[name], rel=0.01)
    assert found.note == "read 4 of 5 lines; not understood, though they speak of memory: 5"


def test_the_terms_of_a_profile_are_compared_on_the_memory_that_the_log_states(
    tmp_path: Path,
) -> None:
    found = record(tmp_path, LLAMA)
    options = dict(found.record.run.serving_options)
    assert options == {
        "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    stated = found.record.engine_log
    for name, within in (("weights_bytes", 0.002), ("activation_bytes", 0.005)):
        assert found.predicted[name] == pytest.approx(stated[name], rel=within)
    # what is left of 0.9 of the stated memory, all terms of the log taken off
    left = 71.30 - 14.96 - 0.10 - 1.26
    assert stated["kv_pool_bytes"] / GiB == pytest.approx(left, abs=0.01)
    assert found.predicted["kv_pool_bytes"] == pytest.approx(stated["kv_pool_bytes"], rel=0.01)


def test_sglang_is_told_from_vllm_by_its_lines(tmp_path: Path) -> None:
    found = record(tmp_path, SGLANG, gpu="a100-sxm-80gb")
    run = found.record.run
    assert (run.serving, run.context) == ("sglang", 131_072)
    assert dict(run.serving_options) == {"mem_fraction_static": 0.88, "chunked_prefill_size": 8192}
    assert found.predicted["kv_pool_tokens"] == pytest.approx(444_500, rel=0.03)


def test_prompts_of_sglang_that_are_not_cut_are_read_as_such(tmp_path: Path) -> None:
    log = SGLANG.replace("chunked_prefill_size=8192", "chunked_prefill_size=-1")
    run = record(tmp_path, log, gpu="a100-sxm-80gb").record.run
    assert dict(run.serving_options)["chunked_prefill_size"] == -1


def test_a_log_of_a_quantised_copy_needs_no_name(tmp_path: Path) -> None:
    name = "Qwen/Qwen2.5-7B-Instruct-AWQ"
    log = QWEN.replace("Qwen/Qwen3-8B", name).replace("=None", "=awq_marlin")
    log = log.replace("40960", "32768").replace("40,960", "32,768")
    found = record(tmp_path, log)
    assert (found.record.run.model, found.record.run.quant) == (name, "awq-int4")
    assert found.predicted == record(tmp_path, log, model=name).predicted


# Two requests to llama-server on a CPU, in its words.
ON_CPU = """\
print_info: file type   = Q4_K - Medium
llama_context: n_seq_max             = 1
llama_context: n_ctx_seq             = 2048
slot print_timing: id  0 | task 0 |
prompt eval time =     900.00 ms /   100 tokens (    9.00 ms per token,   111.11 tokens per second)
       eval time =    4800.00 ms /   100 tokens (   48.00 ms per token,    20.83 tokens per second)
      total time =    5700.00 ms /   200 tokens
prompt eval time =    3100.00 ms /   300 tokens (   10.33 ms per token,    96.77 tokens per second)
       eval time =    5200.00 ms /   100 tokens (   52.00 ms per token,    19.23 tokens per second)
"""


def test_a_log_of_llama_cpp_on_a_cpu_times_other_lengths(tmp_path: Path) -> None:
    def asked(prompt_len: int) -> ServingPrediction:
        run = RunConfig(
            model="Qwen/Qwen3-0.6B", phase="inference", serving="llama-cpp",
            serving_options=(("file_type", "Q4_K_M"),), prompt_len=prompt_len, max_new_tokens=100,
        )  # fmt: skip
        gpu = find_gpu("cpu")
        answer = predict(
            load_model(run.model), run, gpu, load_calibration(gpu, tmp_path / "calibration")
        )
        assert answer.serving is not None
        return answer.serving

    by_memory = asked(200).time
    assert by_memory is not None
    assert by_memory.tpot_s != pytest.approx(0.05, rel=0.2)
    found = record(tmp_path, ON_CPU, "cpu", model="Qwen/Qwen3-0.6B")
    values = found.record.engine_log
    assert (values["ttft_s"], values["tpot_s"]) == pytest.approx((2.0, 0.05))
    assert (found.record.run.prompt_len, found.record.run.max_new_tokens) == (200, 100)
    assert found.predicted["tpot_s"] == pytest.approx(by_memory.tpot_s, rel=0.02)
    same, longer = asked(200).time, asked(800).time
    assert same is not None
    assert longer is not None
    assert same.tpot_s == pytest.approx(0.05, rel=0.02)
    assert longer.tpot_s > same.tpot_s
    assert longer.ttft_s > 4 * same.ttft_s
    low, high = same.interval_tpot_s
    assert low < same.tpot_s < high
    again = record(tmp_path, ON_CPU + "\n", "cpu", model="Qwen/Qwen3-0.6B")
    assert again.predicted["ttft_s"] == pytest.approx(2.0, rel=0.1)


def test_a_log_of_llama_cpp_needs_the_name_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"Llama 3\.1 8B.*name it with --model"):
        record(tmp_path, LLAMA_CPP)
    found = record(tmp_path, LLAMA_CPP, "rtx-4090-24gb", model="meta-llama/Llama-3.1-8B")
    run = found.record.run
    assert (run.serving, run.context, run.batch_size) == ("llama-cpp", 4096, 1)
    options = {"file_type": "Q4_K_M", "n_gpu_layers": 33, "parallel": 2}
    assert dict(run.serving_options) == options
    for name in ("weights_bytes", "kv_cache_bytes"):
        assert found.predicted[name] == pytest.approx(found.record.engine_log[name], rel=1e-3)


def test_times_of_llama_cpp_are_of_one_request_however_many_slots_there_are(tmp_path: Path) -> None:
    timed = "eval time =  1950.00 ms /  100 tokens (  19.50 ms per token,  51.28 tokens per second)"
    few, many = (
        record(
            tmp_path,
            f"{LLAMA_CPP.replace('n_seq_max             = 2', slots)}{timed}\n",
            "rtx-4090-24gb",
            model="meta-llama/Llama-3.1-8B",
        )
        for slots in ("n_seq_max = 1", "n_seq_max = 4")
    )
    assert many.record.engine_log["num_slots"] == 4
    assert "num_running" not in many.record.engine_log
    assert many.predicted["tpot_s"] == few.predicted["tpot_s"]


@pytest.mark.parametrize(
    ("contexts", "context", "slots", "mib"),
    [
        (
            "n_seq_max = 4\nllama_context: n_ctx = 32768\nllama_context: n_ctx_per_seq = 8192",
            8192, 4, 4096,
        ),
        # slots that share one cache, each of which may have all of it
        (
            "n_seq_max = 4\nllama_context: n_ctx = 8192\nllama_context: n_ctx_seq = 8192\n"
            "llama_context: kv_unified = true", 8192, 4, 1024,
        ),
        # of 2025, which state the share of each, too
        (
            "n_seq_max = 4\nllama_context: n_ctx = 8192\nllama_context: n_ctx_per_seq = 2048\n"
            "llama_context: kv_unified = true", 8192, 4, 1024,
        ),
        ("n_ctx      = 8192", 8192, 1, 1024),  # of 2024
        ("n_ctx      = 8192\nINFO initializing slots, n_slots = 2", 4096, 2, 1024),
        ("flash_attn = 0\nslot 0: new slot n_ctx_slot = 8192", 8192, 1, 1024),
    ],
)  # fmt: skip
def test_llama_cpp_states_its_context_in_the_words_of_its_release(
    tmp_path: Path, contexts: str, context: int, slots: int, mib: int
) -> None:
    log = (
        "llm_load_tensors:      CUDA0 buffer size =  15317.02 MiB\n"
        f"llama_new_context_with_model: {contexts}\n"
        f"llama_kv_cache_init:      CUDA0 KV buffer size =  {mib}.00 MiB\n"
    )
    found = record(tmp_path, log, "l40s", model="meta-llama/Llama-3.1-8B")
    run = found.record.run
    stated = dict(run.serving_options).get("parallel", 1)
    assert (run.context, stated, run.batch_size) == (context, slots, 1)
    assert found.record.engine_log["context_tokens"] == context
    assert "all_context_tokens" not in found.record.engine_log
    assert found.predicted["kv_cache_bytes"] == found.record.engine_log["kv_cache_bytes"]
    assert "weights_bytes" in found.record.engine_log


# As prometheus_client writes a number from a million on.
METRICS = {
    "vllm": """\
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="5000"} 1.0
vllm:request_prompt_tokens_sum{engine="0",model_name="meta-llama/Llama-3.1-8B"} 300.0
vllm:request_prompt_tokens_count{engine="0",model_name="meta-llama/Llama-3.1-8B"} 3.0
""",
    "sglang": """\
# HELP sglang:max_total_num_tokens Maximum total number of tokens in the KV cache pool.
sglang:max_total_num_tokens{engine_type="unified",model_name="meta-llama/Llama-3.1-8B"} 1.4445e+06
sglang:num_used_tokens{model_name="meta-llama/Llama-3.1-8B",tp_rank="0"} 12.0
""",
}  # fmt: skip


@pytest.mark.parametrize("engine", METRICS)
def test_metrics_name_the_model_on_which_their_labels_agree(tmp_path: Path, engine: str) -> None:
    found = record(tmp_path, METRICS[engine], "b200-180gb")
    assert (found.record.run.model, found.record.run.serving) == ("meta-llama/Llama-3.1-8B", engine)
    other = METRICS[engine] + METRICS[engine].replace("3.1-8B", "3.2-1B")
    with pytest.raises(DataFileError, match=r"several models, 'm.*-8B', 'm.*; name it with"):
        record(tmp_path, other, "b200-180gb")
    named = record(tmp_path, other, "b200-180gb", model="meta-llama/Llama-3.1-8B")
    assert named.record.run.model == "meta-llama/Llama-3.1-8B"


def test_metrics_of_sglang_state_its_pool_in_tokens(tmp_path: Path) -> None:
    found = record(tmp_path, METRICS["sglang"], "b200-180gb")
    assert found.record.engine_log == {"kv_pool_tokens": 1_444_500}
    assert "kv_pool_tokens" in found.predicted
    assert "not understood" not in found.note


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (QWEN.replace("50.32", "2375"), r"kv_pool_bytes: 2.32 TiB is more than h100.* has, 79"),
        (QWEN.replace("50.32", "-3.0"), r"kv_pool_bytes: -3.00 GiB is below 0, with which vllm"),
        (QWEN.replace("366,480", "-5"), r"kv_pool_tokens: -5 is below 0"),
        (LLAMA.replace("79.22", "141.0"), r"total_bytes: 141.0 GiB is more than h100"),
        (
            LLAMA_CPP.replace("CUDA0 KV buffer size =  ", "CUDA0 KV buffer size =  999"),
            r"kv_cache_bytes: .* is more than 16 of h100.* have",
        ),
    ],
)  # fmt: skip
def test_a_log_of_what_the_card_cannot_have_is_refused(
    tmp_path: Path, text: str, fault: str
) -> None:
    model = "meta-llama/Llama-3.1-8B"
    with pytest.raises(DataFileError, match=f"{fault}.*check the log") as error:
        record(tmp_path, text, model=model)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "calibration").exists()


def test_readings_that_differ_by_less_than_nothing_are_kept(tmp_path: Path) -> None:
    """Another process that ends while the engine measures makes a difference negative."""
    found = record(tmp_path, LLAMA.replace("takes 0.10GiB", "takes -0.10GiB"))
    assert found.record.engine_log["non_torch_bytes"] == -0.1 * GiB


def test_times_are_predicted_for_as_many_as_ran(tmp_path: Path) -> None:
    line = "INFO Avg generation throughput: 900.5 tokens/s, Running: 16 reqs, Waiting: 0 reqs\n"
    found = record(tmp_path, QWEN + line)
    assert found.record.run.batch_size == 16
    assert found.predicted["output_tokens_per_s"] > 500
    assert "output_tokens_per_s" not in record(tmp_path, QWEN).predicted


def test_the_same_log_is_recorded_once_and_survives_a_table(tmp_path: Path) -> None:
    first = record(tmp_path, QWEN)
    again = record(tmp_path, QWEN)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.record == again.record
    assert len(first.path.read_text().splitlines()) == 1
    table = tmp_path / "records.csv"
    shipped = len(record_ids([data_folder("calibration")], "h100-sxm-80gb"))
    folder = tmp_path / "calibration"
    assert export_records(table, ["h100-sxm-80gb"], calibration_dir=folder) == shipped + 1
    _, refused = import_table(table, calibration_dir=tmp_path / "other")
    assert not refused
    (refit,) = calibrate_all(["h100-sxm-80gb"], tmp_path / "other")
    assert refit.after.num_records == shipped  # a log is not fitted
    (file,) = (tmp_path / "other" / "h100-sxm-80gb" / "measurements").glob("*.jsonl")
    assert json.loads(file.read_text())["engine_log"] == dict(first.record.engine_log)


def test_an_engine_that_gave_up_is_an_error_with_its_line(tmp_path: Path) -> None:
    head = QWEN.split("\n")[0].replace("40960", "2000000")
    refusal = (
        "ValueError: To serve at least one request with the models's max seq len (2000000), (274.66"
        " GiB KV cache is needed, which is larger than the available KV cache memory (50.32 GiB)."
    )
    found = record(tmp_path, f"{head}\n{refusal}\n")
    assert found.record.outcome == "error"
    assert found.record.detail == refusal


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nothing of an engine\n", "has no line of vllm or sglang"),
        (QWEN.replace("Qwen/Qwen3-8B", "/models/mine"), "model '/models/mine' of the log is not"),
        ("Available KV cache memory: 5.0 GiB\n", "names no model; name it with --model"),
        (QWEN.replace("quantization=None", "quantization=aqlm"), "quantization aqlm is not"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_one_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    with pytest.raises((ConfigError, DataFileError), match=fault) as error:
        record(tmp_path, text)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "calibration").exists()


def test_a_folder_of_another_machine_is_named_by_the_user(tmp_path: Path) -> None:
    log = QWEN.replace("Qwen/Qwen3-8B", "/models/mine")
    assert record(tmp_path, log, model="Qwen/Qwen3-8B").record.run.model == "Qwen/Qwen3-8B"


def test_quantised_weights_of_a_log_are_ours(tmp_path: Path) -> None:
    named = {"fp8": "fp8", "awq_marlin": "awq-int4", "bitsandbytes": "nf4", "modelopt_fp4": "nvfp4"}
    for theirs, ours in named.items():
        log = QWEN.replace("quantization=None", f"quantization={theirs}")
        assert record(tmp_path, log).record.run.quant == ours


def test_nothing_of_a_log_is_evaluated_or_opened(tmp_path: Path) -> None:
    """Names in it are texts, also those that look like code, a path or an escape."""
    planted = tmp_path / "planted"
    hostile = QWEN.replace(
        "enforce_eager=False", f"max_num_seqs=__import__('os').mkdir('{planted}')"
    ).replace("INFO [other.py:1]", "\x1b[2J args: block_size=1e309")
    found = record(tmp_path, hostile)
    assert not planted.exists()
    assert found.record.run.serving_options == ()


def test_the_command_prints_errors_and_where_it_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(QWEN)
    asked = ["calibrate", "--from-log", str(log), "--calibration-dir", str(tmp_path / "c")]
    done = CliRunner().invoke(main, [*asked, "--gpu", "h100"])
    assert done.exit_code == 0, done.output
    assert "50.32 GiB" in done.output
    assert "kept in" in done.output
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 2
    assert "--from-log needs one --gpu" in refused.output


def test_one_of_engines_that_share_experts_is_compared_with_its_own_pool(tmp_path: Path) -> None:
    text = (
        "INFO vLLM API server version 0.19.0\n"
        "INFO args: Namespace(model='MiniMaxAI/MiniMax-M2.5', max_model_len=8192, "
        "data_parallel_size=4, enable_expert_parallel=True)\n"
        "INFO [gpu_worker.py:298] Available KV cache memory: 40.00 GiB\n"
        "INFO [kv_cache_utils.py:1087] GPU KV cache size: 169,104 tokens\n"
    )
    found = record(tmp_path, text, gpu="h200-sxm-141gb")
    run = found.record.run
    assert dict(run.serving_options) == {"data_parallel_size": 4, "enable_expert_parallel": True}
    gpu = find_gpu("h200-sxm-141gb")
    answer = predict(load_model(run.model), run, gpu, load_calibration(gpu)).serving
    assert answer is not None
    assert found.predicted["kv_pool_tokens"] == answer.kv_pool_tokens / 4
    assert found.predicted["kv_pool_bytes"] == answer.kv_pool_bytes


def test_a_log_is_compared_and_not_fitted(tmp_path: Path) -> None:
    """No fit would take it in: predictions do not ask for one."""
    folder, key = tmp_path / "calibration", "b200-180gb"
    path = tmp_path / "engine.log"
    path.write_text(QWEN)
    record_log(path, key, calibration_dir=folder)
    gpu = find_gpu(key)
    assert not stale_note(load_calibration(gpu, folder), folder)
    (refit,) = calibrate_all([key], folder)
    assert refit.after.num_records == 0
    (why,) = refit.after.left_out.values()
    assert why == "a log of vllm, which is compared with its prediction and not fitted"
    assert not stale_note(load_calibration(gpu, folder), folder)


# Qwen3.5-9B by vLLM 0.19, whose settings its server prints as a mapping.
SEES = """\
INFO [utils.py:233] non-default args: {{'model_tag': 'Qwen/Qwen3.5-9B', 'max_model_len': 8192{}}}
INFO [core.py:77] Initializing a V1 LLM engine (v0.19.0) with config: model='Qwen/Qwen3.5-9B', \
dtype=torch.bfloat16, max_seq_len=8192, quantization=None, enforce_eager=False
INFO [gpu_worker.py:298] Available KV cache memory: 50.32 GiB
"""


@pytest.mark.parametrize(
    ("limits", "read"),
    [
        (", 'limit_mm_per_prompt': {'image': 0, 'video': 0}", '{"image": 0, "video": 0}'),
        (
            ", 'limit_mm_per_prompt': {'image': {'count': 0, 'width': None}, 'video': 0}, 'x': {}",
            '{"image": {"count": 0, "width": null}, "video": 0}',
        ),
        ("", None),
    ],
)
def test_a_start_for_texts_alone_is_compared_as_one(
    tmp_path: Path, limits: str, read: str | None
) -> None:
    found = record(tmp_path, SEES.format(limits))
    assert dict(found.record.run.serving_options).get("limit_mm_per_prompt") == read
    alone = (("language_model_only", read is not None),)
    run = RunConfig(
        model="Qwen/Qwen3.5-9B", phase="inference", serving="vllm", serve="merged", context=8192,
        libraries=(("vllm", "0.19.0"),), serving_options=alone,
    )  # fmt: skip
    card = find_gpu("h100-sxm-80gb")
    serving = predict(load_model(run.model), run, card, load_calibration(card)).serving
    assert serving is not None
    assert found.predicted["kv_pool_bytes"] == serving.kv_pool_bytes
