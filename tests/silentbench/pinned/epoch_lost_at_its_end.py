"""A loader that is saved at the end of an epoch skips the next one after loading: it is empty."""

from torchdata.stateful_dataloader import StatefulDataLoader


def shown():
    loader = StatefulDataLoader(list(range(8)), batch_size=2)
    for _ in loader:
        pass
    resumed = StatefulDataLoader(list(range(8)), batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    return len(list(resumed))
