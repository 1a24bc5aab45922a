"""A dataset → the JSONL files that a training job reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from whichlora.dataset.base import BaseDataset, checked_splits, data_format, examples
from whichlora.errors import DataFileError
from whichlora.store.written import OTHER_FOLDER, remove_own, replace_file, require_own


def write_jsonl(dataset: BaseDataset, folder: Path) -> dict[str, Path]:
    """Write each split as `<split>.jsonl`, whole or not at all.

    A line is an example in the columns of `data_format(dataset)`. Messages stay messages: the job
    renders them with the chat template of the model that it trains.

    Args:
        dataset: what to write.
        folder: made if it is missing.

    Returns:
        The files by split; a split without text has none.

    Raises:
        DataFileError: a file can't be written, or one is there that WhichLoRA did not write.
    """
    expected = data_format(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Path] = {}
    splits = checked_splits(dataset)
    require_own((folder / f"{split}.jsonl" for split in splits), instead=OTHER_FOLDER)
    for split, rows in splits.items():
        file = folder / f"{split}.jsonl"
        partial = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            num_examples = 0
            with partial.open("w", encoding="utf-8") as out:
                for example in examples(dataset, split, rows, expected=expected):
                    if example is not None:
                        out.write(json.dumps(example, ensure_ascii=False) + "\n")
                        num_examples += 1
            if num_examples:
                replace_file(file, partial)
                files[split] = file
            else:
                remove_own([file])  # of an earlier run that had such a split
        except OSError as error:
            raise DataFileError(
                f"{file}: can't be written ({error.strerror}); check the folder and the disk"
            ) from None
        finally:
            partial.unlink(missing_ok=True)
    return files
