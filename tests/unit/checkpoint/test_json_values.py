"""What a checkpoint can hold comes back as it was; what it cannot hold is refused by its place."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from farandole.errors import ConfigError
from farandole.training.checkpoint.snapshot import from_json, to_json

pytestmark = pytest.mark.core

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())
nested = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.frozensets(st.integers(), max_size=1)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
    ),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    plain, tensors = to_json(value)
    return from_json(json.loads(json.dumps(plain, allow_nan=False)), tensors)


@given(nested)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)  # types, -0.0, and the order of keys


def test_numbers_of_all_kinds_come_back() -> None:
    assert there_and_back([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(there_and_back(math.nan))
    loss = there_and_back(np.float32(0.1))
    assert type(loss) is np.float32
    assert loss == np.float32(0.1)
    assert there_and_back(Counter({30: 1, 60: 2})) == Counter({30: 1, 60: 2})
    assert there_and_back(torch.bfloat16) is torch.bfloat16


def test_tensors_are_named_by_their_place_and_the_same_one_is_named_once() -> None:
    weight = torch.ones(2)
    plain, tensors = to_json({"model": {"weight": weight}, "list": [weight, torch.zeros(1)]})
    assert list(tensors) == ["model.weight", "list.1"]
    assert tensors["model.weight"] is weight
    back = from_json(plain, tensors)
    assert back["list"][0] is back["model"]["weight"]


def test_two_places_that_look_alike_get_two_names() -> None:
    value = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}}
    assert len(to_json(value)[1]) == 2
    assert there_and_back(value) == value


@pytest.mark.parametrize("value", [object(), print, type("Own", (), {})(), np.zeros(3, dtype=object)[0:1]])
def test_what_could_run_code_is_refused_by_its_place(value: object) -> None:
    with pytest.raises(ConfigError, match=r"state\.history\.1 is a .*which a checkpoint cannot contain"):
        to_json({"state": {"history": [1, value]}})


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="rows is a tensor of layout"):
        to_json({"rows": torch.eye(2).to_sparse()})


@pytest.mark.parametrize(
    "plain",
    [
        {"$": "tensor", "name": "gone"},
        {"$": "function", "of": "os.system"},
        {"$": "dtype", "of": "load"},
        {"$": "tuple"},
        {"$": "numpy", "dtype": "O", "of": 1},
        {"$": ["list"], "of": 1},
    ],
)
def test_what_was_never_written_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match="not a value of a checkpoint"):
        from_json(plain, {})
