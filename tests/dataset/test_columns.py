"""Columns of public data sets, as their first rows have them, become examples to train on."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from whichlora.dataset import (
    BaseDataset,
    count_tokens,
    data_format,
    open_dataset,
    write_jsonl,
)
from whichlora.dataset.columns import recognised
from whichlora.dataset.label_tokens import num_classes
from whichlora.errors import ConfigError, DataFileError, WhichLoraError
from whichlora.spec.data_format import DataFormat, Rows
from whichlora.spec.plan import DatasetConfig

SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [USER, ASSISTANT]
OTHER = {"role": "assistant", "content": "Go away"}


def turns(prompt: str, answer: str, system: str = "") -> dict[str, Any]:
    """An example of one question and its answer."""
    head = [{"role": "system", "content": system}] if system else []
    return {
        "prompt": [*head, {"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": answer}],
    }


# Hub id: a row in the columns of the data set, the example, and the columns that are left out.
PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tatsu-lab/alpaca": (
        {"instruction": "i", "input": "n", "output": "o", "text": "t"},
        turns("i\n\nn", "o"),
        "text",
    ),
    "yahma/alpaca-cleaned": (
        {"instruction": "i", "input": "", "output": "o"},
        turns("i", "o"),
        "",
    ),
    "databricks/databricks-dolly-15k": (
        {"instruction": "i", "context": "c", "response": "o", "category": "k"},
        turns("i\n\nc", "o"),
        "category",
    ),
    "HuggingFaceH4/ultrachat_200k": (
        {"prompt": "Hi", "prompt_id": "1", "messages": CHAT},
        {"messages": CHAT},
        "prompt, prompt_id",
    ),
    "stingning/ultrachat": ({"id": "1", "data": ["Hi", "Hello"]}, {"messages": CHAT}, "id"),
    "OpenAssistant/oasst_top1_2023-08-25": ({"text": "t"}, {"text": "t"}, ""),
    "timdettmers/openassistant-guanaco": ({"text": "t"}, {"text": "t"}, ""),
    "openai/gsm8k": ({"question": "q", "answer": "a"}, turns("q", "a"), ""),
    "anon8231489123/ShareGPT_Vicuna_unfiltered": (
        {"id": "1", "conversations": SHAREGPT},
        {"messages": CHAT},
        "id",
    ),
    "Open-Orca/SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                *({**turn, "weight": 1.0} for turn in SHAREGPT),
            ]
        },
        {"messages": [SYSTEM, *CHAT]},
        "",
    ),
    "teknium/OpenHermes-2.5": (
        {"id": None, "conversations": SHAREGPT, "system_prompt": "Be brief.", "source": "s"},
        {"messages": [SYSTEM, *CHAT]},
        "id, source",
    ),
    "Open-Orca/OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "r"},
        turns("q", "r", "s"),
        "id",
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "", "question": "Hi", "chosen": "Hello", "rejected": "Go away"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        "",
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": "Hi",
            "prompt_id": "1",
            "chosen": CHAT,
            "rejected": [USER, OTHER],
            "messages": CHAT,
            "score_chosen": 8.0,
        },
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        "prompt_id, messages, score_chosen",
    ),
    "trl-lib/ultrafeedback_binarized": (
        {"chosen": CHAT, "rejected": [USER, OTHER], "score_chosen": 8.0},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        "score_chosen",
    ),
    "Anthropic/hh-rlhf": (
        {"chosen": "c", "rejected": "r"},
        {"chosen": "c", "rejected": "r"},
        "",
    ),
    "Dahoas/rm-static": (
        {"prompt": "p", "response": "c", "chosen": "c", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        "response",
    ),
    "lvwerra/stack-exchange-paired": (
        {"qid": 1, "question": "Hi", "response_j": "Hello", "response_k": "Go away"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
        "qid",
    ),
    "GAIR/lima": (
        {"conversations": ["Hi", "Hello"], "source": "s"},
        {"messages": CHAT},
        "source",
    ),
    "HuggingFaceH4/no_robots": (
        {"prompt": "Hi", "prompt_id": "1", "messages": CHAT, "category": "c"},
        {"messages": CHAT},
        "prompt, prompt_id, category",
    ),
    "LDJnr/Capybara": (
        {"source": "s", "conversation": [{"input": "Hi", "output": "Hello"}]},
        {"messages": CHAT},
        "source",
    ),
    "allenai/WildChat-1M": (
        {"model": "m", "conversation": [turn | {"language": "English"} for turn in CHAT]},
        {"messages": CHAT},
        "model",
    ),
    "nvidia/HelpSteer2": (
        {"prompt": "p", "response": "r", "helpfulness": 4},
        turns("p", "r"),
        "helpfulness",
    ),
    "trl-lib/tldr": (
        {"prompt": "p", "completion": "c"},
        {"prompt": "p", "completion": "c"},
        "",
    ),
    "EdinburghNLP/xsum": ({"document": "d", "summary": "s", "id": "1"}, turns("d", "s"), "id"),
    "abisee/cnn_dailymail": (
        {"article": "d", "highlights": "s", "id": "1"},
        turns("d", "s"),
        "id",
    ),
    "knkarthick/samsum": ({"id": "1", "dialogue": "d", "summary": "s"}, turns("d", "s"), "id"),
    "FiscalNote/billsum": ({"text": "d", "summary": "s", "title": "t"}, turns("d", "s"), "title"),
    "meta-math/MetaMathQA": (
        {"type": "t", "query": "q", "original_question": "o", "response": "r"},
        turns("q", "r"),
        "type, original_question",
    ),
    "AI-MO/NuminaMath-TIR": (
        {"problem": "Hi", "solution": "Hello", "messages": CHAT},
        {"messages": CHAT},
        "problem, solution",
    ),
    "ise-uiuc/Magicoder-OSS-Instruct-75K": (
        {"lang": "python", "seed": "s", "problem": "p", "solution": "o"},
        turns("p", "o"),
        "lang, seed",
    ),
    "b-mc2/sql-create-context": (
        {"answer": "a", "question": "q", "context": "c"},
        turns("q\n\nc", "a"),
        "",
    ),
    "Open-Orca/FLAN": ({"inputs": "q", "targets": "a", "task": "t"}, turns("q", "a"), "task"),
    "google-research-datasets/mbpp": (
        {"task_id": 1, "text": "q", "code": "a", "test_list": ["t"]},
        turns("q", "a"),
        "task_id, test_list",
    ),
    "FreedomIntelligence/medical-o1-reasoning-SFT": (
        {"Question": "q", "Complex_CoT": "c", "Response": "a"},
        turns("q", "a"),
        "Complex_CoT",
    ),
    "stanfordnlp/imdb": ({"text": "t", "label": 1}, {"text": "t"}, "label"),
    "allenai/c4": (
        {"text": "t", "timestamp": "2019", "url": "u"},
        {"text": "t"},
        "timestamp, url",
    ),
    "codeparrot/codeparrot-clean": ({"repo_name": "r", "content": "t"}, {"text": "t"}, "repo_name"),
    "hiyouga/LLaMA-Factory alpaca with history": (
        {"instruction": "i", "input": "", "output": "o", "history": [["Hi", "Hello"]]},
        {
            "prompt": [*CHAT, {"role": "user", "content": "i"}],
            "completion": [{"role": "assistant", "content": "o"}],
        },
        "",
    ),
}


def open_rows(
    folder: Path, *rows: dict[str, Any], of: Rows = "texts", **settings: Any
) -> BaseDataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_dataset(DatasetConfig(path=str(path), validation_fraction=0.0, **settings), of)


def only_example(dataset: BaseDataset) -> dict[str, Any]:
    (row,) = dataset.splits()["train"]
    return dict(dataset.to_example(row))


@pytest.mark.parametrize(("row", "example", "unused"), PUBLIC.values(), ids=PUBLIC)
def test_rows_of_public_data_sets_are_recognised(
    tmp_path: Path, row: dict[str, Any], example: dict[str, Any], unused: str
) -> None:
    dataset = open_rows(tmp_path, row)
    assert only_example(dataset) == example
    assert data_format(dataset) == DataFormat.of(example)
    assert (f"(not used: {unused})" in dataset.describe()) == bool(unused)


@pytest.mark.parametrize(
    "columns",
    [
        ("Instruction", "Input", "Output"),
        ("INSTRUCTION", "Context", "Response"),
        (" Question", "context", "Answer "),
    ],
)
def test_names_are_known_in_any_case(tmp_path: Path, columns: tuple[str, str, str]) -> None:
    dataset = open_rows(tmp_path, dict(zip(columns, ("i", "n", "o"), strict=True)))
    assert only_example(dataset) == turns("i\n\nn", "o")


def test_rows_without_an_input_or_a_system_prompt_have_none(tmp_path: Path) -> None:
    rows = [
        {"system": "s", "instruction": "i", "input": "n", "output": "o"},
        {"system": None, "instruction": "i", "input": None, "output": "o"},
    ]
    dataset = open_rows(tmp_path, *rows)
    examples = [dataset.to_example(row) for row in dataset.splits()["train"]]
    assert examples == [turns("i\n\nn", "o", "s"), turns("i", "o")]


def test_messages_in_a_cell_of_a_csv_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "conversations"], ["1", json.dumps(SHAREGPT)]])
    dataset = open_dataset(DatasetConfig(path=str(path), validation_fraction=0.0))
    assert only_example(dataset) == {"messages": CHAT}


def test_what_a_template_of_tools_needs_of_a_message_is_kept(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    reply = {"role": "tool", "content": "4", "name": "add", "weight": 1}
    (_, called, answered) = only_example(open_rows(tmp_path, {"messages": [USER, call, reply]}))[
        "messages"
    ]
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    assert answered == {"role": "tool", "content": "4", "name": "add"}


def test_columns_that_are_named_become_a_question_and_its_answer(tmp_path: Path) -> None:
    row = {"Kundenfrage": "q", "Antwort": "a", "id": "1"}
    settings = {"prompt_column": "Kundenfrage", "completion_column": "Antwort"}
    assert only_example(open_rows(tmp_path, row, **settings)) == turns("q", "a")
    with pytest.raises(ConfigError, match="go together"):
        DatasetConfig(path="a.jsonl", completion_column="q")


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        (
            {"id": "1", "Kundenfrage": "q", "Antwort": "a"},
            "give dataset.prompt_column and dataset.completion_column, such as Kundenfrage and "
            'Antwort, or dataset.template, such as "{id}\\n{Kundenfrage}\\n{Antwort}"',
        ),
        (
            {"response": "a", "body": "q"},
            'such as body and response, or dataset.template, such as "{body}\\n{response}"',
        ),
        (
            {"question": "q", "answer": True, "passage": "p"},
            'give dataset.template, such as "{question}\\n{passage}\\n{answer}"',
        ),
        (
            {"translation": {"de": "a", "en": "b"}},
            "translation must be made text or messages first, to be used; give rows with text, "
            "messages, or prompt and completion",
        ),
        (
            {"title": "t", "context": "c", "question": "q", "answers": {"text": ["a"]}},
            "answers must be made text or messages first, to be used; give "
            "dataset.prompt_column and dataset.completion_column, such as context and question",
        ),
        (
            {"Ticket Body": "it does not work", "Agent Reply": "turn it on", "Büro": "B7"},
            "dataset.completion_column, such as Ticket Body and Agent Reply, or",
        ),
        ({"a": 1, "b": 2}, 'give dataset.template, such as "{b}\\n{a}"'),
    ],
)
def test_a_suggestion_names_every_text_and_the_answer_last(
    tmp_path: Path, row: dict[str, Any], advice: str
) -> None:
    with pytest.raises(DataFileError) as caught:
        open_rows(tmp_path, row)
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}:1: has the columns ")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"question": "q", "good": "a", "bad": "b"}, "question", "good", "bad"),
        ({"id": 1, "worse": "b", "better": "a", "body": "q"}, "body", "better", "worse"),
        (
            {"Input": "q", "Bad answer": "b", "Good answer": "a", "source": "s"},
            *("Input", "Good answer", "Bad answer"),
        ),
    ],
)
def test_a_better_and_a_worse_answer_are_a_pair_and_no_question_and_its_answer(
    tmp_path: Path, row: dict[str, Any], prompt: str, chosen: str, rejected: str
) -> None:
    named = f"dataset.prompt_column {prompt}, dataset.chosen_column {chosen} and "
    named += f"dataset.rejected_column {rejected}"
    with pytest.raises(DataFileError) as caught:
        open_rows(tmp_path, row)
    told = str(caught.value)
    assert f"{named} in a plan with trainer dpo" in told
    assert told.endswith(f"dataset.prompt_column {prompt} and dataset.completion_column {chosen}")
    with pytest.raises(ConfigError) as needed:
        recognised(row, "pairs")
    assert str(needed.value).endswith(f", here {named}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"instruction": "i", "output": "o"}, {"instruction": "i", "output": None}],
            ":2: column 'output' must hold text, got nothing; correct or remove the row",
        ),
        (
            [{"question": "q", "answer": "a", "context": {"title": ["t"]}}],
            ":1: column 'context' must hold text, got dict",
        ),
        ([{"question": "q", "answer": "a"}, {"question": "q"}], ":2: column 'answer' is missing"),
        (
            [{"conversations": [{"from": "narrator", "value": "x"}]}],
            ":1: column 'conversations': message 1 is from 'narrator'; accepted are user, human,",
        ),
        (
            [{"conversations": [{"from": "humann", "value": "x"}]}],
            ":1: column 'conversations': message 1 is from 'humann'; did you mean human; accepted",
        ),
        (
            [{"messages": CHAT}, {"messages": [USER, {"role": "asistant", "content": "x"}]}],
            ":2: column 'messages': message 2 has the role 'asistant'; did you mean assistant; "
            "correct or remove the row",
        ),
        (
            [{"messages": CHAT}, {"messages": [USER, {"role": "assistant"}]}],
            ":2: column 'messages': message 2 must have role and content, or from and value",
        ),
        (
            [{"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}],
            ":1: column 'messages': message 1 has a part without text, and only text is trained",
        ),
        ([{"text": "a"}, {"text": "\ud83d"}], ":2: holds half of a surrogate pair; remove it"),
        (
            [{"instruction": "i", "output": "o", "history": ["Hi"]}],
            ":1: column 'history' must hold pairs of texts",
        ),
    ],
)
def test_a_bad_row_is_told_with_its_line(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataFileError) as caught:
        open_rows(tmp_path, *rows)
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}{message}")


# -- splits ---------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    path.write_text(json.dumps({"text": text}) + "\n")


@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev", "eval", "test"])
def test_a_folder_holds_its_validation_under_any_usual_name(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / "train.jsonl", "a")
    write_text(tmp_path / f"{name}.jsonl", "b")
    write_text(tmp_path / "test.json5", "no data file")
    splits = open_dataset(DatasetConfig(path=str(tmp_path))).splits()
    assert (splits["train"], splits["validation"]) == ([{"text": "a"}], [{"text": "b"}])


def test_files_in_parts_are_one_split(tmp_path: Path) -> None:
    for part, text in enumerate("ab"):
        write_text(tmp_path / f"train-0000{part}-of-00002.jsonl", text)
    splits = open_dataset(DatasetConfig(path=str(tmp_path), validation_fraction=0.0)).splits()
    assert splits["train"] == [{"text": "a"}, {"text": "b"}]


def test_a_validation_file_is_read_beside_the_training_file(tmp_path: Path) -> None:
    write_text(tmp_path / "mine.jsonl", "a")
    write_text(tmp_path / "held_out.jsonl", "b")
    files = {"path": "mine.jsonl", "validation_path": "held_out.jsonl"}
    config = DatasetConfig(**{key: str(tmp_path / name) for key, name in files.items()})
    assert open_dataset(config).splits()["validation"] == [{"text": "b"}]
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    with pytest.raises(DataFileError, match=r"held_out\.jsonl:1: has prompt, completion as mess"):
        open_dataset(config)


def test_a_folder_without_a_training_file_lists_what_it_has(tmp_path: Path) -> None:
    write_text(tmp_path / "mine.jsonl", "a")
    with pytest.raises(DataFileError, match=r"no training file, such as train\.jsonl, but mine"):
        open_dataset(DatasetConfig(path=str(tmp_path)))


# -- whatever a file holds ------------------------------------------------------------------------

NAMES = ("text", "messages", "conversations", "prompt", "completion", "chosen", "rejected")
MORE_NAMES = ("instruction", "input", "output", "system", "history", "question", "answer", "id")


def any_value(dice: random.Random, depth: int = 0) -> Any:
    """A value as JSON may hold it: texts, messages of every spelling, and what is neither."""
    plain = ["", "a", " ", "[", "[[1]]", '[{"role": "user"}]', "\ud83d", None, 1, 0.5, True]
    if depth > 2 or dice.random() < 0.5:
        return dice.choice(plain)
    if dice.random() < 0.5:
        return [any_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    keys = ("role", "content", "from", "value", "input", "output", "type", "text", "tool_calls")
    chosen = dice.sample(keys, dice.randrange(1, 4))
    return {key: any_value(dice, depth + 1) for key in chosen}


def test_any_row_is_an_example_or_one_line(tmp_path: Path) -> None:
    dice = random.Random(0)
    num_read, refusals = 0, []
    for _ in range(1000):
        names = dice.sample(NAMES + MORE_NAMES, dice.randrange(1, 5))
        rows = [{name: any_value(dice) for name in names} for _ in range(dice.randrange(1, 3))]
        try:
            dataset = open_rows(tmp_path, *rows)
            lengths = count_tokens(dataset, tokenizer=None, offline=True, max_length=99)
            written = write_jsonl(dataset, tmp_path / "out")["train"].read_text().splitlines()
        except WhichLoraError as error:
            refusals.append(str(error))
            continue
        num_read += 1
        assert len(written) == lengths.num_sequences()
        assert {DataFormat.of(json.loads(line)) for line in written} == {data_format(dataset)}
    assert num_read > 30
    assert not any("\n" in refusal for refusal in refusals)


ANSWERS: dict[str, tuple[Rows, dict[str, Any], dict[str, Any]]] = {
    "TRL's pairs": (
        "pairs",
        {"prompt": "p", "chosen": "a", "rejected": "b", "score": 1},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
    ),
    "pairs that both begin with their prompt": (
        "pairs",
        {"chosen": "p a", "rejected": "p b"},
        {"chosen": "p a", "rejected": "p b"},
    ),
    "pairs of conversations": (
        "pairs",
        {"chosen": CHAT, "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [OTHER]},
    ),
    "labelled texts, as a CSV file spells them": (
        "labelled",
        {"prompt": "p", "completion": "a", "label": "False"},
        {"prompt": "p", "completion": "a", "label": False},
    ),
    "labelled answers of instruction data": (
        "labelled",
        {"instruction": "p", "output": "a", "kto_tag": 1},
        turns("p", "a") | {"label": True},
    ),
    "prompts, with a column for the rewards": (
        "prompts",
        {"prompt": [USER], "answer": "42"},
        {"prompt": [USER], "answer": "42"},
    ),
}


@pytest.mark.parametrize(("of", "row", "example"), ANSWERS.values(), ids=ANSWERS)
def test_rows_of_answers_are_those_that_trl_takes(
    tmp_path: Path, of: Rows, row: dict[str, Any], example: dict[str, Any]
) -> None:
    dataset = open_rows(tmp_path, row, of=of)
    assert only_example(dataset) == example
    data_format(dataset).require(of)
    assert "not trained on" not in dataset.describe()


def test_columns_of_a_pair_that_are_named_are_taken(tmp_path: Path) -> None:
    row = {"Frage": "p", "gut": "a", "schlecht": "b", "chosen": "other", "rejected": "other"}
    named = {"prompt_column": "Frage", "chosen_column": "gut", "rejected_column": "schlecht"}
    assert only_example(open_rows(tmp_path, row, of="pairs", **named)) == {
        "prompt": [{"role": "user", "content": "p"}],
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
    }
    with pytest.raises(DataFileError, match="column 'besser' is missing; there are Frage, gut"):
        open_rows(tmp_path, row, of="pairs", **(named | {"chosen_column": "besser"}))


@pytest.mark.parametrize(
    ("of", "row", "message"),
    [
        (
            "pairs",
            {"prompt": "p", "choosen": "a", "rejected": "b"},
            r"rows.jsonl:1: has the columns prompt, choosen, rejected; a trainer on pairs takes "
            r"chosen and rejected.* \('choosen' may be chosen\)$",
        ),
        (
            "labelled",
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            "has the columns prompt, chosen, rejected; a trainer on labelled answers takes prompt, "
            "completion and label",
        ),
        ("prompts", {"text": "t"}, "has the columns text; a trainer on prompts takes prompt"),
        (
            "labelled",
            {"prompt": "p", "completion": "a", "label": "good"},
            "'label' must hold true or false .or 1 or 0., got 'good'; correct or remove the row",
        ),
        ("pairs", {"chosen": CHAT, "rejected": [OTHER]}, "begin with no common message"),
    ],
)
def test_rows_that_a_trainer_can_not_take_are_told_in_one_line(
    tmp_path: Path, of: Rows, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataFileError, match=message):
        open_rows(tmp_path, row, of=of)


def test_a_class_whose_rows_are_texts_is_refused_where_pairs_are_taken() -> None:
    with pytest.raises(ConfigError, match="has text as text, and the trainer takes pairs: prompt"):
        DataFormat.of({"text": "t"}).require("pairs")


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}], 2),
        ([{"text": "a", "label": 0}, {"text": "b", "label": 4}], 5),  # numbers are places
        ([{"tokens": ["a", "b"], "tags": ["O", "PER"]}, {"tokens": ["c"], "tags": ["LOC"]}], 3),
        ([{"text": "no label"}], 0),
    ],
)
def test_classes_are_counted_as_the_job_counts_them(
    rows: list[dict[str, Any]], number: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kind: Rows = "tagged" if "tags" in rows[0] else "texts"
    kind = "classified" if "label" in rows[0] else kind
    assert num_classes(open_dataset(DatasetConfig(path=str(file)), kind)) == number
