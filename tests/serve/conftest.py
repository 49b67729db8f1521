"""A small model, and a run folder of whichever model a module has."""

from pathlib import Path

import pytest

import gss
from tests.making import save_run
from tests.serve.serving import SMALL, lively_model


@pytest.fixture(scope="module")
def model() -> gss.LanguageModel:
    return lively_model(**SMALL)


@pytest.fixture(scope="module")
def run(model: gss.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(model, tmp_path_factory.mktemp("serve") / "tiny")
