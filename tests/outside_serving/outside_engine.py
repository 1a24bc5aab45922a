"""vLLM under another name: nobody who asks for a name may tell it from the built-in one."""

from dataclasses import replace

from whichlora.serving import get_engine

ENGINE = replace(get_engine("vllm"), name="outside-engine")
