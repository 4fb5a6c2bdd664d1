"""The version of the package, also of a checkout that is on the path and not installed."""

import importlib.metadata
from typing import Any

import pytest
from tiny_models import questions

import anchorlens as al
from anchorlens.runs import fingerprint
from anchorlens.system import package as versions


def test_the_version_is_that_of_the_installed_package() -> None:
    assert al.__version__ == fingerprint.versions()["anchorlens"]
    assert al.__version__ == versions.installed_version("anchorlens")


def test_a_checkout_without_metadata_runs(
    gpt2: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_others(package: str) -> str:
        if package == "anchorlens":
            raise importlib.metadata.PackageNotFoundError(package)
        return importlib.metadata.version(package)

    monkeypatch.setattr(versions, "version", of_others)
    monkeypatch.setattr(fingerprint, "_version_of", versions.installed_version)
    options: dict[str, Any] = {"folder": tmp_path, "resamples": 0, "progress": False}
    for _ in range(2):  # the second run reads what the first one stored
        record = al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], **options)["accuracy"]
        assert record.info["versions"]["anchorlens"] == "unknown"
