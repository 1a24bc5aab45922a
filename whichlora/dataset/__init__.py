"""Training data → examples, token lengths and the batches that a Trainer makes of them."""

from __future__ import annotations

from whichlora.dataset.base import BaseDataset, data_format
from whichlora.dataset.encoders import BYTE_LEVEL
from whichlora.dataset.export import write_jsonl
from whichlora.dataset.lengths import UNCUT, TokenLengths
from whichlora.dataset.sources import first_format, open_dataset
from whichlora.dataset.tokens import count_tokens
from whichlora.dataset.workload import Workload, evaluation_widths, workload

__all__ = [
    "BYTE_LEVEL",
    "UNCUT",
    "BaseDataset",
    "TokenLengths",
    "Workload",
    "count_tokens",
    "data_format",
    "evaluation_widths",
    "first_format",
    "open_dataset",
    "workload",
    "write_jsonl",
]
