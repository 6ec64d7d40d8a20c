"""Public scripts of other projects, and what ``tp move`` makes of them; their sources are not kept here.

    python -m tests.tp_trainer.move.tried             fetches the repositories, at the commits below
    python -m tests.tp_trainer.move.tried FOLDER      FOLDER/OWNER+NAME is a clone

What "trains" was moved without a hand, and then trained for four steps on made-up data, on the CPU: pictures
and pairs of sentences of its shapes, small models in place of downloaded ones. The others are answered with
these words. The command moves each again, and compares.
"""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tp_core.errors import ConfigError
from tp_core.plugins import registry
from typer.main import get_command

TRAINS = "trains"
COMMITS = {
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
}
TRIED = {
    "pytorch/examples": {
        "distributed/ddp-tutorial-series/multigpu.py": TRAINS,
        "distributed/ddp-tutorial-series/multigpu_torchrun.py": TRAINS,
        "distributed/ddp-tutorial-series/single_gpu.py": TRAINS,
        "dcgan/main.py": TRAINS,
        "imagenet/main.py": TRAINS,
        "mnist/main.py": TRAINS,
        "mnist_rnn/main.py": TRAINS,
        "siamese_network/main.py": TRAINS,
        "vae/main.py": TRAINS,
        "mnist_forward_forward/main.py": "its layers train themselves",
        "regression/main.py": "it has no optimizer over model.parameters()",
    },
    "huggingface/accelerate": {
        "examples/nlp_example.py": TRAINS,
        "examples/by_feature/checkpointing.py": TRAINS,
        "examples/by_feature/cross_validation.py": TRAINS,
        "examples/by_feature/early_stopping.py": TRAINS,
        "examples/by_feature/gradient_accumulation.py": TRAINS,
        "examples/by_feature/multi_process_metrics.py": TRAINS,
        "examples/by_feature/tracking.py": TRAINS,
        "examples/by_feature/local_sgd.py": "it uses accelerate.local_sgd",
    },
    "Lightning-AI/pytorch-lightning": {
        "examples/fabric/image_classifier/train_torch.py": TRAINS,
        "examples/pytorch/basics/transformer.py": TRAINS,
        "examples/pytorch/bug_report/bug_report_model.py": TRAINS,
        "examples/pytorch/domain_templates/generative_adversarial_net.py": TRAINS,
        "examples/fabric/image_classifier/train_fabric.py": "it uses lightning.fabric",
        "examples/pytorch/basics/autoencoder.py": "it uses lightning.pytorch.cli",
        "examples/pytorch/basics/backbone_image_classifier.py": "it uses lightning.pytorch.cli",
    },
    "karpathy/nanoGPT": {"train.py": "it scales its losses by GradScaler"},
    "karpathy/minGPT": {"mingpt/trainer.py": "its sampler draws 1e10 samples"},
}


def moved(source):
    """Return what ``tp move --write`` makes of a script.

    Raises:
        ConfigError: It cannot be moved.
    """
    (move,) = (c.item for c in registry.commands() if c.item.name == "move")
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        script, new = Path(folder, "script.py"), Path(folder, "new.py")
        script.write_text(source)
        get_command(move.load())(["--write", str(new), str(script)], standalone_mode=False)
        return new.read_text()


def fetch(folder):
    """Fetch one commit of each repository into a folder."""
    for repository, commit in COMMITS.items():
        clone, address = Path(folder, repository.replace("/", "+")), f"https://github.com/{repository}"
        clone.mkdir()
        for command in (["init"], ["fetch", "--depth=1", address, commit]):
            subprocess.run(["git", "-C", str(clone), *command, "--quiet"], check=True)


def differences(folder):
    """Yield a line for each script with another outcome than the table's."""
    for repository, scripts in TRIED.items():
        clone = Path(folder) / repository.replace("/", "+")
        clone = clone if (clone / ".git").exists() or not (clone / "repo").exists() else clone / "repo"
        for path, expected in scripts.items():
            show = ["git", "-C", str(clone), "show", f"{COMMITS[repository]}:{path}"]
            source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
            try:
                compile(moved(source), path, "exec")
                found = TRAINS
            except ConfigError as error:
                found = str(error)
            if expected not in found:
                yield f"{repository} {path}: expected {expected!r}, found {found!r}"


if __name__ == "__main__":
    with TemporaryDirectory() as fetched:
        if not sys.argv[1:]:
            fetch(fetched)
        found = list(differences(sys.argv[1] if sys.argv[1:] else fetched))
    print("\n".join(found) or f"{sum(map(len, TRIED.values()))} scripts as in the table")
    sys.exit(bool(found))
