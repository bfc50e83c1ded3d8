"""Several processes that train one model by torch.distributed."""
