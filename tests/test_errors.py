"""Tests of the line between a user's mistake, told in one line, and a bug, told by a traceback."""

import json

import pytest

from metaphrase.data.pairs import check_columns
from metaphrase.errors import is_mistake
from metaphrase.modeling import MetaphraseConfig
from metaphrase.techniques.rewards import pack


def caught(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return error
    pytest.fail("no error")


@pytest.mark.parametrize(
    "error",
    [
        caught(MetaphraseConfig, d_model=7),  # the network's own check
        caught(json.loads, "no JSON"),  # a library's check
        caught(open, "missing"),
        caught(check_columns, "file", ["source"], []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_mistake(error):
    assert is_mistake(error)


def test_value_error_inside_the_package_is_a_bug():
    assert not is_mistake(caught(pack, [[2]], [], is_merged=True))
