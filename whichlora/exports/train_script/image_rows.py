"""The functions of `train.py` that read rows with images."""

from __future__ import annotations

IMAGE_PROCESSOR_LINES = """\
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
    raise SystemExit(f"{{{source}}}: has no chat template, which places the images")
"""
FROZEN_TOWER_LINES = """\
# The vision tower stays as it is.
text = model.get_decoder()
inside = {id(module) for module in (*text.modules(), model.get_output_embeddings())}
frozen = [
    name
    for name, module in model.named_modules()
    if inside.isdisjoint(map(id, module.modules()))
]
""".splitlines()
FREEZING_LINES = """\
for name, parameter in model.named_parameters():
    if name.rpartition(".")[0] in frozen:
        parameter.requires_grad_(False)
""".splitlines()
LIMIT = '''\
def limited(size):
    """Width and height of an image with at most IMAGE_MAX_PIXELS."""
    width, height = size
    factor = math.sqrt(min(1, IMAGE_MAX_PIXELS / (width * height)))
    return max(1, int(width * factor)), max(1, int(height * factor))


'''
IMAGE_ROWS = '''\
def image_size(path):
    """Width and height of an image as the processor sees it."""
    with Image.open(path) as image:
        is_turned = image.getexif().get(0x0112, 1) >= 5  # as `load_image` turns it
        return {size}


@lru_cache(maxsize=None)
def image_tokens(processor, size):
    """Tokens that the processor writes for an image of this size, tried with a blank one."""
    blank, begin = Image.new("RGB", size), processor.tokenizer.bos_token or ""
    text = begin + processor.image_token  # some write the first themselves where it is missing
    ids = processor(text=[text], images=[[blank]], add_special_tokens=False)["input_ids"]
    return len(ids[0]) - bool(begin)


def read_rows(path, processor):
    """The rows of a JSONL file: text, images and labels; images are read batch by batch."""
    rows, tokenizer = [], processor.tokenizer
    place = tokenizer.convert_tokens_to_ids(processor.image_token)
    if not path.exists():
        columns = "{columns}, images"
        raise SystemExit(f"{{path}}: is missing; put rows there, JSON lines of {{columns}}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                images = [str(HERE / image) for image in row["images"]]
                numbers = [image_tokens(processor, image_size(image)) for image in images]
                ids, learned = encode(row, tokenizer)
                places = [at for at, token in enumerate(ids) if token == place]
                if len(places) != len(images):
                    raise ValueError(f"{{len(images)}} images, {{len(places)}} places for them")
            except Exception as error:
                kind = type(error).__name__
                raise SystemExit(f"{{path}}:{{number}}: {{kind}}: {{error}}") from error
            labels, start = [], 0
            for at, tokens_of_image in zip(places, numbers):  # no token of an image is learned
                labels += learned[start:at] + [-100] * tokens_of_image
                start = at + 1
            labels += learned[start:]
            text = render({messages}, tokenizer)
            rows.append({{"text": text, "images": images, "labels": labels, "places": places}})
    kept = [row for row in rows if len(row["labels"]) <= SEQ_LEN or not row["images"]]
    if len(kept) < len(rows):
        few = f"{{len(rows) - len(kept)}} of {{len(rows)}} rows"
        say(f"{{path}}: {{few}} are left out: with their images they exceed SEQ_LEN")
    learned = [row for row in kept if any(label != -100 for label in row["labels"][1:SEQ_LEN])]
    if len(learned) < len(kept):
        few = f"{{len(kept) - len(learned)}} of {{len(kept)}} rows"
        say(f"{{path}}: {{few}} are left out: nothing in them is learned")
    return learned


class ImageBatches:
    """Reads the images of a batch; the processor makes token ids and pixels."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, rows):
        first = next((number for number, row in enumerate(rows) if row["images"]), 0)
        rows = [*rows[first:], *rows[:first]]  # some processors look for an image in the first
        images = [[{load} for image in row["images"]] for row in rows]
        batch = self.processor(
            text=[row["text"] for row in rows],
            images=images if any(images) else None,
            add_special_tokens=False,
            padding=True,
            truncation=True,  # of rows without images
            max_length=SEQ_LEN,
            return_tensors="pt",
        )
        labels = torch.full_like(batch["input_ids"], -100)
        for number, row in enumerate(rows):
            length = int(batch["attention_mask"][number].sum())
            labels[number, :length] = torch.tensor(self.placed(row, length))
        return {{**batch, "labels": labels}}

    def placed(self, row, length):
        """Labels of a row; the text beside an image may be cut into other tokens than alone."""
        labels, first = row["labels"], min(row["places"], default=0)
        more = length - len(labels)
        if not row["images"]:
            return labels[:length]
        return labels[:first] + [-100] * more + labels[first + max(0, -more) :]


'''
