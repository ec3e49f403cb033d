"""Settings of the elastic memory below SGLang, without SGLang."""

import json
import os
import pathlib
import subprocess
import sys

import kvik
import pytest
from kvik.plugin import register_in_sglang
from kvik.sglang.elastic_settings import ElasticSettings


def test_sizes_are_read_and_defaults_are_all_of_it():
    settings = ElasticSettings.read("{}")
    assert (settings.group, settings.limit_bytes, settings.cache_bytes, settings.page_bytes) == (None, None, 0, 2 << 20)
    settings = ElasticSettings.read('{"group": "a", "limit": "1GiB", "cache": 7, "page": "4MiB", "directory": "/tmp"}')
    assert (settings.limit_bytes, settings.cache_bytes, settings.page_bytes) == (1 << 30, 7, 4 << 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yes", "`KVIK_SGLANG_ELASTIC` is yes; allowed: an object in JSON"),
        ("[]", "allowed: an object in JSON"),
        ('{"limits": 1}', "`KVIK_SGLANG_ELASTIC` has limits; allowed: group, limit, cache, page, directory"),
        ('{"page": "3MiB"}', "`page` is 3MiB; allowed: multiples of 2MiB"),
        ('{"limit": "much"}', "`limit` is 'much'"),
        ('{"cache": -1}', "`cache` is -1"),
        ('{"group": 7}', "`group` is 7; allowed: a name"),
    ],
)
def test_wrong_settings_are_named_and_end_the_process(given, message, monkeypatch):
    with pytest.raises(kvik.InvalidValueError) as error:
        ElasticSettings.read(given)
    assert message in str(error.value)
    # SGLang goes on without a plugin that raises an exception.
    monkeypatch.setenv("KVIK_SGLANG_ELASTIC", given)
    with pytest.raises(SystemExit, match="kvik: "):
        register_in_sglang()


def test_without_the_variable_the_plugin_imports_nothing():
    code = "import sys; from kvik.plugin import register_in_sglang; register_in_sglang(); print([m for m in sys.modules if 'sglang' in m])"
    environment = {name: value for name, value in os.environ.items() if name != "KVIK_SGLANG_ELASTIC"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert json.loads(ended.stdout) == []


def test_the_package_tells_sglang_of_its_plugin():
    project = (pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nkvik = "kvik.plugin:register_in_sglang"\n' in project
