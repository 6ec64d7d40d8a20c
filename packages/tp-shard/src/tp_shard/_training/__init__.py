"""What a training loop needs over shards: clipping, loss scaling, groups of parameters, sparse updates."""
