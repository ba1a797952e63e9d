"""The fixture `hub`: `pytest_plugins = ["hub.fixtures"]` in a test file."""

from collections.abc import Iterator

import pytest

from hub.server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty Hub. It must get no request that it does not know, and storage no token."""
    with HubServer() as hub:
        yield hub
        assert hub.unknown_routes == []
        assert hub.leaks == []
