"""Finds a package file on whichever index pip is configured for."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError

from services.bootstrap.store.errors import ModelStoreError
from services.bootstrap.store.known import PinnedFile

TIMEOUT_SECONDS = (10.0, 30.0)  # connect, read


def new_session() -> requests.Session:
    """A session that trusts what pip trusts."""
    session = requests.Session()
    if certificates := os.environ.get("PIP_CERT"):
        session.verify = certificates
    return session


def index_url() -> str:
    """Pip's index: ``PIP_INDEX_URL``, else pip's configuration files, else the public default."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    # not `config get`, which does not see the file that PIP_CONFIG_FILE names
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed words)
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key == "global.index-url":
            return str(ast.literal_eval(value))
    return PYPI_SIMPLE_ENDPOINT


def file_url(session: requests.Session, index: str, project: str, file: PinnedFile) -> str:
    """The address of one file of a project.

    Raises:
        ModelStoreError: the index can't be reached, or has no such file.
    """
    _require_http(index)
    where = public_part(index)
    try:
        page = PyPISimple(endpoint=index, session=session).get_project_page(project, timeout=TIMEOUT_SECONDS)
    except NoSuchProjectError as error:
        raise ModelStoreError(f"package index {where} has no project {project}") from error
    except UnsupportedContentTypeError as error:
        raise ModelStoreError(f"package index {where} does not speak the simple repository API") from error
    except requests.RequestException as error:
        raise ModelStoreError(f"cannot reach package index {where} ({reason(error)}): check the network") from error
    for package in page.packages:
        if package.filename == file.name:
            return package.url
    raise ModelStoreError(f"package index {where} has no file {file.name} of {project}")


def _require_http(index: str) -> None:
    """Refuse an index address that no request can be made of; it is not shown, as it may hold a password."""
    try:
        parts = urlsplit(index)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half an IPv6 address
        usable = False
    if not usable:
        raise ModelStoreError(
            "the package index's address is not one of http:// or https://: check PIP_INDEX_URL and `pip config list`"
        )


def public_part(url: str) -> str:
    """The address without user name and password, fit for a message."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"


def reason(error: requests.RequestException) -> str:
    """A network failure in a few words."""
    if error.response is not None:
        return f"HTTP {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "timed out"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate is not trusted"
    if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error)):
        return system[1]
    return "the connection broke"
