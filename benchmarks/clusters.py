"""The inputs of scaling.py: machines, networks, and what a GPU computes, with the source of each number."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machines:
    """Machines of one kind. All bandwidths are those of one GPU in one direction, as they are reached.

    Attributes:
        name: what the tables call them.
        gpus: GPUs, or processes, in a machine.
        call_s: start of a collective (alpha, once).
        inside_s: one message inside a machine (alpha).
        between_s: one message between machines (alpha).
        message_s: each further message that a process sends at the same time (o in LogP).
        inside_bytes_per_s: inside a machine (1/beta).
        between_bytes_per_s: between machines: the machine's network, divided by its GPUs (1/beta).
        added_bytes_per_s: bytes of one summand that are added in a second (1/gamma).
        launch_s: start of one addition.
        cores: where the processes compute on shared cores: how many; None where each has its own GPU.
        turn_s: with shared cores, what a message waits for a receiver that is on none of them.
        last_s: with shared cores, how much longer a meeting of all processes waits for the last one with each
            doubling of the processes per core.
    """

    name: str
    gpus: int
    call_s: float
    inside_s: float
    between_s: float
    message_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float
    added_bytes_per_s: float
    launch_s: float
    cores: int | None = None
    turn_s: float = 0.0
    last_s: float = 0.0


# call, inside, between: LL128 in NCCL's tuning model (src/graph/tuning.cc: baseLat 14, hwLat of the
# ring 1.9 on NVLink and 4.0 on the network); message: a post to the network (getNetOverhead, Intel: 1).
# Launch of a kernel: 4 to 6 us on the host. An addition of float32 reads two values and writes one.
_NCCL = {"call_s": 14e-6, "inside_s": 1.9e-6, "between_s": 4.0e-6, "message_s": 1e-6, "launch_s": 5e-6}
H100 = Machines(
    name="H100, 400 Gb/s a GPU",
    gpus=8,
    **_NCCL,
    inside_bytes_per_s=370e9,  # NVLink: 450 at the wire, 370 reached (nccl-tests issue 212)
    between_bytes_per_s=48.5e9,  # ConnectX-7: 50 at the wire, 48 to 49 reached (nccl-tests issue 267)
    added_bytes_per_s=3.35e12 / 3,  # HBM3 of the data sheet
)
A100 = Machines(
    name="A100, 200 Gb/s a GPU",
    gpus=8,
    **_NCCL,
    inside_bytes_per_s=235e9,  # NVLink: 300 at the wire; NCCL's model takes at most 235
    between_bytes_per_s=24.2e9,  # 25 at the wire, the share of the H100's network
    added_bytes_per_s=2.0e12 / 3,  # HBM2e of the data sheet
)
V100 = Machines(
    name="V100, 25 Gb/s a machine",
    gpus=8,
    call_s=14e-6,
    inside_s=1.9e-6,
    between_s=50e-6,  # TCP in one data centre: assumed
    message_s=10e-6,  # a system call on both sides: assumed
    inside_bytes_per_s=123e9,  # NVLink: 150 at the wire, the share of the H100's
    between_bytes_per_s=3.03e9 / 8,  # one network card of 25 Gb/s for all 8 (AWS p3.16xlarge)
    added_bytes_per_s=0.9e12 / 3,  # HBM2 of the data sheet
    launch_s=5e-6,
)


@dataclass(frozen=True)
class Work:
    """What one GPU computes in a step.

    Attributes:
        name: what the tables call it.
        parameters: of the model; gradients are float32.
        compute_s: forward and backward, alone on one GPU.
        running: running statistics of BatchNorm: numbers that evenstep sums in each step, in float64.
    """

    name: str
    parameters: float
    compute_s: float
    running: int = 0

    @property
    def gradient_bytes(self):
        """Bytes that are summed in a step."""
        return 4 * self.parameters

    @property
    def vector_bytes(self):
        """Bytes of what evenstep sums along with them: loss, weight, two wishes, statistics."""
        return 8 * (4 + self.running)


_RUNNING = 2 * 26_560 + 53  # of ResNet-50: mean and variance of each channel, and a count for each layer

# Images a second of one GPU in mixed precision: DeepLearningExamples, ConvNets/resnet50v1.5, A100 and V100.
# The transformer: 6 operations a parameter and token, 41 % of 989 T/s (Megatron-LM's smallest model on H100).
CASES = (
    (H100, Work("transformer, 2 G parameters, 16,384 tokens a GPU", 2e9, 6 * 2e9 * 16_384 / 0.41 / 989e12)),
    (A100, Work("ResNet-50, 256 images a GPU", 25.6e6, 256 / 2470, _RUNNING)),
    (A100, Work("ResNet-50, 32 images a GPU", 25.6e6, 32 / 2470, _RUNNING)),
    (V100, Work("ResNet-50, 256 images a GPU", 25.6e6, 256 / 1200, _RUNNING)),
)
