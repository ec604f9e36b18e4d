"""scripts/pictures_to_arrays.py: the arrays of folders, of MNIST's and of CIFAR-10's files."""
import gzip
import json
import pathlib
import subprocess
import sys

import numpy
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/pictures_to_arrays.py"


def run(*arguments, code=0):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr


def arrays(folder):
    return numpy.load(folder / "pixel_values.npy"), numpy.load(folder / "labels.npy").tolist()


def test_folders_of_classes(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    source = tmp_path / "pictures"
    for name, colour, size in (("bee", (0, 255, 0), (40, 20)), ("ant", (255, 0, 0), (8, 16)), ("held_out/ant", (0, 0, 255), (8, 8)), ("held_out/bee", (9, 9, 9), (8, 8))):
        (source / name).mkdir(parents=True)
        Image.new("RGB", size, colour).save(source / name / "a.png")
    (source / "ant/notes.txt").write_text("no picture")
    assert "notes.txt" in run(source, tmp_path / "out", "--size", "8")
    pixels, labels = arrays(tmp_path / "out")
    assert pixels.shape == (2, 3, 8, 8) and pixels.dtype == numpy.uint8 and labels == [0, 1]
    assert pixels[0, 0].min() == 255 and pixels[0, 1].max() == 0 and pixels[1, 1].min() == 255
    assert (tmp_path / "out/classes.txt").read_text() == "ant\nbee\n"
    pixels, labels = arrays(tmp_path / "out/held_out")
    assert labels == [0, 1] and pixels[0, 2].min() == 255 and pixels[1].max() == 9
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "bee", "1": "ant"}}))
    run(source, tmp_path / "like", "--size", "4", "--grey", "--like", tmp_path)
    pixels, labels = arrays(tmp_path / "like")
    assert pixels.shape == (2, 1, 4, 4) and labels == [0, 1] and set(pixels[1].flat) == {76}  # red, as Pillow converts it
    assert (tmp_path / "like/classes.txt").read_text() == "bee\nant\n"
    assert "already" in run(source, tmp_path / "out", code=1)
    (source / "ant/b.jpg").write_bytes(b"no picture")
    assert "b.jpg" in run(source, tmp_path / "damaged", code=1)


def test_the_largest_square_in_the_centre(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    wide = numpy.zeros((4, 12), numpy.uint8)
    wide[:, 4:8] = 200
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.fromarray(wide).save(tmp_path / "in" / name / "x.png")
    run(tmp_path / "in", tmp_path / "out", "--size", "4", "--grey")
    assert (arrays(tmp_path / "out")[0] == 200).all()


def test_mnist(tmp_path):
    def write(name, shape, values, gz=False):
        data = bytes([0, 0, 8, len(shape)]) + numpy.array(shape, ">u4").tobytes() + bytes(values)
        (tmp_path / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)

    write("train-images-idx3-ubyte", (3, 1, 2), range(6), gz=True)
    write("train-labels-idx1-ubyte", (3,), (2, 0, 1))
    write("t10k-images.idx3-ubyte", (1, 1, 2), (7, 8))
    write("t10k-labels.idx1-ubyte", (1,), (1,))
    run(tmp_path, tmp_path / "out")
    pixels, labels = arrays(tmp_path / "out")
    assert pixels.tolist() == [[[[0, 1]]], [[[2, 3]]], [[[4, 5]]]] and labels == [2, 0, 1]
    assert arrays(tmp_path / "out/held_out")[0].tolist() == [[[[7, 8]]]]
    write("train-labels-idx1-ubyte", (4,), (2, 0, 1))
    assert "damaged" in run(tmp_path, tmp_path / "bad", code=1)
    write("train-labels-idx1-ubyte", (2,), (2, 0))
    assert "3 pictures, but 2 labels" in run(tmp_path, tmp_path / "bad", code=1)


def test_cifar(tmp_path):
    record = lambda label: bytes([label]) + bytes([1] * 1024 + [2] * 1024 + [3] * 1024)
    (tmp_path / "data_batch_2.bin").write_bytes(record(5))
    (tmp_path / "data_batch_1.bin").write_bytes(record(9) + record(0))
    (tmp_path / "test_batch.bin").write_bytes(record(3))
    run(tmp_path, tmp_path / "out")
    pixels, labels = arrays(tmp_path / "out")
    assert pixels.shape == (3, 3, 32, 32) and labels == [9, 0, 5] and [pixels[0, c].max() for c in range(3)] == [1, 2, 3]
    assert arrays(tmp_path / "out/held_out")[1] == [3]
    (tmp_path / "test_batch.bin").write_bytes(record(3)[1:])
    assert "damaged" in run(tmp_path, tmp_path / "bad", code=1)
