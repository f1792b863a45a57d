"""``evenstep bench``: plain PyTorch, DataParallel, DDP and evenstep side by side on this machine."""
