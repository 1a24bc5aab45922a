"""The data of a plan as each model's tokenizer cuts it, counted once per tokenizer."""

from __future__ import annotations

from whichlora.besides import num_evaluations
from whichlora.dataset import (
    BYTE_LEVEL,
    UNCUT,
    BaseDataset,
    TokenLengths,
    Workload,
    count_tokens,
    evaluation_widths,
    open_dataset,
    workload,
)
from whichlora.plan import Plan


class TrainingData:
    """Token lengths by model, and the batches that a training makes of them.

    Args:
        lengths: by tokenizer, what was counted so far; runs on the same data on other devices
            share it.
    """

    def __init__(self, plan: Plan, lengths: dict[str, TokenLengths] | None = None) -> None:
        self.dataset: BaseDataset = open_dataset(plan.dataset)
        self._plan = plan
        self._lengths: dict[str, TokenLengths] = {} if lengths is None else lengths
        self._evaluated: dict[tuple[str, int], dict[int, float]] = {}
        self._workloads: dict[tuple[str, int], Workload] = {}

    def tokenizer(self, model: str) -> str:
        """The tokenizer that `model` is trained with."""
        if self._plan.weights == "random":
            return BYTE_LEVEL
        return self._plan.tokenizers.get(model, model)

    def lengths(self, model: str) -> TokenLengths:
        """Token lengths of the data as the tokenizer of `model` cuts them."""
        tokenizer = self.tokenizer(model)
        joins = self._plan.collator == "packed"  # before it cuts
        if tokenizer not in self._lengths:
            self._lengths[tokenizer] = count_tokens(
                self.dataset,
                tokenizer=tokenizer,
                offline=self._plan.weights == "random",
                max_length=UNCUT if joins else self._plan.finetune.seq_len,
            )
        return self._lengths[tokenizer]

    def workload(self, model: str, batch_size: int) -> Workload:
        """The batches of a whole training of `model`."""
        key = (self.tokenizer(model), batch_size)
        if key not in self._workloads:
            self._workloads[key] = workload(
                self.lengths(model),
                collator=self._plan.collator,
                batch_size=batch_size,
                seq_len=self._plan.finetune.seq_len,
                accumulation=self._plan.finetune.gradient_accumulation_steps,
                epochs=self._plan.epochs,
                seed=self._plan.seed,
            )
        return self._workloads[key]

    def evaluation(self, model: str, batch_size: int) -> dict[int, float]:
        """Padded length to the number of evaluation batches of a whole training of `model`."""
        plan = self._plan
        key = (self.tokenizer(model), batch_size)
        if key not in self._evaluated:
            load = self.workload(model, batch_size)
            passes = num_evaluations(plan.keeping, num_steps=load.num_steps, epochs=plan.epochs)
            widths = evaluation_widths(
                self.lengths(model),
                batch_size=batch_size,
                collator=plan.collator,
                seq_len=plan.finetune.seq_len,
            )
            self._evaluated[key] = {
                width: passes * count for width, count in widths.items() if passes
            }
        return self._evaluated[key]
