import pytest
import tp_tuple
from tp_tuple import compat


def test_public_names_are_sorted_and_there():
    assert tp_tuple.__all__ == sorted(tp_tuple.__all__)
    assert all(hasattr(tp_tuple, name) for name in tp_tuple.__all__)
    assert set(tp_tuple.__all__) <= set(dir(tp_tuple))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_tuple.nothing  # noqa: B018 - it raises


@pytest.mark.parametrize("name", compat.__all__)
def test_earlier_spellings_can_be_imported_from_the_package_itself(name):
    assert getattr(tp_tuple, name) is getattr(compat, name)
    assert name not in tp_tuple.__all__
