"""Settings: the command line and what it refuses."""

from __future__ import annotations

import logging

import pytest

from pd_integration.proxy import ConfigError, Prefiller, ProxyConfig
from pd_integration.proxy.__main__ import parse_args

ONE = ["--prefill", "http://127.0.0.1:8100", "--prefill-bootstrap", "http://127.0.0.1:8998"]
DECODE = ["--decode", "http://127.0.0.1:8200"]


def test_pairs_are_made_in_order_and_slashes_dropped() -> None:
    config = parse_args(
        [*ONE, "--prefill", "http://b:1/", "--prefill-bootstrap", "http://b:2/", *DECODE, "--decode", "https://c/x/"]
    )
    assert config.prefillers == (
        Prefiller("http://127.0.0.1:8100", "http://127.0.0.1:8998"),
        Prefiller("http://b:1", "http://b:2"),
    )
    assert config.decoders == ("http://127.0.0.1:8200", "https://c/x")
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_every_setting_has_an_option() -> None:
    options = ["max-body-bytes", "health-failures", "connect-timeout", "prefill-timeout", "first-byte-timeout"]
    options += ["idle-timeout", "total-timeout", "health-interval", "health-timeout", "shutdown-timeout", "port"]
    options += ["aside-timeout", "max-resends"]
    config = parse_args([*ONE, *DECODE, *(word for option in options for word in ("--" + option, "7"))])
    assert {getattr(config, option.replace("-", "_")) for option in options} == {7}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([*ONE], "--decode"),
        ([*DECODE], "--prefill"),
        ([*ONE[:2], *DECODE], "--prefill-bootstrap"),
        ([*ONE, *ONE, *DECODE], "more than once"),
        ([*ONE, *DECODE, *DECODE], "more than once"),
        ([*ONE, "--decode", "127.0.0.1:8200"], "http://"),
        ([*ONE, "--decode", "http://"], "server address"),
        ([*ONE, "--decode", "http://h:99999"], "server address"),
        ([*ONE, "--decode", "http://user:key@h:1"], "without user"),
        ([*ONE, "--decode", "http://h:1/?a=b"], "query"),
        ([*ONE, *DECODE, "--idle-timeout", "0"], "idle_timeout"),
        ([*ONE, *DECODE, "--idle-timeout", "nan"], "idle_timeout"),
        ([*ONE, *DECODE, "--total-timeout", "inf"], "total_timeout"),
        ([*ONE, *DECODE, "--max-body-bytes", "0"], "max_body_bytes"),
        ([*ONE, *DECODE, "--health-failures", "-1"], "health_failures"),
        ([*ONE, *DECODE, "--max-resends", "-1"], "max_resends"),
        ([*ONE, *DECODE, "--aside-timeout", "0"], "aside_timeout"),
        ([*ONE, *DECODE, "--port", "70000"], "port"),
        ([*ONE, *DECODE, "--port", "x"], "--port"),
    ],
)
def test_unusable_settings_are_named(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    assert "--prefill-bootstrap http://127.0.0.1:8998" in capsys.readouterr().out


def test_the_library_checks_the_same() -> None:
    with pytest.raises(ConfigError, match="no Decode server"):
        ProxyConfig((Prefiller("http://a", "http://b"),), ())
    logging.getLogger("pd_integration.proxy")  # importing the package must not configure logging
    assert not logging.getLogger("pd_integration.proxy").handlers
