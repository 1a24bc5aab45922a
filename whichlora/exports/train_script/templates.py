"""Templates for the text of `train.py`."""

from __future__ import annotations

import re

# Import lines of the standard library, each with the text that shows that it is used.
STANDARD = (
    ("import argparse", "argparse."),
    ("import gc", "gc."),
    ("import json", "json."),
    ("import math", "math."),
    ("import os", "os."),
    ("import re", "re."),
    ("import runpy", "runpy."),
    ("import shlex", "shlex."),
    ("import shutil", "shutil."),
    ("import sys", "sys."),
    ("import wave", "wave."),
    ("from bisect import bisect_left, insort", "insort("),
    ("from functools import lru_cache", "lru_cache("),
    ("from importlib.metadata import version", "version("),
    ("from os.path import commonprefix", "commonprefix("),
    ("from pathlib import Path", "Path("),
    ("from resource import RUSAGE_SELF, getrusage", "getrusage("),
)


def standard_imports(body: str) -> str:
    """The import lines of the standard library that `body` needs."""
    return "\n".join(line for line, word in STANDARD if re.search(rf"\b{re.escape(word)}", body))


HEAD = '''\
"""Fine-tune MODEL on the train.jsonl beside this file.

After an interruption `python train.py --resume` goes on from the last checkpoint. Written by
WhichLoRA for exactly the run it predicted; edit it as you like.
"""

{standard}

{arrays}import torch
{imports}

HERE = Path(__file__).resolve().parent
{constants}


'''
RANDOM_MODEL = '''\
def write_random_model():
    """A checkpoint with random weights, so that nothing is downloaded."""
    set_seed(SEED)
    config = AutoConfig.for_model(**MODEL_CONFIG{settings})
    model = {model_class}.from_config(config, dtype=torch.{dtype})
    mine = MODEL.with_name(f"{{MODEL.name}}-{{os.getpid()}}")
    model.save_pretrained(mine)
    try:
        mine.rename(MODEL)
    except OSError:  # another process of this run was first; the seed makes all alike
        shutil.rmtree(mine)


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
LAST_CHECKPOINT = '''\
def last_checkpoint():
    """The newest checkpoint that was written whole, None if there is none."""
    states = OUTPUT.glob("checkpoint-*/trainer_state.json")
    for state in sorted(states, key=os.path.getmtime, reverse=True):
        try:
            json.loads(state.read_text(encoding="utf-8"))
            return state.parent
        except ValueError:  # it was killed while it wrote
            continue
    return None


class LogAtCheckpoints(TrainerCallback):
    """Losses are averaged from log to log: a resumed run logs the same ones."""

    def on_step_end(self, args, state, control, **_):
        control.should_log |= control.should_save


'''
AFTER_UPDATE = '''\
class AfterUpdate(TrainerCallback):
    """The method reads the gradients of each step, which `zero_grad` then drops."""

    def on_optimizer_step(self, args, state, control, model, **_):
        model.{name}(state.global_step)


'''
SAY = """\
def say(text):
    print(text, file=sys.stderr, flush=True)


"""
VERSIONS = '''\
def compare_versions():
    """Say which libraries are not those that the prediction is of."""
    others = []
    for name, predicted in PREDICTED_WITH.items():
        here = version(name).partition("+")[0]
        if here != predicted:
            others.append(f"{name} {here}, predicted {predicted}")
    if others:
        say(f"note: memory and time may differ: {'; '.join(others)}")


'''
NARROW_TRAINER = '''\
class NarrowTrainer({trainer}):
    """PEFT widens the adapters that it loads from a checkpoint; these are to stay narrow."""

    def _load_from_checkpoint(self, *args, **options):
        dtypes = {{name: p.dtype for name, p in self.model.named_parameters()}}
        super()._load_from_checkpoint(*args, **options)
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])


'''
RESUME_LINES = """\
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--resume", action="store_true", help="go on after a stop")
resume = parser.parse_args().resume
checkpoint = last_checkpoint()
if checkpoint and not resume:
    raise SystemExit(
        f"{checkpoint}: is of an earlier start; go on from it with --resume, or "
        f"remove {OUTPUT} to start again"
    )
if resume and not checkpoint:
    say(f"{OUTPUT}: has no whole checkpoint; starting at step 1")
""".splitlines()
CHAT_TEMPLATE_LINES = """\
if tokenizer.chat_template is None:
    say("note: the tokenizer has no chat template; it is saved with CHAT_TEMPLATE")
    tokenizer.chat_template = CHAT_TEMPLATE
""".splitlines()
FILTER_ROWS = """\
trainer.train_dataset = trainer.train_dataset.filter(is_learned)
"""
FILTER_VALIDATION_ROWS = """\
if trainer.eval_dataset is not None:
    trainer.eval_dataset = trainer.eval_dataset.filter(is_learned)
"""
ROWS_LEFT_OUT = """\
num_left_out = len(train_rows) - len(trainer.train_dataset)
if num_left_out:
    few = f"{num_left_out} of {len(train_rows)} rows"
    say(f"{few} are left out: they are longer than SEQ_LEN allows")
if not len(trainer.train_dataset):
    raise SystemExit(f"{HERE / 'train.jsonl'}: no row is left to train on")
"""
REWARD_LINES = """\
reward_funcs = reward_functions()
""".splitlines()
TRAIN_LINES = """\
train_rows = read_rows(HERE / "train.jsonl", {reader})
if not train_rows:
    raise SystemExit(f"{{HERE / 'train.jsonl'}}: no row is left to train on")
"""
VALIDATION_LINES = """\
validation = HERE / "validation.jsonl"
validation_rows = read_rows(validation, {reader}) if validation.exists() else []
"""
STOPPED = """\
        if checkpoint := last_checkpoint():
            again = shlex.join(["python", sys.argv[0], "--resume"])
            say(f"\\nstopped; go on from {checkpoint} with: {again}")
        else:
            say("\\nstopped before the first checkpoint")
"""
STOPPED_WITHOUT = """\
        say("\\nstopped; no checkpoint was asked for")
"""
LAST_EVALUATION = """\
    history = trainer.state.log_history
    evaluated = [entry["step"] for entry in history if "eval_loss" in entry]
    if validation_rows and outcome.global_step not in evaluated:
        trainer.evaluate()
"""
VALIDATION_LOSS = """\
    for entry in trainer.state.log_history:
        if "eval_loss" in entry:
            result["validation_loss"] = entry["eval_loss"]
"""
TAIL = """\
    # As planned: the Trainer would spread each batch over every GPU that it sees.
    args._n_gpu = min(args.n_gpu, 1)
    trainer = {trainer}(
        model=model,
        args=args,
        train_dataset={train},
{evaluation}\
        processing_class={reader},  # what ends a text for it does so for the model
{collator}{adapter}{optimizer}{callbacks}\
    )
{after}\
    try:
        outcome = trainer.train({resume})
    except BaseException as error:
{stopped}\
        if isinstance(error, KeyboardInterrupt):
            sys.exit(130)
        raise

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
{validation}    trainer.save_model(OUTPUT)
    if not trainer.is_world_process_zero():
        return  # one process tells
    {reader}.save_pretrained(OUTPUT)
    with (OUTPUT / "result.json").open("w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
    for name, value in result.items():
        print(f"{{name}}: {{value}}")


if __name__ == "__main__":
    main()
{leaving}"""
# A thread of gloo needs the GIL to release the tensors of the last collective. It aborts where the
# interpreter ends meanwhile. It hangs where a DDP has the group last: torch 2.13's `~Reducer` joins
# the thread under the GIL. A group alone is destroyed without the GIL.
LEAVING = """\
    gc.collect()  # DDP goes before its group, else the end of the group may hang
    PartialState().destroy_process_group()
"""
