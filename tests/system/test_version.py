"""The version of the package, also of a checkout that is on the path and not installed."""

import importlib.metadata
from importlib import reload
from typing import Any

import pytest
from tiny_models import questions

import anchorlens as al
from anchorlens.runs import fingerprint
from anchorlens.system import version


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        expected = importlib.metadata.version("anchorlens")
    except importlib.metadata.PackageNotFoundError:
        expected = "0+unknown"
    assert al.__version__ == expected == fingerprint.versions()["anchorlens"]


def test_a_checkout_without_metadata_runs(
    gpt2: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.metadata.version

    def of_others(package: str) -> str:
        if package == "anchorlens":
            raise importlib.metadata.PackageNotFoundError(package)
        return known(package)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", of_others)
        patch.setattr(fingerprint, "_version_of", of_others)
        assert reload(version).__version__ == "0+unknown"
        options: dict[str, Any] = {"folder": tmp_path, "resamples": 0, "progress": False}
        for _ in range(2):  # the second run reads what the first one stored
            record = al.run(gpt2, questions(gpt2, 2), [al.Accuracy()], **options)["accuracy"]
            assert record.info["versions"]["anchorlens"]
    reload(version)
