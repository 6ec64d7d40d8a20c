import pytest
import tp_shard


def test_public_names_are_sorted_and_there():
    for module in (tp_shard, tp_shard.nn, tp_shard.distributed, tp_shard.nn.functional):
        assert module.__all__ == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tp_shard.nothing  # noqa: B018 - it raises


def test_a_star_import_works_and_the_names_of_the_marks_are_attribute_names():
    namespace = {}
    exec("from tp_shard import *", namespace)
    assert set(tp_shard.__all__) <= set(namespace)
    assert "slice" not in namespace, "torchshard's spelling does not hide Python's"
    assert tp_shard._PARALLEL_ATTR == tp_shard._PARALLEL_DIM
    assert tp_shard._ORDER_ATTR == tp_shard._ORDER_TYPE
    for name in (tp_shard._PARALLEL_DIM, tp_shard._ORDER_TYPE):
        assert name.isidentifier()
