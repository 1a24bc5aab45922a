"""WhichLoRA inside other people's trainers; needs the `profile` extra."""

from __future__ import annotations

from whichlora.integrations.callback import WhichLoRACallback

__all__ = ["WhichLoRACallback"]
