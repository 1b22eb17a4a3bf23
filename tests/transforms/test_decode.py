"""Bytes become arrays as the libraries themselves make them, in threads and processes too."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
import simplejpeg
import soundfile
from PIL import Image, UnidentifiedImageError

import streamline as sl
from streamline.errors import PlanError, PlanTypeError
from streamline.transforms import decode
from tests.io.formats.archives import archive
from tests.io.formats.records import record_file

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


STORED = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB")]


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, kind, **options)
    return file.getvalue()


def by_pillow(data: bytes, mode: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", decode.MODES)
@pytest.mark.parametrize(("kind", "stored"), STORED)
def test_an_image_is_as_pillow_has_it(kind: str, stored: str, mode: Any) -> None:
    data = encoded(kind, stored)
    found = sl.decode.image(mode)(data)
    assert np.array_equal(found, by_pillow(data, mode))
    assert found.dtype == np.uint8
    assert found.flags.writeable
    assert found.shape == {"RGB": (5, 7, 3), "L": (5, 7), "RGBA": (5, 7, 4)}[mode]


def test_jpeg_is_decoded_by_simplejpeg_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls = encoded("JPEG"), list[int]()
    whole = simplejpeg.decode_jpeg

    def counting(jpeg: bytes, **options: Any) -> Any:
        calls.append(len(jpeg))
        return whole(jpeg, **options)

    monkeypatch.setattr(simplejpeg, "decode_jpeg", counting)
    decode._turbo.cache_clear()
    first = sl.decode.image()(data)
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    decode._turbo.cache_clear()
    assert np.array_equal(sl.decode.image()(data), first)
    assert calls == [len(data)]
    monkeypatch.undo()
    decode._turbo.cache_clear()


def test_items_of_readers_are_decoded_as_they_come(tmp_path: Path) -> None:
    data = encoded("PNG")
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.tar").write_bytes(archive([("a.png", data)]))
    for pipe in (sl.read_files(tmp_path / "a.png"), sl.read_tar(tmp_path / "a.tar", group=False)):
        for backend in (sl.Inline(), sl.Processes(1)):
            with pipe.map(sl.decode.image()).open(backend=backend) as stream:
                (found,) = stream
            assert np.array_equal(found, PIXELS)
    with sl.read_files(tmp_path / "a.png").map(sl.decode.image(), executor="thread", concurrency=2).open() as threads:
        assert all(np.array_equal(found, PIXELS) for found in threads)
    assert np.array_equal(sl.decode.image()(memoryview(data)), PIXELS)


def test_what_is_no_image_fails_as_in_pillow() -> None:
    with pytest.raises(UnidentifiedImageError):
        sl.decode.image()(b"no image")
    for kind in ("JPEG", "PNG"):
        data = encoded(kind)
        with pytest.raises(OSError):  # noqa: PT011 - Pillow's words differ
            sl.decode.image()(data[: len(data) // 2])
    with pytest.raises(TypeError, match="expected bytes, or what has them"):
        sl.decode.image()(cast(Any, 5))


# Audio ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_audio_is_as_it_was_written(kind: str, channels: int) -> None:
    samples = (np.arange(20 * channels).reshape(20, channels) / 2**10).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=kind)
    found = sl.decode.audio()(file.getvalue())
    assert (found.rate, found.samples.shape) == (16_000, (20, channels))
    assert found.samples.dtype == np.float32
    assert np.array_equal(found.samples, samples)


def test_what_is_no_audio_fails_as_in_soundfile() -> None:
    with pytest.raises(soundfile.LibsndfileError):
        sl.decode.audio()(b"no audio")


# Video ----------------------------------------------------------------------------------------------------------------

FPS, LENGTH = 20, 90


@cache
def video(codec: str, container: str) -> bytes:
    """Return 4.5 s of video with a key frame every 12 frames; frame n is 2 n grey."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=FPS)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 12, 2
        for number in range(LENGTH):
            grey = np.full((64, 64, 3), 2 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


@cache
def all_frames(codec: str, container: str) -> list[Any]:
    with av.open(io.BytesIO(video(codec, container)), "r") as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


KINDS = [("mpeg4", "mp4"), ("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "avi"), ("mpeg4", "mpegts")]


@pytest.mark.parametrize(("codec", "container"), KINDS)
@pytest.mark.parametrize("times", [[0], [0.024, 0.05, 0.051, 4.44], [1.53], [0.3, 3.99, 3.99, 99], 7])
def test_frames_are_those_that_are_shown_at_a_time(codec: str, container: str, times: Any) -> None:
    found = sl.decode.video(times)(video(codec, container))
    seconds = times if isinstance(times, list) else [LENGTH / FPS * (part + 0.5) / times for part in range(times)]
    numbers = [min(LENGTH - 1, int(time_s * FPS + 1e-6)) for time_s in seconds]
    assert np.allclose(found.times, [number / FPS for number in numbers], atol=1e-3)
    whole = all_frames(codec, container)
    assert len(whole) == LENGTH
    assert all(np.array_equal(frame, whole[number]) for frame, number in zip(found.frames, numbers, strict=True))


def test_what_lies_far_before_a_time_is_not_decoded() -> None:
    decoded = 0

    class Counting(decode._FrameReader):
        def time_s(self, frame: Any) -> float:
            nonlocal decoded
            decoded += 1
            return super().time_s(frame)

    with av.open(io.BytesIO(video("libx264", "mp4")), "r") as container:
        assert Counting(container).at(4.0).time == 4.0
    assert decoded < 20


def test_what_is_no_video_is_said_to_be_none() -> None:
    with pytest.raises(av.error.FFmpegError):
        sl.decode.video(1)(b"no video")
    tones = io.BytesIO()
    soundfile.write(tones, np.zeros((4, 1), np.float32), 8000, format="WAV")
    with pytest.raises(ValueError, match="it has no video"):
        sl.decode.video(1)(tones.getvalue())


@pytest.mark.parametrize(
    ("times", "error", "why"),
    [
        (0, PlanError, "at least 1"),
        ([], PlanError, "rising"),
        ([2, 1], PlanError, "rising"),
        ([-1], PlanError, "0 or more"),
        ([float("nan")], PlanError, "0 or more"),
        ("ab", PlanTypeError, "is seconds, or how many frames"),
        (None, PlanTypeError, "is seconds"),
    ],
)
def test_times_are_checked(times: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        sl.decode.video(times)


# Examples -------------------------------------------------------------------------------------------------------------


def message(**features: Any) -> bytes:
    """Return an Example, written by hand: int64, float32, or bytes for each name."""
    entries = b""
    for name, values in features.items():
        if values and isinstance(values[0], bytes):
            kind, body = 1, b"".join(field(1, value) for value in values)
        elif values and isinstance(values[0], float):
            kind, body = 2, field(1, np.array(values, "<f4").tobytes())
        else:
            kind, body = 3, field(1, b"".join(varint(value % 2**64) for value in values))
        entries += field(1, field(1, name.encode()) + field(2, field(kind, body)))
    return field(1, entries)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


DATA = message(i=[1, -2, 2**40], f=[1.0, -0.5], b=[b"one", b"\xff"], label=[7], image=[b"png"])


def test_an_example_is_parsed_without_tensorflow() -> None:
    found = sl.decode.example()(DATA)
    assert list(found) == ["b", "f", "i", "image", "label"]
    assert found["i"].dtype == np.int64
    assert found["f"].dtype == np.float32
    assert {name: list(values) for name, values in found.items()} == {
        "i": [1, -2, 2**40],
        "f": [1.0, -0.5],
        "b": [b"one", b"\xff"],
        "label": [7],
        "image": [b"png"],
    }


def test_wanted_features_come_in_their_shapes() -> None:
    found = sl.decode.example({"label": (), "image": (), "i": (-1, 1), "f": (2,), "b": (2,)})(DATA)
    assert list(found) == ["label", "image", "i", "f", "b"]
    assert (found["label"], found["image"], found["b"]) == (7, b"png", [b"one", b"\xff"])
    assert (found["i"].shape, found["f"].shape) == ((3, 1), (2,))
    assert isinstance(found["label"], np.int64)


@pytest.mark.parametrize(
    ("features", "why"),
    [
        ({"other": ()}, "feature 'other' is missing"),
        ({"i": ()}, r"feature 'i' has 3 values: expected shape \(\)"),
        ({"i": (2, -1)}, "feature 'i' has 3 values"),
        ({"b": ()}, "feature 'b' has 2 values of bytes"),
    ],
)
def test_what_an_example_lacks_is_named(features: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sl.decode.example(features)(DATA)


def test_what_is_no_example_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match=r"expected a tf\.train\.Example, got 9 bytes that are none"):
        sl.decode.example()(b"\xff" * 9)
    assert sl.decode.example()(b"") == {}


def test_examples_of_files_resume(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(record_file(message(label=[number]) for number in range(9)))
    pipe = sl.read_tfrecord(tmp_path / "a").map(sl.decode.example({"label": ()}))
    with pipe.open(backend=sl.Processes(1)) as stream:
        first = [next(stream) for _ in range(4)]
        snapshot = stream.snapshot()
    with pipe.open(resume=snapshot) as stream:
        assert [int(item["label"]) for item in [*first, *stream]] == list(range(9))


# By extension ---------------------------------------------------------------------------------------------------------


def test_the_fields_of_a_sample_are_decoded_by_extension(tmp_path: Path) -> None:
    file, tones = io.BytesIO(), io.BytesIO()
    np.save(file, PIXELS)
    soundfile.write(tones, np.zeros((4, 1), np.float32), 8000, format="WAV")
    members = {
        "seg.PNG": encoded("PNG"), "jpg": encoded("JPEG"), "cls": b"5\n", "txt": "ö".encode(), "json": b'{"a": [1]}',
        "npy": file.getvalue(), "wav": tones.getvalue(), "pkl": pickle.dumps(1), "bin": b"\x00",
    }  # fmt: skip
    (tmp_path / "a.tar").write_bytes(archive([(f"d/0.{field}", data) for field, data in members.items()]))
    (sample,) = sl.read_tar(tmp_path / "a.tar").map(sl.decode.auto(bin=len))
    assert np.array_equal(sample.pop("seg.png"), PIXELS)
    assert np.array_equal(sample.pop("npy"), PIXELS)
    assert sample.pop("jpg").shape == PIXELS.shape
    assert sample.pop("wav").samples.shape == (4, 1)
    assert sample == {
        "__key__": "d/0", "cls": 5, "txt": "ö", "json": json.loads(members["json"]), "pkl": members["pkl"], "bin": 1
    }  # fmt: skip


def test_a_whole_file_becomes_a_sample(tmp_path: Path) -> None:
    (tmp_path / "a.seg.png").write_bytes(encoded("PNG"))
    (sample,) = sl.read_files(tmp_path / "*.png").map(sl.decode.auto(png=sl.decode.image("L")))
    assert sample["__key__"] == str(tmp_path / "a")
    assert sample["seg.png"].shape == (5, 7)
    with pytest.raises(TypeError, match="expected a sample"):
        sl.decode.auto()(b"bytes")


def test_a_field_that_cannot_be_decoded_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 'd/0', field 'seg.png': cannot identify"):
        sl.decode.auto()({"__key__": "d/0", "seg.png": b"no image"})
    file = io.BytesIO()
    np.save(file, np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"field 'npy': .*allow_pickle=False"):
        sl.decode.auto()({"npy": file.getvalue()})


# Options --------------------------------------------------------------------------------------------------------------


def test_options_are_checked() -> None:
    with pytest.raises(PlanError, match="is one of"):
        sl.decode.image(cast(Any, "BGR"))
    with pytest.raises(PlanTypeError, match="name: shape"):
        sl.decode.example(cast(Any, ["label"]))
    with pytest.raises(PlanTypeError, match="expected a shape for 'label'"):
        sl.decode.example({"label": cast(Any, int)})
    with pytest.raises(PlanError, match="'label' is at least -1"):
        sl.decode.example({"label": (-2,)})
    with pytest.raises(PlanTypeError, match="is a function"):
        sl.decode.auto(png=cast(Any, "L"))


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (sl.decode.image, r"Pillow.*streamline-data\[media\]"),
        (partial(sl.decode.video, 1), r"PyAV.*streamline-data\[media\]"),
        (sl.decode.audio, r"soundfile.*streamline-data\[media\]"),
        (sl.decode.example, r"protobuf.*streamline-data\[tfrecord\]"),
    ],
)
def test_a_library_that_is_not_there_is_named(make: Any, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamline.core.options.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=needs):
        make()


PLAIN = [
    sl.decode.image("L"),
    sl.decode.audio(),
    sl.decode.video([1, 2]),
    sl.decode.example({"a": ()}),
    sl.decode.auto(png=len),
]


@pytest.mark.parametrize("one", PLAIN, ids=str)
def test_they_are_plain_data(one: Any) -> None:
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != sl.decode.image()
