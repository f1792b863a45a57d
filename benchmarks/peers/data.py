"""Make the files that all peers read, from anything that evenstep can read (an archive of JPEG files, say).

    python data.py OUT [--source SOURCE] [--test 2001]

OUT gets train-images.npy (uint8, (N, 32, 32, 3)), train-labels.npy (int64), the same for test, meta.json with
mean and standard deviation, and the same arrays as data-TEST.npz, whose test part has the first --test
images: this is what the command `evenstep train` is given, and OUT/cache is its cache, filled here. SOURCE is
needed once; another --test is cut from the arrays that are there.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from evenstep.data.sources import open_source, prepare


def read(source, out):
    """Write the arrays of a source, and meta.json last, which says that they are whole."""
    found = open_source(source, data_dir="data", cache_dir=out / "cache")
    for name, split in (("train", found.train), ("test", found.test)):
        np.save(out / f"{name}-images.npy", split.images)
        np.save(out / f"{name}-labels.npy", split.labels)
    meta = {"source": found.name, "mean": found.train.mean, "std": found.train.std}
    (out / "meta.json").write_text(json.dumps(meta))


def cut(out, test):
    """Write data-TEST.npz from the arrays."""
    arrays = {
        f"{letter}_{split}": np.load(out / f"{split}-{part}.npy", mmap_mode="r")
        for split in ("train", "test")
        for letter, part in (("x", "images"), ("y", "labels"))
    }
    if test > len(arrays["y_test"]):
        raise SystemExit(f"--test {test}: the data in {out} have {len(arrays['y_test'])} test images")
    arrays |= {name: arrays[name][:test] for name in ("x_test", "y_test")}
    half_done = out / "half-done.npz"
    np.savez(half_done, **arrays)
    half_done.replace(out / f"data-{test}.npz")


def main():
    """Write the files, unless they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", help="needed the first time")
    parser.add_argument("--test", type=int, default=2001, help="test images in the .npz")
    args = parser.parse_args()
    meta = args.out / "meta.json"
    if meta.exists():
        if args.source is not None:
            name = json.loads(meta.read_text()).get("source")
            print(f"taking the data of {name} that are in {args.out}, not --source", file=sys.stderr)
    elif args.source is None:
        parser.error(f"there are no data in {args.out} yet; give --source PATH once")
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        read(args.source, args.out)
    npz = args.out / f"data-{args.test}.npz"
    if not npz.exists():
        cut(args.out, args.test)
    prepare(str(npz), data_dir="data", cache_dir=args.out / "cache")


if __name__ == "__main__":
    main()
