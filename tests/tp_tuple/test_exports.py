import tp_tuple


def test_public_names_are_sorted_and_there():
    assert tp_tuple.__all__ == sorted(tp_tuple.__all__)
    assert all(hasattr(tp_tuple, name) for name in tp_tuple.__all__)
    assert {n for n in vars(tp_tuple) if not n.startswith("_")} == set(tp_tuple.__all__)
