"""``tp convert``: the model of a checkpoint as safetensors."""
