import pytest
import tp_data


def test_public_names_are_sorted_and_there():
    assert tp_data.__all__ == sorted(tp_data.__all__)
    assert all(hasattr(tp_data, name) for name in tp_data.__all__)
    assert set(tp_data.__all__) <= set(dir(tp_data))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_data.nothing  # noqa: B018 - it raises
