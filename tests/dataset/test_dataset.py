"""Training data: files, classes, the hub and counts, as texts and their lengths."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import statistics
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_job import script_of, train_script_of

from whichlora.config import load_plan
from whichlora.dataset import (
    BYTE_LEVEL,
    UNCUT,
    BaseDataset,
    TokenLengths,
    assumed,
    count_tokens,
    data_format,
    open_dataset,
    workload,
    write_jsonl,
)
from whichlora.dataset.assumed import RELATIVE_DEVIATIONS
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.data_format import ALPACA_CHAT_TEMPLATE, DataFormat
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.run import RunConfig

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


class Rows(BaseDataset):
    """The smallest dataset of a user: texts, and none held out."""

    def __init__(self, *texts: str) -> None:
        self.rows = [{"text": text} for text in texts]

    def splits(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {"train": self.rows}

    def to_text(self, row: Mapping[str, Any]) -> str:
        return str(row["text"])


def texts_of(dataset: BaseDataset, split: str = "train") -> list[str]:
    return [dataset.to_example(row)["text"] for row in dataset.splits()[split]]


def open_file(path: Path, content: str | bytes, **settings: Any) -> BaseDataset:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_dataset(DatasetConfig(path=str(path), **{"validation_fraction": 0.0} | settings))


# -- files ---------------------------------------------------------------------------------------

ROWS = [{"q": "a, b", "a": 'say "x"'}, {"q": "é\n2", "a": "7"}]
TEXTS = ['a, b = say "x"', "é\n2 = 7"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "".join(json.dumps(row) + "\n\n" for row in ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("rows.csv", 'q,a\n"a, b","say ""x"""\n"é\n2",7\n'),
        ("rows.tsv", 'q\ta\n"a, b"\t"say ""x"""\n"é\n2"\t7\n'),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("semicolons.csv", 'q;a\n"a, b";"say ""x"""\n"é\n2";7\n'),
        ("bom.csv", '\ufeffq,a\r\n"a, b","say ""x"""\r\n"é\n2",7\r\n'),
    ],
)
def test_each_format_gives_the_same_texts(tmp_path: Path, name: str, content: str) -> None:
    dataset = open_file(tmp_path / name, content, template="{q} = {a}")
    assert texts_of(dataset) == TEXTS


def test_parquet_gives_the_same_texts(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    config = DatasetConfig(
        path=str(tmp_path / "rows.parquet"), template="{q} = {a}", validation_fraction=0.0
    )
    assert texts_of(open_dataset(config)) == TEXTS


def test_each_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    assert texts_of(open_file(tmp_path / "t.txt", "one\n\n two \n")) == ["one", " two "]


def test_a_column_named_text_needs_no_setting(tmp_path: Path) -> None:
    dataset = open_file(tmp_path / "t.jsonl", '{"text": "hi", "messages": 1}\n')
    assert texts_of(dataset) == ["hi"]


def test_chat_stays_messages_and_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    dataset = open_file(tmp_path / "t.jsonl", json.dumps({"messages": messages}))
    expected = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert data_format(dataset) == DataFormat(kind="messages", conversational=True)
    files = write_jsonl(dataset, tmp_path / "out")
    assert json.loads(files["train"].read_text()) == {"messages": expected}


def test_a_folder_gives_both_splits(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "validation.jsonl").write_text('{"text": "b"}\n')
    dataset = open_dataset(DatasetConfig(path=str(tmp_path)))
    assert (texts_of(dataset), texts_of(dataset, "validation")) == (["a"], ["b"])


@given(num_rows=st.integers(1, 60), fraction=st.floats(0, 1, exclude_max=True))
def test_splits_share_no_row_and_lose_none(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, fraction: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.txt"
    content = "".join(f"{index}\n" for index in range(num_rows))
    dataset = open_file(path, content, validation_fraction=fraction)
    train, validation = texts_of(dataset), texts_of(dataset, "validation")
    assert sorted(train + validation, key=int) == [str(index) for index in range(num_rows)]
    assert train
    assert len(validation) == min(math.ceil(fraction * num_rows), num_rows - 1)
    assert train == sorted(train, key=int)


BROKEN = {
    "not JSON": (
        "t.jsonl",
        '{"text": "a"}\n{"text": }\n',
        ":2: is not JSON: Expecting value; correct the line",
    ),
    "no object": (
        "t.jsonl",
        '["a"]\n',
        ':1: is not a JSON object, got list; write {"column": value, …} per line',
    ),
    "missing column": (
        "t.jsonl",
        '{"text": "a"}\n\n{"txt": "b", "id": 1}\n',
        ":3: column 'text' is missing; there are txt, id",
    ),
    "null": (
        "t.jsonl",
        '{"text": null}\n',
        ":1: column 'text' must hold text, got nothing; correct or remove the row, or name other "
        "columns under dataset",
    ),
    "number": (
        "t.jsonl",
        '{"text": 5}\n',
        ":1: column 'text' must hold text, got int; correct or remove the row, or name other "
        "columns under dataset",
    ),
    "message": (
        "t.jsonl",
        '{"messages": [{"from": "a"}]}\n',
        ":1: column 'messages': message 1 must have role and content, or from and value; correct "
        "or remove the row",
    ),
    "messages": (
        "t.jsonl",
        '{"messages": "hi"}\n',
        ":1: column 'messages' must hold a list of messages, got str; correct or remove the row",
    ),
    "no rows": ("t.jsonl", "\n", ": has no rows; give at least one"),
    "Latin-1": (
        "t.jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}\n',
        ":2: is not UTF-8 text (byte 0xe9); save the file as UTF-8",
    ),
    "JSON text": ("t.json", "{}", ": is not a JSON list of objects; one row is one object"),
    "broken JSON": ("t.json", '[{"text":\n}]', ":2: is not JSON: Expecting value; correct it"),
    "short CSV row": (
        "t.csv",
        "text,id\na,1\nb\n",
        ":3: has 1 values for the 2 columns text, id; quote a value that holds the delimiter",
    ),
    "lists in lists": (
        "t.jsonl",
        '{"text": ' + "[" * 100_000,
        ":1: is not JSON: maximum recursion depth exceeded while decoding a JSON array from a "
        "unicode string; correct the line",
    ),
    "column twice": (
        "t.csv",
        "text,text\na,b\n",
        ":1: has the column 'text' twice; rename one of them",
    ),
    "CSV header only": ("t.csv", "text\n", ": has no rows; give at least one"),
    "open CSV quote": ("t.csv", 'text\n"a\n', ":2: is not CSV: unexpected end of data; correct it"),
    "unknown type": (
        "t.xlsx",
        "a",
        ": can't be read as .xlsx; accepted: .jsonl, .json, .csv, .tsv, .parquet, .txt",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataFileError) as caught:
        open_file(tmp_path / name, content)
    assert str(caught.value) == f"{tmp_path / name}{message}"


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"t\.jsonl: can't be read \(No such file"):
        open_dataset(DatasetConfig(path=str(tmp_path / "t.jsonl")))


def test_a_file_that_is_not_parquet_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataFileError, match=r"t\.parquet: is not Parquet: "):
        open_file(tmp_path / "t.parquet", "text")


@pytest.mark.parametrize("template", ["plain", "{}", "{0[1]}", "{a.b}", "{a", "a}"])
def test_a_template_names_columns_and_nothing_else(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.template: "):
        DatasetConfig(path="t.jsonl", template=template)


def test_a_template_that_does_not_suit_the_values_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match=r"t\.jsonl:1: dataset\.template: can't be filled"):
        open_file(tmp_path / "t.jsonl", '{"a": "x"}\n', template="{a:d}")


# -- classes -------------------------------------------------------------------------------------

USER_CODE = """
from whichlora.dataset import BaseDataset

class Mine(BaseDataset):
    def splits(self):
        return {"train": [{"n": 1}, {"n": 2}]}

    def to_text(self, row):
        return f"number {row['n']}"

class Unfinished(BaseDataset):
    pass

class Careless(Mine):
    def splits(self):
        return [1, 2]

class Silent(Mine):
    def to_text(self, row):
        return None
"""


def open_class(folder: Path, name: str, code: str = USER_CODE) -> BaseDataset:
    (folder / "mine.py").write_text(code)
    return open_dataset(DatasetConfig(path=f"{folder / 'mine.py'}:{name}"))


def count_bytes(dataset: BaseDataset, max_length: int = 100) -> TokenLengths:
    return count_tokens(dataset, tokenizer=BYTE_LEVEL, offline=True, max_length=max_length)


def test_a_class_of_the_user_is_a_dataset(tmp_path: Path) -> None:
    assert texts_of(open_class(tmp_path, "Mine")) == ["number 1", "number 2"]


def test_a_class_of_an_installed_module_is_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_users_module.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    dataset = open_dataset(DatasetConfig(path="a_users_module:Mine"))
    assert count_bytes(dataset).lengths == {"train": (9, 9), "validation": ()}


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Other", USER_CODE, "there are Mine, Unfinished, Careless, Silent"),
        ("Unfinished", USER_CODE, "Unfinished can't be made: TypeError"),
        ("Mine", "import no_such_module", "can't be imported (ModuleNotFoundError"),
        ("Mine", "class Mine: pass", "is not a whichlora.dataset.BaseDataset; there are none"),
    ],
)
def test_a_class_that_is_no_dataset_is_told(
    tmp_path: Path, name: str, code: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_class(tmp_path, name, code)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Careless", "Careless.splits() must return a mapping with the key 'train', got list"),
        ("Silent", "row 0 of train: a row of text must hold text in each, or a list"),
    ],
)
def test_what_a_class_returns_is_checked(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        count_bytes(open_class(tmp_path, name))
    assert message in str(caught.value)


# -- the hub, as the library datasets shows it ----------------------------------------------------


class HubRows(list[dict[str, str]]):
    """What WhichLoRA uses of `datasets.Dataset`."""

    column_names = ("text",)

    def select(self, indexes: list[int]) -> HubRows:
        return HubRows(self[index] for index in indexes)


def fake_hub(monkeypatch: pytest.MonkeyPatch, **splits: HubRows) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> HubRows:
        if path != "org/data":
            raise ConnectionError("can't reach\nthe hub")
        return splits[split]

    library = types.ModuleType("datasets")
    library.__dict__.update(
        load_dataset=load_dataset, get_dataset_split_names=lambda path, name: list(splits)
    )
    monkeypatch.setitem(sys.modules, "datasets", library)


def test_a_hub_dataset_keeps_its_validation_split(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, train=HubRows([{"text": "a"}]), validation=HubRows([{"text": "b"}]))
    dataset = open_dataset(DatasetConfig(path="org/data"))
    assert (texts_of(dataset), texts_of(dataset, "validation")) == (["a"], ["b"])


def test_a_hub_dataset_without_validation_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, train=HubRows({"text": str(index)} for index in range(10)))
    dataset = open_dataset(DatasetConfig(path="org/data", validation_fraction=0.2))
    assert (len(texts_of(dataset)), len(texts_of(dataset, "validation"))) == (8, 2)


@pytest.mark.parametrize(
    ("split", "names", "held_out"),
    [
        ("train", ("train", "test"), "test"),
        ("train_sft", ("train_sft", "test_prefs", "test_sft", "validation"), "test_sft"),
        ("train", ("train", "dev", "test"), "dev"),
    ],
)
def test_a_hub_dataset_keeps_the_split_that_goes_with_the_training_split(
    monkeypatch: pytest.MonkeyPatch, split: str, names: tuple[str, ...], held_out: str
) -> None:
    fake_hub(monkeypatch, **{name: HubRows([{"text": name}]) for name in names})
    dataset = open_dataset(DatasetConfig(path="org/data", split=split))
    assert texts_of(dataset, "validation") == [held_out]


def test_a_hub_dataset_of_unknown_columns_is_told_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_hub(monkeypatch, train=HubRows([{"Frage": "q", "Antwort": "a"}]))
    with pytest.raises(ConfigError, match=r"^dataset: org/data has the columns Frage, Antwort, wh"):
        open_dataset(DatasetConfig(path="org/data"))


def test_a_hub_dataset_that_can_not_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"'org/none' can't be loaded \(ConnectionError: can't rea"
    ):
        open_dataset(DatasetConfig(path="org/none"))


def test_a_hub_dataset_without_the_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'whichlora\[profile\]'"):
        open_dataset(DatasetConfig(path="org/data"))


# -- lengths -------------------------------------------------------------------------------------


def test_byte_lengths_are_cut_and_counted() -> None:
    lengths = count_bytes(Rows("abc", "é", "x" * 20), max_length=10)
    assert lengths.lengths["train"] == (4, 3, 10)  # with the end of each text
    assert (lengths.num_truncated, lengths.method) == (1, "bytes")
    assert f", 1 row is cut to {lengths.max_length} tokens" in lengths.describe()


def test_rows_whose_prompt_fills_the_length_are_left_out_and_counted() -> None:
    def count(max_length: int, *rows: Mapping[str, Any]) -> TokenLengths:
        return count_tokens(
            Examples(*rows),
            tokenizer=BYTE_LEVEL,
            offline=True,
            max_length=max_length,
            completions_only=True,
        )

    short = {"prompt": "abc", "completion": "de"}  # 3 tokens, and 2 with the end of the text
    long = {"prompt": "x" * 8, "completion": "y"}
    assert count(10, short, long).lengths["train"] == (6, 10)
    whole = count(9, short, long)
    assert (whole.lengths["train"], whole.num_truncated, whole.num_unlearned) == ((6, 9), 1, 0)
    cut = count(8, short, long)  # all that is left of the second is its prompt
    assert (cut.lengths["train"], cut.num_truncated, cut.num_unlearned) == ((6,), 0, 1)
    assert cut.changed() == ["1 rows are left out: within 8 tokens nothing in them is learned"]
    with pytest.raises(ConfigError, match="nothing is learned within 3 tokens of any row"):
        count(3, short, long)
    # whoever learns all tokens loses no row
    assert count_bytes(Examples(short, long), max_length=3).lengths["train"] == (3, 3)
    unanswered = {"messages": [USER]}
    answered = {"messages": [USER, ASSISTANT]}
    assert count(10**6, answered, unanswered).num_unlearned == 1
    said = count(UNCUT, answered, unanswered).changed()
    assert said == ["1 rows are left out: no turn in them is the assistant's"]


@pytest.mark.parametrize("completions_only", [True, False])
def test_conversations_without_an_answer_are_refused_with_their_roles(
    completions_only: bool,
) -> None:
    def count() -> TokenLengths:
        oracle = {"role": "oracle", "content": "Hello"}  # a name of a template's own
        return count_tokens(
            Examples({"messages": [USER]}, {"messages": [SYSTEM, USER, oracle]}),
            tokenizer=BYTE_LEVEL,
            offline=True,
            max_length=100,
            completions_only=completions_only,
        )

    if not completions_only:
        assert len(count().lengths["train"]) == 2
        return
    told = r"no turn is the assistant's: roles are 'user', 'system', 'oracle'; name the role"
    with pytest.raises(ConfigError, match=told):
        count()


def test_an_answer_without_text_is_told(tmp_path: Path) -> None:
    ask, call = {"role": "user", "content": "x"}, {"name": "f", "arguments": {}}
    answers: list[dict[str, Any]] = [
        {"content": " "},
        {"content": "y"},
        {"content": "", "tool_calls": [{"type": "function", "function": call}]},
    ]
    rows = [{"messages": [ask, {"role": "assistant", **answer}]} for answer in answers]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    data = open_dataset(DatasetConfig(path=str(path), validation_fraction=0.0))
    lengths = count_tokens(data, tokenizer=None, offline=True, max_length=64)
    assert lengths.changed() == [
        "1 row without text is left out",
        "1 row has an answer without text, of which the end is learned",
    ]


def test_rows_without_text_are_left_out_and_counted() -> None:
    lengths = count_bytes(Rows("abc", "", " \n"))
    assert (lengths.lengths["train"], lengths.num_empty) == ((4,), 2)
    assert lengths.describe().endswith("longest 4, 2 rows without text are left out")
    assert lengths.changed() == ["2 rows without text are left out"]
    with pytest.raises(ConfigError, match="has no text to learn in its split train"):
        count_bytes(Rows("", " "))


ALPACA_TURN = len("### Instruction:\nHi\n\n### Response:\nHello" + "$" + "\n\n")
ALPACA_PREAMBLE = len(
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n"
)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (None, (1 + (5 + 3) + (5 + 1) + (5 + 2), 1 + (5 + 1) + (5 + 2))),
        # the prompt of Stanford Alpaca; the end of the text is one token
        (BYTE_LEVEL, (len("Be brief.\n\n") + ALPACA_TURN, ALPACA_PREAMBLE + ALPACA_TURN)),
    ],
)
def test_messages_without_a_tokenizer_count_with_what_a_template_adds(
    tokenizer: str | None, expected: tuple[int, ...]
) -> None:
    if tokenizer is not None:
        pytest.importorskip("jinja2", reason="comes with torch, and renders templates")
    rows = [{"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}]
    for row, number in zip(rows, expected, strict=True):
        lengths = count_tokens(Examples(row), tokenizer=tokenizer, offline=True, max_length=999)
        assert lengths.lengths["train"] == (number,)
        assert ("5 tokens a message" in lengths.method) == (tokenizer is None)


def test_half_a_character_is_told() -> None:
    with pytest.raises(ConfigError, match="row 1 of train: holds half of a surrogate pair"):
        count_bytes(Rows("a", "\ud83d"))


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [(None, "there is no tokenizer"), ("org/none", "tokenizer org/none is not on this machine")],
)
def test_an_estimate_says_that_it_is_one_and_why(
    tokenizer: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    lengths = count_tokens(Rows("abcde"), tokenizer=tokenizer, offline=True, max_length=9)
    assert lengths.lengths["train"] == (3,)
    assert lengths.method == (
        f"estimated: 1 token per 4 UTF-8 bytes, which may be 2.96 to 5, as {why}"
    )


def test_an_estimate_goes_with_what_tokenizers_may_make_of_it() -> None:
    rows = Rows(*("word " * (8 * number) for number in range(1, 26)))  # 40 to 1000 bytes
    lengths = count_tokens(rows, tokenizer=None, offline=True, max_length=10_000)
    fewest, most = (sum(each.lengths["train"]) for each in lengths.alternatives)
    num_bytes = 40 * 25 * 26 // 2
    assert fewest == pytest.approx(num_bytes / 5 + 25, rel=0.02)
    assert most == pytest.approx(num_bytes / 2.96 + 25, rel=0.02)
    assert (max(lengths.lengths["train"]), lengths.longest()) == (251, 357)
    load = workload(lengths, batch_size=4, seq_len=10_000)
    assert (load.least_longest, load.longest) == (201, 357)
    alone = workload(lengths, batch_size=1, seq_len=10_000)  # without padding
    reach = math.exp(NormalDist().inv_cdf(0.95) * alone.deviation)
    assert alone.padded_tokens / reach <= fewest
    assert alone.padded_tokens * reach == pytest.approx(most)
    cut = count_tokens(rows, tokenizer=None, offline=True, max_length=300)
    assert cut.longest() == 300


def test_counted_lengths_are_what_they_are() -> None:
    lengths = count_tokens(Rows("a" * 40), tokenizer=BYTE_LEVEL, offline=True, max_length=99)
    assert (lengths.alternatives, lengths.longest()) == ((), 41)
    assert workload(lengths, batch_size=1, seq_len=99).deviation == 0


def test_any_first_few_of_the_further_lengths_share_the_batches() -> None:
    lengths = TokenLengths(lengths={"train": (10,) * 80 + (1000,) * 20}, max_length=2000, method="")
    further = workload(lengths, batch_size=1).further_lengths(20)
    for number in (5, 10, 20):
        share = sum(length > 500 for length in further[:number]) / number
        assert share == pytest.approx(0.2, abs=0.1)


def test_a_tokenizer_in_a_folder_counts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)  # of the file, not of the job
    words.enable_padding(length=2)
    words.save(str(tmp_path / "tokenizer.json"))
    dataset = Rows("a", "a b c d")
    lengths = count_tokens(dataset, tokenizer=str(tmp_path), offline=True, max_length=3)
    assert (lengths.lengths["train"], lengths.num_truncated) == ((1, 3), 1)
    assert lengths.method == f"tokenizer {tmp_path}"

    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    ended = count_tokens(dataset, tokenizer=str(tmp_path), offline=True, max_length=9)
    assert ended.lengths["train"] == (1, 5)  # the first ends by itself

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataFileError, match=r"tokenizer\.json: is not a tokenizer: "):
        count_tokens(dataset, tokenizer=str(tmp_path), offline=True, max_length=3)


@pytest.mark.oracle
def test_chat_is_counted_with_the_template_of_the_tokenizer_and_written_as_messages(
    tmp_path: Path,
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    words.add_special_tokens(["<s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
                "{{ m.content }} {% endfor %}",
            }
        )
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    dataset = open_file(tmp_path / "t.jsonl", json.dumps({"messages": messages}))
    lengths = count_tokens(dataset, tokenizer=str(tmp_path), offline=True, max_length=99)
    assert lengths.lengths["train"] == (1 + 4,)  # <s> once, not twice
    files = write_jsonl(dataset, tmp_path / "out")
    assert json.loads(files["train"].read_text()) == {"messages": messages}


def lengths_of_counts(max_length: int = 4096, **counts: Any) -> TokenLengths:
    dataset = open_dataset(DatasetConfig(num_samples=20_000, mean_tokens=200.0, **counts))
    return count_tokens(dataset, tokenizer=None, offline=True, max_length=max_length)


def test_counts_are_spread_as_public_instruction_data() -> None:
    lengths = lengths_of_counts()
    assert lengths.num_sequences() == 20_000
    assert lengths.mean() == pytest.approx(200, rel=1e-3)
    values = lengths.lengths["train"]
    ratio = statistics.pstdev(values) / lengths.mean()
    assert ratio == pytest.approx(statistics.median(RELATIVE_DEVIATIONS.values()), rel=0.02)
    narrow, wide = (
        statistics.pstdev(alternative.lengths["train"]) / alternative.mean()
        for alternative in lengths.alternatives
    )
    assert min(RELATIVE_DEVIATIONS.values()) < narrow < 0.5 * ratio
    assert 1.4 * ratio < wide < max(RELATIVE_DEVIATIONS.values())
    assert values != tuple(sorted(values))  # packing takes them in their order
    assert lengths.method.startswith("assumed, as only counts are given: log-normal around")
    with pytest.raises(ConfigError, match="gives only counts"):
        open_dataset(DatasetConfig(num_samples=10, mean_tokens=2.5)).splits()


def test_counts_are_cut_and_the_longest_may_be_of_any_length() -> None:
    lengths = lengths_of_counts(max_length=300)
    assert lengths.num_truncated <= sum(length == 300 for length in lengths.lengths["train"])
    assert 0.1 < lengths.num_truncated / 20_000 < 0.3
    assert lengths_of_counts(max_length=100_000).longest() == 100_000
    assert lengths_of_counts(max_length=100_000, max_tokens=1500).longest() == 1500


def test_what_is_known_of_the_lengths_is_kept_to() -> None:
    lengths = lengths_of_counts(p95_tokens=500, max_tokens=2000)
    assert np.quantile(lengths.lengths["train"], 0.95) == pytest.approx(500, rel=0.01)
    assert lengths.mean() == pytest.approx(200, rel=1e-3)
    assert lengths.alternatives == ()


@given(num_samples=st.integers(1, 3000), mean=st.floats(1, 500))
def test_no_token_of_the_counts_is_lost(num_samples: int, mean: float) -> None:
    counts = assumed.lengths_of(num_samples, mean, spread=assumed.TYPICAL, max_length=10**9)
    assert len(counts) == num_samples
    assert counts.min() >= 1
    # rounding is carried over; a sequence has one token at the least
    assert num_samples * mean - 1 <= counts.sum() <= num_samples * (mean + 0.5) + 1


USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("row", "kind", "conversational"),
    [
        ({"text": "a"}, "text", False),
        ({"messages": [USER]}, "messages", True),
        ({"prompt": "a", "completion": "b"}, "prompt-completion", False),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt-completion", True),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER]}, "preference", True),
    ],
)
def test_a_row_tells_its_format(row: dict[str, Any], kind: str, conversational: bool) -> None:
    row_format = DataFormat.of(row)
    assert (row_format.kind, row_format.conversational) == (kind, conversational)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "id": 1}, "a row has the columns text, id; accepted are text; messages;"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "in each, got list, str"),
        ({"messages": "a"}, "messages can't have conversational False; accepted is True"),
        ({"text": [USER]}, "text can't have conversational True; accepted is False"),
    ],
)
def test_a_row_of_no_format_is_told(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataFormat.of(row)


class Examples(BaseDataset):
    """A user's rows that are examples already."""

    def __init__(self, *rows: Mapping[str, Any]) -> None:
        self.rows = rows

    def splits(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {"train": self.rows}

    def to_example(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row


def test_a_class_may_give_examples_of_any_format(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "a", "completion": " "}]
    lengths = count_bytes(Examples(*rows))
    assert (lengths.lengths["train"], lengths.num_empty) == ((4,), 1)
    files = write_jsonl(Examples(*rows), tmp_path)
    assert [json.loads(line) for line in files["train"].read_text().splitlines()] == rows[:1]


def test_rows_of_two_formats_are_told() -> None:
    with pytest.raises(ConfigError, match="row 1 of train: has messages as messages, and the rows"):
        count_bytes(Examples({"text": "a"}, {"messages": [USER]}))


EVERY_FORMAT = (
    {"text": "to be or not"},
    {"prompt": "to be ", "completion": "or not"},
    {"prompt": "to be ", "chosen": "or not", "rejected": "to"},
    {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]},
    {"prompt": [USER], "completion": [ASSISTANT]},
    {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [USER]},
    {"chosen": [USER, ASSISTANT], "rejected": [USER, USER]},
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, **config: Any) -> None:
    """A tokenizer of bytes that begins each text with <s>, as Llama's does."""
    tokenizers = pytest.importorskip("tokenizers")
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    content = {"tokenizer_class": "PreTrainedTokenizerFast"} | names | config
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


@pytest.mark.oracle
def test_messages_that_a_chat_template_refuses_are_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    refuses = "{{ raise_exception('System role not supported') }}"
    write_tokenizer(tmp_path, chat_template=refuses)
    with pytest.raises(ConfigError, match="refuses the messages of system, user that") as caught:
        count_tokens(
            Examples({"messages": [SYSTEM, USER]}),
            tokenizer=str(tmp_path),
            offline=True,
            max_length=99,
        )
    assert "'Be brief.': System role not supported; correct the row, or" in str(caught.value)


KINDS = ["bytes", "with a chat template", "without"]


def job_and_tokenizer(folder: Path, example: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """The job for rows like `example`, and the tokenizer that it takes."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(folder, **({"chat_template": CHATML} if kind == "with a chat template" else {}))
    weights: dict[str, Any] = {"weights": "random"} if kind == "bytes" else {}
    path = folder / "train.py"
    path.write_text(
        train_script_of(
            RunConfig(model="tiny", precision="fp32"),
            target_modules="all-linear",
            model_config={"model_type": "llama"},
            batching="longest",
            data_format=DataFormat.of(example),
            **weights,
        )
    )
    script = script_of(path)
    tokenizer = (
        script.byte_tokenizer()
        if kind == "bytes"
        else transformers.AutoTokenizer.from_pretrained(folder)
    )
    if tokenizer.chat_template is None:  # as the job does before it reads its rows
        tokenizer.chat_template = getattr(script, "CHAT_TEMPLATE", None)
    return script, tokenizer


@pytest.mark.sampled(14)
@pytest.mark.oracle
@pytest.mark.parametrize("example", EVERY_FORMAT)
@pytest.mark.parametrize("kind", KINDS)
def test_planned_lengths_are_those_that_the_job_trains_on(
    tmp_path: Path, example: dict[str, Any], kind: str
) -> None:
    script, tokenizer = job_and_tokenizer(tmp_path, example, kind)
    ids, _ = script.encode(example, tokenizer)
    planned = count_tokens(
        Examples(example),
        tokenizer=BYTE_LEVEL if kind == "bytes" else str(tmp_path),
        offline=True,
        max_length=999,
    )
    assert planned.lengths["train"] == (len(ids),)


@pytest.mark.sampled(14)
@pytest.mark.oracle
@pytest.mark.parametrize("example", EVERY_FORMAT)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_left_out_at_every_length_at_which_the_job_leaves_them_out(
    tmp_path: Path, example: dict[str, Any], kind: str
) -> None:
    script, tokenizer = job_and_tokenizer(tmp_path, example, kind)
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps(example) + "\n")
    ids, _ = script.encode(example, tokenizer)
    for length in range(2, len(ids) + 2):
        script.SEQ_LEN = length
        is_trained_on = bool(script.read_rows(rows, tokenizer))
        with contextlib.suppress(ConfigError):  # no row is left
            planned = count_tokens(
                Examples(example),
                tokenizer=BYTE_LEVEL if kind == "bytes" else str(tmp_path),
                offline=True,
                max_length=length,
                completions_only=True,
            )
            assert is_trained_on, length
            assert planned.lengths["train"] == (min(length, len(ids)),)
            continue
        assert not is_trained_on, length


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            [USER, ASSISTANT],
            "<s>Below is an instruction that describes a task. Write a response that "
            "appropriately completes the request.\n\n### Instruction:\nHi\n\n### Response:\n"
            "Hello</s>\n\n",
        ),
        (
            [SYSTEM, USER, ASSISTANT, USER],
            "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n"
            "### Instruction:\nHi\n\n",
        ),
    ],
)
def test_the_alpaca_chat_template_renders_the_prompt_of_stanford_alpaca(
    messages: list[dict[str, str]], expected: str
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1})),
        bos_token="<s>",
        eos_token="</s>",
    )
    template = ALPACA_CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert text == expected
    prompt_text = tokenizer.apply_chat_template(
        messages[:-1], chat_template=template, tokenize=False, add_generation_prompt=True
    )
    if messages[-1]["role"] == "assistant":  # what is trained starts where generation does
        assert text.startswith(prompt_text)


# -- export --------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_counted(tmp_path: Path) -> None:
    dataset = open_dataset(load_plan(QUICKSTART).dataset)
    files = write_jsonl(dataset, tmp_path / "new")
    lengths = count_tokens(dataset, tokenizer=BYTE_LEVEL, offline=True, max_length=10**6)
    assert set(files) == {"train", "validation"}
    for split, file in files.items():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert tuple(1 + len(row["text"].encode()) for row in rows) == lengths.lengths[split]
    assert sorted(path.name for path in (tmp_path / "new").glob("[!.]*")) == [
        "train.jsonl",
        "validation.jsonl",
    ]


def test_a_written_folder_opens_as_the_same_dataset(tmp_path: Path) -> None:
    dataset = open_dataset(load_plan(QUICKSTART).dataset)
    write_jsonl(dataset, tmp_path)
    again = open_dataset(DatasetConfig(path=str(tmp_path)))
    for split in ("train", "validation"):
        assert texts_of(again, split) == texts_of(dataset, split)


def test_an_empty_split_leaves_no_file_and_removes_an_old_one(tmp_path: Path) -> None:
    write_jsonl(open_dataset(load_plan(QUICKSTART).dataset), tmp_path)
    assert (tmp_path / "validation.jsonl").is_file()
    assert list(write_jsonl(Rows("a"), tmp_path)) == ["train"]
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["train.jsonl"]


def test_rows_of_the_user_are_kept(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    with pytest.raises(DataFileError, match="no record of writing it; set another output_dir"):
        write_jsonl(Rows("a"), tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataFileError, match=r"train\.jsonl: can't be written \(No space left on"):
        write_jsonl(Rows("a"), tmp_path)


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    write_jsonl(Rows("old"), tmp_path)
    with pytest.raises(ConfigError, match="surrogate"):
        write_jsonl(Rows("new", "\ud83d"), tmp_path)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["train.jsonl"]
    assert (tmp_path / "train.jsonl").read_text() == '{"text": "old"}\n'


def test_the_quickstart_data_is_small_and_varied() -> None:
    lengths = count_bytes(open_dataset(load_plan(QUICKSTART).dataset), max_length=10_000)
    assert 60 <= lengths.num_sequences() + lengths.num_sequences("validation") <= 80
    assert lengths.longest() > 3 * np.quantile(
        lengths.lengths["train"], 0.05, method="inverted_cdf"
    )
    assert (lengths.num_truncated, lengths.num_empty) == (0, 0)


def test_importing_datasets_costs_no_heavy_library() -> None:
    heavy = "('numpy', 'pandas', 'pyarrow', 'datasets', 'transformers', 'torch', 'tokenizers')"
    code = f"import sys, whichlora.dataset; print([n for n in {heavy} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
