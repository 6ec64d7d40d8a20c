import tp_dp_gather


def test_public_names_are_sorted_and_there():
    assert tp_dp_gather.__all__ == sorted(tp_dp_gather.__all__)
    assert {n for n in vars(tp_dp_gather) if not n.startswith("_")} == set(tp_dp_gather.__all__)
