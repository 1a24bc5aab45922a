"""The written job on CPU, for real: what it learns, its checkpoints, and a kill in the middle."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train_runs import RANK_VARIABLES, run_ranks, run_script, start_script, wait_for
from written_job import script_of, train_script_of

from whichlora.exports.launch import launch_files, train_command
from whichlora.spec.data_format import DataFormat
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Keeping
from whichlora.spec.run import RunConfig

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
RUN = RunConfig(
    model="tiny", method="lora", padding="padded", seq_len=64, batch_size=2, precision="fp32", r=4
)
CHAT = DataFormat(kind="messages", conversational=True)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<a>"
    "{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}<u>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
REWRITES = (  # earlier turns lose their first letter, as reasoning is dropped from earlier turns
    "{% for message in messages %}"
    "{{ message.content if loop.last else message.content[1:] }}{% endfor %}"
)


def write(folder: Path, rows: list[dict[str, Any]], run: RunConfig = RUN, **job: Any) -> Path:
    """The script of `run`, and `rows` for both splits."""
    folder.mkdir(exist_ok=True)
    options = {"weights": "random", "model_config": LLAMA, "target_modules": ["q_proj", "v_proj"]}
    path = folder / "train.py"
    path.write_text(train_script_of(run, **(options | job)))
    for name in ("train", "validation"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return path


def result_of(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((path.parent / "output" / "result.json").read_text())
    return result


ON_CPU = Path(__file__).parents[1] / "spread_on_cpu.py"
TEXTS = [{"text": "to be or not to be, " * (1 + n % 3)} for n in range(24)]


# --- what is learned


def learned(path: Path, tokenizer: Any, row: dict[str, Any]) -> str:
    """What of a row has a loss, as text."""
    ids, labels = script_of(path).encode(row, tokenizer)
    assert len(ids) == len(labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    text: str = tokenizer.decode([label for label in labels if label != -100])
    return text


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [turn("user", "Hi"), turn("assistant", "Yes?"), turn("user", "Go"), turn("assistant", "OK")]
PAIR = DataFormat(kind="prompt-completion")
CHAT_PAIR = DataFormat(kind="prompt-completion", conversational=True)
PREFERENCE = DataFormat(kind="preference")
CHAT_PREFERENCE = DataFormat(kind="preference", conversational=True)
ANSWERED = {"prompt": TURNS[:1], "chosen": TURNS[1:2], "rejected": [turn("assistant", "No")]}


@pytest.mark.parametrize(
    ("data_format", "row", "completions", "everything"),
    [
        (DataFormat(), {"text": "ab"}, "ab</s>", "ab</s>"),
        (DataFormat(), {"text": "ab</s>"}, "ab</s>", "ab</s>"),
        (PAIR, {"prompt": "ab ", "completion": "cd"}, "cd</s>", "ab cd</s>"),
        (CHAT_PAIR, {"prompt": TURNS[:1], "completion": TURNS[1:2]}, "Yes?</s>", None),
        (CHAT_PAIR, {"prompt": TURNS[:3], "completion": TURNS[3:]}, "OK</s>", None),
        (CHAT, {"messages": TURNS}, "Yes?</s>OK</s>", "<u>Hi<a>Yes?</s><u>Go<a>OK</s>"),
        (PREFERENCE, {"prompt": "a", "chosen": "b", "rejected": "c"}, "b</s>", "ab</s>"),
        (PREFERENCE, {"chosen": "ab", "rejected": "ac"}, "ab</s>", "ab</s>"),
        (CHAT_PREFERENCE, ANSWERED, "Yes?</s>", "<u>Hi<a>Yes?</s>"),
        (
            CHAT_PREFERENCE,
            {"chosen": TURNS, "rejected": TURNS[:3]},
            "OK</s>",
            "<u>Hi<a>Yes?</s><u>Go<a>OK</s>",
        ),
    ],
)
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_completions_and_the_end_are_learned_and_prompts_only_if_asked(
    tmp_path: Path,
    data_format: DataFormat,
    row: dict[str, Any],
    completions: str,
    everything: str | None,
    template: str,
) -> None:
    path = write(tmp_path / "completions", [row], data_format=data_format)
    tokenizer = script_of(path).byte_tokenizer()
    tokenizer.chat_template = template
    assert learned(path, tokenizer, row) == completions
    if everything is not None:
        path = write(tmp_path / "all", [row], data_format=data_format, train_on="all")
        assert learned(path, tokenizer, row) == everything


def test_a_template_that_rewrites_earlier_turns_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, [{"messages": TURNS}], data_format=CHAT)
    script = script_of(path)
    tokenizer = script.byte_tokenizer()
    tokenizer.chat_template = REWRITES
    with pytest.raises(SystemExit) as refusal:
        script.read_rows(tmp_path / "train.jsonl", tokenizer)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(f"{tmp_path / 'train.jsonl'}:1: ValueError: the chat template renders")
    assert "train_on: all" in line


def test_the_end_is_learned_where_padding_has_the_same_token(tmp_path: Path) -> None:
    path = write(tmp_path, TEXTS)
    script = script_of(path)
    tokenizer = script.byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    from transformers import DataCollatorForSeq2Seq

    rows = script.read_rows(tmp_path / "train.jsonl", tokenizer)
    batch = DataCollatorForSeq2Seq(tokenizer)([rows[0], rows[2]])
    end = len(rows[0]["input_ids"])
    assert batch["labels"][0, end - 1] == tokenizer.eos_token_id
    assert batch["labels"][0, end:].eq(-100).all()
    assert batch["attention_mask"].sum(dim=1).tolist() == [end, len(rows[2]["input_ids"])]


def test_a_row_whose_prompt_fills_the_length_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a" * 200, "completion": "b"}, {"prompt": "a", "completion": "b"}]
    path = write(tmp_path, rows, data_format=PAIR)
    script = script_of(path)
    rows = script.read_rows(tmp_path / "train.jsonl", script.byte_tokenizer())
    assert len(rows) == 1
    assert "1 of 2 rows are left out" in capsys.readouterr().err


def test_a_job_without_rows_to_learn_from_ends_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "a" * 200, "completion": "b"}] * 3, data_format=PAIR)
    done = run_script(path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{tmp_path / 'train.jsonl'}: no row is left to train on"
    (tmp_path / "train.jsonl").unlink()
    done = run_script(path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "train.jsonl: is missing; put rows there, JSON lines of prompt, completion"
    )


def test_a_tokenizer_without_a_chat_template_is_saved_with_the_plain_one(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}] * 4
    run = replace(RUN, seq_len=512, batch_size=1)
    path = write(tmp_path, rows, run, data_format=CHAT, keeping=Keeping(save_steps=0))
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert "the tokenizer has no chat template; it is saved with CHAT_TEMPLATE" in done.stderr
    saved = tmp_path / "output" / "chat_template.jinja"
    assert "### Response:" in saved.read_text()
    assert not list((tmp_path / "output").glob("checkpoint-*"))


# --- checkpoints


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_killed_run_resumes_to_the_same_steps_and_the_same_loss(
    tmp_path: Path, method: str
) -> None:
    run = replace(RUN, method=method, lora_dropout=0.1)
    options: dict[str, Any] = {"epochs": 3.0, "keeping": Keeping(save_steps=7)}
    whole = write(tmp_path / "whole", TEXTS, run, **options)
    assert run_script(whole).returncode == 0
    killed = write(tmp_path / "killed", TEXTS, run, **options)
    output = killed.parent / "output"
    slow = killed.read_text().replace(
        "        control.should_log |= control.should_save\n",
        "        control.should_log |= control.should_save\n"
        "        __import__('time').sleep(0.2 if state.global_step > 14 else 0)\n",
    )
    killed.write_text(slow)
    child = start_script(killed, log=tmp_path / "killed.log")
    while not (output / "checkpoint-14" / "trainer_state.json").exists():
        assert child.is_alive()
        time.sleep(0.05)
    time.sleep(0.3)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (output / "result.json").exists()
    refused = run_script(killed)
    assert refused.returncode == 1
    assert "checkpoint-14: is of an earlier start; go on from it with --resume" in refused.stderr
    done = run_script(killed, "--resume")
    assert done.returncode == 0, done.stderr
    expected, resumed = result_of(whole), result_of(killed)
    assert resumed["num_steps"] == expected["num_steps"] == 36
    assert resumed["final_loss"] == expected["final_loss"]
    assert resumed["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-6)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == [
        "checkpoint-35",
        "checkpoint-36",
    ]


def test_narrow_adapters_stay_narrow_after_a_resume(tmp_path: Path) -> None:
    run = replace(RUN, precision="bf16-pure")
    keeping = Keeping(save_steps=6, save_total_limit=5)
    path = write(tmp_path, TEXTS, run, keeping=keeping)
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    loss = result_of(path)["final_loss"]
    (tmp_path / "output" / "checkpoint-12" / "trainer_state.json").write_text("{")  # half written
    done = run_script(path, "--resume")
    assert done.returncode == 0, done.stderr
    assert result_of(path)["final_loss"] == loss
    from safetensors.torch import load_file

    adapters = load_file(tmp_path / "output" / "checkpoint-12" / "adapter_model.safetensors")
    assert {parameter.dtype for parameter in adapters.values()} == {torch.bfloat16}


def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    path = write(tmp_path, TEXTS, epochs=200.0, keeping=Keeping(save_steps=3))
    log = tmp_path / "interrupted.log"
    child = start_script(path, log=log)
    while not list((tmp_path / "output").glob("checkpoint-*/trainer_state.json")):
        assert child.is_alive()
        time.sleep(0.05)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    wait_for(child, timeout_s=240)
    assert child.exitcode == 130
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("stopped; ")]
    assert line.startswith(f"stopped; go on from {tmp_path / 'output'}/checkpoint-")
    assert line.endswith(f"with: python {path} --resume")


def test_other_versions_than_those_predicted_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(RUN, libraries=(("peft", "0.10.0"),))
    script = script_of(write(tmp_path, TEXTS, run))
    assert script.PREDICTED_WITH["peft"] == "0.10.0"
    capsys.readouterr()
    script.compare_versions()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: memory and time may differ: ")
    assert line.endswith(", predicted 0.10.0")


@pytest.mark.parametrize(
    ("strategy", "method", "options"),
    [
        ("ddp", "lora", ()),
        ("fsdp", "lora", ()),
        ("fsdp", "qlora", ()),
        ("fsdp", "qlora", (("offload", ("optimizer", "params")),)),
    ],
)
def test_two_processes_train_what_the_strategy_spreads(
    tmp_path: Path, strategy: str, method: str, options: tuple[tuple[str, Any], ...]
) -> None:
    precision = "bf16" if method == "qlora" else "fp32"
    parallel = ParallelConfig(strategy=strategy, gpus=2, options=options)
    run = replace(RUN, method=method, precision=precision, parallel=parallel)
    rows = [{"text": f"row {number} " * 20} for number in range(32)]
    wide = {**LLAMA, "hidden_size": 64}  # 4-bit kernels of a CPU evaluate blocks of 64 in a row
    path = write(tmp_path, rows, run, epochs=0.2, model_config=wide)
    printed = "".join(run_ranks(ON_CPU, str(path), world_size=2, logs_folder=tmp_path))
    assert printed.count("final_loss: ") == 1
    spread = {"ddp": "MULTI_CPU", "fsdp": "FSDP"}[strategy]
    assert printed.count(f"distributed_type: {spread}") == 2
    if strategy == "ddp":  # FSDP keeps hold of its groups
        assert printed.count("threads of gloo: 0") == 2  # else one may abort its rank
    assert result_of(path)["num_steps"] > 0
    assert (tmp_path / "output" / "adapter_model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_command_starts_the_ranks_with_what_they_read(tmp_path: Path, strategy: str) -> None:
    run = replace(RUN, parallel=ParallelConfig(strategy=strategy, gpus=2))
    path = tmp_path / "train.py"
    path.write_text(  # a file for each: two ranks that print at once mix their lines
        "import json, os\nfrom pathlib import Path\n"
        f"read = {{name: os.environ[name] for name in {sorted(RANK_VARIABLES)}}}\n"
        "Path(__file__).with_name(f\"{os.environ['RANK']}.json\").write_text(json.dumps(read))\n"
    )
    done = subprocess.run(train_command(path, run), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
    assert all(rank["RANK"] == rank["LOCAL_RANK"] for rank in ranks)


@pytest.mark.parametrize(
    ("strategy", "options", "method"),
    [
        ("zero1", (), "lora"),
        ("zero2", (), "lora"),
        ("zero3", (), "lora"),
        ("zero3", (), "full"),
        ("zero2", (("offload", ("optimizer",)),), "lora"),
        ("zero3", (("offload", ("optimizer", "params")),), "lora"),
    ],
)
def test_two_processes_train_under_deepspeed(
    tmp_path: Path, strategy: str, options: tuple[tuple[str, Any], ...], method: str
) -> None:
    """With its file beside the script; offloading compiles DeepSpeed's Adam for CPUs first."""
    pytest.importorskip("deepspeed", reason="needs deepspeed 0.19.8, which is no dependency")
    spread = ParallelConfig(strategy=strategy, gpus=2, options=options)
    run = replace(RUN, method=method, precision="bf16", parallel=spread)
    rows = [{"text": f"row {number} " * 20} for number in range(32)]
    path = write(tmp_path, rows, run, epochs=1.0)
    for name, text in launch_files(run).items():
        (tmp_path / name).write_text(text)
    *launcher, script = train_command(path, run)
    done = subprocess.run(
        [*launcher, str(ON_CPU), script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert result_of(path)["num_steps"] == 8  # of 32 rows, in batches of 2 on each rank
    saved = "adapter_model.safetensors" if method == "lora" else "model.safetensors"
    assert (tmp_path / "output" / saved).stat().st_size > 1000
