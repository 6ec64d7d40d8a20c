import pytest
import tp_context


def test_public_names_are_sorted_and_there():
    assert tp_context.__all__ == sorted(tp_context.__all__)
    assert all(hasattr(tp_context, name) for name in tp_context.__all__)
    assert set(tp_context.__all__) <= set(dir(tp_context))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_context.nothing  # noqa: B018 - it raises
