"""Servers that the tests of several APIs share."""

import pytest
from local_server import running, upper_service
from tiny_generator import tiny_generator

from metaphrase.serving import Limits
from metaphrase.texts.plan import Terms


@pytest.fixture(scope="session")
def guarded_url():
    """A server that writes sources in upper case, needs the key `right`, and reads 4 kB."""
    glossaries = {"en-de": Terms(glossary={"cat": "Kater"})}
    limits = Limits(max_body_kilobytes=4)
    with running(upper_service(limits=limits, api_keys=["right"], glossaries=glossaries)) as address:
        yield address


@pytest.fixture(scope="session")
def model_url():
    """A server of a tiny model for translation, which needs the key `right`."""
    glossaries = {"pets": Terms(glossary={"cat": "Kater"})}
    with running(upper_service(tiny_generator(), api_keys=["right"], glossaries=glossaries)) as address:
        yield address
