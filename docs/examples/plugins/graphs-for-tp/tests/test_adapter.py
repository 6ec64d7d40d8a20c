"""The adapter does what every collate adapter must do, and a script trains on graphs with it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_add_pool
from tp_testing import AdapterConformance, PluginConformance
from tp_trainer import Trainer

from graphs_for_tp.adapter import GraphAdapter, graph_cost


def make_graph(nodes: int, number: int) -> Data:
    generator = torch.Generator().manual_seed(number)
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    x = torch.randn(nodes, 3, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edges, y=x.sum().reshape(1), number=torch.tensor([number]))


class TestPlugin(PluginConformance):
    plugin = "graphs_for_tp._plugin"
    brings = {"collate adapter": ("graphs",)}


class TestAdapter(AdapterConformance):
    adapter = GraphAdapter

    def make_samples(self, count: int) -> list[Any]:
        return [make_graph(4, number) for number in range(count)]

    def collate(self, samples: list[Any]) -> Any:
        return Batch.from_data_list(samples)

    def numbers(self, batch: Any) -> list[int]:
        found: list[int] = batch.number.tolist()
        return found

    def same(self, first: Any, second: Any) -> bool:
        mine, other = first.to_dict(), second.to_dict()
        return mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)


class TestAdapterOfPairs(TestAdapter):
    """Samples that are a graph and a label, as many datasets have them."""

    def make_samples(self, count: int) -> list[Any]:
        return [(make_graph(4, number), float(number)) for number in range(count)]

    def collate(self, samples: list[Any]) -> Any:
        graphs, labels = zip(*samples, strict=True)
        return Batch.from_data_list(list(graphs)), torch.tensor(labels)

    def numbers(self, batch: Any) -> list[int]:
        return super().numbers(batch[0])

    def same(self, first: Any, second: Any) -> bool:
        return super().same(first[0], second[0]) and torch.equal(first[1], second[1])


def test_large_graphs_are_spread() -> None:
    graphs = [make_graph(nodes, number) for number, nodes in enumerate((100, 90, 3, 2, 2, 1))]
    parts = GraphAdapter().adapt(Batch.from_data_list, parts=2)(graphs)
    assert sorted(part.num_nodes for part in parts) == [98, 100]


def test_what_is_no_graph_is_left_to_others() -> None:
    verdict = GraphAdapter().assess(torch.ones(3), 2)
    assert not verdict.is_fit
    assert verdict.reason == "a Tensor has no graph of torch_geometric in it"


def test_the_cost_of_a_graph_is_its_nodes_and_edges() -> None:
    assert graph_cost(make_graph(5, 0)) == 15
    assert graph_cost({"left": make_graph(5, 0), "right": make_graph(1, 1)}) == 18


# -- a script -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, graphs: Any) -> Tensor:
        hidden = self.conv(graphs.x, graphs.edge_index).relu()
        output: Tensor = self.head(global_add_pool(hidden, graphs.batch))
        return output  # (graphs, 1)


def step(model: nn.Module, graphs: Any) -> Tensor:
    loss: Tensor = (model(graphs)[:, 0] - graphs.y).square().mean()
    return loss


def train(**where: Any) -> dict[str, Tensor]:
    """A script as torch_geometric's guide has it; ``where`` is all that differs."""
    torch.manual_seed(1)
    model = Net().double()
    graphs = [make_graph(2 + number * 7 % 11, number) for number in range(22)]
    loader = DataLoader(graphs, batch_size=6, shuffle=True)
    with Trainer(seed=5, progress=False, **where) as trainer:
        trainer.fit(
            model, torch.optim.Adam(model.parameters(), lr=0.01), loader, step=step, epochs=2
        )
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("devices", [2, 3])
def test_a_script_on_several_devices_leads_where_one_leads(devices: int) -> None:
    expected = train(devices="cpu")
    found = train(
        devices=["cpu"] * devices, backend="tuple", options={"tuple": {"adapter": "graphs"}}
    )
    by_itself = train(devices=["cpu"] * devices, backend="tuple")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)
        assert torch.equal(by_itself[name], found[name]), "it was not taken by itself"
