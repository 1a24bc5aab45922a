"""The text of `train.py` that settings fill in or choose between."""

from __future__ import annotations

HEAD = '''\
"""Fine-tune MODEL on the train.jsonl beside this file.

Written by WhichLoRA for exactly the run it predicted; edit it as you like.
"""

import json
{os}{bisect}from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
{imports}

HERE = Path(__file__).resolve().parent
{constants}


'''
RANDOM_MODEL = '''\
def write_random_model():
    """A checkpoint with random weights, so that nothing is downloaded."""
    config = AutoConfig.for_model(**MODEL_CONFIG)
    model = {model_class}.from_config(config, dtype=torch.{dtype})
    model.save_pretrained(MODEL)


'''
BYTE_TOKENIZER = '''\
def byte_tokenizer():
    """Each byte is a token, so that no tokenizer is downloaded."""
    symbols = ["<pad>", "</s>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        mask_token="<mask>",
    )


'''
READ_TEXTS = """\
    with path.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
"""
RENDER_CHATS = """\
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    template = tokenizer.chat_template or CHAT_TEMPLATE
    # Tokenizing adds a first token by itself.
    first = tokenizer.bos_token if tokenizer("")["input_ids"] else ""
    texts = [
        tokenizer.apply_chat_template(
            row["messages"], chat_template=template, tokenize=False
        ).removeprefix(first or "")
        for row in rows
    ]
"""
READ_ROWS = {
    "longest": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file as token ids; batches are padded to their longest."""
{read_texts}\
    ids = tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"]
    return [{{"input_ids": row}} for row in ids if row]


''',
    "fixed": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file as token ids, cut or padded to SEQ_LEN."""
{read_texts}\
    columns = tokenizer(
        texts, truncation=True, padding="max_length", max_length=SEQ_LEN
    )
    rows = zip(columns["input_ids"], columns["attention_mask"], strict=True)
    return [{{"input_ids": ids, "attention_mask": mask}} for ids, mask in rows]


''',
    "packed": '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file, joined and cut into blocks of SEQ_LEN: no padding."""
{read_texts}\
    rows = tokenizer(texts, verbose=False)["input_ids"]
    ids = [token for row in rows for token in row]
    starts = range(0, len(ids) - SEQ_LEN + 1, SEQ_LEN)
    return [{{"input_ids": ids[start : start + SEQ_LEN]}} for start in starts]


''',
}
READ_ROWS["grouped"] = READ_ROWS["longest"]
READ_ROWS["packed-bfd"] = '''\
def read_rows(path, tokenizer):
    """The texts of a JSONL file, whole, put together into rows of up to SEQ_LEN."""
{read_texts}\
    ids = tokenizer(texts, truncation=True, max_length=SEQ_LEN)["input_ids"]
    rows = []
    for start in range(0, len(ids), 1000):  # each thousand on its own, as TRL packs
        room = []  # left, and in which row
        for row in sorted(ids[start : start + 1000], key=len, reverse=True):
            fits = bisect_left(room, (len(row), -1))
            left, number = room.pop(fits) if fits < len(room) else (SEQ_LEN, len(rows))
            rows += [[]] * (number == len(rows))
            rows[number] = rows[number] + row
            insort(room, (left - len(row), number))
    return [{{"input_ids": row}} for row in rows if row]


'''
TAIL = """\
    # As planned: the Trainer would spread each batch over every GPU that it sees.
    args._n_gpu = min(args.n_gpu, 1)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=read_rows(HERE / "train.jsonl", tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm={masked_lm}),
{optimizer}    )
    outcome = trainer.train()

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = {{
        "num_steps": outcome.global_step,
        "final_loss": losses[-1],
        "train_s": outcome.metrics["train_runtime"],
    }}
    if torch.cuda.is_available():
        result["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:  # the whole process; Linux counts in KiB
        result["peak_process_bytes"] = 1024 * getrusage(RUSAGE_SELF).ru_maxrss
    trainer.save_model(OUTPUT)
    tokenizer.save_pretrained(OUTPUT)

    validation = HERE / "validation.jsonl"
    if validation.exists() and (rows := read_rows(validation, tokenizer)):
        result["validation_loss"] = trainer.evaluate(rows)["eval_loss"]
    with (OUTPUT / "result.json").open("w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
    for name, value in result.items():
        print(f"{{name}}: {{value}}")


if __name__ == "__main__":
    main()
"""
