"""WhichLoRA: the largest model, LoRA variant and batch size that fit your GPU."""

from __future__ import annotations

__version__ = "0.1.0"
