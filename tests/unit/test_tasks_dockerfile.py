"""Dockerfiles as plans: what is replayed, what is passed over, and the sentence for what is not."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opengyre.tasks.dockerfile import Copy, Folder, Plan, Run, read_dockerfile, substitute
from opengyre.tasks.errors import TaskError


def plan(*lines: str) -> Plan:
    return read_dockerfile("\n".join(["FROM base:1", *lines]))


def test_the_environment_of_a_run_is_what_was_set_before_it() -> None:
    found = plan("ENV A=1 B=$A", "RUN one", "ENV A=2 C=${A}x", "WORKDIR /srv", "WORKDIR app", "USER me", "RUN two")
    runs = [step for step in found.steps if isinstance(step, Run)]
    assert runs[0].env == {"A": "1", "B": ""}
    assert (runs[0].workdir, runs[0].user) == ("/", None)
    assert runs[1].env == {"A": "2", "B": "", "C": "1x"}
    assert (runs[1].workdir, runs[1].user) == ("/srv/app", "me")
    assert [step.path for step in found.steps if isinstance(step, Folder)] == ["/srv", "/srv/app"]
    assert (found.workdir, found.user, found.instructions) == ("/srv/app", "me", 8)
    assert not found.refused


def test_arguments_are_for_from_or_for_what_comes_after() -> None:
    text = "ARG V=3\nFROM python:${V}-slim\nARG V\nARG W=w\nRUN echo $V $W\nENV X=$W"
    found = read_dockerfile(text)
    assert found.base == "python:3-slim"
    assert found.env == {"X": "w"}
    given = read_dockerfile(text, {"W": "given"})
    assert given.env == {"X": "given"}


def test_files_are_copied_to_absolute_places() -> None:
    found = plan(
        "WORKDIR /app", "COPY a.txt b/ ./", "COPY --chown=1:2 --chmod=755 x y", "ADD . /all", 'COPY ["a b", "/c/"]'
    )
    copies = [step for step in found.steps if isinstance(step, Copy)]
    assert [(c.sources, c.target, c.folder) for c in copies] == [
        (("a.txt", "b"), "/app", True),
        (("x",), "/app/y", False),
        ((".",), "/all", False),
        (("a b",), "/c", True),
    ]
    assert (copies[1].owner, copies[1].mode) == ("1:2", "755")


def test_what_only_describes_a_container_is_passed_over() -> None:
    found = plan("LABEL a=b", "EXPOSE 80", 'CMD ["x"]', "HEALTHCHECK NONE", "VOLUME /x", "ENTRYPOINT y")
    assert found.passed_over == ("LABEL", "EXPOSE", "CMD", "HEALTHCHECK", "VOLUME", "ENTRYPOINT")
    assert not found.refused
    assert not found.steps


def test_a_list_and_a_shell_are_what_docker_makes_of_them() -> None:
    found = plan('SHELL ["/bin/bash", "-ec"]', 'RUN ["echo", "a b"]', "RUN [ -f /x ] || true")
    commands = [(step.command, step.shell) for step in found.steps if isinstance(step, Run)]
    assert commands == [("echo 'a b'", ("/bin/bash", "-ec")), ("[ -f /x ] || true", ("/bin/bash", "-ec"))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("FROM other", "line 2: a second FROM; allowed is one stage"),
        ("COPY --from=x /a /b", "COPY has --from"),
        ("ADD https://x.org/a /b", "fetches https://x.org/a"),
        ("ADD git@github.com:a/b.git /b", "fetches git@github.com"),
        ("ADD a.tar.gz /b", "ADD unpacks a.tar.gz"),
        ("COPY ../x /b", "names ../x"),
        ("COPY x", "at least one source and a target"),
        ("RUN --mount=type=secret,id=a cat", "RUN has --mount=type=secret"),
        ("RUN --network=host x", "RUN has --network=host"),
        ("RUN cat <<EOF\nx\nEOF", "heredoc"),
        ("ONBUILD RUN x", "ONBUILD is not replayed"),
        ("ENV A='", "cannot be read"),
        ("SHELL sh", "JSON list"),
    ],
)
def test_what_is_not_replayed_is_said_with_its_line(line: str, words: str) -> None:
    found = plan(line)
    assert len(found.refused) == 1
    assert words in found.refused[0]
    assert found.refused[0].startswith("Dockerfile line 2: ")


def test_mounts_that_bring_nothing_in_are_allowed() -> None:
    (step,) = plan("RUN --mount=type=cache,target=/x pip install a").steps
    assert isinstance(step, Run)
    assert step.command == "pip install a"


@pytest.mark.parametrize("text", ["", "# nothing", "RUN x"])
def test_a_dockerfile_begins_with_an_image(text: str) -> None:
    with pytest.raises(TaskError, match="FROM"):
        read_dockerfile(text)


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="$\\")))
def test_text_without_variables_stays(text: str) -> None:
    assert substitute(text, {"A": "x"}) == text


@given(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text(alphabet="abc $'\"", max_size=8))
def test_a_value_is_not_substituted_again(name: str, value: str) -> None:
    assert substitute(f"<${{{name}}}>", {name: value}) == f"<{value}>"
    assert substitute(f"${{{name}:-d}}", {}) == "d"
    assert substitute(f"${{{name}:+d}}", {name: "x"}) == "d"
    assert substitute(f"\\${name}", {name: value}) == f"${name}"


@given(st.lists(st.text(alphabet="ab'\" ", min_size=1, max_size=5), min_size=1, max_size=3))
def test_a_command_is_kept_as_it_is_written(words: list[str]) -> None:
    command = shlex.join(words)
    (step,) = plan(f"RUN echo {command} end").steps
    assert isinstance(step, Run)
    assert step.command == f"echo {command} end"


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        read_dockerfile(f"FROM a\n{text}")
    except TaskError:
        return
