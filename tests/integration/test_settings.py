"""Settings: what is unknown or wrong is refused with one sentence that says what is allowed."""

import json
from pathlib import Path

import pytest

from opengyre.shared.settings import SettingsError, load


def test_the_environment_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "gyre.toml"
    file.write_text('[bus]\nurl = "nats://file:1"\nreplicas = 3\n[host]\ncapacity = 7\n')
    settings = load(file, {"GYRE_BUS__URL": "nats://env:2", "GYRE_GATEWAY__API_KEYS": "a, b"})
    assert settings.bus.url == "nats://env:2"
    assert settings.bus.replicas == 3
    assert settings.host.capacity == 7
    assert [key.get_secret_value() for key in settings.gateway.api_keys] == ["a", "b"]


def test_the_resolved_form_holds_every_section_and_no_secret() -> None:
    resolved = load(None, {"GYRE_GATEWAY__API_KEYS": "verysecret"}).resolved()
    assert "verysecret" not in resolved
    assert json.loads(resolved)["bus"]["url"] == "nats://127.0.0.1:4222"


def test_a_password_in_an_address_is_masked_in_the_resolved_form() -> None:
    environment = {"GYRE_BUS__URL": "nats://me:verysecret@h1:4222,nats://me:verysecret@h2:4222"}
    resolved = load(None, environment).resolved()
    assert "verysecret" not in resolved
    assert "@h1:4222,nats://**********@h2:4222" in resolved


def test_an_empty_api_key_is_refused_since_it_would_let_everybody_in(tmp_path: Path) -> None:
    file = tmp_path / "gyre.toml"
    file.write_text('[gateway]\napi_keys = [""]\n')
    with pytest.raises(SettingsError, match=r"gateway.api_keys.0"):
        load(file, {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[bus]\nurls = 'x'\n", r"unknown setting bus.urls.*allowed here: url, replicas"),
        ("[buss]\nurl = 'x'\n", r"unknown setting buss.*allowed here: state_dir, log, bus"),
        ("[host]\ncapacity = 0\n", r"setting host.capacity is 0.*allowed are numbers from 1 on"),
        ("[host]\nengine = 'gpu'\n", r"host.engine is 'gpu'.*'tiny'"),
        ("[bus\n", r"gyre.toml is not valid TOML"),
        ("bus = 3\n", r"setting bus is 3.*allowed is a table of url, replicas"),
        ("[bus]\nurl = 'foo'\n", r"setting bus.url is 'foo'.*: allowed is a URL like nats://127.0.0.1:1234"),
        ("[bus]\nurl = 'nats://a:1,b'\n", r"setting bus.url is 'nats://a:1,b'.*: allowed is a URL like nats://"),
        ("[cache]\nurl = 'foo'\n", r"setting cache.url is 'foo'.*: allowed is a URL like redis://127.0.0.1:1234"),
        ("[cache]\nurl = 'redis://a:99999'\n", r"setting cache.url is 'redis://a:99999'.*: allowed is a URL like"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "gyre.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=sentence) as error:
        load(file, {})
    assert "\n" not in str(error.value).strip() or "TOML" in str(error.value)


def test_a_binary_file_and_a_missing_file_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "gyre.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load(file, {})
    with pytest.raises(SettingsError, match="does not exist"):
        load(tmp_path / "none.toml", {})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("GYRE_BUSS__URL", "no section 'buss'.*bus"), ("GYRE_BUS__URI", "no key 'uri'.*url, replicas")],
)
def test_an_unknown_environment_variable_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(None, {name: "x"})


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"GYRE_HOST__COUNT": "2"}, "host.count is '2'.*allowed is 1, or more with host.engine emulated"),
        (
            {"GYRE_HOST__COUNT": "2", "GYRE_HOST__ENGINE": "emulated", "GYRE_HOST__CELL": "c"},
            "host.count is '2'.*allowed is 1 with host.cell set",
        ),
        ({"GYRE_HOST__TIME_SCALE": "0"}, "host.time_scale is '0'.*allowed are numbers above 0 up to 1000000"),
        ({"GYRE_HOST__ENGINE": "steam"}, "host.engine is 'steam'.*'tiny', 'vllm' or 'emulated'"),
    ],
)
def test_hosts_that_cannot_be_are_refused_by_name(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(None, environment)


def test_a_list_of_the_environment_is_json_or_has_commas() -> None:
    """`["--x"]` in the environment became one text, brackets and all, which vLLM took for the name of a model."""
    said = ' ["--kv-cache-dtype", "fp8", "--hf-overrides", "{\\"a\\": 1, \\"b\\": 2}"]'
    assert load(None, {"GYRE_HOST__VLLM_ARGUMENTS": said}).host.vllm_arguments == (
        "--kv-cache-dtype", "fp8", "--hf-overrides", '{"a": 1, "b": 2}',
    )  # fmt: skip
    assert load(None, {"GYRE_HOST__VLLM_ARGUMENTS": "--seed, 4,"}).host.vllm_arguments == ("--seed", "4")
    assert load(None, {"GYRE_HOST__VLLM_ARGUMENTS": "[]"}).host.vllm_arguments == ()


@pytest.mark.parametrize("value", ['["--x"', '["--seed", 4]', "[--x]"])
def test_a_list_of_the_environment_that_is_no_json_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, {"GYRE_GATEWAY__API_KEYS": value})
    assert str(error.value) == (
        "environment variable GYRE_GATEWAY__API_KEYS begins with [ and is no JSON list of texts; "
        'allowed is one like ["a", "b"], or texts with commas between them'
    )


def test_arguments_of_vllm_begin_with_one(tmp_path: Path) -> None:
    """Its server took the first for the name of a model."""
    file = tmp_path / "gyre.toml"
    file.write_text('[host]\nvllm_arguments = ["foo"]\n')
    with pytest.raises(SettingsError, match=r"host.vllm_arguments is .*foo.*: allowed are arguments like --kv-cache"):
        load(file, {})
    file.write_text('[host]\nvllm_arguments = ["-tp", "2"]\n')
    assert load(file, {}).host.vllm_arguments == ("-tp", "2")
