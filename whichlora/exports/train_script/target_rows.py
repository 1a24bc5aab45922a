"""The functions of `train.py` that read pairs of texts for an encoder and its decoder."""

from __future__ import annotations

from whichlora.spec.data_format import DataFormat

_ENCODE = '''\
def encode(row, tokenizer):
    """Token ids of what the encoder reads, and of what the decoder learns to write."""
{split}\
    read = tokenizer(source, truncation=True, max_length=SEQ_LEN)
    written = tokenizer(text_target=target, truncation=True, max_length=TARGET_LEN)
    return read["input_ids"], written["input_ids"]


'''
_TEXTS = '    source, target = row["prompt"], row["completion"]\n'
_CHATS = """\
    source = "\\n\\n".join(message["content"] for message in row["prompt"])
    target = "\\n\\n".join(message["content"] for message in row["completion"])
"""
_TURNS = """\
    *before, answer = row["messages"]
    if answer["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    source = "\\n\\n".join(message["content"] for message in before)
    target = answer["content"]
"""
BATCHING = "    rows = [(ids, labels) for ids, labels in encoded if ids and labels]\n"
TARGET_ROWS = """\
    return [{"input_ids": ids, "labels": labels} for ids, labels in rows]


"""


def encode_pairs(data: DataFormat) -> str:
    """The source of `encode` for pairs, or for messages of which the last is the target."""
    split = _TEXTS
    if data.conversational:
        split = _TURNS if data.kind == "messages" else _CHATS
    return _ENCODE.format(split=split)
