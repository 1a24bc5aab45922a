"""The functions of `train.py` that read rows with images."""

from __future__ import annotations

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


'''
IMAGE_BATCHES = '''\
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
        return with_labels(batch, rows)


'''
