import pytest
import tp_dp_gather


def test_public_names_are_sorted_and_there():
    assert tp_dp_gather.__all__ == sorted(tp_dp_gather.__all__)
    assert all(hasattr(tp_dp_gather, name) for name in tp_dp_gather.__all__)
    assert set(tp_dp_gather.__all__) <= set(dir(tp_dp_gather))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_dp_gather.nothing  # noqa: B018 - it raises
