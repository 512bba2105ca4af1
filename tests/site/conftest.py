"""The built site: ``.ci/site FOLDER`` builds it and says where it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", name="site")
def _site() -> Path:
    folder = os.environ.get("CLEARHEAD_SITE")
    if folder is None:
        pytest.skip("needs a built site: .ci/site FOLDER builds one and runs these tests")
    return Path(folder)
