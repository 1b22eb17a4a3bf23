"""Bytes become arrays as the libraries themselves make them, in threads and processes too."""

from __future__ import annotations

import io
import json
import pickle
import re
import struct
import zlib
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
import simplejpeg
import soundfile
from PIL import EpsImagePlugin, Image, PngImagePlugin, UnidentifiedImageError

import streamline as sl
from streamline.backends.base import Backend
from streamline.errors import DataError, PlanError, PlanTypeError
from streamline.transforms import decode
from tests.io.formats.archives import archive
from tests.io.formats.records import record_file

image_of: Any = sl.decode.image  # for modes of any type

RAMP = np.arange(2**16, dtype=np.uint16).reshape(256, 256)

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


STORED = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "RGB")]


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, kind, **options)
    return file.getvalue()


def by_pillow(data: bytes, mode: str) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize(("kind", "stored"), STORED)
def test_an_image_is_as_pillow_has_it(kind: str, stored: str, mode: Any) -> None:
    data = encoded(kind, stored)
    found = image_of(mode)(data)
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


def test_items_of_readers_are_decoded_as_they_come(tmp_path: Path, processes: Backend) -> None:
    data = encoded("PNG")
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.tar").write_bytes(archive([("a.png", data)]))
    for pipe in (sl.read_files(tmp_path / "a.png"), sl.read_tar(tmp_path / "a.tar", group=False)):
        for backend in (sl.Inline(), processes):
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


def png(pixels: Any, colour: int, transparent: bytes = b"") -> bytes:
    """Return a PNG of 16 bits, in grey (0), RGB (2), grey with alpha (4) or RGBA (6)."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = pixels.shape[:2]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0))
    rows = zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels))
    key = chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + head + key + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def tiff(pixels: Any, bits: int = 16, black: int = 1, number: int = 1) -> bytes:
    """Return a TIFF in grey, in the byte order of its pixels; a number is unsigned (1), signed (2) or a float (3)."""
    order = ">" if pixels.dtype.byteorder == ">" else "<"
    tags = {256: 256, 257: 256, 258: bits, 259: 1, 262: black, 273: 130, 277: 1, 278: 256, 279: pixels.nbytes}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in {**tags, 339: number}.items())
    head = {">": b"MM\0*", "<": b"II*\0"}[order] + struct.pack(f"{order}IH", 8, 10)
    return (head + entries).ljust(130, b"\0") + bytes(pixels.tobytes())


def saved(pixels: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


DEEP = {
    "PNG": png(RAMP, 0),
    "TIFF": tiff(RAMP),
    "TIFF of the other byte order": tiff(RAMP.astype(">u2")),
    "TIFF with LZW": saved(RAMP, "TIFF", compression="tiff_lzw"),
    "TIFF of the other byte order with LZW": saved(RAMP.astype(">u2"), "TIFF", compression="tiff_lzw"),
    "TIFF in which 0 is white": tiff(2**16 - 1 - RAMP, black=0),
    "JPEG 2000": saved(RAMP, "JPEG2000"),
    "PGM": b"P5 256 256 65535\n" + RAMP.astype(">u2").tobytes(),
    "plain PGM": b"P2 256 256 65535\n" + b" ".join(b"%d" % value for value in RAMP.flat),
}


@pytest.mark.parametrize("kind", DEEP)
def test_16_bits_are_shifted_and_come_whole_on_demand(kind: str) -> None:
    upper = RAMP >> 8
    assert np.array_equal(sl.decode.image("L")(DEEP[kind]), upper)
    assert np.array_equal(sl.decode.image("RGB")(DEEP[kind]), np.stack([upper] * 3, -1))
    assert np.array_equal(sl.decode.image("RGBA")(DEEP[kind]), np.stack([*[upper] * 3, upper * 0 + 255], -1))
    found = sl.decode.image("I;16")(DEEP[kind])
    assert np.array_equal(found, RAMP)
    assert found.dtype == np.uint16
    assert found.flags.writeable
    assert sl.decode.image("L")(DEEP[kind]).dtype == np.uint8


def test_a_png_of_16_bits_that_an_older_pillow_opens_as_32_is_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    assert np.array_equal(sl.decode.image("L")(DEEP["PNG"]), RAMP >> 8)
    assert np.array_equal(sl.decode.image("I;16")(DEEP["PNG"]), RAMP)


def test_12_bits_are_shifted_by_four() -> None:
    pairs = np.arange(2**12).repeat(16).reshape(-1, 2)
    packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], -1)
    data = tiff(packed.astype(np.uint8), bits=12)
    assert np.array_equal(sl.decode.image("L")(data), (RAMP >> 8))
    assert np.array_equal(sl.decode.image("I;16")(data), RAMP >> 4)


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_16_bits_of_several_channels_come_as_the_upper_eight(colour: int, channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 2**16, (5, 7, channels), np.uint16)
    upper = (pixels >> 8).astype(np.uint8)
    whole = upper if channels > 2 else upper[..., [0, 0, 0, 1]]
    assert np.array_equal(sl.decode.image("RGB")(png(pixels, colour)), whole[..., :3])
    if channels != 3:
        assert np.array_equal(sl.decode.image("RGBA")(png(pixels, colour)), whole)
    with pytest.raises(DataError, match=r"'I;16'\) takes 16 bits of grey, got PNG of RGB"):
        sl.decode.image("I;16")(png(pixels, colour))


def test_a_transparent_grey_of_16_bits_is_compared_whole() -> None:
    found = sl.decode.image("RGBA")(png(RAMP, 0, transparent=b"\x12\x34"))
    assert np.argwhere(found[..., 3] == 0).tolist() == [[0x12, 0x34]]
    assert np.array_equal(found[..., 0], RAMP >> 8)
    colours = png(np.stack([RAMP] * 3, -1), 2, transparent=b"\x12\x34" * 3)
    with pytest.raises(DataError, match="got PNG of RGB with a transparent colour of 16 bits"):
        sl.decode.image("RGBA")(colours)
    assert np.array_equal(sl.decode.image()(colours), np.stack([RAMP >> 8] * 3, -1))


@pytest.mark.parametrize("mode", decode.MODES)
def test_pixels_without_a_white_are_refused_by_name(mode: Any) -> None:
    floats = RAMP.astype("<f4")
    for data in (tiff(floats, 32, number=3), b"Pf\n256 256\n-1.0\n" + floats.tobytes()):
        with pytest.raises(DataError, match=r"got (TIFF|PPM) of floating-point numbers: use np.array"):
            image_of(mode)(data)
    for numbers, bits, kind in (("<i2", 16, 2), (">i2", 16, 2), ("<i4", 32, 2), ("<u4", 32, 1)):
        with pytest.raises(DataError, match="got TIFF of integers of 32 bits or with a sign"):
            image_of(mode)(tiff(RAMP.astype(numbers), bits, number=kind))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "P"])
def test_the_full_depth_of_8_bits_is_refused(kind: str) -> None:
    with pytest.raises(DataError, match=r"takes 16 bits of grey, got (JPEG|PNG) of (RGB|P)"):
        sl.decode.image("I;16")(encoded("PNG", "P") if kind == "P" else encoded(kind))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("stored", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_simplejpeg_finds_damaged_is_not_left_to_pillow(stored: str, mode: Any) -> None:
    file = io.BytesIO()
    Image.fromarray((RAMP >> 8).astype(np.uint8)).convert("RGB").convert(stored).save(file, "JPEG")
    data = file.getvalue()
    data = data[: len(data) - 400] + data[-200:]
    assert by_pillow(data, mode).size  # it says nothing
    way = 'on_error="skip" leaves it out, PIL.Image.open in a function of your own may take'
    with pytest.raises(OSError, match=f"the JPEG is cut or damaged: Corrupt JPEG data.*; {way}"):
        image_of(mode)(data)


def test_what_simplejpeg_warns_of_in_a_header_is_damage() -> None:
    data = encoded("JPEG")
    at = data.index(b"\xff\xc4")
    with pytest.raises(
        OSError, match="the JPEG is cut or damaged: Corrupt JPEG data: 5 extraneous bytes before marker"
    ):
        sl.decode.image()(data[:at] + b"\0" * 5 + data[at:])


def test_a_jpeg_that_claims_a_huge_size_is_left_to_pillow() -> None:
    data = encoded("JPEG")
    at = data.index(b"\xff\xc0") + 5
    with pytest.raises(Image.DecompressionBombError):
        sl.decode.image()(data[:at] + b"\xff\xdc" * 2 + data[at + 4 :])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_an_image_that_is_cut_fails_wherever_it_is_cut(kind: str) -> None:
    data = encoded(kind)
    whole = sl.decode.image()(data)
    for end in range(8, len(data) - 24, max(1, len(data) // 40)):
        with pytest.raises((OSError, SyntaxError, ValueError, UserWarning)):
            assert not np.array_equal(sl.decode.image()(data[:end]), whole)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 5\n%%EndComments\n(id) run\n%%EOF\n"


def test_postscript_never_reaches_ghostscript(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[Any]()
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **options: ran.append(args))
    with pytest.raises(UnidentifiedImageError, match=r"expected JPEG, PNG, .*, got b'%!PS-Ado'"):
        sl.decode.image()(EPS)
    with pytest.raises(ValueError, match="field 'jpg': cannot identify the image: expected JPEG"):
        sl.decode.auto()({"__key__": "0001", "jpg": EPS})
    assert ran == []


@pytest.mark.parametrize("kind", ["ICO", "PCX", "TGA", "SGI"])
def test_other_formats_of_pillow_are_refused(kind: str) -> None:
    with pytest.raises(UnidentifiedImageError, match="cannot identify the image: expected JPEG"):
        sl.decode.image()(encoded(kind))


def test_a_pillow_without_avif_says_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.delitem(Image.OPEN, "AVIF")
    monkeypatch.setattr(Image, "init", lambda: None)
    with pytest.raises(UnidentifiedImageError, match="cannot identify the image: expected JPEG"):
        sl.decode.image()(b"no image")


# Audio ----------------------------------------------------------------------------------------------------------------

TONE = (np.sin(np.arange(32_124) / 6) / 2).astype(np.float32)[:, None]


def sound(kind: str, subtype: str | None = None, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.repeat(TONE, channels, 1), 16_000, format=kind, subtype=subtype)
    return file.getvalue()


def mp3(**options: str) -> bytes:
    """Return an MP3 by LAME, with a count of its frames or, by `write_xing="0"`, without."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp3", options=options) as output:
        stream: Any = output.add_stream("libmp3lame", rate=44_100, layout="mono")
        frame = av.AudioFrame.from_ndarray(TONE.T.copy(), format="fltp", layout="mono")
        frame.sample_rate = 44_100
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def expected_and_found(data: bytes) -> tuple[str, int]:
    """Return the figures of the error, of which the second is the length of what is kept."""
    with pytest.raises(DataError, match="is cut, or its header isn't finished") as caught:
        sl.decode.audio()(data)
    figures = re.search(
        r"expected (.*) frames, found ([\d,]+); sl.decode.audio\(truncated=\"keep\"\)", str(caught.value)
    )
    assert figures
    found = int(figures[2].replace(",", ""))
    assert len(sl.decode.audio(truncated="keep")(data).samples) == found
    return figures[1], found


SOUNDS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "ULAW"),
    ("WAVEX", "FLOAT"),
    ("AIFF", "PCM_16"),
    ("AIFF", "FLOAT"),
]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("kind", "subtype"), SOUNDS)
def test_a_wav_or_aiff_that_is_cut_says_how_many_frames_it_lacks(kind: str, subtype: str, channels: int) -> None:
    data = sound(kind, subtype, channels)
    whole = sl.decode.audio()(data).samples
    size = channels * {"PCM_16": 2, "PCM_24": 3, "ULAW": 1, "FLOAT": 4}[subtype]
    for missing in [1, size, size + 1, 999, len(data) // 2, len(data) * 9 // 10]:
        expected, found = expected_and_found(data[:-missing])
        assert (expected, found) == ("32,124", 32_124 - -(-missing // size))
        assert np.array_equal(sl.decode.audio(truncated="keep")(data[:-missing]).samples, whole[:found])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a callback of soundfile
@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "AIFF"])
def test_a_cut_in_a_header_is_an_error(kind: str) -> None:
    data = sound(kind)
    start = data.index({"AIFF": b"SSND"}.get(kind, b"data"))
    for end in range(start + 8):
        with pytest.raises((soundfile.LibsndfileError, DataError)):
            sl.decode.audio()(data[:end])


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM"])
def test_cut_blocks_of_several_frames_are_seen(subtype: str) -> None:
    data = sound("WAV", subtype)
    assert len(sl.decode.audio()(data).samples) >= 32_124
    for missing in (1, len(data) // 2):
        assert expected_and_found(data[:-missing])[0] == "more than these"


@pytest.mark.parametrize("riff", [None, 0, 36, 2**32 - 1])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_wav_whose_size_was_never_filled_in_is_an_error(channels: int, riff: int | None) -> None:
    data = bytearray(sound("WAV", channels=channels))
    at = data.index(b"data")
    data[at + 4 : at + 8] = bytes(4)
    if riff is not None:
        data[4:8] = riff.to_bytes(4, "little")
    assert expected_and_found(bytes(data)) == ("0", 32_124)
    whole = sl.decode.audio()(sound("WAV", channels=channels))
    assert np.array_equal(sl.decode.audio(truncated="keep")(data).samples, whole.samples)


@pytest.mark.parametrize("size", [0, 8])
def test_an_aiff_whose_size_was_never_filled_in_is_an_error(size: int) -> None:
    data = bytearray(sound("AIFF"))
    at = data.index(b"SSND")
    data[at + 4 : at + 8] = size.to_bytes(4, "big")
    assert expected_and_found(bytes(data)) == ("0", 32_124)


@pytest.mark.parametrize("size", [0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("riff", [None, 0, 2**32 - 1])
def test_a_wav_that_was_written_into_a_pipe_goes_on_to_its_end(riff: int | None, size: int) -> None:
    data = bytearray(sound("WAV"))
    at = data.index(b"data")
    data[at + 4 : at + 8] = size.to_bytes(4, "little")
    if riff is not None:
        data[4:8] = riff.to_bytes(4, "little")
    assert np.array_equal(sl.decode.audio()(data).samples, sl.decode.audio()(sound("WAV")).samples)


@pytest.mark.parametrize("kind", ["WAV", "AIFF"])
def test_a_recording_of_no_frames_is_none(kind: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, TONE[:0], 16_000, format=kind)
    assert sl.decode.audio()(file.getvalue()).samples.shape == (0, 1)


def test_chunks_around_the_samples_are_no_frames() -> None:
    data = sound("WAV")
    at = data.index(b"data")
    note = b"LIST" + struct.pack("<I", 5) + b"INFO?\0"
    assert len(sl.decode.audio()(data[:at] + note + data[at:] + note).samples) == 32_124
    assert len(sl.decode.audio()(data + note[:9]).samples) == 32_124
    empty = data[: at + 4] + bytes(4) + note
    assert len(sl.decode.audio()(empty).samples) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_that_is_cut_is_an_error_wherever_it_is_cut(subtype: str) -> None:
    data = sound("OGG", subtype)
    assert len(sl.decode.audio()(data).samples) == 32_124
    assert len(sl.decode.audio()(data + b"tags" * 9).samples) == 32_124
    pages = [match.start() for match in re.finditer(b"OggS", data)]
    for end in [*pages[2:], *range(pages[2], len(data), 97), len(data) - 1]:
        try:
            assert expected_and_found(data[:end])[0] == "more than these"
        except soundfile.LibsndfileError as error:
            assert end < pages[-1], error  # noqa: PT017 - which of the two depends on how much is left


@pytest.mark.parametrize("options", [{}, {"b": "32k"}, {"id3v2_version": "0"}, {"write_id3v1": "1"}], ids=str)
def test_an_mp3_that_counts_its_frames_is_compared_with_what_is_there(options: dict[str, str]) -> None:
    data = mp3(**options)
    assert len(sl.decode.audio()(data).samples) == 32_124
    end = len(data) - 128 * ("write_id3v1" in options)
    for cut in [end - 1, end - 500, len(data) * 9 // 10, len(data) // 2, len(data) // 5]:
        expected, found = expected_and_found(data[:cut])
        assert expected == "32,124"
        assert found < 32_124


@pytest.mark.one_in(2, 1)
@pytest.mark.parametrize("options", [{}, {"id3v2_version": "0"}, {"write_id3v1": "1"}], ids=str)
def test_an_mp3_without_a_count_is_cut_if_its_last_frame_is(options: dict[str, str]) -> None:
    data = mp3(write_xing="0", **options)
    whole = sl.decode.audio()(data)
    end = len(data) - 128 * ("write_id3v1" in options)
    start = 0 if options.get("id3v2_version") else 45
    assert expected_and_found(data[: end - 1])[0] == "more than these"
    cuts, seen = range(start + 3000, end, 7), 0
    for cut in cuts:
        try:
            kept = sl.decode.audio()(data[:cut])
        except DataError:
            seen += 1
        else:
            assert len(kept.samples) % 1152 == 0
    assert seen >= len(cuts) * 0.98
    assert len(whole.samples) >= 32_124


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 24_000, 44_100, 48_000])
def test_whole_mp3s_of_all_rates_are_whole(rate: int) -> None:
    for channels in (1, 2):
        file = io.BytesIO()
        soundfile.write(file, np.repeat(TONE, channels, 1), rate, format="MP3")
        assert len(sl.decode.audio()(file.getvalue()).samples) == 32_124
        cut = file.getvalue()[:-1]
        assert expected_and_found(cut)[0] == "32,124"


def test_a_flac_that_is_cut_is_an_error_of_soundfile() -> None:
    data = sound("FLAC")
    for truncated in ("raise", "keep"):
        with pytest.raises(soundfile.LibsndfileError):
            sl.decode.audio(cast(Any, truncated))(data[: len(data) // 2])


@pytest.mark.parametrize("kind", ["AU", "CAF", "W64", "VOC"])
def test_other_formats_of_libsndfile_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"expected WAV, WAVEX, AIFF, FLAC, OGG, MP3, got {kind}"):
        sl.decode.audio()(sound(kind))


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
def video(codec: str, container: str, rate: int = FPS) -> bytes:
    """Return 90 frames of video with a key frame every 12 frames; frame n is 2 n grey."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = 12, 2
        for number in range(LENGTH):
            grey = np.full((64, 64, 3), 2 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


@cache
def all_frames(codec: str, container: str, rate: int = FPS) -> list[Any]:
    with av.open(io.BytesIO(video(codec, container, rate)), "r") as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


KINDS = [
    ("mpeg4", "mp4"),
    ("libx264", "mp4"),
    ("libx264", "matroska"),
    ("mpeg4", "avi"),
    ("mpeg4", "mpegts"),
    ("libx264", "mpegts"),
]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize(("codec", "container"), KINDS)
@pytest.mark.parametrize("times", [[0], [0.024, 0.05, 0.051, 4.44], [1.53], [0.3, 3.99, 3.99, 99], 7])
def test_frames_are_those_whose_time_is_nearest(codec: str, container: str, times: Any) -> None:
    found = sl.decode.video(times)(video(codec, container))
    seconds = times if isinstance(times, list) else [LENGTH / FPS * (part + 0.5) / times for part in range(times)]
    early = 0.49 if isinstance(times, list) else 0
    numbers = [min(LENGTH - 1, int(time_s * FPS + early + 1e-6)) for time_s in seconds]
    assert np.allclose(found.times, [number / FPS for number in numbers], atol=1e-3)
    whole = all_frames(codec, container)
    assert len(whole) == LENGTH
    assert all(np.array_equal(frame, whole[number]) for frame, number in zip(found.frames, numbers, strict=True))


def test_what_lies_far_before_a_time_is_not_decoded() -> None:
    asked = set[float]()

    class Counting(decode._FrameReader):
        def time_s(self, frame: Any) -> float:
            asked.add(frame.time)
            return super().time_s(frame)

    with av.open(io.BytesIO(video("libx264", "mp4")), "r") as container:
        assert Counting(container).at(4.0).time == 4.0
    assert len(asked) < 20


@pytest.mark.one_in(5, 3)
@pytest.mark.parametrize(("codec", "container"), KINDS)
@pytest.mark.parametrize("rounded", [np.float32, lambda time_s: round(time_s, 6), lambda time_s: round(time_s, 3)])
def test_times_that_were_rounded_find_their_frames(codec: str, container: str, rounded: Any) -> None:
    data, exact = video(codec, container, 30), [number / 30 for number in range(60)]
    found = sl.decode.video([rounded(time_s) for time_s in exact])(data)
    assert np.allclose(found.times, exact, atol=1e-3)
    whole = all_frames(codec, container, 30)
    assert all(np.array_equal(frame, whole[number]) for number, frame in enumerate(found.frames))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("time_s", [0.5, 1.5, 1.9, 99])
@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "flv"])
def test_the_only_key_frame_is_found_again(container: str, time_s: float) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.width = stream.height = 64
        for number in range(40):
            grey = np.full((64, 64, 3), 5 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        output.mux(stream.encode(None))
    assert np.allclose(sl.decode.video([time_s])(file.getvalue()).times, [min(time_s, 39 / FPS)], atol=1e-3)


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("early", [1e-3, 0.48, 0.52, 1 - 1e-3])
def test_a_time_between_two_frames_finds_the_nearer_one(early: float) -> None:
    data = video("libx264", "mp4")
    numbers = range(1, 80)
    found = sl.decode.video([(number - early) / FPS for number in numbers])(data)
    assert np.allclose(found.times, [(number - (early > 0.5)) / FPS for number in numbers])
    halves = sl.decode.video([float(np.float32((number + 0.5) / FPS)) for number in range(80)])(data)
    assert np.allclose(halves.times, [number / FPS for number in range(80)])
    assert np.allclose(sl.decode.video(LENGTH)(data).times, [number / FPS for number in range(LENGTH)])


def test_where_frames_are_far_apart_a_time_finds_the_one_that_is_shown() -> None:
    file, shown = io.BytesIO(), [0, 1, 2, 40, 41, 42, 42.25, 42.5, 90]
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=FPS)
        stream.width = stream.height = 64
        stream.codec_context.time_base = Fraction(1, 4 * FPS)
        for number, time in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = int(4 * time), Fraction(1, 4 * FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    asked = {0.4: 0, 1.4: 1, 2.4: 2, 20: 2, 30: 2, 39: 2, 40.1: 40, 42.1: 42, 42.2: 42.25, 60: 42.5, 99: 90}
    found = sl.decode.video([time / FPS for time in asked])(file.getvalue())
    assert np.allclose(found.times * FPS, list(asked.values()), atol=1e-2)


@pytest.fixture(scope="module", params=["mpeg4 mp4", "mpeg4 matroska", "mpeg4 avi", "libx264 mov", "libx264 matroska"])
def noisy_video(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a video whose frames take bytes, with its index in front."""
    codec, container = request.param.split()
    path = tmp_path_factory.mktemp("videos") / f"whole.{container}"
    with av.open(path, "w", format=container, options={"movflags": "faststart"}) as output:
        stream: Any = output.add_stream(codec, rate=FPS)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = 12
        for number in range(LENGTH):
            pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return path.read_bytes()


@pytest.mark.one_in(7, 4)
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_video_that_is_cut_has_no_frames_after_the_cut(noisy_video: bytes, share: float) -> None:
    times = [number / FPS for number in range(LENGTH)]
    whole = sl.decode.video(times)(noisy_video).frames
    data = noisy_video[: int(len(noisy_video) * share)]
    given = []
    for number, time_s in enumerate(times):
        try:
            (frame,) = sl.decode.video([time_s])(data).frames
        except (DataError, av.error.InvalidDataError):
            continue
        given.append(number)
        assert np.array_equal(frame, whole[number])
    assert given == list(range(len(given)))
    assert LENGTH * share / 2 < len(given) < LENGTH * share + 2
    with pytest.raises((DataError, av.error.InvalidDataError)):
        sl.decode.video([99])(data)


def test_a_cut_video_says_where_it_ends() -> None:
    data = video("mpeg4", "matroska")
    with pytest.raises(DataError, match=r"the video is cut: expected a frame at 4\.4 s, found the last at [23]\.\d+ s"):
        sl.decode.video([0, 4.4])(data[: len(data) * 2 // 3])


NAMES = {
    "concat": b"ffconcat version 1.0\nfile 'other.mp4'\n",
    "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1.0,\nother.ts\n#EXT-X-ENDLIST\n",
    "SDP": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 5004 RTP/AVP 96\r\n"
    b"a=rtpmap:96 H264/90000\r\n",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_video_opens_no_other_file_and_no_socket(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.mp4").write_bytes(video("mpeg4", "mp4"))
    Path("other.ts").write_bytes(video("mpeg4", "mpegts"))
    with pytest.raises((DataError, av.error.InvalidDataError), match=r"expected mp4,|Invalid data"):
        sl.decode.video(1)(NAMES[kind])
    if kind == "concat":
        with pytest.raises(DataError, match=r"expected mp4,matroska,.*, got b'ffconcat'"):
            sl.decode.video(1)(NAMES[kind])


OTHERS = [
    ("mpeg2video", "mpeg"),
    ("flv1", "flv"),
    ("libvpx", "webm"),
    ("libx264", "mov"),
    ("mpeg4", "3gp"),
    ("libvpx", "ogg"),
]


@pytest.mark.parametrize(("codec", "container"), OTHERS)
def test_the_named_containers_are_read(codec: str, container: str) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=FPS)
        stream.width = stream.height = 64
        for number in range(9):
            grey = np.full((64, 64, 3), 20 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        output.mux(stream.encode(None))
    assert sl.decode.video([0, 0.1])(file.getvalue()).frames.shape == (2, 64, 64, 3)


def test_what_is_no_video_is_said_to_be_none() -> None:
    with pytest.raises(av.error.FFmpegError):
        sl.decode.video(1)(b"no video")
    with pytest.raises(DataError, match=r"expected mp4,.*, got b'RIFF"):
        sl.decode.video(1)(sound("WAV"))
    with pytest.raises(ValueError, match="it has no video"):
        sl.decode.video(1)(sound("OGG"))


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


def sequence(context: bytes, **lists: list[bytes]) -> bytes:
    """Return a SequenceExample of a context and of feature lists, whose steps are Examples of one feature "x"."""
    entries = b""
    for name, steps in lists.items():
        features = b"".join(field(1, step[step.index(b"x") + 3 :]) for step in steps)
        entries += field(1, field(1, name.encode()) + field(2, features))
    return context + field(2, entries)


SEQUENCE = sequence(
    message(label=[7], video=[b"v"]),
    frames=[message(x=[b"one"]), message(x=[b"two", b"three"])],
    tokens=[message(x=[1]), message(x=[2])],
    none=[],
)


def test_a_sequence_example_has_its_feature_lists_too() -> None:
    found = sl.decode.example()(SEQUENCE)
    assert list(found) == ["frames", "label", "none", "tokens", "video"]
    assert (found["label"].tolist(), found["video"], found["none"]) == ([7], [b"v"], [])
    assert found["frames"] == [[b"one"], [b"two", b"three"]]
    assert [step.tolist() for step in found["tokens"]] == [[1], [2]]
    assert sl.decode.example({"tokens": (), "label": ()})(SEQUENCE) == {"tokens": [1, 2], "label": 7}
    with pytest.raises(ValueError, match=r"feature 'frames' has 2 values of bytes: expected shape \(\)"):
        sl.decode.example({"frames": ()})(SEQUENCE)


def test_a_name_of_both_parts_of_a_sequence_example_is_refused() -> None:
    twice = sequence(message(a=[1], b=[2]), a=[message(x=[1])])
    with pytest.raises(ValueError, match=r"'a' is a feature of the context and a feature list"):
        sl.decode.example()(twice)
    assert sl.decode.example({"b": ()})(twice) == {"b": 2}


def test_what_is_no_example_is_said_to_be_none() -> None:
    with pytest.raises(ValueError, match=r"expected a tf\.train\.Example, got 9 bytes that are none"):
        sl.decode.example()(b"\xff" * 9)
    assert sl.decode.example()(b"") == {}


def test_examples_of_files_resume(tmp_path: Path, processes: Backend) -> None:
    (tmp_path / "a").write_bytes(record_file(message(label=[number]) for number in range(9)))
    pipe = sl.read_tfrecord(tmp_path / "a").map(sl.decode.example({"label": ()}))
    with pipe.open(backend=processes) as stream:
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
