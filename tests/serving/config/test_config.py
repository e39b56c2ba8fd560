"""Settings: refused values, precedence of sources, and error messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.serving.config.fields import parse_bytes, settings_of
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import SETTINGS, resolve


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"dtype": "fp16"},
            "--dtype is 'fp16'; it must be one of auto, bfloat16, float16, half, float32",
        ),
        *(
            ({"redundant_experts": 4} | others, f"--redundant-experts is 4; {problem}")
            for others, problem in (
                ({}, "with --ep 1 it must be 0: a rank alone has all experts"),
                ({"ep": 3}, "it must be a multiple of --ep, 3"),
                ({"ep": 2, "tp": 2}, "with --tp 2 it must be 0: all ranks have all tokens there"),
                ({"ep": 2, "cp": 2}, "with --cp 2 it must be 0: all ranks have all tokens there"),
                ({"ep": 2, "backend": "jax"}, "with --backend jax it must be 0"),
                (
                    {"ep": 2, "kernels": "plain"},
                    "with --kernels plain it must be 0: only overlapped kernels choose among "
                    "copies",
                ),
            )
        ),
        ({"threads": 0}, "--threads is 0; it must be at least 1"),
        ({"max_model_len": -1}, "--max-model-len is -1; it must be at least 1"),
        ({"memory_fraction": 0.0}, "--memory-fraction is 0.0; it must be above 0"),
        ({"memory_fraction": 1.5}, "--memory-fraction is 1.5; it must be at most 1"),
        ({"memory_fraction": float("nan")}, "--memory-fraction is nan; it must be a finite number"),
        ({"stall_timeout": math.inf}, "--stall-timeout is inf; it must be a finite number"),
        ({"max_num_seqs": "8"}, "--max-num-seqs is '8'; it must be an integer"),
        ({"prefix_caching": 1}, "--prefix-caching is 1; it must be true or false"),
        ({"model": 3}, "--model is 3; it must be text"),
        (
            {"pp": 16, "tp": 8},
            "--tp is 8, --cp 1, --ep 1 and --pp 16: 128 ranks; there can be at most 64",
        ),
    ],
)
def test_engine_config_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**wrong)
    assert str(caught.value) == message


@pytest.mark.parametrize("port", [-1, 65536])
def test_server_config_refuses_ports(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port is {port}; it must be at (least 0|most 65535)"):
        ServerConfig(port=port)


def test_defaults_are_valid_and_every_field_has_help() -> None:
    EngineConfig()
    ServerConfig()
    assert all(setting.help.text for setting in SETTINGS.values())


def test_no_two_dataclasses_share_a_name() -> None:
    assert len(SETTINGS) == len(settings_of(EngineConfig)) + len(settings_of(ServerConfig))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("4G", 4 * 2**30),
        ("4GiB", 4 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5 K", 1536),
        ("2TiB", 2 * 2**40),
    ],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "4GB", "-4G", "4 4G", "0x10", "inf"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_bytes(text)


def write(folder: Path, text: str) -> Path:
    file = folder / "weft.toml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 1\nmax_queue = 1\nmax_num_seqs = 1\n")
    environment = {"WEFT_PORT": "2", "WEFT_MAX_QUEUE": "2", "HOME": "/root"}
    settings = resolve({"port": "3"}, environment, file)
    found = {name: (value.value, value.source) for name, value in settings.items()}
    assert found["port"] == (3, "--port")
    assert found["max_queue"] == (2, "WEFT_MAX_QUEUE")
    assert found["max_num_seqs"] == (1, f"max_num_seqs in {file}")
    assert found["block_size"] == (None, "default")
    assert settings.build(ServerConfig).port == 3
    assert settings.build(EngineConfig).max_queue == 2


def test_environment_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'kv_cache_memory = "2G"\nprefix_caching = false\n')
    config = resolve({}, {"WEFT_CONFIG": str(file)}).build(EngineConfig)
    assert config == EngineConfig(kv_cache_memory=2 * 2**30, prefix_caching=False)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WEFT_PROT": "1"}, "unknown environment variable WEFT_PROT; did you mean WEFT_PORT?"),
        ({"WEFT_FOO": "1"}, "unknown environment variable WEFT_FOO; see `weft config`"),
        ({"WEFT_PORT": "http"}, "WEFT_PORT is 'http'; it must be an integer"),
        ({"WEFT_TP": "2.0"}, "WEFT_TP is '2.0'; it must be an integer"),
        ({"WEFT_THREADS": "2e0"}, "WEFT_THREADS is '2e0'; it must be an integer"),
        ({"WEFT_PORT": "70000"}, "WEFT_PORT is 70000; it must be at most 65535"),
        ({"WEFT_PREFIX_CACHING": "maybe"}, "WEFT_PREFIX_CACHING is 'maybe'; it must be true or"),
        ({"WEFT_KV_CACHE_MEMORY": "4GB"}, "WEFT_KV_CACHE_MEMORY is '4GB'; it must be a number of"),
        ({"WEFT_PORT": "tcp://10.0.0.1:80", "WEFT_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        ({"WEFT_CONFIG": "/nowhere.toml"}, "--config /nowhere.toml: No such file or directory"),
    ],
)
def test_environment_errors(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_qeue = 3", "unknown key 'max_qeue'; did you mean max_queue?"),
        ("[server]\nport = 3", "unknown key 'server'; see `weft config` for all"),
        ("port = 1.5", "is 1.5; it must be an integer"),
        ("tp = 2.0", "is 2.0; it must be an integer"),
        ("port = true", "is True; it must be an integer"),
        ("port = ", "is not TOML"),
    ],
)
def test_file_errors(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_what_is_secret_is_not_shown() -> None:
    secrets = {"api_key": "sk-alice-0123456789", "ssl_keyfile_password": "of the key's file"}
    environment = {f"WEFT_{name.upper()}": value for name, value in secrets.items()}
    settings = resolve({}, environment | {"WEFT_SSL_CERTFILE": "cert.pem"})
    shown = settings.without_secrets()
    config = settings.build(ServerConfig)
    for name, secret in secrets.items():
        assert shown[name].value == "(set)"
        assert secret not in f"{shown} {config}"
        assert getattr(config, name) == secret
