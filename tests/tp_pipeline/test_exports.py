import pytest
import tp_pipeline


def test_public_names_are_sorted_and_there():
    assert tp_pipeline.__all__ == sorted(tp_pipeline.__all__)
    assert all(hasattr(tp_pipeline, name) for name in tp_pipeline.__all__)
    assert set(tp_pipeline.__all__) <= set(dir(tp_pipeline))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_pipeline.nothing  # noqa: B018 - it raises
