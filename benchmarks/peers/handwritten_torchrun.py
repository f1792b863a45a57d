"""The hand-written script under torchrun: the same training, no mp.spawn."""

import torch.distributed as dist
from common import arguments
from handwritten_spawn import run

if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size(), arguments())
