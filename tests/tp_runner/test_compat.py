"""easycore's programs with their imports changed: configurations and runners."""

import copy
import pickle

import pytest
from tp_core.errors import ConfigError
from tp_runner.compat import CfgNode, OrderedRunner, UnorderedRunner

pytest.importorskip("yaml")


def test_a_configuration_is_made_of_nested_values_and_text_that_spells_some():
    cfg = CfgNode({"a": "3", "b": {"c": "(1, 2)", "d": "text"}, "e": [1]})
    assert cfg.dict() == {"a": 3, "b": {"c": (1, 2), "d": "text"}, "e": [1]}
    assert type(cfg.dict()["b"]) is dict
    assert cfg.b.d == "text"
    with pytest.raises(ConfigError, match="each key of a configuration must be text, got 1"):
        CfgNode({1: 2})


def test_a_frozen_configuration_takes_no_attribute_and_no_other_configuration():
    cfg = CfgNode({"a": 1, "b": {"c": 2}})
    cfg.freeze()
    assert cfg.is_frozen()
    assert cfg.b.is_frozen()
    with pytest.raises(AttributeError, match="cannot set 'c' to 3: this configuration is frozen"):
        cfg.b.c = 3
    with pytest.raises(ConfigError, match="cannot merge into a configuration that is frozen"):
        cfg.merge(CfgNode({"a": 2}))
    for copied in (cfg.copy(), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert copied == cfg
        assert type(copied.b) is CfgNode
        assert copied.is_frozen()
        copied.freeze(False)
        copied.b.c = "4"
        assert pickle.loads(pickle.dumps(copied)).b.c == "4"
    assert cfg.b.c == 2


def test_configurations_are_merged_node_by_node():
    cfg = CfgNode({"a": 1, "b": {"c": 2, "d": 3}})
    other = CfgNode({"b": {"c": [4]}, "e": {"f": 5}})
    cfg.merge(other)
    assert cfg.dict() == {"a": 1, "b": {"c": [4], "d": 3}, "e": {"f": 5}}
    other.b.c.append(6)
    assert cfg.b.c == [4]


def test_a_configuration_goes_through_yaml(tmp_path):
    cfg = CfgNode({"a": 1, "b": {"c": (2, 3), "d": None}})
    cfg.save(tmp_path / "cfg.yaml")
    with (tmp_path / "cfg.yaml").open() as file:
        assert CfgNode.open(file) == cfg
    assert CfgNode.open(str(tmp_path / "cfg.yaml")) == CfgNode.load(CfgNode.dump(cfg)) == cfg
    assert CfgNode.load("") == CfgNode()
    with pytest.raises(ConfigError, match="plain values, lists, tuples and dictionaries"):
        CfgNode.load("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match="a configuration must be a mapping, got list"):
        CfgNode.load("[1]")


class Powers(UnorderedRunner):
    @staticmethod
    def producer_work(device, cfg, data):
        return data**cfg.exponent

    @staticmethod
    def consumer_init(cfg):
        cfg.sum = 0

    @staticmethod
    def consumer_work(cfg, data):
        cfg.sum += data

    @staticmethod
    def consumer_end(cfg):
        return cfg.sum


@pytest.mark.parametrize("options", [{"engine": "thread"}, {"start_method": "fork"}])
def test_a_runner_takes_such_a_configuration_and_says_whether_it_runs(options, tmp_path):
    (tmp_path / "cfg.yaml").write_text("exponent: 3\n")
    runner = Powers(devices=2, cfg=CfgNode.open(str(tmp_path / "cfg.yaml")), **options)
    assert runner.is_activate
    assert runner(range(10)) == sum(i**3 for i in range(10))
    runner.close()
    assert not runner.is_activate
    runner.activate()
    assert runner(range(3)) == 9
    runner.close()
    assert not issubclass(Powers, OrderedRunner)
