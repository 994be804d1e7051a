"""What is said of a wrong setting is ours, for every setting that there is."""

import re

import pytest
from pydantic import BaseModel, ValidationError

from opengyre.shared.settings import HostSettings, Settings, _sentence
from opengyre.shared.settings_words import allowed

WRONG = ([], {}, "steam", -1, 0, 1e99, 0.5, 10**400, True, "", float("nan"), [3], [""])


@pytest.mark.parametrize(
    ("kind", "context", "field", "sentence"),
    [
        ("greater_than_equal", {"ge": 1}, "count", "allowed are whole numbers from 1 to 10000"),
        ("int_parsing", {}, "count", "allowed are whole numbers from 1 to 10000"),
        ("greater_than_equal", {"ge": 1}, "forest_tokens", "allowed are whole numbers from 1 on"),
        ("less_than_equal", {"le": 1}, "vllm_memory_fraction", "allowed are numbers above 0 up to 1"),
        ("float_parsing", {}, "vllm_canary_nats", "allowed are numbers above 0"),
        ("float_type", {}, "switch_s", "allowed are numbers from 0 to 86400"),
        ("greater_than_equal", {"ge": 0.02}, None, "allowed are numbers from 0.02 on"),
        ("less_than", {"lt": 3}, None, "allowed are numbers below 3"),
        ("finite_number", {}, None, "allowed are numbers"),
        ("int_type", {}, None, "allowed are whole numbers"),
        ("bool_parsing", {}, "offload", "allowed are true and false"),
        ("string_type", {}, "host", "allowed is a text"),
        ("tuple_type", {}, "vllm_arguments", "allowed is a list of texts"),
        ("path_type", {}, None, "allowed is a path"),
        ("literal_error", {"expected": "'a' or 'b'"}, "engine", "allowed is 'a' or 'b'"),
        ("string_too_short", {"min_length": 1}, None, "allowed is a text of at least 1 character(s)"),
        ("string_pattern_mismatch", {"pattern": "^/"}, None, "allowed is a path that begins with /"),
        ("string_pattern_mismatch", {"pattern": "^x"}, None, "allowed is a text that matches ^x"),
        ("value_error", {"error": ValueError("allowed is a URL")}, None, "allowed is a URL"),
        ("of_tomorrow", {}, None, None),
    ],
)
def test_bad_settings_are_said_in_our_words(kind: str, context: dict, field: str | None, sentence: str | None) -> None:
    assert allowed(kind, context, HostSettings.model_fields[field] if field else None) == sentence


def sections() -> list[tuple[str, str]]:
    kinds = {name: field.annotation for name, field in Settings.model_fields.items()}
    return [
        (section, key)
        for section, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for key in kind.model_fields
    ]


@pytest.mark.parametrize(("section", "key"), [*sections(), ("", "state_dir"), ("", "host"), ("", "log")])
def test_of_each_setting_it_is_said_what_is_allowed_and_never_what_input_should_be(section: str, key: str) -> None:
    """`[host] vllm_arguments = "--x"`: "Input should be a valid tuple"."""
    for value in WRONG:
        document = {section: {key: value}} if section else {key: value}
        try:
            Settings.model_validate(document)
        except ValidationError as error:
            said = _sentence(error, None)
            assert re.match(rf"setting {re.escape('.'.join(filter(None, (section, key))))}[.0-9]* is ", said), said
            assert ": allowed " in said, said
            assert "nput" not in said, said


def test_a_wrong_key_of_the_gateway_is_not_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"gateway": {"api_keys": "verysecret"}})
    assert _sentence(caught.value, None) == "setting gateway.api_keys is not allowed: allowed is a list of texts"
