"""The built site: ``.ci/site FOLDER`` builds it and says where it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import opened_browser


@pytest.fixture(scope="session", name="site")
def _site() -> Path:
    folder = os.environ.get("CLEARHEAD_SITE")
    if folder is None:
        pytest.skip("needs a built site: .ci/site FOLDER builds one and runs these tests")
    return Path(folder)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session", name="address")
def _address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session", name="browser")
def _browser(address: str) -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser
