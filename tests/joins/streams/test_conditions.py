"""Conditions between inputs: what is understood, and what is refused before the first row."""

from decimal import Decimal

import pyarrow as pa
import pytest

from headrace.joins.errors import JoinInputError, StreamSchemaError
from headrace.joins.streams import JoinGraph, Near
from headrace.storage.errors import KeyInputError

A = pa.schema([("x", pa.int64()), ("y", pa.string()), ("t", pa.timestamp("ms")), ("f", pa.float32())])
B = pa.schema([("x", pa.int32()), ("y", pa.string()), ("t", pa.timestamp("ms")), ("f", pa.float64())])
TWO, THREE = {"a": A, "b": B}, {"a": A, "b": B, "c": A}


def test_equalities_between_the_same_inputs_are_one_key():
    graph = JoinGraph(TWO, ["x", ("b.y", "a.y"), ("x", "x")])
    (edge,) = graph.edges
    assert (edge.sides, edge.width) == ((0, 1), None)
    assert [key.columns for keys in graph.keys for key in keys] == [(0, 1), (0, 1)]


def test_inputs_that_share_columns_share_keys():
    graph = JoinGraph(THREE, [("a.y", "b.y"), ("b.y", "c.y")])
    assert [len(keys) for keys in graph.keys] == [1, 1, 1]
    assert [edge.keys for edge in graph.edges] == [(0, 0), (0, 0)]


def test_columns_with_dots_are_found_by_their_whole_name():
    schema = pa.schema([("p.q", pa.int8())])
    graph = JoinGraph({"a": schema, "b": schema}, [("p.q", "b.p.q")])
    assert graph.keys[1][0].columns == (0,)


@pytest.mark.parametrize(
    ("within", "columns", "words", "number"),
    [
        (5, "x", 5, 0.0),
        (Decimal("2.9"), "x", 2, 0.0),
        ("1.5s", "t", 1500, 0.0),
        (7, "t", 7, 0.0),
        (0.25, "f", 0, 0.25),
        (2**70, "x", 2**64 - 1, 0.0),
    ],
)
def test_widths_are_whole_steps_of_the_key_or_floats(within, columns, words, number):
    width = JoinGraph(TWO, Near(columns, columns, within)).edges[0].width
    assert (width.words, width.number, width.floating) == (words, number, columns == "f")


@pytest.mark.parametrize(
    ("inputs", "on", "error", "message"),
    [
        ({"a": A}, "x", JoinInputError, "two or more inputs"),
        ([A, B], "x", JoinInputError, "two or more inputs"),
        ({"a": A, "b.c": B}, "x", JoinInputError, "without a dot"),
        ({"a": A, "b": "x"}, "x", JoinInputError, "pyarrow schema"),
        (TWO, [], JoinInputError, "pairs of columns"),
        (TWO, None, JoinInputError, "pairs of columns"),
        (TWO, [3], JoinInputError, "pairs of columns"),
        (TWO, [("x", "y", "z")], JoinInputError, "pairs of columns"),
        (TWO, [("a.x", "a.x")], JoinInputError, "with itself"),
        (TWO, "z", StreamSchemaError, "one column 'z'"),
        (THREE, ["x"], JoinInputError, "must name its input"),
        (THREE, [("a.x", "b.x")], JoinInputError, "no condition connects 'c'"),
        (TWO, [("x", "y")], KeyInputError, "can never equal"),
        (TWO, [("x", "f")], KeyInputError, "both are floats"),
        (TWO, [("f", "x")], KeyInputError, "both are floats"),
        (TWO, Near("y", "y", 1), KeyInputError, "no distance"),
        (TWO, Near("x", "t", 1), KeyInputError, "no distance"),
        (TWO, Near("x", "x", -1), JoinInputError, "at least 0"),
        (TWO, Near("x", "x", 0.5), JoinInputError, "exact"),
        (TWO, Near("f", "f", float("nan")), JoinInputError, "finite"),
        (TWO, Near("t", "t", "5 apples"), ValueError, "apples"),
    ],
)
def test_what_cannot_be_joined_is_refused(inputs, on, error, message):
    with pytest.raises(error, match=message):
        JoinGraph(inputs, on)
