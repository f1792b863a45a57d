"""Make the files that all peers read, from anything that evenstep can read (an archive of JPEG files, say).

    python data.py SOURCE OUT [--test 2001]

OUT gets train-images.npy (uint8, (N, 32, 32, 3)), train-labels.npy (int64), the same for test, meta.json with
mean and standard deviation, and the same arrays as data.npz, whose test part has --test images: this is what
the command `evenstep train` is given, and OUT/cache is its cache, filled here.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from evenstep.data.sources import open_source, prepare


def main():
    """Write the files, unless they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--test", type=int, default=2001, help="test images in the .npz")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cache = args.out / "cache"
    npz = args.out / f"data-{args.test}.npz"
    if not npz.exists():
        source = open_source(args.source, data_dir="data", cache_dir=cache)
        for name, split in (("train", source.train), ("test", source.test)):
            np.save(args.out / f"{name}-images.npy", split.images)
            np.save(args.out / f"{name}-labels.npy", split.labels)
        meta = {"source": source.name, "mean": source.train.mean, "std": source.train.std}
        (args.out / "meta.json").write_text(json.dumps(meta))
        half_done = args.out / "half-done.npz"
        np.savez(
            half_done,
            x_train=source.train.images,
            y_train=source.train.labels,
            x_test=source.test.images[: args.test],
            y_test=source.test.labels[: args.test],
        )
        half_done.replace(npz)
    prepare(str(npz), data_dir="data", cache_dir=cache)


if __name__ == "__main__":
    main()
