"""The public surface of tp_trainer."""

import tp_trainer


def test_the_public_names_of_tp_trainer_are_these():
    assert tp_trainer.__all__ == [
        "Checkpoints",
        "EpochRecord",
        "History",
        "Interrupted",
        "ParallelTrainer",
        "Parallel_Trainer",
        "Step",
        "Trainer",
    ]
    assert all(hasattr(tp_trainer, name) for name in tp_trainer.__all__)
    assert tp_trainer.Parallel_Trainer is tp_trainer.ParallelTrainer
