"""The command line: what it loads, what it prints, and how it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from whichlora import __version__
from whichlora.cli import main

MODEL = "HuggingFaceTB/SmolLM2-135M"
LLAMA = "meta-llama/Llama-3.1-8B"
HEAVY = {
    "bitsandbytes",
    "datasets",
    "huggingface_hub",
    "numpy",
    "pandas",
    "peft",
    "plotly",
    "pydantic",
    "scipy",
    "sklearn",
    "torch",
    "transformers",
}


def whichlora(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="whichlora")


def process(*args: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-m", "whichlora", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def predictions(*args: str) -> list[dict[str, Any]]:
    result = whichlora("estimate", *args, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    assert set(answer) == {"schema_version", "predictions", "refused"}
    found: list[dict[str, Any]] = answer["predictions"]
    return found


# --- what is loaded


LIGHT = (
    ("--help",),
    ("estimate", "--help"),
    ("estimate", LLAMA, "--gpu", "h100-sxm-80gb"),
    ("estimate", LLAMA, "--gpu", "h100-sxm-80gb", "--json"),
    ("estimate", MODEL, "--gpu", "cpu", "--phase", "inference", "--precision", "fp32"),
    ("estimate", LLAMA, "--gpu", "l4-24gb", "--method", "qlora,qdora", "--batch-size", "1,4"),
    ("estimate", LLAMA, "--gpu", "h100-sxm-80gb", "--batch-size", "max"),
    ("explain", LLAMA, "--gpu", "h100-sxm-80gb"),
    ("explain", LLAMA, "--gpu", "h100-sxm-80gb", "--phase", "inference", "--json"),
    ("where", LLAMA, "--method", "qlora", "--gpu", "all"),
)


def test_a_light_command_loads_no_heavy_library() -> None:
    code = f"""
import sys
from whichlora.cli import main
for args in {LIGHT!r}:
    assert not main(args, standalone_mode=False), args
    heavy = {{name.partition(".")[0] for name in sys.modules}} & {HEAVY!r}
    assert not heavy, (args, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_help_does_not_load_what_prints_tables() -> None:
    done = process("--help", flags=("-X", "importtime"))
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "whichlora" in loaded
    assert not loaded & {"rich", "whichlora.predict.quantities"}
    assert not {name.partition(".")[0] for name in loaded} & HEAVY


# --- the JSON of estimate: a contract


def test_json_has_the_keys_of_the_contract() -> None:
    (one,) = predictions(LLAMA, "--gpu", "h100-sxm-80gb")
    assert {"model", "config", "memory", "time", "fits", "basis"} <= set(one)
    assert {
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "device_used_bytes",
        "interval_bytes",
        "breakdown",
    } <= set(one["memory"])
    assert {
        "step_s",
        "tokens_per_s",
        "prefill_s",
        "decode_s_per_token",
        "time_per_token_s",
        "interval_s",
    } <= set(one["time"])


def test_json_keeps_every_key_that_was_ever_printed() -> None:
    (one,) = predictions(LLAMA, "--gpu", "h100-sxm-80gb")
    assert set(one) >= {
        "num_params",
        "num_trainable_params",
        "usable_bytes",
        "verdict",
        "notes",
    }
    assert set(one["memory"]) >= {"moment", "confidence"}
    assert set(one["time"]) >= {"breakdown", "confidence"}


@pytest.mark.parametrize(
    "settings",
    [
        *(("--method", one) for one in ("full", "lora", "qlora", "dora", "qdora")),
        *(("--phase", "inference", "--quant", one) for one in ("none", "nf4-dq", "int8")),
    ],
    ids=lambda one: one[-1],
)
def test_every_prediction_adds_up_and_says_what_it_rests_on(settings: tuple[str, ...]) -> None:
    (one,) = predictions(LLAMA, "--gpu", "a100-sxm-80gb", *settings)
    memory, time = one["memory"], one["time"]
    assert sum(memory["breakdown"].values()) == memory["device_used_bytes"]
    assert all(size >= 0 for size in memory["breakdown"].values())
    low, high = memory["interval_bytes"]
    assert 0 < low <= memory["device_used_bytes"] <= high
    for counter in ("allocated", "reserved"):
        low, high = memory[f"{counter}_interval_bytes"]
        assert 0 < low <= memory[f"peak_{counter}_bytes"] <= high
    assert memory["peak_allocated_bytes"] <= memory["peak_reserved_bytes"]
    assert memory["peak_reserved_bytes"] <= memory["device_used_bytes"]
    low, high = time["interval_s"]
    assert 0 < low < high
    assert time["tokens_per_s"] > 0
    assert time["time_per_token_s"] > 0
    serves = "inference" in settings
    assert (time["step_s"] is None) == serves
    assert (time["prefill_s"] is not None) == serves
    assert one["fits"] is True or one["fits"] is False
    assert one["basis"]


def test_json_config_has_every_setting_with_its_default_filled_in() -> None:
    (one,) = predictions(LLAMA, "--gpu", "rtx-4090-24gb", "--method", "qlora")
    config = one["config"]
    assert None not in config.values()
    assert config["quant"] == "nf4-dq"
    assert config["prepare_kbit"] is True
    assert config["gpu"] == "rtx-4090-24gb"
    assert config["target_modules"] == ["all-linear"]


def test_lists_with_commas_make_a_grid() -> None:
    found = predictions(
        *(MODEL, "EleutherAI/pythia-160m"),
        *("--gpu", "l4-24gb,t4-16gb"),
        *("--method", "lora,dora"),
        *("--batch-size", "1,2,4"),
        *("--seq-len", "128"),
    )
    keys = {
        (
            one["model"],
            one["config"]["gpu"],
            one["config"]["method"],
            one["config"]["batch_size"],
        )
        for one in found
    }
    assert len(found) == len(keys) == 2 * 2 * 2 * 3


def test_a_setting_that_the_phase_does_not_read_makes_no_duplicates() -> None:
    found = predictions(
        *(MODEL, "--gpu", "l4-24gb", "--phase", "finetune,inference"),
        *("--method", "lora,qlora", "--prompt-len", "16,32", "--r", "8,16"),
    )
    phases = [one["config"]["phase"] for one in found]
    assert phases.count("finetune") == 4  # methods and ranks
    # prompts; merged, or as trained with qlora at each rank
    assert phases.count("inference") == 2 * (1 + 2)


def test_a_name_in_any_spelling_is_the_same_model() -> None:
    first, second = predictions(LLAMA.lower(), "llama-3.1-8b", "--gpu", "h100-sxm-80gb")
    assert first["num_params"] == second["num_params"] == 8030261248


@pytest.mark.parametrize("named", [("--model", "gpt2"), ("--model=gpt2",), ("--models", "gpt2")])
def test_a_model_may_be_named_as_an_option(named: tuple[str, ...]) -> None:
    for command in ("estimate", "explain", "where"):
        plain = whichlora(command, "gpt2", "--gpu", "l4-24gb")
        assert plain.exit_code == 0
        assert whichlora(command, "--gpu", "l4-24gb", *named).output == plain.output


def test_a_local_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (one,) = predictions(str(tmp_path), "--gpu", "cpu", "--precision", "fp32")
    assert one["num_params"] == 320 * 64 * 2 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64


def test_a_prediction_of_inference_says_what_one_sequence_waits_for() -> None:
    result = whichlora(
        *("estimate", LLAMA, "--gpu", "a100-sxm-80gb", "--phase", "inference"),
        *("--batch-size", "8"),
    )
    (line,) = [one for one in result.stdout.splitlines() if one.startswith("prompt pass ")]
    assert line.endswith("the time per token is of all sequences together")


def test_a_card_without_bf16_units_is_told_with_the_precision_that_has_some() -> None:
    (one,) = predictions(LLAMA, "--gpu", "t4-16gb", "--precision", "bf16")
    assert one["notes"][0].endswith("from its fp32 rate; precision fp16 uses its fp16 units")


def test_without_a_precision_a_card_without_bf16_runs_in_fp16_and_says_so() -> None:
    old, new = predictions(LLAMA, "--gpu", "t4-16gb,a100-sxm-80gb")
    assert [one["config"]["precision"] for one in (old, new)] == ["fp16", "bf16"]
    assert "precision fp16: t4-16gb has no bf16" in old["notes"]
    assert not any("precision" in note for note in new["notes"])


# --- the largest that fits, and where


def test_max_is_a_number_in_the_answer_and_a_note_says_what_ended_it() -> None:
    (one,) = predictions(
        LLAMA, "--gpu", "h100-sxm-80gb", "--method", "qlora", "--batch-size", "max"
    )
    size = one["config"]["batch_size"]
    assert one["verdict"] == "fits"
    assert f"batch_size {size} is the largest whose upper bound fits" in one["notes"][0]
    (more,) = predictions(
        *(LLAMA, "--gpu", "h100-sxm-80gb", "--method", "qlora", "--batch-size", str(size + 1))
    )
    assert more["verdict"] != "fits"


def test_max_says_what_is_lacking_where_not_even_one_fits() -> None:
    result = whichlora(
        *("estimate", LLAMA, "--gpu", "t4-16gb", "--method", "full", "--batch-size", "max")
    )
    assert result.exit_code == 1
    assert "Llama-3.1-8B full on t4-16gb: batch_size 1 lacks " in result.stdout


def test_thousands_of_tokens_are_1024() -> None:
    found = predictions("openai-community/gpt2", "--gpu", "4090", "--seq-len", "512,1k")
    assert [each["config"]["seq_len"] for each in found] == [512, 1024]


def test_a_length_ends_at_the_positions_of_the_model() -> None:
    (one,) = predictions("openai-community/gpt2", "--gpu", "h100-sxm-80gb", "--seq-len", "max")
    assert one["config"]["seq_len"] == 1024
    assert "the model has no more positions" in one["notes"][0]


QLORA_8BIT = ("--method", "qlora", "--optimizer", "adamw_8bit")


def test_where_lists_every_accelerator_the_smallest_that_fits_first() -> None:
    found = json.loads(whichlora("where", LLAMA, *QLORA_8BIT, "--json").stdout)
    assert found["schema_version"] == 1
    placements = found["placements"]
    assert len(placements) == len(json.loads(whichlora("gpus", "--json").stdout)["gpus"])
    fitting = [one for one in placements if (one["prediction"] or {}).get("fits")]
    assert placements[: len(fitting)] == fitting
    sizes = [one["memory_bytes"] for one in fitting]
    assert sizes == sorted(sizes)
    assert all(one["largest_batch_size"] >= 1 for one in fitting)
    (gaudi,) = (one for one in placements if one["gpu"] == "gaudi2-96gb")
    assert gaudi["refusal"].startswith("optimizer: adamw_8bit does not run on Gaudi: bitsandbytes")


def test_where_says_which_cards_lack_units_and_what_has_some() -> None:
    table = whichlora("where", MODEL, "--gpu", "t4,v100-sxm2-32gb,rtx-4090,l4").stdout
    notes = [one for one in table.splitlines() if one[:5] == "note:"]
    (slow,) = [one for one in notes if "t4-16gb" in one and "bf16" in one]
    assert slow.startswith("note: precision fp16: it has no bf16 (")
    assert "rtx-4090-24gb" not in slow


def test_where_nothing_fits_the_exit_code_says_so() -> None:
    run = ("--method", "full", "--batch-size", "512")
    result = whichlora("where", LLAMA, *run, "--gpu", "b200,h100,rtx-4090,t4")
    assert result.exit_code == 1
    assert " yes " not in result.stdout


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
load_in_4bit: true
adapter: qlora
lora_target_linear: true
sequence_len: 2048
micro_batch_size: {batch_size}
datasets: [{{path: any, type: alpaca}}]
"""


@pytest.mark.parametrize(("batch_size", "code"), [(1, 0), (64, 1)])
def test_a_check_fails_where_a_run_does_not_fit(batch_size: int, code: int, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL.format(batch_size=batch_size), encoding="utf-8")
    result = whichlora("estimate", "--from", str(path), "--gpu", "4090", "--check", "--markdown")
    assert result.exit_code == code
    assert result.stdout.startswith("# Llama-3.1-8B qlora r=16")
    assert ("of 23.52 GiB, does not fit" in result.stderr) == bool(code)


@pytest.mark.parametrize(
    ("command", "title", "head"),
    [
        (
            ("where", MODEL, "--gpu", "l4,t4"),
            "# SmolLM2-135M lora r=16",
            "| accelerator | memory |",
        ),
        (("recommend", "--gpu", "l4", "--models", MODEL), "# Winner: ", "| model | variant |"),
    ],
)
def test_a_table_of_cards_or_models_is_a_markdown_document_too(
    command: tuple[str, ...], title: str, head: str
) -> None:
    result = whichlora(*command, "--markdown")
    assert result.exit_code == 0
    assert result.stdout.startswith(title)
    assert head in result.stdout
    assert "\n- basis: " in result.stdout
    assert_refused((*command, "--markdown", "--json"), "--json and --markdown: only one of both")


def test_a_check_fails_where_a_run_is_refused() -> None:
    stored = ("--method", "qlora", "--quant", "fp4")
    result = whichlora("estimate", MODEL, "--gpu", "l4,gaudi3", *stored, "--check")
    assert result.exit_code == 1
    assert f"{MODEL} on gaudi3-128gb: quant: 'fp4'" in result.stderr


# --- text


def test_one_prediction_prints_its_breakdown_and_its_basis() -> None:
    result = whichlora("estimate", LLAMA, "--gpu", "h100-sxm-80gb")
    assert result.exit_code == 0
    assert "device memory used" in result.stdout
    assert "optimizer_states" in result.stdout
    assert "basis: " in result.stdout
    assert result.stderr == ""


def test_a_default_of_ours_refuses_no_model() -> None:
    done = whichlora("estimate", "albert-base-v2,gpt2", "--gpu", "4090")
    assert done.exit_code == 0
    assert "note: gradient_checkpointing is off: the albert of transformers has none" in done.stdout
    assert "left out" not in done.stdout


def test_the_rest_of_a_grid_is_answered_and_what_is_refused_listed_with_its_reason() -> None:
    args = ("estimate", f"{MODEL},albert-base-v2", "--gpu", "4090,2080ti", "--attn")
    both = (*args, "sdpa,flash_attention_2", "--gradient-checkpointing")
    done = whichlora(*both, "--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert len(answer["predictions"]) == 3  # sdpa on both, flash on the newer
    asked = [(one["model"], one["gpu"], one["settings"].get("attn")) for one in answer["refused"]]
    assert len(asked) == len(set(asked)) == 5
    assert (MODEL, "rtx-2080-ti-11gb", "flash_attention_2") in asked
    text = whichlora(*both).stdout
    assert text.count("left out: ") == 2
    assert "flash_attention_2 does not run on it (it needs compute capability" in text


def test_a_combination_that_excludes_itself_refuses_no_other() -> None:
    args = ("estimate", MODEL, "--gpu", "4090", "--adapter-dtype", "bfloat16", "--precision")
    done = whichlora(*args, "bf16,fp16", "--json")
    answer = json.loads(done.stdout)
    assert [one["config"]["precision"] for one in answer["predictions"]] == ["bf16"]
    (refused,) = answer["refused"]
    assert refused["settings"]["precision"] == "fp16"
    assert refused["reason"].startswith("adapter_dtype: bfloat16 adapters need a bf16 precision")


def test_a_grid_of_which_nothing_is_left_is_refused_with_every_reason() -> None:
    args = ("albert-base-v2,gpt2", "--gpu", "2080ti", "--attn", "flash_attention_2")
    assert_refused(
        ("estimate", *args, "--gradient-checkpointing"),
        "nothing is left of 2 combinations: gradient_checkpointing: true",
    )


def test_a_grid_prints_one_row_for_each() -> None:
    result = whichlora("estimate", MODEL, "--gpu", "l4-24gb", "--batch-size", "1,2,4")
    assert result.stdout.count(MODEL) == 3
    assert "device memory used" not in result.stdout


@pytest.mark.parametrize("command", ["gpus", "models"])
def test_a_catalog_prints_as_text_and_as_json(command: str) -> None:
    text = whichlora(command)
    assert text.exit_code == 0
    listed = json.loads(whichlora(command, "--json").stdout)
    assert listed["schema_version"] == 1
    assert len(listed[command]) > 50


def test_models_lists_what_contains_the_pattern() -> None:
    listed = json.loads(whichlora("models", "SmolLM2", "--json").stdout)["models"]
    assert [one["hub_id"] for one in listed] == [
        "HuggingFaceTB/SmolLM2-1.7B",
        "HuggingFaceTB/SmolLM2-135M",
        "HuggingFaceTB/SmolLM2-360M",
    ]


def test_version_names_the_release() -> None:
    assert whichlora("--version").stdout == f"whichlora, version {__version__}\n"


# --- refusals: one line on stderr, nothing on stdout, exit code 2

REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--batch-size", "0"), "--batch-size: '0' is not a whole number from 1"),
    (("--batch-size", "-4"), "--batch-size: '-4' is not a whole number"),
    (("--batch-size", "four"), "--batch-size: 'four' is not a whole number"),
    (("--batch-size", "1,max"), "--batch-size: max stands alone, got '1,max'"),
    (("--batch-size", "most"), "--batch-size: 'most' is not a whole number from 1"),
    (("--batch-size", "max", "--seq-len", "max"), "such as --batch-size max --seq-len 4096,16384"),
    (("--seq-len", "4096", "--phase", "inference"), "give prompt_len and max_new_tokens"),
    (("--prompt-len", "4096"), "prompt_len: is of phase inference; give seq_len"),
    (("--context", "4096"), "context: is of phase inference; give seq_len"),
    (("--length-spread", "0"), "length_spread: is of an engine that serves; give phase inference"),
    (("--request-rate", "2"), "request_rate: is of an engine that serves; give phase inference"),
    (("--seq-len", "max", "--phase", "finetune,inference"), "--seq-len: max is of fine-tuning"),
    (("--seq-len", "max", "--phase", "inference"), "seq_len: is of phase finetune; give"),
    (("--batch-size", "max", "--engine", "trace"), "batch_size: max needs --engine ledger"),
    (("--batch-size", "1,,4"), "--batch-size: '' is not a whole number"),
    (("--batch-size", "2.5"), "--batch-size: '2.5' is not a whole number"),
    (("--batch-size", "9" * 5000), "--batch-size: '9999"),
    (("--seq-len", "99999999999"), "--seq-len: '99999999999' is not a whole number"),
    (("--seq-len", "4,096"), "--seq-len: '4,096' is a list, of which '096' is no number; write"),
    (("--r", "0"), "--r: '0' is not a whole number from 1"),
    (("--prompt-len", "0", "--phase", "inference"), "--prompt-len: '0' is not"),
    (("--max-new-tokens", "x", "--phase", "inference"), "--max-new-tokens: 'x' is no number"),
    (("--gradient-accumulation-steps", "0"), "--gradient-accumulation-steps: '0' is not"),
    (("--lora-dropout", "1.5"), "--lora-dropout: '1.5' is not a number from 0 to below 1"),
    (("--lora-dropout", "nan"), "--lora-dropout: 'nan' is not"),
    (("--lora-dropout", "0.1,much"), "--lora-dropout: 'much' is not"),
    (
        ("--method", "lorax"),
        "method: 'lorax' is not known; did you mean lora; accepted are full, lora, qlora",
    ),
    (("--method", "lora,"), "--method: has an empty name in 'lora,'"),
    (("--batch-size", "auto"), "give one, or several with commas, or max"),
    (("--libraries", "transformers==x"), "libraries: transformers='x' is no version"),
    (("--precision", "int4"), "--precision: 'int4' is not known; accepted are auto"),
    (
        ("--optimizer", "adam"),
        "--optimizer: 'adam' is not known; did you mean adamw_torch_fused; accepted",
    ),
    (
        ("--attn", "flash"),
        "--attn: 'flash' is not known; did you mean flash_attention_2; accepted are sdpa",
    ),
    (("--padding", "left"), "--padding: 'left' is not known; accepted are none, padded"),
    (("--loss-head", "mine"), "--loss-head: 'mine' is not known; accepted are hf"),
    (("--kv-cache", "big"), "--kv-cache: 'big' is not known; accepted are dynamic"),
    (("--phase", "train"), "--phase: 'train' is not known; accepted are finetune, inference"),
    (("--phase", "inference", "--serve", "nf5"), "--serve: 'nf5' is not known; accepted are"),
    (("--quant", "int3"), "--quant: 'int3' is not known; accepted are none, nf4"),
    (("--quant", "nf4", "--method", "full"), "quant: 'nf4' weights cannot be trained"),
    (("--quant", "fp4", "--gpu", "gaudi2-96gb"), "not among what bitsandbytes has for hpu"),
    (("--target-modules", "c_attn"), "target_modules: 'c_attn' is no linear layer of"),
    (("--target-modules", "q_proj,"), "--target-modules: has an empty name"),
    (("--gpu", "nosuch"), "unknown GPU 'nosuch'"),
    (("--gpu", "all"), "'whichlora where' judges every one"),
    (("--gpu", "rtx4099"), "unknown GPU 'rtx4099': did you mean"),
    (("--gpu", ""), "--gpu: has an empty name"),
    (("--precision", "tf32", "--gpu", "cpu"), "precision: tf32 has no units on cpu"),
    (
        ("--precision", "tf32", "--gpu", "t4-16gb"),
        "precision: tf32 has no units on t4-16gb; use fp32 or fp16",
    ),
    (("--attn", "flash_attention_2"), "attn: flash_attention_2 does not run on cpu"),
    (
        ("--attn", "flash_attention_2", "--gpu", "t4-16gb"),
        "attn: flash_attention_2 does not run on t4-16gb (it needs compute capability 8.0",
    ),
    (
        ("--attn", "flash_attention_2", "--gpu", "h100-sxm-80gb", "--precision", "fp32"),
        "attn: flash_attention_2 needs 16-bit precision",
    ),
    (("--calibration-dir", "/nowhere/at/all"), "'/nowhere/at/all' does not exist"),
    (("--seqlen", "8"), "No such option '--seqlen'. (Did you mean one of: '--seq-len',"),
    (("--lora-r", "8"), "No such option '--lora-r'. Did you mean '--r'?; see"),
    (("--load-in-4bit",), "Did you mean '--method qlora'?"),
    (("--max-model-len", "8"), "Did you mean '--context'?"),
    (("--cutoff_len", "8"), "No such option '--cutoff_len'. Did you mean '--seq-len'?"),
    (("--learning_rate", "8"), "it has no say in memory and time, so leave it out"),
    (("--max-num-seqs", "8"), "Did you mean '--serving-option max_num_seqs=VALUE'?"),
    (("--num-generations", "8"), "Did you mean '--trainer-option num_generations=VALUE'?"),
    (("--lora-alpha", "8"), "'--lora-alpha': it has no say in memory and time, so leave it out"),
    (("--quant", "4bit"), "'4bit' is not known; did you mean nf4-dq"),
    (("--trainer", "embedding"), "did you mean sentence-transformers"),
    (("--batch-size",), "Option '--batch-size' requires an argument"),
    (("--json=yes",), "'--json' does not take a value"),
]


@pytest.mark.parametrize(
    ("args", "said"), REFUSED, ids=[" ".join(args)[:40] for args, _ in REFUSED]
)
def test_a_bad_argument_gets_one_clear_line(args: tuple[str, ...], said: str) -> None:
    gpu = () if "--gpu" in args else ("--gpu", "cpu")
    assert_refused(("estimate", MODEL, *gpu, *args), said)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("estimate",), "whichlora estimate: Missing argument 'MODEL...'"),
        (("estimate", "", "--gpu", "cpu"), "model: has an empty name"),
        (("guide", "--models", "gpt2", "--samples", "x"), "'x' is not a valid whole number"),
        (("recommend", "--epochs", "x"), "'x' is not a valid number"),
        (
            ("estimate", "meta-llama/Llama-3.1-9B", "--gpu", "cpu"),
            "did you mean meta-llama/Llama-3.1-8B",
        ),
        (("estimate", "/nowhere/config.json", "--gpu", "cpu"), "no such file or folder"),
        (("estimate", "qwen3", "--gpu", "cpu"), "'qwen3' is ambiguous: it may be Qwen/Qwen3-0.6B,"),
        (
            ("explain", MODEL, "--gpu", "cpu", "--r", "8,16"),
            "--r: explain takes one value, got 8,16; 'whichlora estimate' takes lists",
        ),
        (
            ("explain", MODEL, "--gpu", "cpu", "--batch-size", "max"),
            "--batch-size: explain takes numbers; 'whichlora estimate' finds max",
        ),
        (("explain", MODEL, "--gpu", "nosuch"), "unknown GPU 'nosuch'"),
        (
            ("explain", MODEL, "--gpu", "l4,t4"),
            "--gpu: explain takes one type, got l4,t4; 'whichlora estimate' and 'whichlora where'",
        ),
        (("export", MODEL, "--to", "trl", "--gpus", "l4,t4"), "--gpu: export takes one type"),
        (("where", MODEL, "--gpu", "l4,,t4"), "--gpu: has an empty name in 'l4,,t4'"),
        (("where", MODEL, "--gpu", "l4,nosuch"), "unknown GPU 'nosuch'"),
        (("estimate", MODEL, "--gpus", ""), "--gpus: has an empty name in ''"),
        (("estimate", MODEL, "--gpu", "l4", "--gpus", "t4"), "give --gpu alone"),
        (("estimate", MODEL, "--gpu", "l4,8"), "unknown GPU '8': give a type"),
        (("calibrate", "--gpu", "l4,t4", "--launch-us", "20"), "--launch-us needs one --gpu"),
        (("explain", MODEL, "--gpu", "cpu", "--json", "--markdown"), "--json and --markdown"),
        (("where", MODEL, "--method", "lora,qlora"), "--method: where takes one value"),
        (("where", MODEL, "--method", "full", "--quant", "nf4"), "weights cannot be trained"),
        (("run",), "whichlora run: Missing argument 'CONFIG'"),
        (("run", "nowhere.yaml"), "nowhere.yaml: can't be read"),
        (("gpus", "h100"), "whichlora gpus: Got unexpected extra argument"),
        (("estimat",), "No such command 'estimat'"),
        (("--jsn",), "whichlora: No such option '--jsn'"),
    ],
)
def test_a_bad_command_gets_one_clear_line(args: tuple[str, ...], said: str) -> None:
    assert_refused(args, said)


@pytest.mark.parametrize(
    "command",
    [
        ("estimate", MODEL),
        ("explain", MODEL),
        ("where", MODEL),
        ("guide", "--models", MODEL),
        ("export", MODEL, "--to", "trl"),
    ],
    ids=lambda command: command[0],
)
def test_types_and_counts_of_gpus_do_not_mix(command: tuple[str, ...]) -> None:
    said = "--gpus: l4,2: is the number of GPUs; --gpu takes the type"
    assert_refused((*command, "--gpus", "l4,2"), said)


def test_an_export_of_several_gpus_states_the_strategy_and_how_it_starts(tmp_path: Path) -> None:
    job = ("export", MODEL, "--gpu", "l4", "--gpus", "4", "--output", str(tmp_path))
    result = whichlora(*job, "--to", "transformers")
    assert result.exit_code == 0, result.stderr
    assert "--nproc-per-node=4 train.py" in result.stdout
    assert (tmp_path / "accelerate.yaml").is_file()
    refused = whichlora(*job, "--to", "unsloth", "--parallel", "zero2")
    assert refused.exit_code == 2
    assert "--to unsloth: parallel zero2 sets deepspeed, which unsloth can't" in refused.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpus 0", "--gpus: '0' is not a whole number from 1 to 100000"),
        ("--gpus -1", "--gpus: '-1' is not a whole number from 1"),
        ("--gpus 2.5", "--gpus: '2.5' is not a whole number from 1"),
        ("--gpus 1000000", "--gpus: '1000000' is not a whole number from 1 to 100000"),
        ("--gpus 3 --nodes 2", "gpus: 3 over all nodes can't be divided by 2 nodes"),
        ("--nodes 2", "gpus: is missing beside nodes"),
        ("--parallel ddp", "gpus: is missing beside parallel ddp"),
        ("--gpus 2 --parallel none", "parallel: is missing for 2 GPUs"),
        ("--gpus 2 --parallel dpp", "--parallel: 'dpp' is not known; accepted are cp, ddp, "),
        ("--gpus 2 --parallel ddp+dpp", "--parallel: 'dpp' is not known; accepted are cp, ddp, "),
        (
            "--gpus 2 --phase inference",
            "gpus: several are known of fine-tuning, and of serving by vllm or sglang",
        ),
        ("--gpus 2 --engine trace", "gpus: a trace is of one GPU, got 2; use --engine ledger"),
        ("--global-batch-size 0", "--global-batch-size: '0' is not a whole number from 1"),
        (
            "--gpus 2 --parallel ddp --batch-size 3 --global-batch-size 8",
            "global_batch_size: 8 can't be reached with batch_size 3 on 2 GPUs at once; give a mul",
        ),
        (
            "--gpus 2 --parallel ddp --gradient-accumulation-steps 3 --global-batch-size 8",
            "gradient_accumulation_steps: follows from global_batch_size, which makes 4 of them",
        ),
        (
            "--batch-size max --gpus 2 --global-batch-size 8",
            "--batch-size: max finds the largest without accumulation; compare some that fill "
            "--global-batch-size, such as --batch-size 1,2,4,8 --global-batch-size 8",
        ),
        ("--gpus 8x", "--gpus: 8x: is the number of GPUs; for types give --gpu alone"),
    ],
)
def test_several_gpus_that_cannot_be_are_refused_in_one_line(options: str, said: str) -> None:
    assert_refused(("estimate", MODEL, "--gpu", "l4", *options.split()), said)


@pytest.mark.parametrize(
    "command",
    [("guide", "--models", MODEL), ("estimate", MODEL), ("where", MODEL)],
    ids=lambda command: command[0],
)
def test_types_behind_the_older_gpus_are_answered_with_one_line(command: tuple[str, ...]) -> None:
    current = whichlora(*command, "--gpu", "l4,4090", "--json")
    older = whichlora(*command, "--gpus", "l4, 4090", "--json")
    assert (older.exit_code, older.stdout) == (0, current.stdout)
    assert current.stderr == ""
    assert older.stderr == "--gpus: is the number of GPUs; write --gpu l4,4090 for their types\n"


def test_several_names_of_one_accelerator_are_one_row() -> None:
    (prediction,) = predictions(MODEL, "--gpu", "rtx-4090-24gb,4090,RTX 4090")
    assert prediction["config"]["gpu"] == "rtx-4090-24gb"


def test_where_compares_the_accelerators_that_are_named() -> None:
    args = ("where", MODEL, "--gpu", "h100-sxm-80gb,24GB,l4")
    rows = json.loads(whichlora(*args, "--json").stdout)["placements"]
    assert [row["gpu"] for row in rows] == ["24gb", "l4-24gb", "h100-sxm-80gb"]
    assert "what a10-24gb reports" in whichlora(*args).stdout


def test_an_export_of_no_folder_and_no_model_says_both() -> None:
    missing = whichlora("export", "runs/none", "--to", "trl")
    assert "there is no folder runs/none of a whichlora run, either" in missing.stderr


def test_the_older_gpus_is_refused_beside_the_folder_of_a_run(tmp_path: Path) -> None:
    result = whichlora("export", str(tmp_path), "--to", "trl", "--gpus", "l4")
    assert result.exit_code == 2
    assert "--gpus: is for a MODEL" in result.stderr


def assert_refused(args: tuple[str, ...], said: str) -> None:
    result = whichlora(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert said in line
    assert len(line) < 700


def test_a_refusal_reads_the_same_from_a_real_process() -> None:
    done = process("estimate", MODEL, "--gpu", "cpu", "--r", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--r: '0' is not a whole number")
    assert done.stderr.count("\n") == 1
    assert process("estimate").stderr.startswith("whichlora estimate: Missing argument")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("whichlora.workflow.estimates.estimate", broken)
    result = whichlora("estimate", MODEL, "--gpu", "cpu")
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["estimate", "explain", "where", "run", "gpus", "models"])
def test_help_shows_an_example_that_can_be_copied(command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"]).output
    example = re.split("Examples?:\n", text, maxsplit=1)[1].splitlines()[0]
    assert example.startswith(f"    whichlora {command}")


def test_an_old_trl_alone_is_told_to_stand_beside_todays_transformers() -> None:
    def notes(libraries: str) -> str:
        result = whichlora("estimate", MODEL, "--gpu", "24GB", "--libraries", libraries)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "note: libraries: trl 0.17.0 is of 2025-05, beside transformers 4.51.3;" in notes(
        "trl=0.17.0"
    )
    assert "is of 2025-05" not in notes("trl=0.17.0,transformers=4.51.3")
    assert "libraries: trl" not in notes("trl=1.9.0")


@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf", "1e4", "x"])
@pytest.mark.parametrize(
    "command",
    [
        ["guide", "--models", "EleutherAI/pythia-160m", "--gpu", "l4-24gb"],
        ["export", "EleutherAI/pythia-160m", "--to", "trl", "--gpu", "l4-24gb", "--output", "job"],
    ],
    ids=lambda command: command[0],
)
def test_epochs_are_a_number_above_zero(
    command: list[str], value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*command, "--epochs", value])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_choice_is_told_in_one_line() -> None:
    result = CliRunner().invoke(main, ["export", "smollm2-135m"], prog_name="whichlora")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "Missing option '--to'. Choose from: transformers, trl, axolotl" in line


# --- a serving engine

SERVED = ("estimate", "meta-llama/Llama-3.1-8B", "--phase", "inference", "--serving", "vllm")


def test_an_engine_answers_whether_it_starts_and_how_much_it_serves_at_once() -> None:
    result = whichlora(
        *SERVED,
        "--gpu",
        "24GiB,rtx-4090-24gb",
        "--concurrency",
        "1,64",
        "--context",
        "8192",
        "--json",
    )
    assert result.exit_code == 0, result.output
    answers = json.loads(result.stdout)["predictions"]
    assert len(answers) == 4
    serving = answers[-1]["serving"]
    assert serving["starts"] is True
    assert serving["reason"] == ""
    assert serving["concurrency"] == 64
    assert serving["max_concurrency"] == serving["num_blocks"] / 512
    assert serving["kv_pool_tokens"] == int(serving["max_concurrency"] * 8192)
    assert serving["max_running"] == int(serving["max_concurrency"])
    assert answers[-1]["fits"] is True
    assert answers[-1]["time"]["time_per_token_s"] is None
    waits = f"{serving['max_running']} of 64 sequences of 8192 tokens run at once on 1 GPU"
    assert f"{waits}, the others wait" in answers[-1]["notes"]


@pytest.mark.parametrize(("quant", "has_line"), [("none", False), ("awq-int4", True)])
def test_the_command_of_an_engine_says_which_weights_it_needs(quant: str, has_line: bool) -> None:
    shown = whichlora(*SERVED, "--gpu", "rtx-4090-24gb", "--quant", quant).stdout
    line = f"in place of meta-llama/Llama-3.1-8B put the folder of its {quant} weights"
    assert (line in shown) is has_line


def test_markdown_of_an_engine_has_its_waits_and_its_command() -> None:
    shown = whichlora(*SERVED, "--gpu", "rtx-4090-24gb", "--markdown").stdout
    assert "| of requests wait no longer | 50 % | 90 % | 99 % |" in shown
    assert " tokens/s in all, between " in shown
    assert (
        "waits are of prompts of 512 and answers of 128 tokens, not of the context: --prompt-len "
        "and --max-new-tokens state others" in shown
    )
    assert "- start it with: vllm serve meta-llama/Llama-3.1-8B --max-model-len 640" in shown


@pytest.mark.parametrize("command", ["explain", "where"])
def test_a_largest_concurrency_is_told_by_its_own_name(command: str) -> None:
    asked = (command, "meta-llama/Llama-3.1-8B", "--gpu", "h100-sxm-80gb", "--serving", "vllm")
    result = whichlora(*asked, "--concurrency", "max")
    assert result.stderr.startswith(f"--concurrency: {command} takes numbers; 'whichlora estimate'")


def test_flags_of_an_engine_may_keep_their_dashes() -> None:
    shown = whichlora(*SERVED, "--serving-option=--gpu-memory-utilization=0.8", "--gpu", "h100")
    assert "--gpu-memory-utilization 0.8" in shown.stdout


def test_an_engine_is_of_inference_where_no_phase_is_given() -> None:
    asked = ("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "h100-sxm-80gb", "--serving", "vllm")
    assert "--max-model-len 8192" in whichlora(*asked, "--context", "8k").stdout
    refused = whichlora(*asked, "--context", "8k", "--phase", "finetune")
    assert refused.exit_code == 2
    assert "serving: vllm is of phase inference; give it, or leave serving out" in refused.stderr


@pytest.mark.parametrize("setting", ["concurrency", "context"])
def test_max_of_an_engine_is_what_it_serves(setting: str) -> None:
    result = whichlora(*SERVED, "--gpu", "rtx-4090-24gb", f"--{setting}", "max", "--json")
    (answer,) = json.loads(result.stdout)["predictions"]
    serving = answer["serving"]
    assert serving["starts"] is True
    if setting == "context":  # the longest that surely fits
        assert 0.9 * serving["max_context"] < serving["context"] < serving["max_context"]
    else:
        assert serving["concurrency"] == serving["max_running"]


def test_requests_that_an_engine_refuses_have_no_speed_and_fail_a_check() -> None:
    asked = (*SERVED, "--gpu", "rtx-4090-24gb", "--context", "100")
    result = whichlora(*asked, "--json", "--check")
    assert result.exit_code == 1
    (answer,) = json.loads(result.stdout)["predictions"]
    refuses = answer["serving"]["refuses"]
    assert refuses.startswith("prompts of 512 and answers of 128 tokens exceed the context of 100")
    assert refuses in answer["notes"]
    assert refuses in result.stderr
    assert answer["serving"]["starts"]
    assert answer["serving"]["tpot_s"] is None
    fitting = (*asked, "--prompt-len", "80", "--max-new-tokens", "20", "--check")
    assert whichlora(*fitting).exit_code == 0


def test_an_engine_that_does_not_start_says_why_in_one_line() -> None:
    result = whichlora(*SERVED, "--gpu", "rtx-4090-24gb", "--context", "100000")
    assert "vllm does not start on rtx-4090-24gb: one sequence of 100000 tokens" in result.stdout
    result = whichlora(*SERVED, "--gpu", "16GiB", "--concurrency", "max")
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--concurrency", "4", "--batch-size", "4"), "batch_size: is concurrency by another name"),
        (("--batch-size", "4"), "batch_size: is not of serving vllm; give concurrency alone"),
        (("--phase", "finetune", "--concurrency", "4"), "serving: vllm is of phase inference"),
        (("--serving", "transformers", "--context", "max"), "context: is of a serving engine"),
        (("--serving-option", "block_size=x"), "block_size: 'x' is not a whole number from 1 on"),
    ],
)
def test_what_an_engine_is_not_asked_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = whichlora(*SERVED, "--gpu", "rtx-4090-24gb", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)


def test_a_quant_behind_serve_is_of_merged_weights_as_in_recommend() -> None:
    asked = (*SERVED[1:], "--gpu", "4090", "--context", "8192")
    both = predictions(*asked, "--serve", "fp8, awq-int4")
    assert both == predictions(*asked, "--quant", "fp8,awq-int4", "--serve", "merged")
    assert [each["config"]["quant"] for each in both] == ["fp8", "awq-int4"]
    of_files = (SERVED[1], "--serving", "llama-cpp", "--gpu", "4090", "--context", "8192")
    (served, stored) = (predictions(*of_files, flag, "Q5_K_M") for flag in ("--serve", "--quant"))
    assert served == stored
    for more, fault in (
        (("--serve", "fp8", "--quant", "fp8"), "--serve: fp8 is a --quant, which is given, too\n"),
        (("--serve", "adapter"), "--serve: 'adapter' is not known; accepted are as-trained, merg"),
    ):
        assert whichlora("estimate", *asked, *more).stderr.startswith(fault)


def test_what_a_pasted_command_is_asked_beside_it_counts(tmp_path: Path) -> None:
    for name, text in (
        ("serve.sh", "vllm serve Qwen/Qwen3-8B --max-model-len 16384\n"),
        ("train.sh", "swift sft --model Qwen/Qwen3-8B --max_length 2048\n"),
    ):
        (tmp_path / name).write_text(text)
    asked = ("--gpu", "4090", "--concurrency", "4")
    (served,) = predictions("--from", str(tmp_path / "serve.sh"), *asked, "--context", "8192")
    assert (served["serving"]["concurrency"], served["config"]["context"]) == (4, 8192)
    trained = whichlora("estimate", "--from", str(tmp_path / "train.sh"), *asked)
    assert trained.stderr == "concurrency: is of phase inference; give batch_size\n"


def test_where_takes_an_engine() -> None:
    result = whichlora(
        "where", *SERVED[1:], "--context", "8192", "--gpu", "t4-16gb,l4-24gb", "--json"
    )
    small, large = sorted(
        json.loads(result.stdout)["placements"], key=lambda each: each["gpu"] < "t"
    )
    assert [small["gpu"], large["gpu"]] == ["t4-16gb", "l4-24gb"]
    assert small["largest_batch_size"] == 0
    assert large["largest_batch_size"] == large["prediction"]["serving"]["max_running"] > 0


@pytest.mark.parametrize("both", ["optimizer,params", "optimizer+params"])
def test_what_is_offloaded_is_read_as_tables_print_it(both: str) -> None:
    asked = ["estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "a100-sxm-80gb", "--gpus", "2"]
    result = whichlora(*asked, "--parallel", "fsdp", "--offload", both, "--json")
    (prediction,) = json.loads(result.stdout)["predictions"]
    assert prediction["config"]["parallel"]["offload"] == ["optimizer", "params"]


@pytest.mark.parametrize(
    "command",
    [
        ("where", LLAMA, "--method", "qlora"),
        ("guide", "--models", LLAMA, "--method", "qlora"),
    ],
)
def test_a_type_may_state_how_many(command: tuple[str, ...]) -> None:
    counted = whichlora(*command, "--gpu", "2x3090")
    apart = whichlora(*command, "--gpu", "3090", "--gpus", "2")
    assert counted.exit_code == 0, counted.output
    assert counted.output == apart.output
    several = whichlora(*command, "--gpu", "2x3090,4x4090")
    assert several.exit_code == 2
    assert "gpu: 2x3090, 4x4090 state several numbers of GPUs" in several.output


def test_an_export_takes_a_type_with_its_number(tmp_path: Path) -> None:
    asked = ("export", LLAMA, "--to", "trl", "--parallel", "zero3", "--output", str(tmp_path))
    done = whichlora(*asked, "--gpu", "8xh100")
    assert done.exit_code == 0, done.output
    assert "zero3 on 8 GPUs" in done.output


@pytest.mark.parametrize("command", ["where", "explain"])
def test_several_models_are_refused_with_the_command_that_takes_them(command: str) -> None:
    result = whichlora(command, MODEL, "Qwen/Qwen2.5-7B", "--method", "qlora")
    assert result.exit_code == 2
    assert f"model: {command} takes one value, got {MODEL},Qwen/Qwen2.5-7B; " in result.stderr
    assert "'whichlora estimate' takes lists" in result.stderr


def test_guide_takes_models_as_arguments_and_in_a_list() -> None:
    told = whichlora("guide", MODEL, "--models", "gpt2,EleutherAI/pythia-160m", "--gpu", "l4-24gb")
    assert told.exit_code == 0, told.stderr
    shown = [line.split()[0] for line in told.stdout.splitlines() if "l4-24gb " in line]
    assert shown[:3] == [MODEL, "gpt2", "EleutherAI/pythia-160m"]
    missing = whichlora("guide", "--gpu", "l4-24gb")
    assert missing.exit_code == 2
    assert missing.stderr == "guide needs a model: whichlora guide MODEL --gpu 4090\n"
