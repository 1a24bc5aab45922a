"""The functions of `train.py` that read rows with labels, for each kind of them."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.spec.data_format import COLUMNS, DataKind

_READ = '''\
def checked(path, number, function, *arguments):
    """What `function` returns; the line that it can't take ends the script."""
    try:
        return function(*arguments)
    except Exception as error:
        kind = type(error).__name__
        raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error


def read_rows(path, tokenizer):
    """The rows of a JSONL file, cut to SEQ_LEN; batches are padded."""
    if not path.exists():
        columns = "{columns}"
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of {{columns}}")
    with path.open(encoding="utf-8") as file:
        rows = [
            (number, checked(path, number, json.loads, line))
            for number, line in enumerate(file, start=1)
        ]
{classes}\
    return [checked(path, number, encode, row, tokenizer) for number, row in rows]


'''
_FIRST_CLASSES = """\
    if not CLASSES:
        CLASSES.extend(classes_of(path, rows))
"""
_CLASSES = '''\
def classes_of(path, rows):
    """The name of each class in the order of its number; numbers are their own names."""
    labels = set()
    for number, row in rows:
        labels.update(checked(path, number, lambda: {labels}))
    names = sorted(labels, key=str)
    if all(isinstance(label, int) for label in labels):
        names = list(range(max(labels, default=0) + 1))
    if len(names) > NUM_LABELS:
        raise SystemExit(
            f"{{path}}: has {{len(names)}} classes, and num_labels is {{NUM_LABELS}}; plan it anew "
            f"with num_labels {{len(names)}}"
        )
    return names + [f"unused-{{number}}" for number in range(len(names), NUM_LABELS)]


'''
_CLASSIFIED = '''\
def encode(row, tokenizer):
    """Token ids of a text, and the number of its class."""
    ids = tokenizer(row["text"], truncation=True, max_length=SEQ_LEN)["input_ids"]
    return {"input_ids": ids, "labels": CLASSES.index(row["label"])}


'''
_TAGGED = '''\
def encode(row, tokenizer):
    """Token ids of words, and the class of the first token of each; others (-100) have no loss."""
    options = {"truncation": True, "max_length": SEQ_LEN, "is_split_into_words": True}
    words = tokenizer(row["tokens"], **options)
    labels, before = [], None
    for word in words.word_ids():
        is_first = word is not None and word != before
        labels.append(CLASSES.index(row["tags"][word]) if is_first else -100)
        before = word
    return {"input_ids": words["input_ids"], "labels": labels}


'''
_SPANS = '''\
def encode(row, tokenizer):
    """Token ids of a question and its text, and where the answer is; token 0 where it is not."""
    options = {"truncation": "only_second", "max_length": SEQ_LEN, "return_offsets_mapping": True}
    pair = tokenizer(row["question"], row["context"], **options)
    start = end = 0
    if row["answers"]["text"]:
        first = row["answers"]["answer_start"][0]
        last = first + len(row["answers"]["text"][0])
        of_text = [number for number, part in enumerate(pair.sequence_ids()) if part == 1]
        offsets = pair["offset_mapping"]
        inside = [n for n in of_text if offsets[n][0] < last and offsets[n][1] > first]
        if inside and offsets[of_text[-1]][1] >= last:
            start, end = inside[0], inside[-1]
    return {"input_ids": pair["input_ids"], "start_positions": start, "end_positions": end}


'''
_SCORED = '''\
def encode(row, tokenizer):
    """Token ids of a query and a document, and how well it answers."""
    options = {"truncation": "longest_first", "max_length": SEQ_LEN}
    ids = tokenizer(row["query"], row["document"], **options)["input_ids"]
    return {"input_ids": ids, "labels": [float(row["score"])]}


'''
_ANCHORS = '''\
def encode(row, tokenizer):
    """The texts of a row in the order of the loss, which the collator makes token ids of."""
    negatives = [name for name in row if re.fullmatch(r"negative(_\\d+)?", name)]
    negatives.sort(key=lambda name: int(name.partition("_")[2] or 0))
    if len(negatives) != NUM_NEGATIVES:
        raise ValueError(f"has {len(negatives)} negatives, planned with {NUM_NEGATIVES}")
    return {name: row[name] for name in ["anchor", "positive", *negatives]}


'''
_ENCODE: Mapping[DataKind, str] = {
    "classified": _CLASSIFIED,
    "tagged": _TAGGED,
    "spans": _SPANS,
    "scored": _SCORED,
    "anchors": _ANCHORS,
}
_LABELS: Mapping[DataKind, str] = {"classified": '[row["label"]]', "tagged": 'row["tags"]'}
COLLATORS: Mapping[DataKind, str] = {
    "classified": "DataCollatorWithPadding",
    "tagged": "DataCollatorForTokenClassification",
    "spans": "DataCollatorWithPadding",
    "scored": "DataCollatorWithPadding",
}
"""What pads a batch, of the names that transformers exports."""


def label_row_functions(kind: DataKind) -> str:
    """The source of `read_rows` and of what it calls."""
    made = _CLASSES.format(labels=_LABELS[kind]) if has_classes(kind) else ""
    first = _FIRST_CLASSES * has_classes(kind)
    read = _READ.format(columns=", ".join(COLUMNS[kind]), classes=first)
    return made + _ENCODE[kind] + read


def has_classes(kind: DataKind) -> bool:
    """Whether a row names classes, which the model numbers."""
    return kind in _LABELS
