from tp_trainer._checkpoint._checkpointer import Checkpointer as Checkpointer
from tp_trainer._checkpoint._folders import verify as verify
from tp_trainer._checkpoint._settings import Checkpoints as Checkpoints
