"""The functions of `train.py` that read rows with images or clips beside messages."""

from __future__ import annotations

MEDIA_PROCESSOR_LINES = """\
try:
    processor = AutoProcessor.from_pretrained({source}{hub})
except ImportError as error:  # torchvision, for one that reads videos, too
    reason = str(error).strip().partition(". ")[0]
    raise SystemExit(f"{{{source}}}: its processor lacks a library: {{reason}}") from None
tokenizer = processor.tokenizer
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
tokenizer.padding_side = "right"
tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
if tokenizer.chat_template is None:
    raise SystemExit(f"{{{source}}}: has no chat template, which places the {media}")
"""
MEDIA_ROWS = '''\
def read_rows(path, processor):
    """The rows of a JSONL file: text, {media} and labels; {media} are read batch by batch."""
    rows, tokenizer = [], processor.tokenizer
    place = tokenizer.convert_tokens_to_ids(processor.{medium}_token)
    if not path.exists():
        columns = "{columns}, {media}"
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of {{columns}}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                {media} = [{found} for {medium} in row["{media}"]]
                numbers = [{tokens} for {medium} in {media}]
                ids, learned = encode(row, tokenizer)
                places = [at for at, token in enumerate(ids) if token == place]
                if len(places) != len({media}):
                    raise ValueError(f"{{len({media})}} {media}, {{len(places)}} places for them")
            except Exception as error:
                kind = type(error).__name__
                raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error
            labels, start = [], 0
            for at, tokens_of_it in zip(places, numbers):  # of which no token is learned
                labels += learned[start:at] + [-100] * tokens_of_it
                start = at + 1
            labels += learned[start:]
            text = render({messages}, tokenizer)
            rows.append({{"text": text, "{media}": {media}, "labels": labels, "places": places}})
    kept = [row for row in rows if len(row["labels"]) <= SEQ_LEN or not row["{media}"]]
    if len(kept) < len(rows):
        few = f"{{len(rows) - len(kept)}} of {{len(rows)}} rows"
        say(f"{{path}}: {{few}} are left out: {why}")
    learned = [row for row in kept if any(label != -100 for label in row["labels"][1:SEQ_LEN])]
    if len(learned) < len(kept):
        few = f"{{len(kept) - len(learned)}} of {{len(kept)}} rows"
        say(f"{{path}}: {{few}} are left out: nothing in them is learned")
    return learned


def with_labels(batch, rows):
    """`batch` of the processor with the labels of its rows."""
    labels = torch.full_like(batch["input_ids"], -100)
    for number, row in enumerate(rows):
        length = int(batch["attention_mask"][number].sum())
        labels[number, :length] = torch.tensor(placed(row, length))
    return {{**batch, "labels": labels}}


def placed(row, length):
    """Labels of a row; the text beside {one} may be cut into other tokens than alone."""
    labels, first = row["labels"], min(row["places"], default=0)
    more = length - len(labels)
    if not row["{media}"]:
        return labels[:length]
    return labels[:first] + [-100] * more + labels[first + max(0, -more) :]


'''
