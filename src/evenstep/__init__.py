"""Data-parallel PyTorch training with the same bits on any number of processes."""
