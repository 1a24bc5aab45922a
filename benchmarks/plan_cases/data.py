"""Data as people have it: its columns, its lengths, and what stands in the job's files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from plan_cases.folder import Folder, Result
from plan_cases.registry import case, expect

ROWS = 64
PROMPT, COMPLETION = "How do I boil an egg?", "Eight minutes in boiling water, then cold water."
CHAT = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": COMPLETION}]
COLUMNS: dict[str, dict[str, Any]] = {
    "Alpaca": {"instruction": "Answer the question.", "input": PROMPT, "output": COMPLETION},
    "Alpaca without input": {"instruction": PROMPT, "output": COMPLETION},
    "Dolly": {
        "instruction": PROMPT,
        "context": "",
        "response": COMPLETION,
        "category": "open_qa",
    },
    "ShareGPT": {
        "id": "1",
        "conversations": [
            {"from": "human", "value": PROMPT},
            {"from": "gpt", "value": COMPLETION},
        ],
    },
    "messages": {"messages": CHAT},
    "prompt and completion": {"prompt": PROMPT, "completion": COMPLETION},
    "question and answer": {"question": PROMPT, "answer": COMPLETION},
    "text": {"text": f"{PROMPT} {COMPLETION}"},
    "preference": {"prompt": PROMPT, "chosen": COMPLETION, "rejected": "No idea."},
}


def plan_of(folder: Folder, dataset: Any, **keys: Any) -> Result:
    """A dry run of one small model on `dataset`."""
    settings: dict[str, Any] = {
        "gpu": "4090",
        "models": "Qwen/Qwen3-0.6B",
        "methods": "lora",
        "profile": "none",
        "sequence_length": 512,
        "dataset": dataset,
    }
    folder.write_plan(**(settings | keys))
    return folder.whichlora("run", "plan.yaml")


def contents(row: Mapping[str, Any]) -> str:
    """All text of a row of the job's file, whatever its shape."""
    parts = []
    for value in row.values():
        if isinstance(value, list):
            parts += [message["content"] for message in value]
        else:
            parts.append(str(value))
    return "\n".join(parts)


@case("Alpaca, Dolly, ShareGPT, messages, prompt/completion, question/answer, text, preference")
def columns_as_people_have_them(folder: Folder) -> str:
    wrong = []
    for name, row in COLUMNS.items():
        folder.write_rows("data.jsonl", [row] * ROWS)
        result = plan_of(folder, "data.jsonl")
        if result.code != 0:
            wrong.append(f"{name}: {result.last_line}")
            continue
        written = folder.rows("runs/plan/train.jsonl")[0]
        if COMPLETION not in contents(written) or PROMPT not in contents(written):
            wrong.append(f"{name}: {written}")
    expect(not wrong, "; ".join(wrong))
    return f"{len(COLUMNS)} of {len(COLUMNS)}, question and answer in each file"


@case("A chat file, and the tokenizer is not on the planning machine")
def chat_stays_chat(folder: Folder) -> str:
    folder.write_rows("chat.jsonl", [{"messages": CHAT}] * ROWS)
    result = plan_of(folder, "chat.jsonl")
    expect(result.code == 0, result.last_line)
    (row, *_) = folder.rows("runs/plan/train.jsonl")
    expect(row == {"messages": CHAT}, f"train.jsonl: {row}")
    expect("estimated" in result.stdout, "estimated lengths are not said")
    script = (folder.path / "runs/plan/train.py").read_text(encoding="utf-8")
    expect("apply_chat_template" in script, "train.py applies no chat template")
    return "rows stay messages, train.py applies the template, lengths are said to be estimated"


@case("Preference pairs")
def preference_pairs_are_kept(folder: Folder) -> str:
    row = COLUMNS["preference"]
    folder.write_rows("pairs.jsonl", [row] * ROWS)
    result = plan_of(folder, "pairs.jsonl")
    expect(result.code == 0, result.last_line)
    expect(folder.rows("runs/plan/train.jsonl")[0] == row, "a column is lost")
    expect("rejected" in result.stdout + result.stderr, "nothing is said of the rejected answers")
    return "kept whole, and said"


@case("Columns that nobody knows: which template is suggested?")
def suggestion_keeps_the_answer(folder: Folder) -> str:
    row = {"id": "7", "topic": "eggs", "frage": PROMPT, "antwort": COMPLETION}
    folder.write_rows("data.jsonl", [row] * ROWS)
    result = plan_of(folder, "data.jsonl")
    expect(result.code == 2, f"exit code {result.code}")
    expect("{antwort}" in result.stderr and "{frage}" in result.stderr, result.last_line)
    return result.last_line.split(": ", 1)[-1]


@case("Only counts (`samples`, `tokens`): is its batch one that the real file of that size allows?")
def counts_are_as_careful_as_the_file(folder: Folder) -> str:
    # Lengths of a long tail: most rows are short, the longest reach the sequence length.
    lengths = [60 * (1 + number % 4) for number in range(960)] + [4000] * 40
    rows = [{"text": "x " * length} for length in lengths]  # 2 bytes a word, 4 a token
    folder.write_rows("data.jsonl", rows)
    tokens = sum(-(-2 * length // 4) for length in lengths)
    keys: dict[str, Any] = {"models": "meta-llama/Llama-3.1-8B", "methods": "qlora"}
    keys |= {"sequence_length": 2048}
    by_file = plan_of(folder, {"path": "data.jsonl", "validation_fraction": 0}, **keys)
    winner_by_file = folder.answer()["winner"]
    by_counts = plan_of(folder, {"samples": len(rows), "tokens": tokens}, **keys)
    winner = folder.answer()["winner"]
    expect(by_file.code == 0 and by_counts.code == 0, by_counts.last_line)
    expect(winner["seq_len"] == 2048, f"longest batch {winner['seq_len']} tokens")
    expect(
        winner["batch_size"] <= winner_by_file["batch_size"],
        f"batch {winner['batch_size']}; the file allows {winner_by_file['batch_size']}",
    )
    low, high = winner["total_time_low_s"], winner["total_time_high_s"]
    of_file = winner_by_file["total_time_s"]
    expect(low <= of_file <= high, f"{of_file:.0f} s by the file, {low:.0f} to {high:.0f} s")
    return (
        f"batch {winner['batch_size']} (file: {winner_by_file['batch_size']}), whose time is inside"
    )


@case("CSV, JSON, a folder of train and validation files")
def other_files(folder: Folder) -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows([{"prompt": PROMPT, "completion": COMPLETION}] * ROWS)
    folder.write("data.csv", table.getvalue())
    folder.write_rows("split/train.jsonl", [{"text": PROMPT}] * ROWS)
    folder.write_rows("split/validation.jsonl", [{"text": PROMPT}] * 8)
    for dataset, num_validation in (("data.csv", 4), ("./split", 8)):
        result = plan_of(folder, dataset)
        expect(result.code == 0, result.last_line)
        written = len(folder.rows("runs/plan/validation.jsonl"))
        expect(written == num_validation, f"{dataset}: {written} validation rows")
    return "all read, validation as given or 5 %"


@case("A row without its answer, and one of another type")
def broken_rows(folder: Folder) -> str:
    told = []
    for broken in ({"prompt": PROMPT}, {"prompt": PROMPT, "completion": 7}, {"messages": "hello"}):
        good = {"prompt": PROMPT, "completion": COMPLETION}
        folder.write_rows("data.jsonl", [good] * 5 + [broken] + [good] * 5)
        result = plan_of(folder, "data.jsonl")
        lines = result.stderr.strip().splitlines()
        expect(result.code == 2 and ":6:" in lines[-1], f"{broken}: {result.last_line}")
        told.append(lines[-1])
    return told[-1]


@case("Is the time per token beside a total that of the same batches?")
def per_token_belongs_to_the_total(folder: Folder) -> str:
    lengths = [200 + 37 * (number % 40) for number in range(400)]
    folder.write_rows("data.jsonl", [{"text": "x " * length} for length in lengths])
    result = plan_of(folder, {"path": "data.jsonl", "validation_fraction": 0})
    expect(result.code == 0, result.last_line)
    answer = folder.answer()
    tokens = answer["dataset"]["tokens_per_epoch"]
    for row in answer["finetune"]:
        ratio = row["total_time_s"] / row["time_per_token_s"] / tokens
        # padded tokens over real ones: what the batches of these lengths can hold
        expect(0.99 <= ratio < 2.2, f"{row['name']}: {ratio:.2f} times the tokens of the data")
    return f"{len(answer['finetune'])} rows agree"
