"""A dataset → the JSONL files that a training job reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from whichlora.dataset.base import BaseDataset, checked_splits, row_texts
from whichlora.dataset.tokens import with_chat_template
from whichlora.errors import DataFileError


def write_jsonl(
    dataset: BaseDataset, folder: Path, *, tokenizer: str | None = None, offline: bool = True
) -> dict[str, Path]:
    """Write each split as `<split>.jsonl` with one {"text": …} per line, whole or not at all.

    Args:
        dataset: what to write.
        folder: made if it is missing.
        tokenizer: the one that `count_tokens` was given, whose chat template then makes the
            text of chat messages.
        offline: never ask the hub.

    Returns:
        The files by split; a split without text has none.

    Raises:
        DataFileError: a file can't be written.
    """
    dataset = with_chat_template(dataset, tokenizer, offline=offline)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Path] = {}
    for split, rows in checked_splits(dataset).items():
        file = folder / f"{split}.jsonl"
        partial = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            num_texts = 0
            with partial.open("w", encoding="utf-8") as out:
                for text in filter(None, row_texts(dataset, split, rows)):
                    out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    num_texts += 1
            if num_texts:
                partial.replace(file)
                files[split] = file
            else:
                file.unlink(missing_ok=True)  # of an earlier run that had such a split
        except OSError as error:
            raise DataFileError(
                f"{file}: can't be written ({error.strerror}); check the folder and the disk"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
    return files
