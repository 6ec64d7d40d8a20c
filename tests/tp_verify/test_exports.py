import pytest
import tp_verify


def test_public_names_are_sorted_and_there():
    assert tp_verify.__all__ == sorted(tp_verify.__all__)
    assert all(hasattr(tp_verify, name) for name in tp_verify.__all__)
    assert set(tp_verify.__all__) <= set(dir(tp_verify))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_verify.nothing  # noqa: B018 - it raises
