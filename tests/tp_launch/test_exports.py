import pytest
import tp_launch


def test_public_names_are_sorted_and_there():
    assert tp_launch.__all__ == ["LaunchOutcome", "LaunchRequest", "RankFailure", "execute", "launch"]
    assert all(hasattr(tp_launch, name) for name in tp_launch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_launch.nothing  # noqa: B018 - it raises
