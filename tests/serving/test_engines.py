"""The engines: how they are found, also in another package, and what is refused of all."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest
from devices import A100, CPU

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.explain import explain
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import Engine, get_engine, list_engines
from whichlora.serving.scheduler import MOST_CLIENTS
from whichlora.spec import members
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB
from whichlora.workflow.combinations import combinations, only_runs, shared_by_engine
from whichlora.workflow.estimates import estimate

OUTSIDE = Path(__file__).parents[1] / "outside_serving"
RUN = RunConfig(model="HuggingFaceTB/SmolLM2-135M", phase="inference", serving="vllm")


def predicted(run: RunConfig, gpu: GpuSpec = A100) -> Prediction:
    return predict(load_model(run.model), run, gpu, load_calibration(gpu))


def test_generate_of_transformers_is_the_default_and_has_no_pool() -> None:
    default = RunConfig(model=RUN.model, phase="inference")
    assert next(iter(list_engines())) == default.serving == "transformers"
    assert predicted(default).serving is None
    assert "serving" not in default.to_dict()


def test_an_engine_of_another_package_answers_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setattr(members, "entry_points", importlib.metadata.entry_points)
    named = predicted(RUN).serving
    renamed = predicted(replace(RUN, serving="outside-engine")).serving
    assert named
    assert renamed
    assert replace(renamed, engine="vllm") == named


def test_releases_of_an_engine_of_another_package_are_those_of_its_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setattr(members, "entry_points", importlib.metadata.entry_points)
    run = replace(RUN, serving="outside-engine", quant="fp8", libraries=(("vllm", "0.13.0"),))
    refusal = "outside-engine 0.13.0 has no kernels for fp8 .* give libraries vllm=0.14 or newer"
    with pytest.raises(ConfigError, match=refusal):
        predicted(run, find_gpu("t4-16gb"))


@pytest.mark.parametrize("name", ["Ollama", "llama.cpp", "llamacpp"])
def test_what_runs_an_engine_means_it(name: str) -> None:
    assert get_engine(name).name == "llama-cpp"
    settings = {"model": [RUN.model], "phase": ["inference"], "serving": [name]}
    (run,) = only_runs(combinations(settings))
    assert run.serving == "llama-cpp"


def test_a_name_that_no_engine_has_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"serving: 'tgi' is not known; accepted are .*llama-cpp"):
        get_engine("tgi")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama-cpp"])
def test_more_clients_than_can_be_simulated_are_refused(engine: str) -> None:
    with pytest.raises(ConfigError, match="concurrency: at most 10000 clients are simulated, got"):
        predicted(replace(RUN, serving=engine, batch_size=MOST_CLIENTS + 1))


@pytest.mark.parametrize(
    ("engine", "option", "setting"),
    [
        ("vllm", "max_model_len", "context"),
        ("vllm", "dtype", "precision"),
        ("vllm", "quantization", "quant"),
        ("sglang", "context_length", "context"),
    ],
)
def test_a_flag_that_is_a_setting_of_the_run_names_it(
    engine: str, option: str, setting: str
) -> None:
    run = replace(RUN, serving=engine, serving_options=((option, "8192"),))
    with pytest.raises(ConfigError, match=f"{option} is the setting {setting}; give --{setting}"):
        predicted(run)


@pytest.mark.parametrize(
    ("engine", "flag", "said"),
    [
        ("sglang", "trust_remote_code", "changes nothing that is predicted; leave it out"),
        ("vllm", "all2all_backend", "sets how states are exchanged"),
        ("vllm", "cpu_offload_gb", "keeps weights on the host"),
        ("vllm", "enable_chunked_prefill", "give their max_num_batched_tokens"),
        ("sglang", "moe_a2a_backend", "sets how states are exchanged"),
        ("llama-cpp", "threads", "changes nothing"),
    ],
)
def test_a_flag_that_is_no_option_says_why(engine: str, flag: str, said: str) -> None:
    run = replace(RUN, serving=engine, serving_options=((flag, "2"),))
    with pytest.raises(ConfigError, match=f"serving_options: {flag} .*{said}"):
        predicted(run)


def test_flags_of_a_server_are_taken_and_told() -> None:
    flags = (
        ("seed", 4),
        ("enable_auto_tool_choice", True),
        ("device", "cuda"),
        ("moe_backend", "triton"),
    )
    plain, asked = predicted(replace(RUN, serving="vllm")), replace(RUN, serving="vllm")
    answer = predicted(replace(asked, serving_options=flags))
    assert answer.serving is not None
    assert plain.serving is not None
    assert answer.serving.kv_pool_bytes == plain.serving.kv_pool_bytes
    assert "device, enable_auto_tool_choice, seed: no say in what is predicted" in answer.notes
    assert "moe_backend: times are those of the default kernels" in answer.notes
    for flag in (" --seed 4", " --enable-auto-tool-choice", " --moe-backend triton"):
        assert flag in answer.serving.command


@pytest.mark.parametrize(
    ("version", "kept"),
    [
        ("0.9.1", {"swap_space", "guided_decoding_backend"}),
        ("0.11.2", {"swap_space", "guided_decoding_backend"}),
        ("0.12.0", {"swap_space"}),
        ("0.17", {"swap_space", "moe_backend"}),
        ("0.33.0", {"moe_backend"}),
    ],
)
def test_a_flag_that_the_release_does_not_know_is_not_in_its_command(
    version: str, kept: set[str]
) -> None:
    flags = ("guided_decoding_backend", "moe_backend", "swap_space")
    run = replace(RUN, serving="vllm", libraries=(("vllm", version),))
    answer = predicted(replace(run, serving_options=tuple((flag, "auto") for flag in flags)))
    assert answer.serving is not None
    for flag in flags:
        is_there = f"--{flag.replace('_', '-')} auto" in answer.serving.command
        assert is_there == (flag in kept), flag
    lacking = ", ".join(flag for flag in flags if flag not in kept)
    assert f"{lacking}: no flags of vllm {version}, left out of the command" in answer.notes


def test_a_flag_that_a_release_lacks_is_not_denied_in_its_command() -> None:
    denied = (("disable_log_stats", False), ("disable_frontend_multiprocessing", False))
    answer = predicted(replace(RUN, serving="vllm", serving_options=denied))
    assert answer.serving is not None
    assert "--no-disable-log-stats" in answer.serving.command
    assert "frontend" not in answer.serving.command


def test_releases_are_said_of_flags_that_are_taken() -> None:
    for engine in map(get_engine, ("vllm", "sglang", "llama-cpp")):
        assert set(engine.ignored_in) <= set(engine.ignored), engine.name


def test_no_option_is_refused_by_its_name() -> None:
    for engine in map(get_engine, ("vllm", "sglang", "llama-cpp")):
        names = {name for each in engine.options for name in (each.name, *each.other_names)}
        assert not names & set(engine.refused), engine.name
        assert not set(engine.elsewhere) & set(engine.refused), engine.name
        assert not set(engine.ignored) & {*names, *engine.refused, *engine.elsewhere}, engine.name


@pytest.mark.parametrize(
    ("engine", "own"), [("vllm", "tensor_parallel_size"), ("sglang", "tp_size")]
)
def test_tp_is_the_number_of_ranks(engine: str, own: str) -> None:
    model = load_model(RUN.model)
    runs = [
        resolve(model, replace(RUN, serving=engine, serving_options=((name, 3),)), A100).run
        for name in ("tp", own)
    ]
    assert runs[0] == runs[1]


def test_gpus_are_shared_out_beside_a_short_name_of_the_stages() -> None:
    settings = {"phase": "inference", "serving": "vllm", "serving_options": {"pp": 2}, "gpus": 4}
    own = shared_by_engine(settings)["serving_options"]
    assert dict(own) == {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


def context_answer(
    engine: str, model: str, context: int, version: str = ""
) -> tuple[bool, str, str]:
    """Whether it starts, why it does not, and what a note says of the positions."""
    libraries = ((engine, version),) if version else ()
    run = replace(RUN, model=model, serving=engine, context=context, libraries=libraries)
    answer = predicted(run)
    assert answer.serving
    told = [note for note in answer.notes if "a context of" in note]
    return answer.serving.starts, answer.serving.reason, "".join(told)


@pytest.mark.parametrize(
    ("engine", "way_out"),
    [
        ("vllm", "rope scaling in --hf-overrides, or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
        ("sglang", "set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"),
    ],
)
def test_a_context_beyond_the_positions_does_not_start(engine: str, way_out: str) -> None:
    starts, reason, told = context_answer(engine, RUN.model, 8193)
    assert (starts, told) == (False, "")
    assert reason == (
        f"a context of 8193 tokens is beyond the 8192 positions of {RUN.model}; give 8192 or less, "
        f"or {way_out}"
    )
    assert context_answer(engine, RUN.model, 8192) == (True, "", "")


@pytest.mark.parametrize(
    ("engine", "model", "context", "version", "told"),
    [
        ("llama-cpp", RUN.model, 8193, "", "8192 positions"),
        ("sglang", RUN.model, 8193, "0.4.6", "sglang warns"),
        ("sglang", RUN.model, 8193, "0.3.3", "sglang warns"),
        # a rotation that is scaled beyond the positions of its config
        ("vllm", "deepseek-ai/deepseek-coder-1.3b-base", 65536, "", ""),
        ("sglang", "deepseek-ai/deepseek-coder-1.3b-base", 65536, "", ""),
        # another model's config, whose positions need not be those of the name
        ("vllm", "HuggingFaceTB/SmolLM2-135M-Instruct", 8193, "", "vllm may not start"),
    ],
)
def test_a_longer_context_that_may_start_is_told(
    engine: str, model: str, context: int, version: str, told: str
) -> None:
    starts, _, note = context_answer(engine, model, context, version)
    assert starts
    assert told in note
    assert bool(told) == bool(note)


def test_the_release_of_another_engine_is_told_to_change_nothing() -> None:
    stated = (("sglang", "0.4.6"), ("vllm", "0.9.2"), ("torch", "2.7.0"))
    told = [note for note in predicted(replace(RUN, libraries=stated)).notes if "changes" in note]
    assert told == ["libraries sglang=0.4.6 changes nothing under serving vllm"]
    assert predicted(RUN).serving


def test_positions_that_are_scaled_are_not_scaled_again() -> None:
    model = "google/gemma-3-4b-pt"  # a linear factor of 8, which its positions have
    assert not context_answer("vllm", model, 131073)[0]
    assert context_answer("sglang", model, 131073)[0]
    assert not context_answer("vllm", "meta-llama/Llama-3.2-1B", 131073)[0]


@pytest.mark.parametrize(
    ("engine", "quant"), [("vllm", "fp8"), ("sglang", "fp8"), ("transformers", "none")]
)
def test_a_model_whose_files_are_fp8_is_served_so_by_what_reads_them(
    engine: str, quant: str
) -> None:
    model = load_model("deepseek-ai/DeepSeek-R1")
    run = RunConfig(model=model.name, phase="inference", serving=engine)
    card = find_gpu("h100-sxm-80gb")
    job = resolve(model, run, card)
    assert job.run.quant == quant
    told = [note for note in notes_on(job) if "the checkpoint is stored in fp8, counted" in note]
    assert bool(told) == (quant == "none")
    assert resolve(model, replace(run, quant="none"), card).run.quant == "none"


def test_a_config_that_names_fp8_is_served_so() -> None:
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    job = resolve(build(config, name="x"), replace(RUN, model="x"), A100)
    assert job.run.quant == "fp8"
    assert not [note for note in notes_on(job) if "stored" in note]


def test_a_run_with_an_engine_survives_json() -> None:
    run = replace(RUN, serving_options=(("max_num_seqs", 8),), context=4096)
    assert RunConfig.from_dict(run.to_dict()) == run


@pytest.mark.parametrize(
    ("changed", "gpu", "message"),
    [
        (
            {"serving": "tgi"},
            A100,
            "serving: 'tgi' is not known; accepted are transformers, vllm, sglang, llama-cpp",
        ),
        ({"phase": "finetune"}, A100, "serving: vllm is of inference; give phase inference"),
        ({"kv_cache": "static"}, A100, "kv_cache: static is a cache of transformers"),
        ({}, CPU, "serving: vllm is predicted for NVIDIA's GPUs, not cpu"),
        (
            {"serving_options": (("max_seqs", 4),)},
            A100,
            "serving_options: 'max_seqs' is no option of vllm, whose options are gpu_memory_util",
        ),
        (
            {"serving": "transformers", "serving_options": (("max_num_seqs", 4),)},
            A100,
            "serving_options: 'max_num_seqs' is no option of transformers, which has none",
        ),
        ({"serving_options": (("max_num_seqs", 0),)}, A100, "max_num_seqs: 0 is not a whole"),
        (
            {"serving_options": (("kv_cache_dtype", "int3"),)},
            A100,
            "kv_cache_dtype: 'int3' is not accepted; accepted are auto, bfloat16, fp8",
        ),
    ],
)
def test_what_no_engine_can_mean_is_refused_in_one_line(
    changed: dict[str, object], gpu: GpuSpec, message: str
) -> None:
    run = replace(RUN, **changed)
    with pytest.raises(ConfigError) as error:
        resolve(load_model(run.model), run, gpu)
    assert str(error.value).startswith(message)


def test_an_engine_without_a_library_has_no_version() -> None:
    engine = Engine(name="bare", summary="nothing")
    assert engine.libraries(RUN) == RUN.versions
    assert get_engine("vllm").libraries(RUN).vllm == "0.33.0"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_what_an_engine_takes_is_explained_line_by_line(name: str) -> None:
    run = replace(RUN, serving=name)
    explained = explain(load_model(run.model), run, A100, load_calibration(A100))
    assert sum(line.num_bytes for line in explained.lines if line.part == "kv_cache") > 40 * GiB
    assert explained.savings == ()


@pytest.mark.parametrize(("name", "least"), [("vllm", "7.0"), ("sglang", "7.5")])
def test_a_card_older_than_an_engine_is_refused(name: str, least: str) -> None:
    run = replace(RUN, serving=name, precision="fp16")
    with pytest.raises(ConfigError, match=f"{name} does not run on .* capability {least} or newer"):
        resolve(load_model(run.model), run, replace(A100, compute_capability="6.1"))


def test_an_engine_is_not_traced() -> None:
    with pytest.raises(ConfigError, match="a trace is of transformers' generate, got vllm"):
        estimate([RUN], ["a100-80gb"], engine="trace")
