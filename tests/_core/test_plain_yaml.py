from __future__ import annotations

import os
import time

import pytest
from omegaconf import OmegaConf

from torchrl_lightning._core.file_limits import YAML_BYTES, YAML_DEPTH
from torchrl_lightning._core.plain_yaml import raw_value, read_config

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: *a{n - 1}}}\n" for n in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "values, counting each alias"),
        (MERGED, "values, counting each alias"),
        ("a: &a [*a]\n", "refers to a node that contains it"),
        ("&a a: *b\n", "refers to a node that contains it"),
        ("a: " + "[" * (YAML_DEPTH + 1) + "]" * (YAML_DEPTH + 1), "levels"),
        ("a: " + "[" * 100_000, "levels"),
        ("a: " + "{x: " * 20_000, "levels"),
        ("- " * 20_000, "begins with"),
        ("a:\n" + "- " * 20_000, "levels"),
        ("a: !!python/object/apply:os.system [touch CANARY]", "tag"),
        ("a: !!python/name:os.system", "tag"),
        ("a: !!python/object/apply:pathlib.PosixPath [x]", "tag"),
        ("a: !mine x", "tag"),
        ("a: !!binary aGVsbG8=", "tag"),
        ("a: !!set {x}", "tag"),
        ("%TAG ! tag:evil.org,2002:\n---\na: !x 1", "tag"),
        ("[1, 2]", "begins with"),
        ("text", "YAML mapping"),
        ("a: 1\n---\nb: 2\n", "YAML mapping"),
        ("a: [1", "YAML mapping"),
        ("a: 1\na: 2\n", "YAML mapping"),
        ("a: \x00", "YAML mapping"),
        ('a: "\x1b[31m', "YAML mapping"),
        (f"a: {'${b' * 1000}", "interpolation"),
        ("? [a, b]\n: 1\n", "YAML mapping"),
        ("a: " + "x" * YAML_BYTES, "at most"),
        ("a: [" + ", ".join(["x"] * 60_000) + "]", "values"),
    ],
)
def test_hostile_yaml_raises_quickly_with_one_line(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ValueError, match=message) as raised:
        read_config(path)
    assert time.process_time() - began < 5
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 800


def test_fifo_and_undecodable_bytes_raise(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="FIFO"):
        read_config(tmp_path / "fifo")
    (tmp_path / "bytes").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ValueError, match="YAML mapping"):
        read_config(tmp_path / "bytes")


def test_config_of_a_run_equals_omegaconf_load(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text('a: &a [1, 2.5, 1e3, null, yes, x]\nb: {c: *a, d: "${a}"}\ne: !!str 3\nf: 2020-01-01\n')
    assert read_config(path) == OmegaConf.load(path)
    path.write_text("")
    assert read_config(path) == {}


def test_raw_value_follows_only_plain_references():
    config = OmegaConf.create({"a": {"b": "${c}"}, "c": 3, "d": "${d}", "e": "${oc.env:HOME}", "f": "${c} ${c}"})
    assert raw_value(config, "a.b") == 3
    assert raw_value(config, "a.x.y") is None
    assert raw_value(config, "d") is None
    assert raw_value(config, "e") == "${oc.env:HOME}"
    assert raw_value(config, "f") == "${c} ${c}"
