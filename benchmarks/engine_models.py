"""Read which architectures each release of vLLM and SGLang knows, and keep the first of each.

    python benchmarks/engine_models.py vllm FOLDER --write      whichlora/serving/releases/
    python benchmarks/engine_models.py sglang FOLDER --write    the same
    python benchmarks/engine_models.py vllm                     say which models of ours it knows

FOLDER is a clone with tags (`v0.8.5`), or has a folder `0.8.5` with the unpacked files of each
release: source distributions of vLLM, wheels of SGLang, as `pip download --no-deps` brings them.
Nothing of an engine is run: vLLM's registry is a dict, SGLang's the `EntryClass` of each module of
`srt/models`. What `EntryClass` is in the end, where code makes it, is not found. The installed
transformers is asked which of its classes the engines' Transformers backend does not take.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whichlora.serving.known_models import FOLDER, known_models
from whichlora.spec.versions import Libraries
from whichlora.store.hub import load_model
from whichlora.store.models import list_models

RELEASE = re.compile(r"v?([0-9]+(?:\.[0-9]+)+(?:\.post[0-9]+)?)")
# Of vLLM's dicts, those whose models write no text, or are no models of a release.
OTHER_KINDS = ("EMBEDDING", "LATE_INTERACTION", "REWARD", "CLASSIFICATION", "CROSS_ENCODER")
OTHER_KINDS += ("SPECULATIVE", "PREVIOUSLY", "OOT", "ROCM", "UNSUPPORTED", "_VLLM_MODELS")
BACKEND = {
    "dense": ("TransformersForCausalLM", "TransformersModel"),
    "experts": ("TransformersMoEForCausalLM",),
    "images": (
        "TransformersForMultimodalLM",
        "TransformersMultiModalForCausalLM",
        "TransformersMultiModalForConditionalGeneration",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The files of one release: their paths below a folder, and the text of one."""

    version: str
    list_files: Callable[[str], list[str]]
    read: Callable[[str], str]


def releases(folder: Path) -> list[Release]:
    """Those of a clone with tags, or of a folder with one folder for each; oldest first."""
    is_clone = (folder / ".git").exists() or (folder / "HEAD").is_file()
    names = _git(folder, "tag").split() if is_clone else [each.name for each in folder.iterdir()]
    found = [
        Release(version=match[1], list_files=partial(_tagged, folder, name),
                read=lambda path, name=name: _git(folder, "show", f"{name}:{path}"))
        if is_clone
        else Release(version=match[1], list_files=partial(_unpacked, folder / name),
                     read=lambda path, name=name: (folder / name / path).read_text("utf-8"))
        for name in names
        if (match := RELEASE.fullmatch(name))
    ]  # fmt: skip
    return sorted(
        found, key=lambda each: [int(part) for part in re.findall("[0-9]+", each.version)]
    )


def _git(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _tagged(folder: Path, tag: str, below: str) -> list[str]:
    return _git(folder, "ls-tree", "--name-only", tag, f"{below}/").split()


def _unpacked(root: Path, below: str) -> list[str]:
    return [str(path.relative_to(root)) for path in (root / below).glob("*") if path.is_file()]


def vllm_architectures(release: Release) -> set[str]:
    """Keys of the registry's dicts: models/registry.py, before models/__init__.py, model_loader.py.

    Names of its Transformers backend are among them.
    """
    models, loader = "vllm/model_executor/models", "vllm/model_executor/model_loader.py"
    paths = release.list_files(models) + release.list_files("vllm/model_executor")
    wanted = (f"{models}/registry.py", f"{models}/__init__.py", loader)
    found: set[str] = set()
    for path in (each for each in wanted if each in paths):
        for name, value in _assigned(release.read(path)):
            if isinstance(value, ast.Dict) and not any(kind in name for kind in OTHER_KINDS):
                found |= {
                    key.value
                    for key in value.keys
                    if isinstance(key, ast.Constant) and isinstance(key.value, str)
                }
    return {name for name in found if name.isidentifier() and name[0].isupper()}


def sglang_architectures(release: Release) -> set[str]:
    """Classes that modules of srt/models name as their `EntryClass`."""
    found: set[str] = set()
    for path in release.list_files("sglang/srt/models") or release.list_files(
        "python/sglang/srt/models"
    ):
        if not path.endswith(".py"):
            continue
        source = release.read(path)
        for name, value in _assigned(source) if "EntryClass" in source else ():
            if name == "EntryClass":
                found |= {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
            if name == "EntryClassRemapping":
                found |= {
                    node.value
                    for node in ast.walk(value)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
    return found


def _assigned(source: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(ast.parse(source.lstrip("\ufeff"))):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(target, ast.Name) and node.value is not None:
            yield target.id, node.value


READERS = {"vllm": vllm_architectures, "sglang": sglang_architectures}
SOURCES = {
    "vllm": "keys of the dicts of vllm/model_executor/models/registry.py, before it "
    "models/__init__.py or model_loader.py, in the source distribution of each release on PyPI "
    "(of 0.3.2, 0.4.0, 0.4.0.post1, 0.15.0 and 0.15.1 in the wheel)",
    "sglang": "EntryClass of each module of sglang/srt/models in the wheel of each release on PyPI",
}


def read(engine: str, folder: Path) -> dict[str, object]:
    """What is kept of an engine.

    A name that was missing in between counts as known there: nothing is refused for it. Names that
    differ in case alone are one, spelled as the newest release does.
    """
    names = {each.version: READERS[engine](each) for each in releases(folder)}
    versions = [version for version, known in names.items() if known]
    for version in sorted(names.keys() - set(versions)):
        print(f"{engine} {version}: no registry found, left out")
    spelled = {name.lower(): name for version in versions for name in sorted(names[version])}
    lower = {version: {name.lower() for name in names[version]} for version in versions}
    seen = {
        spelling: [version for version in versions if name in lower[version]]
        for name, spelling in sorted(spelled.items())
    }
    backend = {
        kind: min((seen[name][0] for name in of_kind if name in seen), key=versions.index)
        for kind, of_kind in BACKEND.items()
        if seen.keys() & set(of_kind)
    }
    own = {name: at for name, at in seen.items() if not name.startswith("Transformers")}
    for name, at in own.items():
        if len(at) != versions.index(at[-1]) - versions.index(at[0]) + 1:
            print(f"{name}: {at[0]} to {at[-1]}, not in all between")
    return {
        "schema_version": 1,
        "engine": engine,
        "source": SOURCES[engine],
        "releases": versions,
        "transformers_backend": backend,
        "not_for_backend": not_for_backend(set(own)),
        "first": {name: at[0] for name, at in own.items()},
        "last": {name: at[-1] for name, at in own.items() if at[-1] != versions[-1]},
    }


def not_for_backend(names: set[str]) -> dict[str, object]:
    """Classes of the installed transformers that have neither of the interfaces of attention."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = names | set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    refused = []
    for name in sorted(names, key=str.lower):
        model = getattr(transformers, name, None)
        if model is None or not hasattr(model, "is_backend_compatible"):
            continue
        if not (model.is_backend_compatible() or model._can_set_attn_implementation()):
            refused.append(name)
    return {"transformers": transformers.__version__, "architectures": refused}


def say(engine: str) -> None:
    """Of every model of ours that continues a text, whether the newest release knows it."""
    known = known_models(engine)
    newest = known.releases[-1]
    libraries = Libraries.of([(engine, newest)])
    unknown: Counter[str] = Counter()
    total = 0
    for record in list_models():
        model = load_model(record.hub_id)
        if model.task != "causal-lm":
            continue
        total += 1
        if not known.knows(libraries, model):
            unknown[f"{', '.join(model.config['architectures'])}"] += 1
    print(f"{engine} {newest}: {total - sum(unknown.values())} of {total} models known")
    for architecture, count in sorted(unknown.items()):
        print(f"  {count} of {architecture}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=READERS)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        kept = json.dumps(read(arguments.engine, arguments.folder), indent=1) + "\n"
        # releases, and classes that the backend does not take, on a line each list
        kept = re.sub(r"\[\s+([^\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", kept)
        if not arguments.write:
            print(kept)
            return
        (FOLDER / f"{arguments.engine}.json").write_text(kept, encoding="utf-8")
    say(arguments.engine)


if __name__ == "__main__":
    main()
