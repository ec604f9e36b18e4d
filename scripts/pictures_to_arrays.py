#!/usr/bin/env python3
"""Makes arrays for data.arrays of pictures: of a folder with a sub-folder for each class, of MNIST's files, or of CIFAR-10's binary files.

    scripts/pictures_to_arrays.py SOURCE OUT [--size 256] [--grey] [--like MODEL]

OUT gets pixel_values.npy (pictures, channels, height, width) and labels.npy, and OUT/held_out the same of the files that belong to evaluation
(MNIST's t10k ones, CIFAR-10's test_batch.bin, or the folder SOURCE/held_out, SOURCE/val or SOURCE/test). classes.txt has the names of the classes
of a folder, in the order of their numbers: that of --like's config.json (id2label) if it has the same names, else that of the names.

Pictures of folders are read by Pillow, turned to RGB (or grey), scaled so that the shorter side has --size pixels, and cut to the square in the
centre. data.crop takes parts of these squares in training.
"""
import argparse
import gzip
import json
import pathlib
import sys

import numpy

PARTS = ("held_out", "val", "test")
PICTURES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def die(message):
    sys.exit(f"pictures_to_arrays.py: {message}")


def save(folder, pixels, labels):
    if len(pixels) != len(labels):
        die(f"{folder}: {len(pixels)} pictures, but {len(labels)} labels")
    folder.mkdir(parents=True, exist_ok=True)
    numpy.save(folder / "pixel_values.npy", pixels)
    numpy.save(folder / "labels.npy", labels.astype(numpy.int64))
    print(f"{folder}: {len(labels)} pictures of {pixels.shape[1]} x {pixels.shape[2]} x {pixels.shape[3]}, {len(set(labels.tolist()))} classes")


def idx_array(folder, name, dimensions):
    """The array of one of MNIST's files, gzipped or not."""
    for path in (folder / f"{name}{end}" for name in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")):
        if not path.exists():
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:4] != bytes([0, 0, 8, dimensions]):
            die(f"{path} is no IDX file of bytes with {dimensions} dimensions")
        shape = numpy.frombuffer(data, ">u4", dimensions, 4).tolist()
        if len(data) != 4 + 4 * dimensions + numpy.prod(shape, dtype=object):
            die(f"{path} has {len(data)} bytes, which is not what its header says: it is damaged")
        return numpy.frombuffer(data, numpy.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return None


def mnist(source, out):
    for part, folder in (("train", out), ("t10k", out / "held_out")):
        pixels, labels = idx_array(source, f"{part}-images-idx3-ubyte", 3), idx_array(source, f"{part}-labels-idx1-ubyte", 1)
        if pixels is not None and labels is not None:
            save(folder, pixels[:, None], labels)
        elif part == "train":
            die(f"{source} has no train-images-idx3-ubyte or no train-labels-idx1-ubyte")


def cifar(source, out):
    def read(files, folder):
        rows = [numpy.frombuffer(file.read_bytes(), numpy.uint8) for file in files]
        for file, row in zip(files, rows):
            if len(row) % 3073 or not len(row):
                die(f"{file} has {len(row)} bytes, which is no whole number of records of 3073: it is damaged")
        rows = numpy.concatenate(rows).reshape(-1, 3073)
        save(folder, rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])

    read(sorted(source.glob("data_batch_*.bin")), out)
    if (source / "test_batch.bin").exists():
        read([source / "test_batch.bin"], out / "held_out")


def class_names(source, like):
    names = sorted(path.name for path in source.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name not in PARTS)
    if len(names) < 2:
        die(f"{source} has {len(names)} sub-folders, but each class needs one, and there must be two or more")
    if like is not None:
        labels = json.loads((like / "config.json").read_text()).get("id2label", {})
        ordered = [labels.get(str(number)) for number in range(len(labels))]
        if sorted(ordered, key=str) == names:
            return ordered
        print(f"{like} has other classes than {source}: they are numbered by name", file=sys.stderr)
    return names


def folders(source, out, names, size, grey):
    from PIL import Image

    files, labels, others = [], [], []
    for label, name in enumerate(names):
        for path in sorted((source / name).iterdir()):
            (files if path.suffix.lower() in PICTURES else others).append(path)
            labels += [label] * (path.suffix.lower() in PICTURES)
    if others:
        print(f"{len(others)} entries are not read, such as {others[0]}", file=sys.stderr)
    if not files:
        die(f"{source} has no pictures in the folders of its classes")
    out.mkdir(parents=True, exist_ok=True)
    shape = (len(files), 1 if grey else 3, size, size)
    pixels = numpy.lib.format.open_memmap(out / "pixel_values.npy", mode="w+", dtype=numpy.uint8, shape=shape)
    for number, path in enumerate(files):
        try:
            with Image.open(path) as picture:
                picture = picture.convert("L" if grey else "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            die(f"{path} cannot be read: {error}: replace it or remove it")
        scale = size / min(picture.size)
        wide, high = (max(size, round(side * scale)) for side in picture.size)
        left, top = (wide - size) // 2, (high - size) // 2
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
        pixels[number] = numpy.asarray(picture).reshape(size, size, -1).transpose(2, 0, 1)
    pixels.flush()
    numpy.save(out / "labels.npy", numpy.array(labels, numpy.int64))
    print(f"{out}: {len(files)} pictures of {shape[1]} x {size} x {size}, {len(names)} classes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--size", type=int, default=256, help="pixels, of pictures in folders")
    parser.add_argument("--grey", action="store_true", help="one channel, of pictures in folders")
    parser.add_argument("--like", type=pathlib.Path, help="Hugging Face directory whose order of classes is kept")
    options = parser.parse_args()
    source, out = options.source, options.out
    if not source.is_dir():
        die(f"{source} is no folder")
    if (out / "pixel_values.npy").exists():
        die(f"{out} has pixel_values.npy already: name another folder, or remove it")
    if list(source.glob("train-*idx*-ubyte*")):
        mnist(source, out)
    elif list(source.glob("data_batch_*.bin")):
        cifar(source, out)
    else:
        names = class_names(source, options.like)
        folders(source, out, names, options.size, options.grey)
        (out / "classes.txt").write_text("".join(f"{name}\n" for name in names))
        for part in PARTS:
            if (source / part).is_dir():
                folders(source / part, out / "held_out", names, options.size, options.grey)
                break


if __name__ == "__main__":
    main()
