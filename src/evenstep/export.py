"""A checkpoint's weights as one plain file, for those who use them without evenstep."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from evenstep import checkpoint
from evenstep.errors import CheckpointError, ConfigError, MachineError

ENDINGS = (".pt", ".pth", ".bin", ".safetensors")


def export(path: str | Path, output: str | Path, *, average: bool = False, force: bool = False) -> int:
    """Write the state_dict of a checkpoint into one file, whole or not at all.

    Every key is in the file, those of shared weights too, as ``model.load_state_dict`` wants it.

    Args:
        path: the checkpoint's directory.
        output: the file; its ending is the format: ``.safetensors``, or ``.pt``, ``.pth``, ``.bin`` for what
            ``torch.load(..., weights_only=True)`` reads.
        average: the moving average of the weights (``--ema-decay``) instead of the weights.
        force: replace a file that is there.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has no moving average.
        ConfigError: the ending is unknown, or the file is there.
        MachineError: the file cannot be written.
    """
    output = Path(output)
    if output.suffix not in ENDINGS:
        raise ConfigError(
            f"--output {output} ends with {output.suffix or 'nothing'!r}, and the ending says the format. "
            f"Use one of {', '.join(ENDINGS)}."
        )
    if output.exists() and not force:
        raise ConfigError(
            f"{output} is there already and would be lost. Choose another --output, or add --force."
        )
    saved = checkpoint.load(path)
    weights = saved.model
    if average:
        found = checkpoint.average_of(saved)
        if found is None:
            raise CheckpointError(
                f"{path} has no moving average of the weights: its run kept none. Leave out --average, or "
                "train with --ema-decay 0.999."
            )
        weights = found
    temporary = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        if output.suffix == ".safetensors":
            # safetensors stores no memory twice, and a plain reader knows nothing of aliases.
            whole = {
                key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in weights.items()
            }
            safetensors.torch.save_file(whole, temporary, {"format": "pt"})
        else:
            with open(temporary, "wb") as file:
                torch.save(dict(weights), file)
        os.replace(temporary, output)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise MachineError(f"cannot write {output}: {error}. Choose another --output.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(weights)
