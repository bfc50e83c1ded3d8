"""One model over several processes of torch.distributed."""
