import tp_shard


def test_public_names_are_sorted_and_there():
    assert tp_shard.__all__ == sorted(tp_shard.__all__)
    assert {n for n in vars(tp_shard) if not n.startswith("_")} == set(tp_shard.__all__)


def test_a_star_import_works_and_the_names_of_the_marks_are_attribute_names():
    namespace = {}
    exec("from tp_shard import *", namespace)
    assert set(tp_shard.__all__) <= set(namespace)
    assert tp_shard._PARALLEL_ATTR == tp_shard._PARALLEL_DIM
    for name in (tp_shard._PARALLEL_DIM, tp_shard._ORDER_TYPE):
        assert name.isidentifier()
