"""What comes in over HTTP: types, rules, sentences."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from opengyre.gateway import examples, models
from opengyre.gateway.deps import is_unicode
from opengyre.gateway.problems import Problem, of_validation, response
from opengyre.proto.run import Dispatch, Elastic, Harness, Optimization, RunSpec, Sampling, Serving, Shot, ShotTurn
from opengyre.proto.task import Artifact, Check, Healthcheck, TaskEnvironment, TaskSpec, TaskStep, TaskTests
from opengyre.proto.task_rules import InvalidTaskError, validate_task

SUBMISSION: TypeAdapter[Any] = TypeAdapter(models.Submission)


def answer_to(document: Any, kind: Any = SUBMISSION) -> Any:
    """The specs that are made of a document, or the problem that it is answered with."""
    try:
        if kind is SUBMISSION:
            return models.specs_of(SUBMISSION.validate_python(document))
        return kind.model_validate(document).spec()
    except ValidationError as error:
        return of_validation(error.errors())
    except Problem as problem:
        return problem


def problem_of(document: Any, kind: Any = SUBMISSION) -> Problem:
    problem = answer_to(document, kind)
    assert isinstance(problem, Problem)
    return problem


@pytest.mark.parametrize(
    ("model", "struct", "apart"),
    [
        (models.CheckIn, Check, set()),
        (models.TaskFields, TaskSpec, set()),
        (models.EnvironmentIn, TaskEnvironment, set()),
        (models.TestsIn, TaskTests, set()),
        (models.StepIn, TaskStep, set()),
        (models.HealthcheckIn, Healthcheck, set()),
        (models.ArtifactIn, Artifact, set()),
        (models.DispatchIn, Dispatch, set()),
        (models.HarnessIn, Harness, set()),
        (models.ShotIn, Shot, set()),
        (models.ShotTurnIn, ShotTurn, set()),
        (models.OptimizationIn, Optimization, set()),
        (models.SamplingIn, Sampling, set()),
        (models.ElasticIn, Elastic, set()),
        (models.ServingIn, Serving, set()),
        (models.RunIn, RunSpec, {"state"}),
    ],
)
def test_a_model_mirrors_its_struct(model: type[models.Input], struct: type[msgspec.Struct], apart: set[str]) -> None:
    assert set(model.model_fields) == set(struct.__struct_fields__) - apart
    for field in msgspec.structs.fields(struct):
        if field.name in apart or field.required:
            continue
        theirs = model.model_fields[field.name].get_default(call_default_factory=True)
        ours = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        if isinstance(ours, msgspec.Struct):
            ours, theirs = msgspec.json.decode(msgspec.json.encode(ours)), theirs.model_dump()  # JSON has lists
        elif isinstance(ours, tuple | bytes):  # JSON has lists, and base64
            ours = list(ours) if isinstance(ours, tuple) else msgspec.to_builtins(ours)
        if field.name != "checks":  # the struct allows a task without checks, the API does not
            assert theirs == ours, field.name


def test_the_examples_are_accepted() -> None:
    assert models.specs_of(SUBMISSION.validate_python(examples.TASK_IN))[0].task == "write-000001"
    assert models.specs_of(SUBMISSION.validate_python(examples.TASK_BATCH))[0].repeat == 2
    assert models.RunIn.model_validate(examples.RUN_IN).spec().dispatch.batch_groups == 8


def changed(**fields: Any) -> dict[str, Any]:
    return {**examples.TASK_IN, **fields}


CHECK = {"name": "a", "command": "true", "weight": 1.0}


@pytest.mark.parametrize(
    ("document", "field", "allowed"),
    [
        (changed(task="a.b"), "task", "pattern"),
        (changed(instruction=""), "instruction", "at least 1"),
        (changed(instruction="  "), "instruction", "1 to 65536"),
        (changed(instruction="a\0b"), "instruction", "NUL"),
        (changed(instruction="\ud800"), "instruction", "unicode"),
        (changed(files={"../x": ""}), "files", "'..'"),
        (changed(files={"/x": ""}), "files", "relative"),
        (changed(files={"a//b": ""}), "files", "empty parts"),
        (changed(files={"a": "", "a/b": ""}), "files", "a file or a folder"),
        (changed(files={"a\n": ""}), "files", "printable"),
        (changed(checks=[]), "checks", "one or more"),
        (changed(checks={}), "checks", "a JSON list"),
        (changed(files=[]), "files", "a JSON object"),
        (changed(max_turns=True), "max_turns", "max_turns is true: input should be a valid integer"),
        (changed(checks=[{**CHECK, "weight": None}]), "checks.0.weight", "is null"),
        (changed(checks=[{**CHECK, "weight": 0.5}]), "checks", "a sum of 1"),
        (changed(checks=[{**CHECK, "weight": 0.5}] * 2), "checks.1.name", "a name of its own"),
        (changed(checks=[{**CHECK, "weight": "1"}]), "checks.0.weight", "valid number"),
        (changed(checks=[{**CHECK, "weight": float("nan")}]), "checks.0.weight", "finite"),
        (changed(checks=[{**CHECK, "wieght": 1}]), "checks.0.wieght", "allowed: name, command, weight"),
        (changed(repeat=0), "repeat", "greater than or equal to 1"),
        (changed(repeat=True), "repeat", "integer"),
        (changed(purpose="test"), "purpose", "'train' or 'evaluate'"),
        (changed(unknown=1), "unknown", "unknown field unknown; allowed: task"),
        ({"tasks": [examples.TASK_IN, changed(repeat=0)]}, "tasks.1.repeat", "greater"),
        ({"tasks": [examples.TASK_IN] * 2}, "tasks.1.task", "an identifier of its own"),
        ({"tasks": [examples.TASK_IN, changed(task="b", files={"..": ""})]}, "tasks.1.files", "'..'"),
        ({"tasks": []}, "tasks", "one or more"),
        ({}, "task", "missing"),
        ([], "body", "body is []: allowed is a JSON object"),
    ],
)
def test_a_malformed_task_is_one_sentence_that_names_the_field(document: Any, field: str, allowed: str) -> None:
    problem = problem_of(document)
    assert problem.status == 422
    assert problem.field == field
    assert allowed.lower() in problem.detail.lower()
    assert "\n" not in problem.detail


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"run": "a-b"}, "run"),
        ({"updates": 0}, "updates"),
        ({"seed": -1}, "seed"),
        ({"model": ""}, "model"),
        ({"model": "/a\0"}, "model"),
        ({"model": "runs/model"}, "model"),
        ({"dispatch": {"phi": -1.0}}, "dispatch.phi"),
        ({"dispatch": {"phi": 0.3}}, "dispatch"),
        ({"dispatch": {"min_members": 9, "group_size": 8}}, "dispatch.min_members"),
        ({"harness": {"max_tokens": 600}}, "harness.context_tokens"),
        ({"state": "active"}, "state"),
    ],
)
def test_a_malformed_run_is_one_sentence_that_names_the_field(change: dict[str, Any], field: str) -> None:
    problem = problem_of({**examples.RUN_IN, **change}, models.RunIn)
    assert (problem.status, problem.field) == (422, field)


def test_a_field_whose_name_is_no_unicode_is_still_an_answer() -> None:
    problem = problem_of(changed(**{"\ud800": 1}))
    assert json.loads(bytes(response(problem).body))["detail"].startswith("unknown field \\ud800; allowed")


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        (b'{"files": {"\\ud83d\\ude00": ""}}', True),
        (b'{"files": {"\\ud800": ""}}', False),
        (b'["\\\\ud800"]', True),
        (b'["\\uDC00"]', False),
        (b'{"\\ud800"', True),
        (b'"x"', True),
    ],
)
def test_half_of_a_surrogate_pair_is_found_in_the_body(body: bytes, fine: bool) -> None:
    assert is_unicode(body) is fine


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(TaskSpec.__struct_fields__, JSON))


@given(st.one_of(JSON, FIELDS, FIELDS.map(lambda fields: {**examples.TASK_IN, **fields})))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_in_is_a_valid_task_or_a_sentence(document: Any) -> None:
    answer = answer_to(document)
    if isinstance(answer, Problem):
        assert answer.status == 422
        assert answer.detail
    else:
        for spec in answer:
            assert msgspec.json.decode(msgspec.json.encode(spec), type=TaskSpec) == spec


def test_a_task_that_is_too_large_for_the_bus_is_refused() -> None:
    spec = msgspec.convert({**examples.TASK_IN, "files": {"a": "x" * (5 << 20)}}, TaskSpec)
    with pytest.raises(InvalidTaskError, match=r"files make the task .* at most 4194304"):
        validate_task(spec)
