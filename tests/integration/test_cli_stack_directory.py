"""A stack is found whatever else the settings say."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opengyre.cli import stack as stacks
from opengyre.cli import stream_read
from opengyre.cli.main import app
from opengyre.cli.stack import Stack, StackError
from opengyre.shared.settings import SettingsError

BAD = '[host]\nvllm_arguments = "--x"\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GYRE_STATE_DIR", "GYRE_CONFIG", "GYRE_BUS__URL", "GYRE_GATEWAY_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", [BAD, f'state_dir = "there"\n{BAD}', "[unknown]\n", "host = 3\n"])
def test_a_bad_gyre_toml_does_not_keep_a_stack_from_being_stopped(here: Path, text: str) -> None:
    """`gyre down` said what is wrong with host.vllm_arguments, and stopped nothing."""
    (here / "gyre.toml").write_text(text)
    done = CliRunner().invoke(app, ["down", "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"stopped": False, "leftovers": []})
    expected = here / ("there" if "there" in text else ".gyre")
    assert stacks.directory(None) == expected
    done = CliRunner().invoke(app, ["status"])
    assert str(done.exception) == (
        f"there is no stack in {expected}; `gyre up` starts one, or name another with --gateway"
    )


def test_with_an_unreadable_gyre_toml_only_a_stack_that_runs_is_taken_by_default(here: Path) -> None:
    (here / "gyre.toml").write_text("[bus\n")
    with pytest.raises(SettingsError, match=r"gyre.toml is not valid TOML.*--state-dir names the stack's directory"):
        stacks.directory(None)
    assert stacks.directory(Path("other")) == here / "other"
    with stacks.Lock(here / ".gyre"):
        assert stacks.directory(None) == here / ".gyre"


def test_a_state_directory_that_is_no_path_is_one_sentence(here: Path) -> None:
    (here / "gyre.toml").write_text("state_dir = 3\n")
    with pytest.raises(SettingsError, match=r"^setting state_dir is 3: allowed is a path;"):
        stacks.directory(None)


def test_run_show_without_a_stack_says_so_at_once(here: Path) -> None:
    """It waited for a broker at the default address, 13.7 s in all, and then named that."""
    done = CliRunner().invoke(app, ["run", "show", "nothere"])
    assert isinstance(done.exception, StackError)
    assert str(done.exception) == (
        f"there is no stack in {here / '.gyre'}; `gyre up` starts one, or name another with --nats"
    )


def test_the_stack_s_broker_is_found_whatever_else_the_settings_say(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_read, "CONNECT_S", 0.2)
    (here / "gyre.toml").write_text(BAD)
    (here / ".gyre").mkdir()
    there = Stack(nats="nats://127.0.0.1:9", valkey=None, gateway="http://x", api_key=None, state_dir=".gyre")
    stacks.write(here / ".gyre", there)
    done = CliRunner().invoke(app, ["run", "show", "nothere"])
    assert str(done.exception).startswith("NATS at nats://127.0.0.1:9 does not answer")
