"""Functions for `.map` that turn bytes into arrays, by the libraries of each field: images, audio, video, Examples.

Each is made by a call that says how, is plain data (it pickles, and prints as it was written), and may be called from
several threads: their libraries release the GIL, so `.map(decode.image(), executor="thread", concurrency=8)` decodes on
eight cores.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from streamline.core.lazy_numpy import loaded_np, np
from streamline.core.options import check_installed, check_int, given
from streamline.errors import PlanError, PlanTypeError

if TYPE_CHECKING:
    import numpy.typing as npt
    from av import VideoFrame
    from av.container import InputContainer

Data: TypeAlias = "bytes | bytearray | memoryview | Any"
"""Bytes, or what has them as `data`: an item of `read_files`, or of `read_tar(group=False)`."""

Mode: TypeAlias = Literal["RGB", "L", "RGBA"]

MODES = ("RGB", "L", "RGBA")


class Audio(NamedTuple):
    """A recording: `samples`, float32 (time, channels) in [-1, 1], and `rate`, how many of them are a second."""

    samples: npt.NDArray[np.float32]
    rate: int


class VideoFrames(NamedTuple):
    """Parts of a video: `frames`, uint8 (frames, height, width, 3), and `times`, float64 (frames,), in seconds."""

    frames: npt.NDArray[np.uint8]
    times: npt.NDArray[np.float64]


def image(mode: Mode = "RGB") -> Callable[[Data], npt.NDArray[np.uint8]]:
    """Return a function that decodes an image (JPEG, PNG, WebP, …) to a writable uint8 array (height, width, channels).

    As it is stored: a camera's orientation isn't applied. RGB of a JPEG is decoded by simplejpeg, where it is
    installed, in half the time that Pillow takes for the same pixels; the rest by Pillow. Needs
    `pip install 'streamline-data[media]'`.

    Args:
      mode: "RGB"; "L": grey, (height, width); "RGBA".

    Raises:
      PlanError: another mode; Pillow isn't installed.
      When an item is decoded: Pillow's UnidentifiedImageError, OSError for a truncated image.
    """
    check_installed("sl.decode.image", "PIL", "Pillow", "media")
    if mode not in MODES:
        raise PlanError(f"sl.decode.image(mode=) is one of {MODES}, got {given(mode)}")
    return _ImageDecoder(mode)


def audio() -> Callable[[Data], Audio]:
    """Return a function that decodes audio (WAV, FLAC, Ogg, MP3), by soundfile. Needs `streamline-data[media]`.

    Raises:
      PlanError: soundfile isn't installed.
      When an item is decoded: soundfile's LibsndfileError.
    """
    check_installed("sl.decode.audio", "soundfile", "soundfile", "media")
    return _AudioDecoder()


def video(times: Sequence[float] | int) -> Callable[[Data], VideoFrames]:
    """Return a function that decodes frames of a video, by PyAV. Needs `pip install 'streamline-data[media]'`.

    Only what lies between the key frame before a time and that time is decoded, where the container can be searched.

    Args:
      times: in seconds from the first frame, rising: for each, the frame that is shown then; after the end, the last
        one. A number: so many frames, in the middles of as many equal parts of the video.

    Raises:
      PlanTypeError, PlanError: no such times; PyAV isn't installed.
      When an item is decoded: ValueError if it has no frames, PyAV's FFmpegError if it is damaged, or no video.
    """
    check_installed("sl.decode.video", "av", "PyAV", "media")
    if isinstance(times, int | loaded_np.integer):
        return _VideoDecoder(check_int("sl.decode.video(times=)", times, 1))
    try:
        found = tuple(map(float, times))
    except (TypeError, ValueError):
        raise PlanTypeError(f"sl.decode.video(times=) is seconds, or how many frames, got {given(times)}") from None
    if not found or not all(0 <= one <= other for one, other in zip(found, [*found[1:], math.inf], strict=True)):
        raise PlanError(f"sl.decode.video(times=) is seconds of 0 or more, rising, got {given(times)}")
    return _VideoDecoder(found)


def example(features: Mapping[str, Sequence[int]] | None = None) -> Callable[[Data], dict[str, Any]]:
    """Return a function that parses a `tf.train.Example`, without TensorFlow. Needs `streamline-data[tfrecord]`.

    Args:
      features: those that are wanted, and the shape of each: `{"label": (), "image": (), "boxes": (-1, 4)}`; () is one
        value. None: all, each as (-1,), since an Example doesn't say which of them are single values.

    Returns:
      Of each feature: a float32 or int64 array of its shape, a scalar of NumPy's where that is (); of one of bytes, a
      list, or where its shape is (), `bytes`.

    Raises:
      PlanTypeError, PlanError: no such mapping; protobuf isn't installed.
      When an item is parsed: ValueError if it is no Example, lacks a feature, or has one of another shape; it names it.
    """
    check_installed("sl.decode.example", "google.protobuf", "protobuf", "tfrecord")
    if features is None:
        return _ExampleParser(None)
    shapes = {}
    if not isinstance(features, Mapping):
        raise PlanTypeError(f'sl.decode.example(features=) is {{name: shape}}, {{"label": ()}}, got {given(features)}')
    for name, shape in features.items():
        if not isinstance(shape, tuple | list):
            raise PlanTypeError(
                f"sl.decode.example(features=): expected a shape for {name!r}, () or (-1, 4), got {given(shape)}"
            )
        shapes[name] = tuple(check_int(f"sl.decode.example(features=): {name!r}", size, -1) for size in shape)
    return _ExampleParser(tuple(shapes.items()))


def auto(**decoders: Callable[[Data], Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that decodes a sample's fields by their extensions, as WebDataset does.

    A sample is a dict of `read_tar`; a whole file, or a member, becomes one: {"__key__": "dir/name", "jpg": array}.
    Images (jpg, jpeg, png, ppm, webp, bmp) are decoded as by `image()`, audio (wav, flac, ogg, mp3) by `audio()`, txt
    and text are text, cls, cls2, index, id and inx integers, json and jsn JSON, npy an array. Others stay
    bytes, pickles (pyd, pkl, pth) too, since loading one runs what is in it.

    Args:
      decoders: for an extension, instead of or beside these: `png=sl.decode.image("L")`.

    Raises:
      PlanTypeError: a decoder isn't callable.
      When a sample is decoded: ValueError, which names its key and field; the field's own error is its cause.
    """
    for extension, decoder in decoders.items():
        if not callable(decoder):
            raise PlanTypeError(f"sl.decode.auto({extension}=) is a function, got {given(decoder)}")
    return _SampleDecoder(tuple(decoders.items()))


def data_of(item: Data) -> bytes | bytearray | memoryview:
    """Return the bytes of an item."""
    data = item if isinstance(item, bytes | bytearray | memoryview) else getattr(item, "data", None)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"expected bytes, or what has them as `data`, got {given(item)}")
    return data


@dataclass(frozen=True)
class _ImageDecoder:
    mode: Mode

    def __call__(self, item: Data) -> npt.NDArray[np.uint8]:
        data = data_of(item)
        found = _turbo_decoded(data) if self.mode == "RGB" and bytes(data[:2]) == b"\xff\xd8" else None
        if found is not None:
            return found
        from PIL import Image

        with Image.open(io.BytesIO(data)) as opened:
            return np.array(opened.convert(self.mode))


def _turbo_decoded(jpeg: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a JPEG; None where Pillow is to read it, or to say what is wrong."""
    turbo = _turbo()
    try:
        if turbo is None or turbo.decode_jpeg_header(jpeg)[2] not in ("YCbCr", "Gray"):
            return None
        found: npt.NDArray[np.uint8] = turbo.decode_jpeg(jpeg, colorspace="RGB")
    except ValueError:
        return None
    return found


@cache
def _turbo() -> Any:
    return None if find_spec("simplejpeg") is None else import_module("simplejpeg")


@dataclass(frozen=True)
class _AudioDecoder:
    def __call__(self, item: Data) -> Audio:
        import soundfile

        samples, rate = soundfile.read(io.BytesIO(data_of(item)), dtype="float32", always_2d=True)
        return Audio(samples, rate)


@dataclass(frozen=True)
class _VideoDecoder:
    times: tuple[float, ...] | int

    def __call__(self, item: Data) -> VideoFrames:
        import av

        with av.open(io.BytesIO(data_of(item)), "r") as container:
            reader = _FrameReader(container)
            shown = [reader.at(time_s) for time_s in self._wanted(reader)]
            frames = [frame.to_ndarray(format="rgb24") for frame in shown]
            return VideoFrames(np.stack(frames), np.array([reader.time_s(frame) for frame in shown]))

    def _wanted(self, reader: _FrameReader) -> Sequence[float]:
        if isinstance(self.times, tuple):
            return self.times
        return [reader.duration_s * (part + 0.5) / self.times for part in range(self.times)]


SEEK_S = 1.0
"""Seconds of a video that are decoded rather than looked for another key frame."""


class _FrameReader:
    """The frames of a video, asked for at rising times, in seconds after the first one."""

    def __init__(self, container: InputContainer) -> None:
        if not container.streams.video:
            raise ValueError("it has no video: expected a stream of frames")
        self._container, self._stream = container, container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # calls run at a time, parts of one needn't
        self._frames = container.decode(self._stream)
        first = next(self._frames, None)
        if first is None:
            raise ValueError("it has no frames: expected at least one")
        self._begin_s: float = first.time or 0.0
        self._shown, self._next = first, next(self._frames, None)

    @property
    def duration_s(self) -> float:
        if self._container.duration is None:
            raise ValueError("it doesn't say how long it is: give times in seconds")
        return self._container.duration / 1e6

    def time_s(self, frame: VideoFrame) -> float:
        return (frame.time or 0.0) - self._begin_s

    def at(self, time_s: float) -> VideoFrame:
        """Return the frame that is shown at a time."""
        if time_s - self.time_s(self._shown) > SEEK_S and not self._sought(time_s):
            self._sought(0)
        while self._next is not None and self.time_s(self._next) <= time_s:
            self._shown, self._next = self._next, next(self._frames, None)
        return self._shown

    def _sought(self, time_s: float) -> bool:
        """Go to the key frame before a time; return whether one was found there: some containers only guess."""
        stream = self._stream
        assert stream.time_base is not None
        self._container.seek(int((self._begin_s + time_s) / stream.time_base), stream=stream)
        self._frames = self._container.decode(stream)
        found = next(self._frames, None)
        if found is None:
            return False
        self._shown, self._next = found, next(self._frames, None)
        return self.time_s(found) <= time_s


@dataclass(frozen=True)
class _ExampleParser:
    shapes: tuple[tuple[str, tuple[int, ...]], ...] | None

    def __call__(self, item: Data) -> dict[str, Any]:
        message, error = _example_message()
        try:
            features = message.FromString(bytes(data_of(item))).features.feature
        except error as failure:
            raise ValueError(
                f"expected a tf.train.Example, got {len(data_of(item)):,} bytes that are none: {failure}"
            ) from failure
        if self.shapes is None:
            return {name: _values(name, features[name], (-1,)) for name in sorted(features)}
        return {name: _values(name, features.get(name), shape) for name, shape in self.shapes}


def _values(name: str, feature: Any, shape: tuple[int, ...]) -> Any:
    """Return what a feature holds, in its shape."""
    kind = None if feature is None else feature.WhichOneof("kind")
    if kind is None:
        if -1 in shape and feature is not None:
            return []  # as TensorFlow writes no values: the kind is unknown
        raise ValueError(f"feature {name!r} is missing: expected values of shape {shape}")
    values = getattr(feature, kind).value
    if kind == "bytes_list":
        return _of_bytes(name, list(values), shape)
    array = np.array(values, np.float32 if kind == "float_list" else np.int64)
    try:
        return array.reshape(shape)[()]
    except ValueError:
        raise ValueError(f"feature {name!r} has {len(array)} values: expected shape {shape}") from None


def _of_bytes(name: str, values: list[bytes], shape: tuple[int, ...]) -> Any:
    if shape == () and len(values) == 1:
        return values[0]
    if shape in ((-1,), (len(values),)):
        return values
    raise ValueError(
        f"feature {name!r} has {len(values)} values of bytes: expected shape {shape}, of which one axis is the most"
    )


@cache
def _example_message() -> tuple[Any, type[Exception]]:
    """Return the message class tf.train.Example (tensorflow/core/example/example.proto), and what parsing may raise."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

    field, file = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto
    made = file(name="streamline/example.proto", package="streamline", syntax="proto3")

    def add(within: Any, name: str, number: int, kind: int, of: str = "", *, many: bool = False) -> Any:
        label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        return within.field.add(name=name, number=number, type=kind, type_name=of or None, label=label)

    lists = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in lists.items():
        add(made.message_type.add(name=name), "value", 1, kind, many=True)
    feature = made.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes_list", "float_list", "int64_list"), 1):
        of = f".streamline.{list(lists)[number - 1]}"
        add(feature, name, number, field.TYPE_MESSAGE, of).oneof_index = 0
    features = made.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field.TYPE_STRING)
    add(entry, "value", 2, field.TYPE_MESSAGE, ".streamline.Feature")
    add(features, "feature", 1, field.TYPE_MESSAGE, ".streamline.Features.FeatureEntry", many=True)
    add(made.message_type.add(name="Example"), "features", 1, field.TYPE_MESSAGE, ".streamline.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(made)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("streamline.Example")), message.DecodeError


IMAGES = ("jpg", "jpeg", "png", "ppm", "webp", "bmp")
AUDIO = ("wav", "flac", "ogg", "mp3")
TEXTS = ("txt", "text")
INTEGERS = ("cls", "cls2", "index", "id", "inx")


@dataclass(frozen=True)
class _SampleDecoder:
    own: tuple[tuple[str, Callable[[Data], Any]], ...]

    def __call__(self, item: Any) -> dict[str, Any]:
        sample = item if isinstance(item, Mapping) else _sample_of(item)
        decoded = {}
        for field, data in sample.items():
            try:
                decoded[field] = self._decoded(field.rpartition(".")[2].lower(), data)
            except Exception as error:
                raise ValueError(f"sample {sample.get('__key__')!r}, field {field!r}: {error}") from error
        return decoded

    def _decoded(self, extension: str, data: Any) -> Any:
        own = dict(self.own).get(extension)
        if own is not None:
            return own(data)
        if not isinstance(data, bytes):
            return data
        if extension in IMAGES:
            return image()(data)
        if extension in AUDIO:
            return audio()(data)
        if extension in TEXTS:
            return data.decode()
        if extension in INTEGERS:
            return int(data)
        if extension in ("json", "jsn"):
            return json.loads(data)
        if extension == "npy":
            return np.load(io.BytesIO(data), allow_pickle=False)
        return data


def _sample_of(item: Any) -> dict[str, Any]:
    """Return the sample that a whole file, or a member, is."""
    path = getattr(item, "path", None) or getattr(item, "name", None)
    if not isinstance(path, str):
        raise TypeError(f"expected a sample (a dict), or an item with a path or a name and data, got {given(item)}")
    folder, slash, name = path.rpartition("/")
    key, _, field = name.partition(".")
    return {"__key__": f"{folder}{slash}{key}", field.lower(): data_of(item)}
