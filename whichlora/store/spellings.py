"""Match a model name as people type it, by its words, with the names of the database."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from whichlora.errors import ConfigError

MAX_LISTED = 8
MAX_NEAR = 3
SAME_SIZE_FRACTION = 0.06  # phi4:14b has 14.66e9 parameters

# "8x7b", "a3b" (active of a mixture), "1.5b", "7b1", "v0.3", "2.5", words
_TOKEN = re.compile(
    r"\d+x\d+(?:\.\d+)?b|a\d+(?:\.\d+)?b(?![a-z0-9])|\d+(?:\.\d+)?[bmk]\d?(?![a-z0-9])"
    r"|v\d+(?:\.\d+)*|\d+(?:\.\d+)*|[a-z]+"
)
# phi-1_5, stablelm-2-1_6b; ModelScope's folders have three of them in place of a dot
_DECIMAL_UNDERSCORE = re.compile(r"(?<=\d)_{1,3}(?=\d(?!\d))")
_SIZE = re.compile(r"\d+x\d+(\.\d+)?b|a?\d+(\.\d+)?[bm]\d?")
_SEPARATOR = re.compile(r"[-_ ]+")
_CONTEXT = re.compile(r"\d+k")
_VERSION = re.compile(r"v\d+(\.\d+)*")
_DATE = re.compile(r"2[3-9](0[1-9]|1[0-2])|(0[1-9]|1[0-2])[0-3]\d")  # 2407, 0528
_KINDS = {
    "base": "base",
    "pt": "base",
    "pretrained": "base",
    "instruct": "instruct",
    "it": "instruct",
    "chat": "instruct",
}
# Words that distinguish no two models of the database: the maker, a 16-bit storage.
_NOISE = frozenset({"meta", "hf", "latest", "model", "bf16", "fp16", "library", "ollama"})
_TRAININGS = frozenset({"sft", "dpo", "lora", "qlora"})  # which leave shapes as they are

_FULL_WIDTH = re.compile(r"(?<![a-z0-9])(fp|bf)16(?![a-z0-9])")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The parts of a model name.

    Args:
        words: the words of the name and the size.
        kind: "base", "instruct", or "" where the name says neither.
        versions: releases of one model, such as v0.3 or 2407.
    """

    words: frozenset[str]
    kind: str
    versions: frozenset[str]

    @property
    def unsized(self) -> frozenset[str]:
        """The words without the size."""
        return frozenset(word for word in self.words if not _SIZE.fullmatch(word))

    def as_base(self) -> Spelling:
        """The same, of which "base" is the kind and no word."""
        return Spelling(self.words - {"base"}, "base", self.versions)

    @property
    def contexts(self) -> frozenset[str]:
        """The words that state a length of the context."""
        return frozenset(filter(_CONTEXT.fullmatch, self.words))


def match(name: str, stems: Mapping[str, str], params: Mapping[str, int]) -> str | None:
    """The name in `stems` that `name` means; None where none has all its words.

    Of several, the one with the fewest further words; a name without a size means every size.

    Args:
        stems: architecture by model name, in the order of preference.
        params: parameters of each architecture, for a size that a model name leaves out.

    Raises:
        ConfigError: the name is ambiguous.
    """
    model = _match(name, stems, params)
    if model is None and "_" in name:  # of llama_3_8b, no decimal point
        return _match(name.replace("_", " "), stems, params)
    return model


def match_start(name: str, stems: Mapping[str, str], params: Mapping[str, int]) -> str | None:
    """The name in `stems` that `name` begins with, as of a model that somebody trained further.

    It says a size, and no word behind it is one of a model's name: Qwen2.5-7B-Instruct-sft.
    """
    vocabulary = _vocabulary(tuple(stems)) - _NOISE - _KINDS.keys() - _TRAININGS
    ends = [len(name), *(found.start() for found in reversed([*_SEPARATOR.finditer(name)]))]
    for end in ends:
        if not vocabulary.isdisjoint(word for word in _tokens(name[end:]) if word.isalpha()):
            return None
        if any(map(_SIZE.fullmatch, _tokens(name[:end]))):
            with contextlib.suppress(ConfigError):
                model = match(name[:end], stems, params)
                if model is not None:
                    return model
    return None


def _match(name: str, stems: Mapping[str, str], params: Mapping[str, int]) -> str | None:
    wanted = _spelling(name, _vocabulary(tuple(stems)))
    found = _match_spelling(wanted, name, stems, params)
    if found is None and "base" in wanted.words:  # no size of it: Qwen3-Coder-Next-Base
        found = _match_spelling(wanted.as_base(), name, stems, params)
    return found


def _match_spelling(
    wanted: Spelling, name: str, stems: Mapping[str, str], params: Mapping[str, int]
) -> str | None:
    if not wanted.unsized:
        return None
    candidates = {model: _candidate(model) for model in stems}
    fitting = {
        model: spelling
        for model, spelling in candidates.items()
        if _has_words(wanted, model, spelling, params[stems[model]])
        and _is_of_kind(spelling, wanted.kind, candidates.values())
    }
    if not fitting:
        return None
    # "4" of "llama 4" is no word of HuggingFaceM4 where a model's own name has it
    named = {model: fit for model, fit in fitting.items() if wanted.unsized <= fit.words}
    whole = {model: fit for model, fit in named.items() if wanted.words <= fit.words}
    fitting = whole or named or fitting  # a size that the name has, before one by its parameters
    exact = [model for model, spelling in fitting.items() if spelling == wanted]
    if exact:
        return exact[0]
    sized = wanted.words != wanted.unsized
    further = {
        model: len((spelling.words if sized else spelling.unsized) - wanted.words)
        for model, spelling in fitting.items()
    }
    fewest = min(further.values())
    closest = _with_shortest_context(
        {model: fit for model, fit in fitting.items() if further[model] == fewest}
    )
    models = _different(closest, fitting, stems)
    if len(models) > 1:
        raise ConfigError(_several(name, models))
    return min(closest, key=lambda model: _preference(fitting[model], wanted))


def _with_shortest_context(fitting: Mapping[str, Spelling]) -> list[str]:
    """Of models that differ in a context that their names state (4k, 128k), the shortest's."""
    if len({fit.words - fit.contexts for fit in fitting.values()}) > 1:
        return list(fitting)
    lengths = {
        model: sorted(int(word[:-1]) for word in fit.contexts) for model, fit in fitting.items()
    }
    return [model for model in fitting if lengths[model] == min(lengths.values())]


def _has_words(wanted: Spelling, name: str, spelling: Spelling, num_params: int) -> bool:
    """Whether a model name, or its organisation, has every word and release of `wanted`."""
    if not wanted.words & spelling.words or not wanted.versions <= spelling.versions:
        return False
    missing = wanted.words - spelling.words
    if missing and spelling.words == spelling.unsized:  # "mistral nemo 12b"
        missing = frozenset(word for word in missing if not _is_size_of(word, num_params))
    return not missing or missing <= frozenset(_tokens(name.rpartition("/")[0]))


def _is_size_of(word: str, num_params: int) -> bool:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([bm])", word)
    if size is None:
        return False
    scale = 1e9 if size[2] == "b" else 1e6
    return abs(float(size[1]) * scale / num_params - 1) < SAME_SIZE_FRACTION


def nearest(name: str, models: Iterable[str], limit: int = MAX_NEAR) -> list[str]:
    """Names of `models` spelled most like `name`, best first; also without the organisation."""
    wanted, short = (_plain(text) for text in (name, name.rpartition("/")[2]))
    scores = {
        candidate: max(
            _similarity(wanted, _plain(candidate)),
            _similarity(short, _plain(candidate.rpartition("/")[2])),
        )
        for candidate in models
    }
    best = sorted((model for model in scores if scores[model] > 0.6), key=lambda m: -scores[m])
    return best[:limit]


def _several(name: str, models: Sequence[str]) -> str:
    shown = ", ".join(models[:MAX_LISTED])
    more = f" and {len(models) - MAX_LISTED} more" if len(models) > MAX_LISTED else ""
    return f"{name!r} is ambiguous: it may be {shown}{more}; give one of these"


def _different(
    models: Iterable[str], spellings: Mapping[str, Spelling], stems: Mapping[str, str]
) -> list[str]:
    """The first name of each model; names with equal words or architecture are the same model."""
    groups: list[tuple[str, set[frozenset[str]], set[str]]] = []
    for model in models:
        words, architecture = spellings[model].words, stems[model]
        for _, words_of, architectures in groups:
            if words in words_of or architecture in architectures:
                words_of.add(words)
                architectures.add(architecture)
                break
        else:
            groups.append((model, {words}, {architecture}))
    return [first for first, _, _ in groups]


def _is_of_kind(spelling: Spelling, kind: str, candidates: Iterable[Spelling]) -> bool:
    """Whether a name may be of this `kind`; a name without a kind means the base model.

    Where the same model also has a name that says base, a name without a kind means instruct.
    """
    if not kind or spelling.kind == kind:
        return True
    if spelling.kind:
        return False
    kinds = {candidate.kind for candidate in candidates if candidate.words == spelling.words}
    return kind == ("instruct" if "base" in kinds else "base")


def _preference(spelling: Spelling, wanted: Spelling) -> tuple[int, list[float]]:
    """The wanted kind, else plain before base before instruct; then the newest release."""
    order = ("", "base", "instruct")
    kind = 0 if spelling.kind == wanted.kind else 1 + order.index(spelling.kind)
    numbers = (re.findall(r"\d+", version)[:2] for version in spelling.versions)
    return kind, sorted(-float(".".join(number)) for number in numbers)


@cache
def _candidate(name: str) -> Spelling:
    return _sorted_out(_tokens(name.rpartition("/")[2]))


def _spelling(name: str, vocabulary: frozenset[str]) -> Spelling:
    tokens = _tokens(name)
    joined: list[str] = []
    for token in tokens:  # "code llama" is codellama, where the vocabulary has that word
        if joined and joined[-1] + token in vocabulary and token.isalpha():
            joined[-1] += token
        else:
            joined.append(token)
    split = [part for token in joined for part in _split(token, vocabulary)]
    return _sorted_out(split)


def _split(token: str, vocabulary: frozenset[str]) -> list[str]:
    """A word outside the vocabulary as two words inside it: "mistralnemo"."""
    if token in vocabulary or not token.isalpha():
        return [token]
    for i in range(2, len(token)):
        if token[:i] in vocabulary and token[i:] in vocabulary:
            return [token[:i], token[i:]]
    return [token]


def _tokens(name: str) -> list[str]:
    text = _DECIMAL_UNDERSCORE.sub(".", _FULL_WIDTH.sub("", name.lower()))
    text = re.sub(r"(\d(?:\.\d+)?) (?=[bm](?![a-z0-9]))", r"\1", text)  # "8 b"
    return _TOKEN.findall(text)


def _sorted_out(tokens: Sequence[str]) -> Spelling:
    versions = {token for token in tokens if _VERSION.fullmatch(token) or _DATE.fullmatch(token)}
    kinds = [_KINDS[token] for token in tokens if token in _KINDS]
    words = {token for token in tokens if token not in versions | _NOISE | _KINDS.keys()}
    if kinds == ["base"] and not versions and not any(map(_SIZE.fullmatch, tokens)):
        words, kinds = {*words, "base"}, []  # a size, as of bert-base-uncased
    return Spelling(frozenset(words), kinds[-1] if kinds else "", frozenset(versions))


@cache
def _vocabulary(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(token for name in names for token in _tokens(name))


def _plain(name: str) -> str:
    return " ".join(token for token in _tokens(name) if token not in _NOISE)


def _similarity(wanted: str, candidate: str) -> float:
    matcher = difflib.SequenceMatcher(None, wanted, candidate)
    if matcher.real_quick_ratio() <= 0.6 or matcher.quick_ratio() <= 0.6:
        return 0.0
    return matcher.ratio()
