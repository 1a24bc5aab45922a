"""Flags of engines that people paste with the others, and why none of them is an option here."""

from __future__ import annotations

NO_NUMBER = "changes nothing that is predicted; leave it out"
REPLICAS = "makes engines of their own: give the GPUs of one, and its share of concurrency"
ALL_TO_ALL = "sets how states are exchanged; the default is predicted, which gathers; leave it out"
DENSE_RANKS = "divides dense matrices in another way, which is not predicted; leave it out"
REDUNDANT_EXPERTS = "holds experts twice, which is not predicted for this engine; leave it out"
HOST_WEIGHTS = "keeps weights on the host, which is not predicted; give more gpus or another quant"
DRAFT = "drafts tokens, which is not predicted; leave it out"
IMAGES = "sets how images are cut, which is not predicted; leave it out"
CAPTURED_SIZES = "sets which sizes are captured, which is not predicted; leave it out"

# Of several engines. None of them has a say in memory of the GPU or in a step.
OF_A_SERVER = dict.fromkeys(
    (
        "host",
        "port",
        "api_key",
        "served_model_name",
        "trust_remote_code",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "tokenizer",
        "tokenizer_mode",
        "download_dir",
        "seed",
        "log_level",
    ),
    NO_NUMBER,
)
