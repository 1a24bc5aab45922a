"""Commands of serving engines, as people paste them."""

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora import estimate
from whichlora.errors import ConfigError
from whichlora.imports import Imported, import_files
from whichlora.serving import BUILT_IN, list_engines
from whichlora.spec.versions import Libraries
from whichlora.store.models import find_copy


def read(folder: Path, text: str, **options: Any) -> Imported:
    path = folder / "serve.sh"
    path.write_text(text)
    return import_files([path], **options)


# github.com/vllm-project/recipes/pull/12
QWEN_CODER = """vllm serve /tmp/model/Qwen3-Coder-480B-A35B-Instruct-FP8 \\
    --served-model-name Qwen3-Coder-480B-A35B-FP8 -dp=8  --enable-expert-parallel \\
    --enable-auto-tool-choice --tool-call-parser qwen3_coder
"""
# github.com/vllm-project/vllm/issues/5248
OLD_SERVER = """CUDA_VISIBLE_DEVICES=0,1 python -m vllm.entrypoints.api_server \\
    --model="/cm/deepseek-coder-6.7b-instruct/" --tensor-parallel-size=2 --trust-remote-code \\
    --dtype="float16"
"""
SGLANG = """python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --tp 2 \\
    --mem-fraction-static 0.85 --kv-cache-dtype fp8_e5m2 --port 30000 --context-length 16k
"""
DOCKER = """docker run --gpus all -e VLLM_PP_LAYER_PARTITION=16,20 -p 8000:8000 --ipc=host \\
    vllm/vllm-openai:v0.20.2-cu130 Qwen/Qwen3-4B --max-model-len 32K --no-enable-prefix-caching \\
    --pipeline-parallel-size 2
"""
LLAMA = "CUDA_VISIBLE_DEVICES=0 ./build/bin/llama-server -m ./m/Qwen3-14B-Q4_K_M.gguf -c 8192 -fa\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            QWEN_CODER,
            {
                "model": "/tmp/model/Qwen3-Coder-480B-A35B-Instruct-FP8",
                "serving": "vllm",
                "serving_options": (("dp", 8), ("enable_expert_parallel", True)),
                "context": 262_144,  # the model's own, as the thread's refusal says
            },
        ),
        (
            OLD_SERVER,
            {
                "model": "deepseek-ai/deepseek-coder-6.7b-instruct",
                "serving": "vllm",
                "serving_options": (("tensor_parallel_size", 2),),
                "precision": "fp16",
                "context": 65_536,  # 16,384 positions, scaled by 4
            },
        ),
        (
            SGLANG,
            {
                "model": "meta-llama/Llama-3.1-8B-Instruct",
                "serving": "sglang",
                "serving_options": (
                    ("kv_cache_dtype", "fp8_e5m2"),
                    ("mem_fraction_static", 0.85),
                    ("tp", 2),
                ),
                "context": 16_000,
            },
        ),
        (
            f"docker run lmsysorg/sglang:latest {SGLANG}",
            {"serving": "sglang", "context": 16_000},
        ),
        (
            f"docker run --rm --ipc=host -e NCCL_DEBUG=INFO registry:5000/sglang:v0 {SGLANG}",
            {"serving": "sglang", "context": 16_000},
        ),
        (
            DOCKER,
            {
                "model": "Qwen/Qwen3-4B",
                "serving": "vllm",
                "libraries": (("vllm", "0.20.2"),),
                "context": 32_768,
                "serving_options": (
                    ("VLLM_PP_LAYER_PARTITION", "16,20"),
                    ("enable_prefix_caching", False),
                    ("pipeline_parallel_size", 2),
                ),
            },
        ),
        (
            LLAMA,
            {
                "model": "./m/Qwen3-14B-Q4_K_M.gguf",
                "serving": "llama-cpp",
                "context": 8192,
                "serving_options": (("fa", True),),
            },
        ),
        (
            "llama-server.exe -m C:\\m\\gpt-oss-20b-mxfp4.gguf -c 4096 --flash-attn on -ngl 99\n",
            {
                "model": "C:/m/gpt-oss-20b-mxfp4.gguf",
                "serving_options": (("flash_attn", "on"), ("ngl", 99)),
            },
        ),
        ("vllm serve Qwen/Qwen3-8B --quantization fp8\n", {"quant": "fp8"}),
        ("vllm serve Qwen/Qwen3-8B-AWQ --quantization awq_marlin --dtype auto\n", {}),
    ],
)
def test_a_command_is_the_run_of_its_engine(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    settings = dict(read(tmp_path, text).settings)
    assert settings["phase"] == "inference"
    assert {name: settings[name] for name in expected} == expected
    assert ("quant" in settings) == ("quant" in expected)


def test_what_the_command_leaves_open_and_what_has_no_say_is_told(tmp_path: Path) -> None:
    served = read(tmp_path, QWEN_CODER)
    assert served.unknown == ()
    assert served.without_effect == (
        "enable_auto_tool_choice",
        "served_model_name",
        "tool_call_parser",
    )
    assert served.assumed == ("max_model_len: is not stated; assumed: 262144, as of the model",)
    assert served.epochs is None
    (note,) = read(tmp_path, "llama-server -hf ggml-org/gpt-oss-20b-GGUF\n").assumed
    assert note.startswith("c: is not stated, and as many tokens as fit are taken; assumed: those")


def test_a_context_of_0_is_stated_and_as_long_as_fits(tmp_path: Path) -> None:
    served = read(tmp_path, "llama-server -hf ggml-org/gpt-oss-20b-GGUF --ctx-size 0\n")
    assert "context" not in served.settings
    assert served.assumed[0].startswith("ctx_size: is 0, and as many tokens as fit are taken;")


def test_flags_that_only_the_host_hears_are_known(tmp_path: Path) -> None:
    first = "--nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000"
    assert read(tmp_path, f"{SGLANG.strip()} {first}\n").unknown == ()
    text = "llama-cli -m ./Qwen3-14B-Q4_K_M.gguf -c 8192 -no-cnv --prio 2 --prompt Hello\n"
    assert read(tmp_path, text).unknown == ()


def test_a_container_of_ones_own_without_a_known_program_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no command that trains or serves"):
        read(tmp_path, "docker run --name vllm registry:5000/mine:v0 ./start.sh --port 8000\n")


def test_what_is_not_predicted_is_left_out_or_refused(tmp_path: Path) -> None:
    text = "vllm serve Qwen/Qwen3.5-9B --max-model-len 8192 --max-num-seqs 8 --enable-x 1"
    drafts = """--speculative-config '{"method": "dflash", "num_speculative_tokens": 2}'"""
    served = read(tmp_path, f"{text} {drafts} --mm-processor-kwargs '{{}}'\n")
    assert served.settings["serving_options"] == (("max_num_seqs", 8),)
    assert served.is_lower_bound
    assert served.unknown == ("enable_x",)
    assert served.assumed == (
        "mm_processor_kwargs: is left out: it sets how images are cut, which is not predicted",
        "speculative_config: is left out, and drafts take memory of their own: these drafts are "
        "not predicted of this model",
    )
    for flag, fault in (
        ("--cpu-offload-gb 10", "keeps weights on the host, which is not predicted"),
        ("--max-model-len lots", "is not a number of tokens"),
        ("--dtype int3", "is no dtype; known are bfloat16"),
    ):
        with pytest.raises(ConfigError, match=f"serve.sh: .*{fault}"):
            read(tmp_path, f"vllm serve Qwen/Qwen3-8B {flag}\n")
    refused = read(tmp_path, "vllm serve Qwen/Qwen3-8B --quantization torchao\n").refused
    assert "'torchao' is not predicted; awq" in refused["quant"]
    unnamed = read(tmp_path, 'vllm serve "$MODEL_DIR" --served-model-name x\n')
    assert "has a variable that the file does not set" in unnamed.refused["model"]


def test_drafts_are_read_however_they_are_written(tmp_path: Path) -> None:
    text = "vllm serve Qwen/Qwen3-32B --max-model-len 8192 --speculative-config.method draft_model"
    more = "--speculative-config.model Qwen/Qwen3-0.6B --speculative-config.num_speculative_tokens"
    ((name, value),) = read(tmp_path, f"{text} {more} 4\n").settings["serving_options"]
    assert name == "speculative_config"
    assert json.loads(value) == {
        "method": "draft_model",
        "model": "Qwen/Qwen3-0.6B",
        "num_speculative_tokens": 4,
    }
    text = "python -m sglang.launch_server --model-path zai-org/GLM-4.5-Air --tp 4"
    served = read(tmp_path, f"{text} --speculative-algorithm NEXTN --speculative-num-steps 3\n")
    assert dict(served.settings["serving_options"]) == {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "tp": 4,
    }
    other = "--speculative-algorithm EAGLE3 --speculative-draft-model-path no/drafter"
    left = read(tmp_path, f"{text} {other} --mem-fraction 0.6\n")
    assert dict(left.settings["serving_options"]) == {"mem_fraction": 0.6, "tp": 4}
    assert any("no/drafter" in note for note in left.assumed)


def test_the_name_of_the_server_names_a_model_that_the_path_does_not(tmp_path: Path) -> None:
    served = read(tmp_path, 'vllm serve "$DIR" --served-model-name Qwen3-8B-AWQ\n')
    assert served.settings["model"] == "Qwen3-8B-AWQ"
    assert not served.refused


def test_a_stated_release_counts_more_than_that_of_the_image(tmp_path: Path) -> None:
    stated = read(tmp_path, DOCKER, libraries=Libraries(vllm="0.33.0"))
    assert "libraries" not in stated.settings
    latest = read(tmp_path, DOCKER.replace("v0.20.2-cu130", "latest"))
    assert "libraries" not in latest.settings


def test_adapters_of_sglang_are_refused_and_chunks_of_vllm_left_out(tmp_path: Path) -> None:
    # github.com/sgl-project/sglang/pull/27181, github.com/noonghunna/club-3090/issues/1107
    text = "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --enable-lora"
    with pytest.raises(ConfigError, match="enable_lora: True keeps adapters beside the model"):
        read(tmp_path, text)
    text = "vllm serve Qwen/Qwen3.6-27B-FP8 --long-prefill-token-threshold 4096"
    served = read(tmp_path, f"{text} --mamba-cache-mode align --max-model-len 8192")
    assert served.settings["serving_options"] == ()
    assert any("long_prefill_token_threshold: is left out" in note for note in served.notes)


def test_an_option_beside_the_file_stands_over_the_options_in_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.85 --max-num-seqs 16\n")
    own = {"gpu_memory_utilization": 0.7}
    (answer,) = estimate(from_file=path, gpu="4090", serving_options=own)
    assert dict(answer.run.serving_options) == {"gpu_memory_utilization": 0.7, "max_num_seqs": 16}


COMPOSE = """
services:
  webui:
    image: ghcr.io/open-webui/open-webui:main
  vllm:
    image: "vllm/vllm-openai:v0.22.0"
    environment:
      - HF_TOKEN=${HF_TOKEN}
    command: >
      --model Qwen/Qwen3-8B-AWQ --max-model-len ${LENGTH:-16384}
      --gpu-memory-utilization 0.85
"""


@pytest.mark.parametrize(
    "command",
    [
        "",
        """["--model", "Qwen/Qwen3-8B-AWQ", "--max-model-len", 16384,
      "--gpu-memory-utilization", "0.85"]""",
    ],
)
def test_a_compose_file_is_the_container_of_the_engine_in_it(tmp_path: Path, command: str) -> None:
    text = f"{COMPOSE.split('command:')[0]}command: {command}\n" if command else COMPOSE
    path = tmp_path / "docker-compose.yml"
    path.write_text(text)
    settings = import_files([path]).settings
    assert settings["model"] == "Qwen/Qwen3-8B-AWQ"
    assert settings["context"] == 16_384
    assert settings["libraries"] == (("vllm", "0.22.0"),)
    assert settings["serving_options"] == (("gpu_memory_utilization", 0.85),)
    path.write_text("services:\n  db:\n    image: postgres\n")
    with pytest.raises(ConfigError, match="has no command that trains or serves"):
        import_files([path])


def test_the_threads_have_the_answer_of_their_log(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(OLD_SERVER)
    (answer,) = estimate(from_file=path, gpu="2xt4", libraries={"vllm": "0.4.3"})
    assert answer.serving is not None
    assert not answer.serving.starts  # 507 blocks, 8,112 tokens
    assert not any("rows are" in note or "GPUs the run has" in note for note in answer.notes)


def test_settings_of_requests_count_beside_a_command(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("vllm serve Qwen/Qwen3-8B --max-model-len 16384\n")
    (usual,) = estimate(from_file=path, gpu="4090")
    (asked,) = estimate(
        from_file=path, gpu="4090", concurrency=4, context=8192, prompt_len=600, max_new_tokens=200
    )
    assert usual.serving is not None
    assert asked.serving is not None
    assert (usual.run.context, usual.run.batch_size) == (16384, 1)
    assert (asked.run.context, asked.run.batch_size, asked.run.prompt_len) == (8192, 4, 600)
    assert asked.serving.max_concurrency > usual.serving.max_concurrency
    for settings, fault in (
        ({"seq_len": 2048}, "seq_len: is of phase finetune; give context"),
        ({"batch_size": 4}, "batch_size: is not of serving vllm; give concurrency alone"),
    ):
        with pytest.raises(ConfigError, match=fault):
            estimate(from_file=path, gpu="4090", **settings)


def test_a_serving_option_of_the_user_replaces_that_of_the_command_alone(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-num-seqs 64\n")

    def options(**stated: Any) -> dict[str, Any]:
        (answer,) = estimate(from_file=path, gpu="3090", context=8192, **stated)
        return dict(answer.run.serving_options)

    of_file = {"tensor_parallel_size": 2, "max_num_seqs": 64}
    assert options() == of_file
    assert options(serving_options={"max_num_seqs": 8}) == {**of_file, "max_num_seqs": 8}
    assert options(serving_options={"tp": 1}) == {**of_file, "tensor_parallel_size": 1}
    assert options(serving="vllm") == of_file
    assert options(serving="sglang", gpus=2) == {"tp_size": 2}  # of another engine


def test_settings_of_requests_are_refused_beside_a_file_that_trains(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text("swift sft --model Qwen/Qwen3-8B --max_length 2048\n")
    for settings, fault in (
        ({"concurrency": 4}, "concurrency: is of phase inference; give batch_size"),
        ({"context": 8192}, "context: is of phase inference; give seq_len"),
        ({"request_rate": 2.0}, "request_rate: is of an engine that serves"),
    ):
        with pytest.raises(ConfigError, match=fault):
            estimate(from_file=path, gpu="4090", **settings)


def test_a_file_of_experts_in_mxfp4_is_of_its_own_type() -> None:
    for name in ("gpt-oss-20b-mxfp4.gguf", "ggml-org/gpt-oss-120b-GGUF"):
        copy = find_copy(name)
        assert copy is not None
        assert copy.config["quantization_config"]["file_type"] == "MXFP4_MOE"
    quantised = find_copy("unsloth/gpt-oss-20b-GGUF:Q8_0")
    assert quantised is not None
    assert quantised.config["quantization_config"]["file_type"] == "Q8_0"


def test_each_engine_declares_what_of_its_refusals_is_set_aside() -> None:
    for engine in list_engines().values():
        assert engine.set_aside <= engine.refused.keys()
    assert any(engine.programs for engine in BUILT_IN.values())


def test_a_flag_that_adds_to_itself_counts_each_time(tmp_path: Path) -> None:
    text = (
        "llama-server -hf unsloth/Qwen3-30B-A3B-GGUF:Q8_0 -c 4096 -ot 'blk.1.*_exps=CPU' -ngl 9 "
        "-ngl 99 --override-tensor 'blk.2.*_exps=CPU' -ot 'blk.3.*_exps=CPU'"
    )
    overrides = "blk.2.*_exps=CPU,blk.1.*_exps=CPU,blk.3.*_exps=CPU"
    options = read(tmp_path, text).settings["serving_options"]
    assert options == (("ngl", 99), ("override_tensor", overrides))


@pytest.mark.parametrize(
    ("flags", "options", "unknown"),
    [
        (
            "--mem-frac 0.87 --disable-radix",
            {"mem_fraction_static": 0.87, "disable_radix_cache": True},
            (),
        ),
        ("--mem-fraction-static 0.8 --tp 2", {"mem_fraction_static": 0.8, "tp": 2}, ()),
        ("--disable-c", {}, ("disable_c",)),  # the beginning of several
    ],
)
def test_argparse_takes_the_beginning_of_a_flag(
    flags: str, options: dict[str, Any], unknown: tuple[str, ...], tmp_path: Path
) -> None:
    """Source: github.com/sgl-project/sglang/issues/1362, whose command has both."""
    command = f"python -m sglang.launch_server --model-path Qwen/Qwen3-4B {flags}"
    imported = read(tmp_path, command)
    assert dict(imported.settings["serving_options"]) == options
    assert imported.unknown == unknown
    llama = read(tmp_path, "llama-server -m Qwen3-14B-Q4_K_M.gguf -c 8192 --cache-type q8_0")
    assert llama.unknown == ("cache_type",)
