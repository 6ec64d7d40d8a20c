import pytest
import tp_tuple


def test_public_names_are_sorted_and_there():
    assert tp_tuple.__all__ == sorted(tp_tuple.__all__)
    assert all(hasattr(tp_tuple, name) for name in tp_tuple.__all__)
    assert set(tp_tuple.__all__) <= set(dir(tp_tuple))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_tuple.nothing  # noqa: B018 - it raises
