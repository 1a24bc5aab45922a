"""Which architectures a release of an engine knows: by the registries of its releases.

`releases/<engine>.json` is written by `benchmarks/engine_models.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.versions import Libraries

FOLDER = Path(__file__).parent / "releases"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModels:
    """What the releases of one engine know.

    Names of architectures are in small letters: transformers writes Phimoe, the hub PhiMoE.

    Args:
        engine: the field of `Libraries` that is its version.
        releases: those whose registries were read, oldest first.
        first: the first that knows an architecture.
        last: the last that does, where a later one was read that does not.
        backend: since when classes of transformers are run where the engine has none of its own,
            by kind: "dense", "experts", "images". A kind that is missing never is.
        not_for_backend: classes of transformers that it does not take.
    """

    engine: str
    releases: tuple[str, ...]
    first: Mapping[str, str]
    last: Mapping[str, str]
    backend: Mapping[str, str]
    not_for_backend: frozenset[str]

    def is_read(self, libraries: Libraries) -> bool:
        """Whether the release is none that is older or newer than all that were read."""
        oldest, newest = self.releases[0], self.releases[-1]
        return not libraries.older(self.engine, oldest) and not libraries.newer(self.engine, newest)

    def knows(self, libraries: Libraries, model: ModelSpec) -> bool:
        """Whether the release has a class for `model`; True of a config that names none."""
        names = architectures_of(model)
        return not names or any(self._has(libraries, name.lower()) for name in names)

    def _has(self, libraries: Libraries, name: str) -> bool:
        first, last = self.first.get(name), self.last.get(name)
        is_known = libraries.reaches(self.engine, first)
        return is_known and (last is None or not libraries.newer(self.engine, last))

    def may_run_otherwise(self, libraries: Libraries, model: ModelSpec) -> bool:
        """Whether the release may run the class that transformers has for `model`.

        It does where the installed transformers has that class with its interface of attention.
        Kind: upper bound. Source: vLLM 0.33.0 docs/models/supported_models.md, "Transformers":
        full and sliding attention, and `_try_resolve_transformers` of its registry; SGLang 0.5.23
        srt/model_loader/utils.py `resolve_transformers_arch`.
        """
        since = self.backend_since(model)
        return libraries.reaches(self.engine, since)

    def backend_since(self, model: ModelSpec) -> str | None:
        """The first release whose Transformers backend may take `model`; None where none does."""
        kinds = {attention.kind for layer, _ in model.layers() for attention in layer.attentions}
        takes_none = any(name.lower() in self.not_for_backend for name in architectures_of(model))
        if kinds != {"softmax"} or takes_none:
            return None
        is_of_images = bool(model.unloaded_params) or "text_config" in model.config
        asked = ["dense", *["experts"] * model.has_experts, *["images"] * is_of_images]
        if any(kind not in self.backend for kind in asked):
            return None
        return max((self.backend[kind] for kind in asked), key=self.releases.index)


def architectures_of(model: ModelSpec) -> tuple[str, ...]:
    """The classes that the config of `model` names."""
    stated = model.config.get("architectures")
    return tuple(name for name in stated if isinstance(name, str)) if stated else ()


@cache
def known_models(engine: str) -> KnownModels:
    """What was read of `engine`, which has a file of its name."""
    read = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return KnownModels(
        engine=engine,
        releases=tuple(read["releases"]),
        first={name.lower(): release for name, release in read["first"].items()},
        last={name.lower(): release for name, release in read["last"].items()},
        backend=read["transformers_backend"],
        not_for_backend=frozenset(
            name.lower() for name in read["not_for_backend"]["architectures"]
        ),
    )


def check_known(served: Served, *, predicted_since: str = "0") -> None:
    """Refuse a model that the release has no class for.

    Nothing is refused of a release that was not read, nor where a class of transformers may do.

    Args:
        predicted_since: the first release that is predicted for the model.

    Raises:
        ConfigError: one line.
    """
    libraries, model, library = served.libraries, served.model, served.engine.library
    known = known_models(library)
    if not known.is_read(libraries) or known.knows(libraries, model):
        return
    if known.may_run_otherwise(libraries, model):
        return
    name, release = architectures_of(model)[0], served.release
    first, last = known.first.get(name.lower()), known.last.get(name.lower())
    since = known.backend_since(model)

    def is_early(known_release: str) -> bool:
        return Libraries.of([(library, known_release)]).older(library, predicted_since)

    if last is not None and libraries.newer(library, last):
        instead = "" if is_early(last) else f"give libraries {library}={last} or "
        raise ConfigError(
            f"serving: {release} does not know {name} any more; {instead}leave serving out"
        )
    if first is not None:
        given = f"{predicted_since}, the first that is predicted" if is_early(first) else first
        raise ConfigError(
            f"serving: {release} does not know {name}, {library} {first} or newer does; give "
            f"libraries {library}={given}, or leave serving out"
        )
    if since:
        given = predicted_since if is_early(since) else since
        raise ConfigError(
            f"serving: {release} does not know {name}; give libraries {library}={given} or newer, "
            "which may run the class of transformers, or leave serving out"
        )
    raise ConfigError(
        f"serving: {release} does not know {name}, nor does any release up to "
        f"{known.releases[-1]}; leave serving out"
    )


def known_note(served: Served) -> list[str]:
    """What a user must know of a model that the release has no class of its own for."""
    libraries, model, library = served.libraries, served.model, served.engine.library
    known = known_models(library)
    if not known.is_read(libraries) or known.knows(libraries, model):
        return []
    first = known.first.get(architectures_of(model)[0].lower())
    later = f", {library} {first} does" if first and libraries.older(library, first) else ""
    return [
        f"{served.release} has no class of its own for "
        f"{architectures_of(model)[0]}{later}: it starts if the installed transformers has one "
        "that its Transformers backend takes, and is predicted as with its own"
    ]


def release_note(served: Served, *, first_start: str) -> list[str]:
    """What a user must know of a release beyond those that were read, or that started.

    Args:
        first_start: the oldest release whose published starts the pool is compared with.
    """
    libraries, library, release = served.libraries, served.engine.library, served.release
    newest = known_models(library).releases[-1]
    if libraries.newer(library, newest):
        return [f"{release} is newer than {newest}, the last that was read: predicted as that one"]
    if libraries.older(library, first_start):
        return [f"{release} is older than {first_start}, the first with a start to compare with"]
    return []
