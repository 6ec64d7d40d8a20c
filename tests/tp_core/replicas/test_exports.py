import tp_core.replicas


def test_public_names_are_sorted_and_there():
    names = ["ReplicaWrapper", "Replicas", "has_modes", "untraced"]
    assert tp_core.replicas.__all__ == sorted(tp_core.replicas.__all__) == names
    assert all(hasattr(tp_core.replicas, name) for name in tp_core.replicas.__all__)
