from tp_trainer._checkpoint._checkpointer import Checkpointer as Checkpointer
from tp_trainer._checkpoint._settings import Checkpoints as Checkpoints
from tp_trainer._checkpoint._verifying import verify as verify
