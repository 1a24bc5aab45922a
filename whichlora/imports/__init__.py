"""Files of other tools → a run: one small file for each tool, also from other packages.

A package adds its own importer with an entry point in the group `whichlora.imports` that loads a
`Tool`. A file is recognised by its content. Nothing of it becomes code or shell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import (
    axolotl,
    engines,
    litgpt,
    llamafactory,
    python,
    swift,
    torchtune,
    trainer,
    trl,
    unsloth,
    unsloth_studio,
)
from whichlora.imports.base import Imported, Keys, Launch, Tool
from whichlora.imports.command import Command
from whichlora.imports.files import Kind, MissingFileError, Source, find_file, read_source
from whichlora.imports.python_calls import IMPORT
from whichlora.imports.spread import OF_TOOL, launch_settings, number_of_gpus
from whichlora.spec.members import Members
from whichlora.spec.versions import Libraries
from whichlora.spec.words import meant

_TOOLS = Members[Tool](
    "tool",
    "imports",
    Tool,
    (
        *(
            each.TOOL
            for each in (
                *(trainer, trl, axolotl, llamafactory, swift, torchtune, python, unsloth),
                *(unsloth_studio, litgpt),
            )
        ),
        *engines.TOOLS,
    ),
)
BUILT_IN = _TOOLS.built_in
ENTRY_POINT_GROUP = _TOOLS.group
list_tools = _TOOLS.all
_ACCELERATE = "accelerate_config"  # TRL's key for accelerate's file
_SUFFIXES = (".yaml", ".yml", ".json")


def import_files(
    paths: Sequence[Path],
    *,
    gpus: int | None = None,
    trainer: str = "",
    libraries: Libraries | None = None,
    model: str = "",
) -> Imported:
    """The run that `paths` describe: a configuration or a command, and files beside it.

    Args:
        paths: one of a tool or of a command; accelerate's YAML and DeepSpeed's JSON beside it.
        gpus: how many the user asks for, whatever the files say.
        trainer: whose file the user says it is, whatever its program is called.
        libraries: versions that it runs with; None for those that formulas are made for.
        model: that the user names in place of the file's.

    Raises:
        ConfigError: a file that can't be read, or of no known tool; a value of a wrong type.
    """
    sources = [read_source(path, _subcommands()) for path in paths]
    return _Files(sources, gpus, trainer, libraries, model).imported()


def _subcommands() -> dict[str, set[str]]:
    """Of tools with a command of their own, such as "trl sft"; none of one such as llama-server.

    A container's image stands for the program that it starts.
    """
    subcommands: dict[str, set[str]] = {}
    for tool in list_tools().values():
        for program in tool.programs:
            name, space, subcommand = program.partition(" ")
            if space:
                subcommands.setdefault(name, set()).add(subcommand)
            elif tool.positional and "." not in program:
                subcommands[name] = set()
        for image in tool.images:
            subcommands[image] = set()
    return subcommands


@dataclass
class _Files:
    """The files of one run."""

    sources: list[Source]
    gpus: int | None
    trainer: str
    libraries: Libraries | None
    model: str
    of_tool: str = ""  # the key whose file is not here, and was taken from the tool

    def imported(self) -> Imported:
        script = self._only("command")
        command = Command(program="")
        if script is not None and script.command is not None:
            command = script.command
        settings = self._only("settings") or self._configuration(script, command)
        main = script or settings
        if main is None:
            return self._launch_alone()
        shown = settings or main
        values = {**shown.values, **({} if shown.is_code else command.options)}
        tool = _tool_of(shown, command.program, values)
        in_shell = {*command.options}
        if tool.positional and command.files:
            values.setdefault(tool.positional, command.files[0])
            in_shell.add(tool.positional)
        values = {name: each for name, each in values.items() if not name.startswith(IMPORT)}
        built_in: Mapping[str, Any] = {}
        if settings is None:
            built_in = _built_in(main, tool, command.options.get("config"))
            values = {**built_in, **tool.flat(values)}
        else:
            values = tool.flat(values)
        accelerate = self._accelerate(main, tool, command.launcher_options, values)
        for name in (_ACCELERATE, "config"):
            values.pop(name, None)
        places = {**shown.places, **dict.fromkeys(command.options, str(main.path))}
        keys = Keys(
            values,
            lambda name: places.get(name, places.get(name.partition(".")[0], str(shown.path))),
            from_shell=in_shell,
            asked_model=self.model,
        )
        keys.assumed += _notes(command, tool)
        if self.of_tool:
            keys.assume(self.of_tool, OF_TOOL)
        if built_in:
            text = f"as {tool.name} {tool.configs_release} has it"
            keys.assume("config", f"{text}; give the file of another release with another --from")
        launch = self._launch(main, command, accelerate, values)
        launch = replace(
            launch, deepspeed_configs=tool.deepspeed_configs, fsdp_configs=tool.fsdp_configs
        )
        launch = _with_pins(launch, self._pins(shown, main))
        return _under_pins(tool.imported(str(shown.path), keys, launch, list(values)), launch.pins)

    def _launch_alone(self) -> Imported:
        """How a run is spread, of accelerate's or DeepSpeed's file; the user names the rest.

        Raises:
            ConfigError: the user names no model.
        """
        first = self.sources[0]
        if not self.model:
            raise ConfigError(
                f"{first.path}: says nothing of a training; give the configuration or the command "
                "of one with another --from, or name the model and its settings: whichlora "
                f"estimate MODEL --method lora --from {first.path}"
            )
        config, zero = self._only("accelerate"), self._only("deepspeed")
        keys = Keys({}, lambda name: str(first.path), asked_model=self.model)
        accelerate = config.values if config else {}
        launch = self._launch(first, Command(program=""), accelerate, {})
        settings = {
            "model": self.model,
            **launch_settings(keys, launch, zero.values if zero else {}),
        }
        return Imported(
            path=str(first.path),
            tool="accelerate" if config else "DeepSpeed",
            settings=settings,
            unknown=tuple(sorted(keys.unknown)),
            assumed=tuple(keys.assumed),
            refused=keys.refused,
        )

    def _pins(self, *sources: Source) -> Mapping[str, str]:
        """Versions that the last of `sources` installs; none where the user states versions."""
        if self.libraries is not None:
            return {}
        return {name: version for each in sources for name, version in each.pins.items()}

    def _configuration(self, script: Source | None, command: Command) -> Source | None:
        """The file that the command names as the tool's configuration, if it does."""
        config = command.options.get("config")
        for name in (*command.files, config):
            if script and isinstance(name, str) and name.endswith(_SUFFIXES):
                try:
                    return self._named(script, "the configuration", name, "settings")
                except MissingFileError:
                    if not _comes_with_tool(command.program, name):
                        raise
        return self._code(script, command)

    def _code(self, script: Source | None, command: Command) -> Source | None:
        """The program in Python that the command starts, if it is here and loads a model."""
        if script is None or not command.script:
            return None
        for tool in list_tools().values():
            if command.program in tool.programs or tool.parses_whole & command.options.keys():
                return None
        with contextlib.suppress(ConfigError):
            path = find_file("", command.script, beside=script.path.parent)
            return read_source(path, _subcommands(), command.options)
        return None

    def _accelerate(
        self, main: Source, tool: Tool, launcher: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The content of accelerate's file: given, named, or one that comes with the tool."""
        source = self._only("accelerate")
        if source is not None:
            return source.values
        for key, name in (
            ("config_file", launcher.get("config_file")),
            (_ACCELERATE, values.get(_ACCELERATE)),
        ):
            if isinstance(name, str):
                if name in tool.launch_configs:
                    return tool.launch_configs[name]
                try:
                    return self._named(main, key, name, "accelerate").values
                except MissingFileError:
                    stem = PurePosixPath(name).stem.removeprefix("deepspeed_")
                    if stem not in tool.launch_configs:
                        raise
                self.of_tool = key
                return tool.launch_configs[stem]
        return {}

    def _only(self, kind: Kind) -> Source | None:
        """The file of this kind, if there is one. Raises: ConfigError: there are several."""
        sources = [source for source in self.sources if source.kind == kind]
        if len(sources) > 1:
            raise ConfigError(
                f"{sources[1].path}: is of the same kind as {sources[0].path}; give one"
            )
        return sources[0] if sources else None

    def _named(self, by: Source, where: str, name: str, kind: Kind) -> Source:
        """A file that `by` names. Raises: ConfigError: it is missing, or of another kind."""
        path = find_file(f"{by.path}: {where}", name, beside=by.path.parent)
        source = read_source(path, _subcommands())
        if source.kind != kind:
            raise ConfigError(f"{path}: holds {source.kind}, {by.path} names it as {kind}")
        return source

    def _launch(
        self,
        main: Source,
        command: Command,
        accelerate: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> Launch:
        config = dict(accelerate)
        if command.launcher == "accelerate":
            config |= _as_config(command.launcher_options, config)
        gpus, nodes = self.gpus, 1
        if gpus is None:
            gpus, nodes = _gpus_and_nodes(main, command, config)

        def read_file(where: str, name: str) -> Mapping[str, Any]:
            if source is not None:
                return source.values
            path = find_file(where, name, beside=main.path.parent)
            return read_source(path, _subcommands()).values

        source = self._only("deepspeed")
        if source is not None and "deepspeed" not in values and "deepspeed_config" not in config:
            config |= {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_config_file": str(source.path)},
            }
        return Launch(
            gpus=gpus,
            nodes=nodes,
            accelerate=config,
            environment=command.environment,
            has_launcher=bool(command.launcher) and command.launcher != "python",
            program=command.program,
            trainer=self.trainer,
            libraries=self.libraries or Libraries(),
            states_libraries=self.libraries is not None,
            tag=command.tag,
            repeated=command.repeated,
            read_file=read_file,
        )


def _with_pins(launch: Launch, pins: Mapping[str, str]) -> Launch:
    return replace(launch, libraries=Libraries.of(pins.items()), pins=pins) if pins else launch


def _under_pins(imported: Imported, pins: Mapping[str, str]) -> Imported:
    """The run with the versions that its files install, where its tool predicts it with these."""
    own = imported.settings.get("libraries")
    if not pins or own == ():
        return imported
    libraries = tuple(sorted({**dict(own or ()), **pins}.items()))
    installs = ", ".join(map(" ".join, sorted(pins.items())))
    return replace(
        imported,
        settings={**imported.settings, "libraries": libraries},
        assumed=(f"installs {installs}, taken as --libraries", *imported.assumed),
    )


def _built_in(main: Source, tool: Tool, name: Any) -> Mapping[str, Any]:
    """The keys of a configuration that comes with the tool.

    Raises:
        ConfigError: none is called so.
    """
    if tool.configs is None or not isinstance(name, str):
        return {}
    content = tool.configs(name)
    if content is None:
        raise ConfigError(
            f"{main.path}: config: {name[:80]!r} is none of those that come with {tool.name} and "
            "are predicted; give its file with another --from"
        )
    return content


def _comes_with_tool(program: str, name: str) -> bool:
    """Whether the tool that `program` starts has a configuration of this name."""
    tools = [tool for tool in list_tools().values() if program in tool.programs]
    return any(tool.configs is not None and tool.configs(name) is not None for tool in tools)


def _as_config(options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `accelerate launch` as the keys of its file."""
    read = {name: value for name, value in options.items() if not name.startswith("fsdp_")}
    on = ("true", "1", "yes")
    if str(options.get("use_deepspeed", "")).lower() in on:
        read["distributed_type"] = "DEEPSPEED"
        read["deepspeed_config"] = dict(options)
    elif str(options.get("use_fsdp", "")).lower() in on:
        read["distributed_type"] = "FSDP"
    fsdp = {name: value for name, value in options.items() if name.startswith("fsdp_")}
    if fsdp:
        earlier = config.get("fsdp_config")
        read["fsdp_config"] = {**(earlier if isinstance(earlier, Mapping) else {}), **fsdp}
    return read


def _gpus_and_nodes(
    main: Source, command: Command, accelerate: Mapping[str, Any]
) -> tuple[int | None, int]:
    """How many processes are started, over how many machines; None is not said."""
    options, environment, where = command.launcher_options, command.environment, str(main.path)

    def option(*names: str) -> Any:
        return next((options[name] for name in names if name in options), None)

    if str(accelerate.get("distributed_type", "")).upper() == "NO":
        return 1, 1
    if "num_processes" in accelerate:
        machines = number_of_gpus(where, accelerate.get("num_machines", 1))
        return number_of_gpus(where, accelerate["num_processes"]), machines or 1
    if command.launcher == "deepspeed":
        nodes, each = option("num_nodes") or 1, option("num_gpus")
    elif command.launcher == "torchrun":
        nodes, each = option("nnodes") or 1, option("nproc_per_node") or 1
    else:
        each = environment.get("NPROC_PER_NODE", 1 if "NPROC_PER_NODE" in command.unseen else None)
        nodes = environment.get("NNODES", 1)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    takes_all = command.launcher or " " in command.program  # a tool's own command sees to it
    if each is None and visible and takes_all:
        each = len([device for device in visible.split(",") if device.strip()])
    return number_of_gpus(where, each, nodes), number_of_gpus(where, nodes) or 1


def _notes(command: Command, tool: Tool) -> list[str]:
    """What the shell keeps from the command, which the script looks as if it gave."""
    cut = f"line {command.cut_at} is a comment and ends the command: " if command.cut_at else ""
    notes = []
    if command.lost:
        matter = [f"--{name}" for name in command.lost if not tool.has_no_effect(name)]
        others = len(command.lost) - len(matter)
        named = [*matter, *([f"{others} without effect"] if others else [])]
        notes.append(f"{cut}{', '.join(named)} never reach {command.program}")
    if command.unseen:
        named = [*command.unseen]
        why = cut if not command.lost else ""
        notes.append(
            f"{why}{command.program} does not see {', '.join(named)}, set and not exported"
        )
    return notes


def _tool_of(main: Source, program: str, values: Mapping[str, Any]) -> Tool:
    """The tool whose program it is, or else the one that has most of its marks.

    Args:
        main: the configuration, or else the command.

    Raises:
        ConfigError: none names its model so.
    """
    tools = list_tools()
    for tool in tools.values():
        if program in (*tool.programs, *tool.images):
            return tool
    is_command = main.kind == "command"
    reading = [
        tool
        for tool in tools.values()
        if tool.reads_code == main.is_code
        and (tool.reads_commands if is_command else tool.reads_files)
    ]
    candidates = [
        tool
        for tool in reading
        if tool.models & values.keys()
        and not (is_command and tool.commands_have.isdisjoint(values) and tool.commands_have)
    ]
    if not candidates:
        models = sorted({name for tool in reading for name in tool.models})
        names = ", ".join(models)
        for key in values:
            if near := meant(key, models):
                raise ConfigError(
                    f"{main.path}: names no model, which is under {near} in such a file, not {key}"
                )
        what = f"{program} is" if is_command else "is"
        raise ConfigError(
            f"{main.path}: {what} of no tool that is known; known are {', '.join(tools)}, whose "
            f"{'arguments' if is_command else 'files'} have one of the keys {names}; give the "
            "settings as options instead"
        )
    return max(candidates, key=lambda tool: len(tool.marks & values.keys()))


__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Imported", "Tool", "import_files", "list_tools"]
