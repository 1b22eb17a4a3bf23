"""Functions for `.map` that turn bytes into arrays, by the libraries of each field: images, audio, video, Examples.

Each is made by a call that says how, is plain data (it pickles, and prints as it was written), and may be called from
several threads: their libraries release the GIL, so `.map(decode.image(), executor="thread", concurrency=8)` decodes on
eight cores.
"""

from __future__ import annotations

import errno
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, overload

from streamline.core.lazy_numpy import loaded_np, np
from streamline.core.options import check_installed, check_int, type_and_repr
from streamline.errors import DataError, PlanError, PlanTypeError

if TYPE_CHECKING:
    import numpy.typing as npt
    from av import VideoFrame
    from av.container import InputContainer

Data: TypeAlias = "bytes | bytearray | memoryview | Any"
"""Bytes, or what has them as `data`: an item of `read_files`, or of `read_tar(group=False)`."""

MODES = ("RGB", "L", "RGBA", "I;16")

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
AUDIO_FORMATS = ("WAV", "WAVEX", "AIFF", "FLAC", "OGG", "MP3")
VIDEO_FORMATS = "mp4,matroska,avi,mpegts,mpeg,flv,ogg,asf,gif"
"""What Pillow, libsndfile and FFmpeg may read, in their words, whatever a file is called. They know more: Pillow runs
Ghostscript on EPS, FFmpeg opens what concat files, playlists and SDP name."""

MP3_RATES = ((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20), (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40))
"""Of MPEG 2 and 1, layer 3, in 8,000 bits a second, as the header of a frame numbers them from 1."""


class Audio(NamedTuple):
    """A recording: `samples`, float32 (time, channels) in [-1, 1], and `rate`, how many of them are a second."""

    samples: npt.NDArray[np.float32]
    rate: int


class VideoFrames(NamedTuple):
    """Parts of a video: `frames`, uint8 (frames, height, width, 3), and `times`, float64 (frames,), in seconds."""

    frames: npt.NDArray[np.uint8]
    times: npt.NDArray[np.float64]


@overload
def image(mode: Literal["RGB", "L", "RGBA"] = "RGB") -> Callable[[Data], npt.NDArray[np.uint8]]: ...
@overload
def image(mode: Literal["I;16"]) -> Callable[[Data], npt.NDArray[np.uint16]]: ...
def image(mode: str = "RGB") -> Callable[[Data], npt.NDArray[Any]]:
    """Return a function that decodes an image to a writable uint8 array (height, width, channels).

    JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, JPEG 2000 and AVIF, nothing else. As it is stored: a camera's orientation
    isn't applied. JPEGs are decoded by simplejpeg, where it is installed, in half the time that Pillow takes for the
    same pixels; the rest by Pillow. Of 16 bits it gives the upper 8. Needs `pip install 'streamline-data[media]'`.

    Args:
      mode: "RGB"; "L": grey, (height, width); "RGBA"; "I;16": uint16 (height, width), of images in grey of 16 bits.

    Raises:
      PlanError: another mode; Pillow isn't installed.
      When an item is decoded: Pillow's UnidentifiedImageError; OSError for an image that is cut, or a JPEG that is
        damaged; DataError for pixels that don't fit the mode, or that are floats or of 32 bits.
    """
    check_installed("sl.decode.image", "PIL", "Pillow", "media")
    if mode not in MODES:
        raise PlanError(f"sl.decode.image(mode=) is one of {MODES}, got {type_and_repr(mode)}")
    return _ImageDecoder(mode)


def audio(truncated: Literal["raise", "keep"] = "raise") -> Callable[[Data], Audio]:
    """Return a function that decodes audio (WAV, AIFF, FLAC, Ogg, MP3), by soundfile. Needs `streamline-data[media]`.

    Args:
      truncated: what becomes of audio that is cut: "raise"; "keep": the frames that there are, of FLAC none.

    Raises:
      PlanError: another `truncated`; soundfile isn't installed.
      When an item is decoded: soundfile's LibsndfileError; DataError if it is cut, or of another format.
    """
    check_installed("sl.decode.audio", "soundfile", "soundfile", "media")
    if truncated not in ("raise", "keep"):
        raise PlanError(f'sl.decode.audio(truncated=) is "raise" or "keep", got {type_and_repr(truncated)}')
    return _AudioDecoder(truncated)


def video(times: Sequence[float] | int) -> Callable[[Data], VideoFrames]:
    """Return a function that decodes frames of a video, by PyAV. Needs `pip install 'streamline-data[media]'`.

    Only what lies between the key frame before a time and that time is decoded, where the container can be searched.

    Args:
      times: in seconds from the first frame, rising: for each, the frame whose time is nearest, within half of its
        length, else the one that is shown then; after the end, the last one. A number: so many frames, in the middles
        of as many equal parts of the video.

    Raises:
      PlanTypeError, PlanError: no such times; PyAV isn't installed.
      When an item is decoded: ValueError if it has no frames, DataError if it is cut before a time, or of another
        format, PyAV's FFmpegError if it is damaged, or no video.
    """
    check_installed("sl.decode.video", "av", "PyAV", "media")
    if isinstance(times, int | loaded_np.integer):
        return _VideoDecoder(check_int("sl.decode.video(times=)", times, 1))
    try:
        found = tuple(map(float, times))
    except (TypeError, ValueError):
        raise PlanTypeError(
            f"sl.decode.video(times=) is seconds, or how many frames, got {type_and_repr(times)}"
        ) from None
    if not found or not all(0 <= one <= other for one, other in zip(found, [*found[1:], math.inf], strict=True)):
        raise PlanError(f"sl.decode.video(times=) is seconds of 0 or more, rising, got {type_and_repr(times)}")
    return _VideoDecoder(found)


def example(features: Mapping[str, Sequence[int]] | None = None) -> Callable[[Data], dict[str, Any]]:
    """Return a function that parses a `tf.train.Example`, without TensorFlow. Needs `streamline-data[tfrecord]`.

    Args:
      features: those that are wanted, and the shape of each: `{"label": (), "image": (), "boxes": (-1, 4)}`; () is one
        value. None: all, each as (-1,), since an Example doesn't say which of them are single values.

    Returns:
      Of each feature: a float32 or int64 array of its shape, a scalar of NumPy's where that is (); of one of bytes, a
      list, or where its shape is (), `bytes`. Of a feature list of a SequenceExample, a list of these, one a step.

    Raises:
      PlanTypeError, PlanError: no such mapping; protobuf isn't installed.
      When an item is parsed: ValueError if it is no Example, lacks a feature, or has one of another shape; it names it.
    """
    check_installed("sl.decode.example", "google.protobuf", "protobuf", "tfrecord")
    if features is None:
        return _ExampleParser(None)
    shapes = {}
    if not isinstance(features, Mapping):
        raise PlanTypeError(
            f'sl.decode.example(features=) is {{name: shape}}, {{"label": ()}}, got {type_and_repr(features)}'
        )
    for name, shape in features.items():
        if not isinstance(shape, tuple | list):
            raise PlanTypeError(
                f"sl.decode.example(features=): expected a shape for {name!r}, () or (-1, 4), got "
                f"{type_and_repr(shape)}"
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
            raise PlanTypeError(f"sl.decode.auto({extension}=) is a function, got {type_and_repr(decoder)}")
    return _SampleDecoder(tuple(decoders.items()))


def data_of(item: Data) -> bytes | bytearray | memoryview:
    data = item if isinstance(item, bytes | bytearray | memoryview) else getattr(item, "data", None)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"expected bytes, or what has them as `data`, got {type_and_repr(item)}")
    return data


@dataclass(frozen=True)
class _ImageDecoder:
    __name__: ClassVar[str] = "decode.image"
    mode: str

    def __call__(self, item: Data) -> npt.NDArray[Any]:
        from PIL import Image, UnidentifiedImageError

        data = data_of(item)
        found = _turbo_decoded(data) if self.mode != "I;16" and bytes(data[:2]) == b"\xff\xd8" else None
        if found is not None:
            return found if self.mode == "RGB" else np.array(Image.fromarray(found).convert(self.mode))
        try:
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
                return _pixels(opened, self.mode)
        except (UnidentifiedImageError, KeyError):  # KeyError: before 11.3 Pillow has no AVIF, which it tries last
            text = f"cannot identify the image: expected {', '.join(IMAGE_FORMATS)}, got {bytes(data[:8])!r}"
            raise UnidentifiedImageError(text) from None


def _pixels(opened: Any, mode: str) -> npt.NDArray[Any]:
    """Return an image's pixels in a mode. More than 8 bits are shifted: Pillow's `convert` clips them at 255."""
    from PIL import Image

    deep = opened.mode.startswith("I") and (opened.mode, opened.format) != ("I", "TIFF")
    key = opened.info.get("transparency") if mode == "RGBA" else None
    if (not deep and (mode == "I;16" or opened.mode in ("I", "F"))) or (key and opened.tile[0][3] == "RGB;16B"):
        kind = {"F": "floating-point numbers", "I": "integers of 32 bits or with a sign"}.get(opened.mode, opened.mode)
        kind += " with a transparent colour of 16 bits" if key else ""
        raise DataError(
            f"sl.decode.image({mode!r}) takes 16 bits of grey{'' if mode == 'I;16' else ', or 8 bits'}, got "
            f"{opened.format} of {kind}: use np.array(PIL.Image.open(io.BytesIO(data))) in a function of your own"
        )
    if not deep:
        return np.array(opened.convert(mode))
    bits, black = (opened.tag_v2[258][0], opened.tag_v2.get(262)) if opened.format == "TIFF" else (16, 1)
    values = np.array(opened).astype(np.uint16) ^ (0 if black else (1 << bits) - 1)
    if mode == "I;16":
        return values
    found = np.array(Image.fromarray((values >> (bits - 8)).astype(np.uint8)).convert(mode))
    if key is not None:
        found[values == key, 3] = 0
    return found


def _turbo_decoded(jpeg: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8] | None:
    """Return the RGB pixels of a JPEG; None where Pillow is to read it, which sees no damage."""
    turbo = _turbo()
    if turbo is None:
        return None
    try:
        height, width, space, _ = turbo.decode_jpeg_header(jpeg, strict=False)
    except (ValueError, KeyError):
        return None
    if height * width > 89_478_485:  # more than Pillow takes without a word: a small file can claim any size
        return None
    inks = space in ("CMYK", "YCCK")  # of which Pillow makes another RGB
    try:
        found: npt.NDArray[np.uint8] = turbo.decode_jpeg(jpeg, colorspace="CMYK" if inks else "RGB")
    except ValueError as failure:
        way = 'on_error="skip" leaves it out, PIL.Image.open in a function of your own may take what it can'
        raise OSError(f"the JPEG is cut or damaged: {failure}; {way}") from failure
    return None if inks else found


@cache
def _turbo() -> Any:
    return None if find_spec("simplejpeg") is None else import_module("simplejpeg")


@dataclass(frozen=True)
class _AudioDecoder:
    __name__: ClassVar[str] = "decode.audio"
    truncated: str = "raise"

    def __call__(self, item: Data) -> Audio:
        import soundfile

        data = bytes(data_of(item))
        claim = _chunks_claim if data[:4] in (b"RIFF", b"FORM") else _ogg_claim if data[:4] == b"OggS" else _mp3_claim
        expected, cut, data = claim(data)
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in AUDIO_FORMATS:
                raise DataError(f"sl.decode.audio(): expected {', '.join(AUDIO_FORMATS)}, got {file.format}")
            samples = file.read(dtype="float32", always_2d=True)
            if expected == -1 or file.format == "FLAC":
                expected, cut = file.frames, cut or len(samples) < file.frames
            if cut and self.truncated == "raise":
                raise DataError(
                    f"the {file.format} is cut, or its header isn't finished: expected "
                    f"{'more than these' if expected is None else f'{expected:,}'} frames, found {len(samples):,}; "
                    'sl.decode.audio(truncated="keep") takes what there is'
                )
            return Audio(samples, file.samplerate)


def _chunks_claim(data: bytes) -> tuple[int | None, bool, bytes]:
    """Return a WAV's or AIFF's count of frames (None: unknown, -1: libsndfile's), whether it is cut, its bytes."""
    order: Literal["big", "little"] = "big" if data[:4] == b"FORM" else "little"

    def number(at: int, length: int = 4) -> int:
        return int.from_bytes(data[at : at + length], order)

    at, frames, block = 12, None, 0
    while (name := data[at : at + 4]) not in (b"data", b"SSND"):
        if len(name) < 4:
            return frames, frames != 0, data
        if name == b"fmt " and number(at + 8, 2) in (1, 3, 6, 7, 0xFFFE):  # a block is a frame
            block = number(at + 20, 2)
        elif name == b"COMM" and data[at + 26 : at + 30] != b"ima4":
            frames = number(at + 10)
        at += 8 + number(at + 4) + number(at + 4) % 2
    at, size = at + 8, number(at + 4)
    start = at + 8 * (name == b"SSND")
    tag = re.match(rb"[ -~]{4}", data[start : start + 4]) and number(start + 4) <= len(data) - start - 8
    if size <= start - at and len(data) > start and not tag:  # it was never filled in
        return 0, True, data[: at - 4] + (len(data) - at).to_bytes(4, order) + data[at:]
    cut = 0x7FFF0000 > size > len(data) - at  # SoX and FFmpeg write larger ones into a pipe, for "to the end"
    return size // block if block else frames, cut, data


def _ogg_claim(data: bytes) -> tuple[int | None, bool, bytes]:
    """Return the same of an Ogg: its last page is marked as the last."""
    at = data.rfind(b"OggS\0")
    page = data[at : at + 27].ljust(27, b"\0")
    length = 27 + page[26] + sum(data[at + 27 :][: page[26]])
    return None, not page[5] & 4 or at + length > len(data), data


def _mp3_claim(data: bytes) -> tuple[int | None, bool, bytes]:
    """Return the same of an MP3: without a count in its first frame a cut shows only in half a frame at its end."""
    at = 10 + sum(byte << 7 * place for place, byte in enumerate(data[9:5:-1])) if data[:3] == b"ID3" else 0
    counted = re.match(rb".{12,40}(Xing|Info)...[\1\3\5\7\t\v\r\17]", data[at : at + 48], re.DOTALL)
    while at + 4 <= len(data):
        head = int.from_bytes(data[at : at + 4])
        mpeg, layer, rate, hz = head >> 19 & 3, head >> 17 & 3, head >> 12 & 15, head >> 10 & 3
        if head >> 21 != 0x7FF or mpeg == 1 or layer != 1 or rate in (0, 15) or hz == 3:
            break  # a tag
        hz = (44100, 48000, 32000)[hz] >> (2, 2, 1, 0)[mpeg]
        at += 8000 * (72, 144)[mpeg // 3] * MP3_RATES[mpeg // 3][rate - 1] // hz + (head >> 9 & 1)
    return -1 if counted else None, at > len(data), data


@dataclass(frozen=True)
class _VideoDecoder:
    __name__: ClassVar[str] = "decode.video"
    times: tuple[float, ...] | int

    def __call__(self, item: Data) -> VideoFrames:
        import av

        data = bytes(data_of(item))
        options = {"format_whitelist": VIDEO_FORMATS, "protocol_whitelist": "none"}
        try:
            container = av.open(io.BytesIO(data), "r", container_options=options)
        except av.error.FFmpegError as failure:
            if failure.errno != errno.EINVAL:
                raise
            raise DataError(f"sl.decode.video(): expected {VIDEO_FORMATS}, got {data[:8]!r}…") from failure
        with container:
            reader = _FrameReader(container, 0.49 if isinstance(self.times, tuple) else 0, cut=_is_cut(data))
            shown = [reader.at(time_s) for time_s in self._frame_times(reader)]
            frames = [frame.to_ndarray(format="rgb24") for frame in shown]
            return VideoFrames(np.stack(frames), np.array([reader.time_s(frame) for frame in shown]))

    def _frame_times(self, reader: _FrameReader) -> Sequence[float]:
        if isinstance(self.times, tuple):
            return self.times
        return [reader.duration_s * (part + 0.5) / self.times for part in range(self.times)]


SEEK_S = 1.0
"""Seconds of a video that are decoded rather than looked for another key frame."""


class _FrameReader:
    """The frames of a video, asked for at rising times, in seconds after the first one; `early` of a length sooner."""

    def __init__(self, container: InputContainer, early: float = 0, *, cut: bool = False) -> None:
        if not container.streams.video:
            raise ValueError("it has no video: expected a stream of frames")
        self._container, self._stream = container, container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # calls run at a time, parts of one needn't
        self._frames, self._early, self._cut = container.decode(self._stream), early, cut
        self._length_s = float(1 / (self._stream.guessed_rate or math.inf))
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
        if time_s - self.time_s(self._shown) > SEEK_S and not self._seek(time_s):
            self._seek(0)
        while self._next is not None:
            after_s = self.time_s(self._next)
            if after_s - self._early * min(self._length_s, after_s - self.time_s(self._shown)) > time_s:
                break
            self._shown, self._next = self._next, next(self._frames, None)
        last_s = self.time_s(self._shown)
        ended = self._cut and self._next is None and time_s - last_s > (1 - self._early) * self._length_s
        if ended or self._shown.is_corrupt:
            raise DataError(f"the video is cut: expected a frame at {time_s:g} s, found the last at {last_s:g} s")
        return self._shown

    def _seek(self, time_s: float) -> bool:
        """Go to the key frame before a time; return whether one was found there: some containers only guess."""
        stream = self._stream
        assert stream.time_base is not None
        if time_s:
            self._container.seek(int((self._begin_s + time_s) / stream.time_base), stream=stream)
        else:
            self._container.seek(0)  # in MPEG-TS the first frame's time may lie behind its key frame
        self._frames = self._container.decode(stream)
        found = next(self._frames, None)
        if found is None:
            return False
        self._shown, self._next = found, next(self._frames, None)
        return self.time_s(found) <= time_s


def _is_cut(data: bytes) -> bool:
    """Whether an AVI, Matroska or MP4 says that it is longer; others don't say."""
    if data[:4] == b"RIFF":
        return int.from_bytes(data[4:8], "little") > len(data) - 8
    if data[:4] == b"\x1aE\xdf\xa3":  # the segment has all frames; its size is unknown if it is all ones
        at = data.find(b"\x18S\x80g") + 4
        length = 9 - data[at].bit_length()
        size = int.from_bytes(data[at : at + length]) - (1 << 7 * length)
        return len(data) - at - length < size < (1 << 7 * length) - 1
    at = 0 if data[4:8] == b"ftyp" else len(data)
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4]) or len(data) - at
        at += max(8, int.from_bytes(data[at + 8 : at + 16]) if size == 1 else size)
    return at > len(data)


@dataclass(frozen=True)
class _ExampleParser:
    __name__: ClassVar[str] = "decode.example"
    shapes: tuple[tuple[str, tuple[int, ...]], ...] | None

    def __call__(self, item: Data) -> dict[str, Any]:
        message, error = _example_message()
        try:
            parsed = message.FromString(bytes(data_of(item)))
        except error as failure:
            raise ValueError(
                f"expected a tf.train.Example, got {len(data_of(item)):,} bytes that are none: {failure}"
            ) from failure
        features = {entry.key: entry.value for entry in parsed.features.feature}
        lists = {entry.key: entry.value.feature for entry in parsed.feature_lists.feature_list}
        wanted = dict.fromkeys(sorted({**features, **lists}), (-1,)) if self.shapes is None else dict(self.shapes)
        if twice := features.keys() & lists.keys() & wanted.keys():
            raise ValueError(f"{min(twice)!r} is a feature of the context and a feature list: expected one of them")
        steps = {name: lists[name] if name in lists else [features.get(name)] for name in wanted}
        made = {name: [_values(name, step, wanted[name]) for step in steps[name]] for name in wanted}
        return {name: found if name in lists else found[0] for name, found in made.items()}


def _values(name: str, feature: Any, shape: tuple[int, ...]) -> Any:
    """Return what a feature holds, in its shape."""
    kind = None if feature is None else next((part.name for part, _ in feature.ListFields()), None)
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
    """Return what reads an Example and a SequenceExample (tensorflow/core/example/example.proto), and may be raised.

    On the wire their first fields, `features` and `context`, are the same, and so are a map and a list of entries.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

    field, file = descriptor_pb2.FieldDescriptorProto, descriptor_pb2.FileDescriptorProto
    made = file(name="streamline/example.proto", package="streamline", syntax="proto3")
    messages: dict[str, dict[str, Any]] = {  # "*": repeated
        "BytesList": {"*value": field.TYPE_BYTES},
        "FloatList": {"*value": field.TYPE_FLOAT},
        "Int64List": {"*value": field.TYPE_INT64},
        "Feature": {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"},
        "FeatureEntry": {"key": field.TYPE_STRING, "value": "Feature"},
        "Features": {"*feature": "FeatureEntry"},
        "FeatureList": {"*feature": "Feature"},
        "FeatureListEntry": {"key": field.TYPE_STRING, "value": "FeatureList"},
        "FeatureLists": {"*feature_list": "FeatureListEntry"},
        "Example": {"features": "Features", "feature_lists": "FeatureLists"},
    }
    for name, parts in messages.items():
        added = made.message_type.add(name=name)
        for number, (part, kind) in enumerate(parts.items(), 1):
            label = field.LABEL_REPEATED if part.startswith("*") else field.LABEL_OPTIONAL
            of = {"type_name": f".streamline.{kind}"} if isinstance(kind, str) else {"type": kind}
            added.field.add(name=part.strip("*"), number=number, label=label, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(made)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("streamline.Example")), message.DecodeError


IMAGES = ("jpg", "jpeg", "png", "ppm", "webp", "bmp")
AUDIO = ("wav", "flac", "ogg", "mp3")
TEXTS = ("txt", "text")
INTEGERS = ("cls", "cls2", "index", "id", "inx")


@dataclass(frozen=True)
class _SampleDecoder:
    __name__: ClassVar[str] = "decode.auto"
    own: tuple[tuple[str, Callable[[Data], Any]], ...]

    def __call__(self, item: Any) -> dict[str, Any]:
        sample = item if isinstance(item, Mapping) else _sample_of(item)
        decoded = {}
        for field, data in sample.items():
            try:
                decoded[field] = self._decode(field.rpartition(".")[2].lower(), data)
            except Exception as error:
                raise ValueError(f"sample {sample.get('__key__')!r}, field {field!r}: {error}") from error
        return decoded

    def _decode(self, extension: str, data: Any) -> Any:
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
        raise TypeError(
            f"expected a sample (a dict), or an item with a path or a name and data, got {type_and_repr(item)}"
        )
    folder, slash, name = path.rpartition("/")
    key, _, field = name.partition(".")
    return {"__key__": f"{folder}{slash}{key}", field.lower(): data_of(item)}
