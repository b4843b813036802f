"""A real server with the default model, and the official client of it."""

import pathlib
import sys

import openai
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from serving import serving  # noqa: E402


@pytest.fixture(scope="session")
def address():
    """The address of a server that lives as long as the tests."""
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def client(address):
    return openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
