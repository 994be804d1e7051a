"""A Dockerfile as steps that can be done in a sandbox: a plan, or sentences that say why there is none. Pure.

What is replayed: one ``FROM``, ``RUN``, ``COPY`` and ``ADD`` of files of the context, ``ENV``, ``ARG``, ``WORKDIR``,
``USER`` and ``SHELL``. What only describes a container is passed over. Everything else is refused: further stages,
addresses, archives that ``ADD`` would unpack, heredocs, mounts that bring something in. A refused Dockerfile has to be
built by Docker.
"""

import io
import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec
from dockerfile_parse import DockerfileParser

from opengyre.tasks.errors import TaskError

PASSED_OVER = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER", "VOLUME")
REPLAYED = ("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "SHELL")
MAX_STEPS = 500
_VARIABLE = re.compile(r"\\\$|\$(?:\{([A-Za-z_]\w*)(?:(:?[-+])([^}]*))?\}|([A-Za-z_]\w*))")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_ADDRESS = re.compile(r"^(?:[a-z][a-z0-9+.-]*://|git@)", re.IGNORECASE)
_HEREDOC = re.compile(r"<<-?[\"']?[A-Za-z_]")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


class Run(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Run a command by a shell."""

    command: str
    shell: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    user: str | None
    line: int


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """Copy files and folders of the context; a source is a pattern relative to it."""

    sources: tuple[str, ...]
    target: str
    """Absolute."""
    folder: bool
    """The target is a folder, into which the sources go by their names."""
    owner: str | None
    mode: str | None
    line: int


class Folder(msgspec.Struct, frozen=True, kw_only=True, tag="folder"):
    """Make a folder (WORKDIR)."""

    path: str
    user: str | None
    line: int


Step = Run | Copy | Folder


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a Dockerfile amounts to."""

    base: str
    steps: tuple[Step, ...] = ()
    env: dict[str, str] = {}
    """Of what runs in the finished environment."""
    workdir: str = "/"
    user: str | None = None
    instructions: int = 0
    """How many the Dockerfile has, without comments."""
    passed_over: tuple[str, ...] = ()
    """Those that only describe a container."""
    refused: tuple[str, ...] = ()
    """Sentences: why it cannot be replayed. Empty: it can."""


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:+instead}`` replaced, unset ones by nothing."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "\\$":
            return "$"
        name, operator, word = found[1] or found[4], found[2], found[3]
        here = values.get(name)
        if operator is None:
            return here or ""
        there = bool(here) if operator.startswith(":") else here is not None
        if operator.endswith("-"):
            return (here or "") if there else word
        return word if there else ""

    return _VARIABLE.sub(value, text)


def read_dockerfile(text: str, args: Mapping[str, str] | None = None) -> Plan:
    """The plan of a Dockerfile; ``args``: values of its build arguments. Raises `TaskError` where it is none."""
    if "\0" in text:
        raise TaskError("Dockerfile holds a NUL; allowed is text")
    # It wants a file of bytes, whatever its annotation says.
    fileobj: Any = io.BytesIO(text.encode())
    structure = DockerfileParser(fileobj=fileobj).structure
    instructions = [item for item in structure if item["instruction"] != "COMMENT"]
    if not any(item["instruction"] == "FROM" for item in instructions):
        raise TaskError("Dockerfile has no FROM; allowed is one that begins with an image")
    if len(instructions) > MAX_STEPS:
        raise TaskError(f"Dockerfile has {len(instructions)} instructions; allowed are {MAX_STEPS}")
    reader = _Reader(dict(args or {}))
    for item in instructions:
        reader.take(item["instruction"], item["value"], item["startline"] + 1)
    return reader.plan(len(instructions))


class _Reader:
    """The state that instructions change."""

    def __init__(self, given: dict[str, str]) -> None:
        self.given = given
        self.args: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.base: str | None = None
        self.workdir = "/"
        self.user: str | None = None
        self.shell: tuple[str, ...] = ("/bin/sh", "-c")
        self.steps: list[Step] = []
        self.passed: list[str] = []
        self.refused: list[str] = []
        self.lost = False
        """What follows is no instruction, but was taken for one."""

    def plan(self, instructions: int) -> Plan:
        return Plan(
            base=self.base or "",
            steps=tuple(self.steps),
            env=dict(self.env),
            workdir=self.workdir,
            user=self.user,
            instructions=instructions,
            passed_over=tuple(self.passed),
            refused=tuple(self.refused),
        )

    def take(self, instruction: str, value: str, line: int) -> None:
        if self.lost:
            return
        if instruction in PASSED_OVER:
            self.passed.append(instruction)
            return
        if instruction not in REPLAYED:
            self._refuse(line, f"{instruction} is not replayed; allowed are {', '.join(REPLAYED)}")
            return
        if self.base is None and instruction not in ("FROM", "ARG"):
            self._refuse(line, f"{instruction} stands before FROM; allowed there is ARG")
            return
        if instruction in ("RUN", "COPY", "ADD") and _HEREDOC.search(value):
            self._refuse(line, f"{instruction} has a heredoc; allowed is a command on lines that end with a backslash")
            self.lost = True
            return
        try:
            _HANDLERS[instruction](self, value, line)
        except ValueError as error:
            self._refuse(line, f"{instruction} cannot be read: {error}")

    def _refuse(self, line: int, why: str) -> None:
        self.refused.append(f"Dockerfile line {line}: {why}")

    def _values(self) -> dict[str, str]:
        return {**self.args, **self.env}

    def _said(self, value: str) -> str:
        return substitute(value, self._values())

    def on_from(self, value: str, line: int) -> None:
        if self.base is not None:
            self._refuse(line, "a second FROM; allowed is one stage")
            return
        words = [word for word in value.split() if not word.startswith("--platform")]
        self.base = substitute(words[0], self.args) if words else ""
        if not self.base or self.base.startswith("--"):
            self._refuse(line, f"FROM {value!r} names no image")
        self.args = {}  # those before FROM are for FROM only

    def on_arg(self, value: str, _line: int) -> None:
        for word in shlex.split(value):
            name, equals, default = word.partition("=")
            if name in self.given:
                self.args[name] = self.given[name]
            elif equals:
                self.args[name] = self._said(default)

    def on_env(self, value: str, _line: int) -> None:
        before = self._values()  # what one instruction sets is not seen by itself
        words = value.split(None, 1)
        if len(words) == 2 and "=" not in words[0]:
            self.env[words[0]] = substitute(words[1].strip(), before)
            return
        for word in _words(value):
            name, equals, text = word.partition("=")
            if not equals or not name:
                raise ValueError(f"{word!r}; allowed is NAME=value")
            self.env[name] = substitute(text, before)

    def on_workdir(self, value: str, line: int) -> None:
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._said(_unquoted(value))))
        self.steps.append(Folder(path=self.workdir, user=None, line=line))

    def on_user(self, value: str, _line: int) -> None:
        self.user = self._said(value.strip()) or None

    def on_shell(self, value: str, _line: int) -> None:
        words = _list(value)
        if not words:
            raise ValueError(f"{value!r}; allowed is a JSON list of strings")
        self.shell = tuple(words)

    def on_run(self, value: str, line: int) -> None:
        flags, command = _flags(value)
        for name, setting in flags:
            if name == "mount" and "type=cache" in setting.split(","):
                continue  # only makes a build faster
            if name == "mount" and "type=tmpfs" in setting.split(","):
                continue
            self._refuse(line, f"RUN has --{name}={setting}; allowed are mounts of type cache and tmpfs")
            return
        words = _list(command)
        if not command:
            raise ValueError("there is no command")
        run = Run(
            command=shlex.join(words) if words is not None else command,
            shell=self.shell,
            env=self._values(),
            workdir=self.workdir,
            user=self.user,
            line=line,
        )
        self.steps.append(run)

    def on_copy(self, value: str, line: int) -> None:
        self._copy("COPY", value, line)

    def on_add(self, value: str, line: int) -> None:
        self._copy("ADD", value, line)

    def _copy(self, instruction: str, value: str, line: int) -> None:
        flags, rest = _flags(value)
        owner = mode = None
        for name, setting in flags:
            match name:
                case "chown":
                    owner = self._said(setting)
                case "chmod":
                    mode = self._said(setting)
                case "link":
                    pass
                case _:
                    self._refuse(line, f"{instruction} has --{name}; allowed are --chown, --chmod and --link")
                    return
        words = [self._said(word) for word in (_list(rest) or shlex.split(rest))]
        if len(words) < 2:
            raise ValueError(f"{rest!r}; allowed are at least one source and a target")
        *sources, target = words
        for source in sources:
            if _ADDRESS.match(source):
                self._refuse(line, f"{instruction} fetches {source[:80]}; allowed are files of the context")
                return
            if instruction == "ADD" and source.lower().endswith(_ARCHIVES):
                self._refuse(line, f"ADD unpacks {source[:80]}; allowed are files that are copied as they are")
                return
            if ".." in source.split("/"):
                self._refuse(line, f"{instruction} names {source[:80]}; allowed are files of the context")
                return
        copy = Copy(
            sources=tuple(posixpath.normpath(source).lstrip("/") or "." for source in sources),
            target=posixpath.normpath(posixpath.join(self.workdir, target)),
            folder=target.endswith("/") or target in (".", "..") or len(sources) > 1,
            owner=owner,
            mode=mode,
            line=line,
        )
        self.steps.append(copy)


_HANDLERS = {
    "FROM": _Reader.on_from, "ARG": _Reader.on_arg, "ENV": _Reader.on_env, "WORKDIR": _Reader.on_workdir,
    "USER": _Reader.on_user, "SHELL": _Reader.on_shell, "RUN": _Reader.on_run, "COPY": _Reader.on_copy,
    "ADD": _Reader.on_add,
}  # fmt: skip


def _words(value: str) -> list[str]:
    """Shell words whose variables stay as they are written."""
    return shlex.split(value)


def _unquoted(value: str) -> str:
    words = shlex.split(value)
    return words[0] if len(words) == 1 else value.strip()


def _list(value: str) -> list[str] | None:
    """The words of the form ``["a", "b"]``; None where it is not that."""
    if not value.lstrip().startswith("["):
        return None
    try:
        words = json.loads(value)
    except ValueError:
        return None  # the shell's own bracket
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _flags(value: str) -> tuple[list[tuple[str, str]], str]:
    """The options before an instruction's words, and the rest."""
    flags = []
    rest = value.strip()
    while found := _FLAG.match(rest):
        flags.append((found[1], found[2] or ""))
        rest = rest[found.end() :]
    return flags, rest
