"""The functions of `train.py` that read a JSONL file into token ids and labels."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.exports.python_source import literal
from whichlora.exports.train_script.audio_rows import (
    AUDIO_BATCHES,
    AUDIO_ROWS,
    READ_CLIPS,
    TRANSCRIPT_ROWS,
)
from whichlora.exports.train_script.image_rows import IMAGE_BATCHES, IMAGE_ROWS, LIMIT
from whichlora.exports.train_script.label_rows import label_row_functions
from whichlora.exports.train_script.media_rows import MEDIA_ROWS
from whichlora.exports.train_script.target_rows import BATCHING, TARGET_ROWS, encode_pairs
from whichlora.methods import input_dtype
from whichlora.spec.data_format import COLUMNS, LABELLED_KINDS, TRANSCRIPTS, DataFormat
from whichlora.spec.plan import Collator, TrainOn
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer

_END = '''\
def with_end(ids, tokenizer):
    """`ids` with the token that ends a text, unless it stands there."""
    if tokenizer.eos_token_id in (None, *ids[-1:]):
        return ids
    return [*ids, tokenizer.eos_token_id]


'''
_ALL = '''\
def encode(row, tokenizer):
    """Token ids of a row, and their labels: all of them are learned, its end, too."""
    text = {whole}
    ids = with_end(tokenizer(text)["input_ids"], tokenizer)
    return ids, ids


'''
_COMPLETION = '''\
def encode(row, tokenizer):
    """Token ids of a row, and their labels: the prompt (-100) is not learned."""
    prompt = {prompt}
    ids = tokenizer(prompt + row["{answer}"])["input_ids"]
    ids = with_end(ids, tokenizer)
    start = len(commonprefix([tokenizer(prompt)["input_ids"], ids]))
    return ids, [-100] * start + ids[start:]


'''
_RENDER = '''\
def render(messages, tokenizer, **options):
    """Messages as text, by the chat template of the tokenizer."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def tokens(text, tokenizer):
    """Token ids of a text that the chat template has rendered."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


'''
_CHAT_ALL = '''\
def encode(row, tokenizer):
    """Token ids of a conversation, and their labels: all of them are learned."""
    ids = tokens(render({messages}, tokenizer), tokenizer)
    return ids, ids


'''
_CHAT_COMPLETION = '''\
def encode(row, tokenizer):
    """Token ids of a row, and their labels: the prompt (-100) is not learned."""
{split}\
    before = tokens(render(prompt, tokenizer, add_generation_prompt=True), tokenizer)
    ids = tokens(render(prompt + answer, tokenizer), tokenizer)
    start = len(commonprefix([before, ids]))
    return ids, [-100] * start + ids[start:]


'''
_PROMPT_AND_COMPLETION = '    prompt, answer = row["prompt"], row["completion"]\n'
_PROMPT_AND_CHOSEN = """\
    answer = row["chosen"]
    prompt = row.get("prompt", answer[:-1])
    answer = answer if "prompt" in row else answer[-1:]
"""
_CHAT_TURNS = '''\
def encode(row, tokenizer):
    """Token ids of a conversation, and their labels: the assistant's turns are learned."""
    messages = row["messages"]
    if re.search(r"\\{%-?\\s*generation\\b", str(tokenizer.chat_template)):
        marked = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = marked["input_ids"], marked["assistant_masks"]
    else:
        ids, learned = mark_turns(messages, tokenizer)
    return ids, [token if on else -100 for token, on in zip(ids, learned)]


def mark_turns(messages, tokenizer):
    """Token ids of a conversation, and a 1 for each of the assistant's."""
    whole = render(messages, tokenizer)
    ids = tokens(whole, tokenizer)
    learned = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:number], tokenizer, add_generation_prompt=True)
        after = render(messages[: number + 1], tokenizer)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise ValueError(
                "the chat template renders this turn of the assistant otherwise once "
                "more follow, so it can't be told apart; plan with train_on: all, "
                "or mark the turns in the template with {% generation %}"
            )
        start = len(commonprefix([tokens(before, tokenizer), ids]))
        end = len(commonprefix([tokens(after, tokenizer), ids]))
        learned[start:end] = [1] * (end - start)
    return ids, learned


'''
_MASKED = '''\
def encode(row, tokenizer):
    """Token ids of a text; the collator chooses which of them to fill in."""
{text}\
    ids = tokenizer(text{truncation})["input_ids"]
    return ids, ids


'''
_READ = '''\
def read_rows(path, tokenizer):
    """{summary}"""
    encoded = []
    if not path.exists():
        columns = "{columns}"
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of {{columns}}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                encoded.append(encode(json.loads(line), tokenizer))
            except Exception as error:
                kind = type(error).__name__
                raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error
{batching}\
'''
_WHOLE = "    rows = [(ids[:SEQ_LEN], labels[:SEQ_LEN]) for ids, labels in encoded]\n"
_SUMMARIES: dict[Collator, str] = {
    "longest": "The rows of a JSONL file; batches are padded to their longest.",
    "grouped": "The rows of a JSONL file; batches are padded to their longest.",
    "fixed": "The rows of a JSONL file; batches are padded to SEQ_LEN.",
    "packed": "The rows of a JSONL file, joined and cut into blocks of SEQ_LEN: no padding.",
    "packed-bfd": "The rows of a JSONL file, whole, put together into rows of up to SEQ_LEN.",
}
_BATCHING: dict[Collator, str] = {
    "longest": _WHOLE,
    "grouped": _WHOLE,
    "fixed": _WHOLE,
    "packed": """\
    all_ids = [token for ids, _ in encoded for token in ids]
    all_labels = [label for _, labels in encoded for label in labels]
    rows = [
        (all_ids[start : start + SEQ_LEN], all_labels[start : start + SEQ_LEN])
        for start in range(0, len(all_ids) - SEQ_LEN + 1, SEQ_LEN)
    ]
""",
    "packed-bfd": """\
    encoded = [(ids[:SEQ_LEN], labels[:SEQ_LEN]) for ids, labels in encoded]
    rows = []
    for start in range(0, len(encoded), 1000):  # TRL packs each thousand separately
        room = []  # free tokens, and of which row
        block = encoded[start : start + 1000]
        for ids, labels in sorted(block, key=lambda pair: len(pair[0]), reverse=True):
            fits = bisect_left(room, (len(ids), -1))
            free, number = room.pop(fits) if fits < len(room) else (SEQ_LEN, len(rows))
            rows += [([], [])] * (number == len(rows))
            rows[number] = (rows[number][0] + ids, rows[number][1] + labels)
            insort(room, (free - len(ids), number))
""",
}
_CAUSAL_ROWS = """\
    learned = [row for row in rows if any(label != -100 for label in row[1][1:])]
    if len(learned) < len(rows):
        few = f"{len(rows) - len(learned)} of {len(rows)} rows"
        say(f"{path}: {few} are left out: nothing in them is learned")
    return [{"input_ids": ids, "labels": labels} for ids, labels in learned]


"""
_MASKED_ROWS = """\
    return [{"input_ids": ids} for ids, _ in rows if ids]


"""


_ANSWERS = '''\
def read_rows(path, tokenizer):
    """The rows of a JSONL file; the trainer makes token ids of them."""
    rows, needed = [], {needed}
    if not path.exists():
        columns = ", ".join(needed)
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of {{columns}}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                rows.append({{name: row[name] for name in needed}} | row)
            except Exception as error:
                kind = type(error).__name__
                raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error
    return {rows}


'''
_PROMPTS = '''\
def short_prompts(rows, tokenizer):
    """The rows whose prompt leaves room for {written} tokens of an answer within SEQ_LEN."""
    short = []
    for row in rows:
        ids = row["prompt"]
        if isinstance(ids, str):
            ids = tokenizer(ids)["input_ids"]
        else:
            options = {{"add_generation_prompt": True, "return_dict": True}}
            ids = tokenizer.apply_chat_template(ids, **options)["input_ids"]
        short += [row] * (len(ids) + {written} <= SEQ_LEN)
    if len(short) < len(rows):
        few = f"{{len(rows) - len(short)}} of {{len(rows)}} rows"
        say(f"{{few}} are left out: they are longer than SEQ_LEN allows")
    return short


def reward_functions():
    """Every function of rewards.py, which you write beside this file."""
    path = HERE / "rewards.py"
    if not path.exists():
        raise SystemExit(
            f"{{path}}: is missing; write functions there that give each answer a number: "
            "def reward(completions, **columns): return [...]"
        )
    named = runpy.run_path(str(path), run_name="rewards").items()
    return [
        value
        for name, value in named
        if getattr(value, "__module__", "") == "rewards" and name[0] != "_"
    ]


'''
_IS_LEARNED = '''\
def is_learned(row):
    """Whether the prompt leaves tokens of each answer within SEQ_LEN."""
    names = [name for name in row if name.endswith("_labels")]
    return all(any(label != -100 for label in row[name]) for name in names)


'''


def _answers(data: DataFormat, run: RunConfig) -> str:
    """The source of `read_rows` for rows that the trainer makes token ids of."""
    trainer = get_trainer(run.trainer)
    # a prompt may be what both answers of a pair begin with
    needed = [name for name in COLUMNS[data.kind] if (name, data.kind) != ("prompt", "preference")]
    written = trainer.scored_tokens(run)
    prompts = trainer.writes_answers
    rows = "short_prompts(rows, tokenizer)" if prompts else "rows"
    read = _ANSWERS.format(needed=literal(needed), rows=rows)
    if prompts:
        read += _PROMPTS.format(written=written)
    return read + _IS_LEARNED * trainer.keeps_unlearned


def row_functions(
    data: DataFormat,
    run: RunConfig,
    train_on: TrainOn,
    reader: Collator,
    *,
    masked_lm: bool,
    has_target: bool = False,
) -> str:
    """The source of `read_rows` and of what it calls, for rows of one format.

    Args:
        has_target: an encoder reads one text of a row, and its decoder writes the other.
    """
    if data.kind in LABELLED_KINDS:
        return label_row_functions(data.kind)
    if data == TRANSCRIPTS:
        dtype = input_dtype(run)
        cast = "" if dtype == "float32" else f".to(torch.{dtype})"
        return READ_CLIPS + TRANSCRIPT_ROWS.format(cast=cast)
    if get_trainer(run.trainer).rows != "texts":
        return _answers(data, run)
    columns = ", ".join(COLUMNS[data.kind])
    if has_target:
        read = _READ.format(summary=_SUMMARIES[reader], batching=BATCHING, columns=columns)
        return encode_pairs(data) + read + TARGET_ROWS
    encode = _masked(data, reader) if masked_lm else _causal(data, train_on)
    if data.media:
        return encode + _with_media(data, run)
    read = _READ.format(
        summary=_SUMMARIES[reader],
        batching=_BATCHING[reader],
        columns=columns,
    )
    return encode + read + (_MASKED_ROWS if masked_lm else _CAUSAL_ROWS)


_MEDIA: Mapping[str, Mapping[str, str]] = {
    "images": {
        "media": "images",
        "medium": "image",
        "one": "an image",
        "found": "str(HERE / image)",
        "tokens": "image_tokens(processor, image_size(image))",
        "why": "with their images they exceed SEQ_LEN",
    },
    "audios": {
        "media": "audios",
        "medium": "audio",
        "one": "a clip",
        "found": "audio",
        "tokens": "audio_tokens(processor, audio)",
        "why": "with their clips they exceed SEQ_LEN, or a clip is longer than the model reads",
    },
}


def _with_media(data: DataFormat, run: RunConfig) -> str:
    """The functions that read images or clips, rows and batches."""
    rows = MEDIA_ROWS.format(
        **_MEDIA[data.media], columns=", ".join(COLUMNS[data.kind]), messages=_whole(data)
    )
    if data.audios:
        return READ_CLIPS + AUDIO_ROWS + rows + AUDIO_BATCHES
    limit, size, load = "", "image.size[::-1] if is_turned else image.size", "load_image(image)"
    if run.image_max_pixels is not None:
        limit, size = LIMIT, f"limited({size})"
        load = "load_image(image).resize(image_size(image))"
    return limit + IMAGE_ROWS.format(size=size) + rows + IMAGE_BATCHES.format(load=load)


def _causal(data: DataFormat, train_on: TrainOn) -> str:
    if data.conversational:
        if train_on == "all":
            return _RENDER + _CHAT_ALL.format(messages=_whole(data))
        if data.kind == "messages":
            return _RENDER + _CHAT_TURNS
        chosen = data.kind == "preference"
        split = _PROMPT_AND_CHOSEN if chosen else _PROMPT_AND_COMPLETION
        return _RENDER + _CHAT_COMPLETION.format(split=split)
    if data.kind == "text" or train_on == "all":
        return _END + _ALL.format(whole=_whole(data))
    if data.kind == "preference":
        return _END + _COMPLETION.format(prompt='row.get("prompt", "")', answer="chosen")
    return _END + _COMPLETION.format(prompt='row["prompt"]', answer="completion")


def _whole(data: DataFormat) -> str:
    """Expression of all that a row says, as text or as messages."""
    match data.kind, data.conversational:
        case "preference", False:
            return 'row.get("prompt", "") + row["chosen"]'
        case "preference", True:
            return 'row.get("prompt", []) + row["chosen"]'
        case "prompt-completion", _:
            return 'row["prompt"] + row["completion"]'
    return f'row["{data.kind}"]'


def _masked(data: DataFormat, reader: Collator) -> str:
    lines = f"    text = {_whole(data)}\n"
    if data.conversational:
        lines = f"    messages = {_whole(data)}\n"
        lines += '    text = "\\n".join(message["content"] for message in messages)\n'
    cut = "" if reader == "packed" else ", truncation=True, max_length=SEQ_LEN"
    return _MASKED.format(text=lines, truncation=cut)
