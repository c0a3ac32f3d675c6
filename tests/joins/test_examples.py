"""The examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import headrace.joins

MODULES = sorted(module.name for module in pkgutil.walk_packages(headrace.joins.__path__, "headrace.joins."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
