"""`whichlora page`: the site as files, made from the package that is installed."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import whichlora
from whichlora.html.marks import PART_COLOURS
from whichlora.html.template import filled, script_json
from whichlora.page.form import Field, fields
from whichlora.page.pyodide import VERSION, pyodide_files
from whichlora.page.questions import answer
from whichlora.page.snapshot import node, snapshot
from whichlora.store.gpus import list_gpus
from whichlora.store.models import list_models
from whichlora.store.paths import data_folder
from whichlora.store.written import write_files

FIRST = {"gpu": "rtx-4090-24gb"}  # what the page shows before anybody asks
_ONE_RUN = {"gpu": "a100-sxm-80gb", "model": "meta-llama/Llama-3.1-8B"}  # a card with coefficients
_WARM = [FIRST, _ONE_RUN, {**_ONE_RUN, "gpus": "2"}]  # what Python has answered when a page opens
# What predicting imports, which is the standard library alone below.
_PACKAGES = (
    "calibration", "config", "dataset", "exports", "families", "imports", "memory", "methods",
    "page", "parallel", "predict", "serving", "spec", "store", "symbolic", "timing", "tracer",
    "tasks", "trainers", "workflow",
)  # fmt: skip
_YAML = "ruamel.yaml"  # what a file of another tool is read with, and nothing else
_MODULES = ("__init__", "errors", "extras", "text", "units")
_OF_PACKAGES = ("*.py", "*.json")
_DATA = ("models_db", "calibration", "costs")
_KINDS = ("*.json", "*.jsonl", "*.csv")
_SCRIPTS = ("page.js", "theme.js", "worker.js")
_SUGGESTED = {"gpu": "gpu-names", "model": "model-names"}
_WIDTHS = dict.fromkeys(("model", "phase", "from", "method", "trainer", "data", "serving"), "wide")
_WIDTHS |= {"gpu": "most", "gpus": "least", "samples": "most", "epochs": "least"}
_HINTS = {
    "model": "any: the largest that fits",
    "gpu": "any; 4090, 24GB",
    "context": "prompt + new",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What was written.

    Args:
        has_snapshot: Python starts from its memory, three times as fast.
    """

    folder: Path
    num_bytes: int
    has_snapshot: bool


def build(folder: Path, pyodide: Path | None = None) -> Site:
    """Write the site to `folder`; a host of plain files serves it.

    Args:
        pyodide: as `pyodide_files` takes it.

    Raises:
        ConfigError: Pyodide can't be downloaded, or is not the pinned release.
        DataFileError: `pyodide` lacks a file, or the folder can't be written, or has a
            file of that name that WhichLoRA did not write.
    """
    program = node()
    content = pyodide_files(pyodide) | site_files(has_snapshot=program is not None)
    if program is not None:
        content["snapshot.gz"] = snapshot(content, _WARM, program)
    write_files(
        {folder / name: data for name, data in content.items()}, instead="give another folder"
    )
    return Site(
        folder=folder,
        num_bytes=sum(map(len, content.values())),
        has_snapshot=program is not None,
    )


def site_files(*, has_snapshot: bool) -> dict[str, bytes]:
    """Every file of the site by name, but for Pyodide's and the snapshot."""
    here, report = files("whichlora.page") / "site", files("whichlora.html")
    colours = "".join(
        f".part-{part} {{ background: {colour}; }}\n" for part, colour in PART_COLOURS.items()
    )
    style = (report / "base.css").read_text(encoding="utf-8")
    style += (here / "page.css").read_text(encoding="utf-8") + colours
    template = (here / "index.html").read_text(encoding="utf-8")
    return {
        "index.html": filled(template, _texts(has_snapshot=has_snapshot)).encode(),
        "page.css": style.encode(),
        "whichlora.zip": bundle(),
        **{name: (here / name).read_bytes() for name in _SCRIPTS},
    }


def bundle() -> bytes:
    """The package with its data as a zip file: what predicting needs, no more; always the same."""
    root = Path(whichlora.__file__).parent
    members = {f"whichlora/{name}.py": root / f"{name}.py" for name in _MODULES}
    for package in _PACKAGES:
        for path in (each for kind in _OF_PACKAGES for each in (root / package).rglob(kind)):
            members[f"whichlora/{path.relative_to(root).as_posix()}"] = path
    members |= dict(_yaml_files())
    for name in _DATA:
        source = data_folder(name)
        for path in (each for kind in _KINDS for each in source.rglob(kind)):
            members[f"whichlora/data/{name}/{path.relative_to(source).as_posix()}"] = path
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(members):
            archive.writestr(
                zipfile.ZipInfo(name), members[name].read_bytes(), zipfile.ZIP_DEFLATED
            )
    return written.getvalue()


def _yaml_files() -> Iterator[tuple[str, Path]]:
    """The modules that read YAML, all Python, and their licence."""
    distribution = metadata.distribution(_YAML)
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if file.suffix == ".py":
            yield file.as_posix(), path
        elif "LICENSE" in file.name:
            yield f"ruamel/yaml/{file.name}", path


def _texts(*, has_snapshot: bool) -> dict[str, str]:
    (*_, last) = answer(json.dumps(FIRST))
    models = (name for record in list_models() for name in (record.hub_id, *record.aliases))
    return {
        "fields": _form(),
        "gpus": _options(gpu.key for gpu in list_gpus()),
        "models": _options(name for name in models if "/" in name),
        "first": script_json(
            {"question": FIRST, "answer": json.loads(last), "hasSnapshot": has_snapshot}
        ),
        "about": escape(_about()),
        "pyodide": VERSION,
        "yaml": metadata.version(_YAML),
    }


def _about() -> str:
    fitted = sorted(
        path.parent.name for path in data_folder("calibration").glob("*/coefficients.json")
    )
    return (
        f"WhichLoRA {whichlora.__version__}, with {len(list_models())} model architectures and "
        f"{len(list_gpus())} cards. Fitted to measured runs: {', '.join(fitted) or 'none'}; every "
        "other card is predicted from its datasheet, and each answer names its basis."
    )


def _options(names: Iterable[str]) -> str:
    return "".join(f'<option value="{escape(name)}">' for name in names)


# --- the form


def _form() -> str:
    """Both phases share what is asked first and what is folded away."""
    every = fields()
    parts = [_group((field for field in every if not (field.phase or field.rare)), "")]
    for phase in ("finetune", "inference"):
        of_phase = [field for field in every if field.phase == phase]
        parts.append(_group((field for field in of_phase if not field.rare), phase))
    parts.append("<details><summary>More settings</summary>")
    for phase in ("", "finetune", "inference"):
        rare = (field for field in every if field.rare and field.phase == phase)
        parts.append(_group(rare, phase))
    return "\n".join([*parts, "</details>"])


def _group(of_group: Iterable[Field], phase: str) -> str:
    of_phase = f' data-phase="{phase}"' if phase else ""
    return f"<fieldset{of_phase}>{''.join(map(_control, of_group))}</fieldset>"


def _control(field: Field) -> str:
    wide = f' class="{_WIDTHS[field.name]}"' if field.name in _WIDTHS else ""
    return (
        f'<p{wide}><label for="field-{field.name}">{escape(field.label)}</label>'
        f"{''.join(_input(field))}</p>"
    )


def _input(field: Field) -> Iterator[str]:
    same = f'id="field-{field.name}" name="{field.name}" data-default="{escape(field.default)}"'
    if field.choices:
        yield f"<select {same}>"
        for value, summary in field.choices:
            chosen = " selected" if value == field.default else ""
            shown = " – ".join(filter(None, (value, summary)))
            yield f'<option value="{escape(value)}"{chosen}>{escape(shown)}</option>'
        yield "</select>"
        return
    hint = ""
    if field.hint:
        same += f' aria-describedby="hint-{field.name}"'
        hint = f'<small id="hint-{field.name}">{escape(field.hint)}</small>'
    if field.kind == "file":
        several = " multiple" if field.several else ""
        yield f'<input {same} type="file" accept="{",".join(field.accept)}"{several}>{hint}'
        return
    value = FIRST.get(field.name, field.default)
    extra = f' list="{_SUGGESTED[field.name]}"' if field.name in _SUGGESTED else ""
    extra += f' placeholder="{escape(_HINTS[field.name])}"' if field.name in _HINTS else ""
    modes = {"count": 'inputmode="numeric"', "number": 'inputmode="decimal"'}
    kind = modes.get(field.kind, 'spellcheck="false"')
    yield f'<input {same} {kind} value="{escape(value)}"{extra}>{hint}'
