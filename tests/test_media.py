"""Limits and rules of media: what a row may reach, what is opened, and how much of it."""

from __future__ import annotations

import base64
import io
import os
import pickle
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av
import numpy as np
import pytest
from helpers import levels, picture
from PIL import Image, ImageFile

from rollplex.data.images import open_image, to_rgb
from rollplex.data.media import MediaAccess, fetch
from rollplex.data.video import decode_video, open_video


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encoded(picture(20, 10))


# ---- what is opened ----


def test_too_many_pixels_are_found_before_a_pixel_is_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="20x10 = 200 pixels; 199 are allowed"):
        open_image(PNG, max_pixels=199)


def test_as_many_pixels_as_allowed_are_opened(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    for source in (PNG, tmp_path / "a.png", picture(20, 10)):
        assert open_image(source, max_pixels=200).size == (20, 10)
        with pytest.raises(ValueError, match="199 are allowed"):
            open_image(source, max_pixels=199)


def test_a_format_that_is_a_program_is_not_opened():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS", "Pillow itself would"
    with pytest.raises(OSError, match="cannot identify"):
        open_image(postscript)


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"])
def test_usual_formats_are_opened(kind):
    try:
        data = encoded(picture(20, 10), kind)
    except (KeyError, OSError) as error:
        pytest.skip(f"this Pillow cannot write {kind}: {error}")
    assert open_image(data).size == (20, 10)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for call in (open_image, lambda p: open_video(p, fps=None, default_fps=2.0, max_frames=8)):
        with pytest.raises(ValueError, match="not a regular file"):
            call(tmp_path / "a.png")


@pytest.mark.parametrize(("frames", "kind"), [(3, "GIF"), (3, "WEBP"), (3, "TIFF")])
def test_of_several_frames_or_pages_the_first_is_taken(frames, kind):
    pictures = [Image.new("RGB", (16, 16), (80 * i, 0, 0)) for i in range(frames)]
    data = encoded(pictures[0], kind, save_all=True, append_images=pictures[1:])
    assert np.asarray(open_image(data)).max() < 10


def test_lab_and_rgbx_have_a_rule():
    colour = picture(8, 8)
    assert np.array_equal(to_rgb(Image.frombytes("RGBX", (8, 8), colour.convert("RGBA").tobytes())), colour)
    lab = Image.merge("LAB", [Image.new("L", (4, 4), value) for value in (255, 128, 128)])
    assert np.asarray(to_rgb(lab)).min() > 245, "white"


def test_big_endian_sixteen_bit_is_the_same_picture():
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    little = Image.fromarray(values)
    big = Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes())
    assert np.array_equal(to_rgb(little), to_rgb(big))
    assert np.array_equal(np.asarray(to_rgb(little))[..., 0], np.rint(values / 257).astype(np.uint8))


# ---- videos ----


@pytest.mark.parametrize(
    ("fewest", "wanted", "rate"),
    [
        (1, [0], 0.5),
        (4, [0, 5, 10, 15], 2.0),
        (3, [0, 6, 13], 1.5),
        (20, list(range(20)), 10),
        (64, list(range(20)), 10),
    ],
)
def test_few_frames_are_filled_up_from_the_file(clip, fewest, wanted, rate):
    video = decode_video(clip, fps=0.5, max_frames=64, min_frames=fewest)
    assert levels(video) == wanted
    assert video.fps == pytest.approx(rate)


def filmed(path, seconds):
    """A file whose frame number i has level 10 * i and is shown from seconds[i] on."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for i, second in enumerate(seconds):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(1000 * second), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("rate", [24, 30])
def test_times_that_the_container_rounds_cost_no_frame(rate, tmp_path):
    path = filmed(tmp_path / "a.mkv", [i / rate for i in range(20)])
    video = decode_video(path, fps=rate, max_frames=64)
    assert levels(video) == list(range(20)) and video.fps == rate


@pytest.mark.parametrize("ending", ["mkv", "mp4"])
def test_a_frame_that_is_shown_for_long_fills_its_time(ending, tmp_path):
    """Or a model would be told that what comes after it comes at once."""
    path = filmed(tmp_path / f"a.{ending}", [0, 3, 3.1, 3.2, 3.5, 5])
    for most, wanted, rate in ((64, [0, 0, 0, 0, 0, 0, 1, 4, 4, 4, 5], 2.0), (6, [0, 0, 0, 1, 4, 5], 1.0)):
        video = decode_video(path, fps=2, max_frames=most)
        assert levels(video) == wanted and video.fps == rate


def test_limits_on_seconds_pixels_and_bytes(clip):
    whole = dict(fps=10, max_frames=64)
    assert len(decode_video(clip, **whole, max_seconds=2.0).frames) == 20
    with pytest.raises(ValueError, match=r"video_max_seconds allows 1\.5"):
        decode_video(clip, **whole, max_seconds=1.5)
    with pytest.raises(ValueError, match="64x48 = 3072 pixels; 3071 are allowed"):
        decode_video(clip, **whole, max_pixels=64 * 48 - 1)
    with pytest.raises(ValueError, match="frames of 64x48 take more"):
        decode_video(clip, **whole, max_bytes=19 * 64 * 48 * 3)
    with pytest.raises(ValueError, match="video_min_frames=9 must be between 1 and video_max_frames=8"):
        decode_video(clip, fps=1, max_frames=8, min_frames=9)


def test_limits_hold_for_frames_too():
    frames = [picture(8, 8)] * 4
    common = dict(fps=None, default_fps=2.0)
    with pytest.raises(ValueError, match="4 frames; video_max_frames allows 3"):
        open_video(frames, **common, max_frames=3)
    for source in (frames, np.zeros((4, 8, 8, 3), np.uint8)):
        with pytest.raises(ValueError, match="64 pixels; 63 are allowed"):
            open_video(source, **common, max_frames=4, max_pixels=63)
        with pytest.raises(ValueError, match="take more than"):
            open_video(source, **common, max_frames=4, max_bytes=4 * 8 * 8 * 3 - 1)


def test_a_playlist_reads_no_other_file(clip, tmp_path):
    for name, text in {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{clip}\n#EXT-X-ENDLIST\n",
        "a.ffconcat": f"ffconcat version 1.0\nfile '{clip}'\n",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises((ValueError, OSError)):
            decode_video(tmp_path / name, fps=1, max_frames=8)
        with pytest.raises((ValueError, OSError)):
            decode_video(text.encode(), fps=1, max_frames=8)
    with pytest.raises((ValueError, OSError)):
        decode_video(f"concat:{clip}|{clip}", fps=1, max_frames=8)


# ---- what a row may reach ----


@pytest.fixture
def access(tmp_path):
    """Roots data/ and more/; secret.png lies beside them."""
    for name in ("data/inner/a.png", "more/b.png", "secret.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "data" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data" / "across.png").symlink_to(tmp_path / "more" / "b.png")
    (tmp_path / "data" / "up").symlink_to(tmp_path)
    return MediaAccess.of([tmp_path / "data", tmp_path / "more"])


def test_paths_inside_the_roots_are_found(access, tmp_path):
    for text in ("inner/a.png", "inner/../inner/a.png", str(tmp_path / "data/inner/a.png")):
        assert access.image(text) == tmp_path / "data/inner/a.png"
    assert access.image("b.png") == access.image("across.png") == tmp_path / "more/b.png"
    assert access.image((tmp_path / "more/b.png").as_uri()) == tmp_path / "more/b.png"


@pytest.mark.parametrize(
    "text", ["../secret.png", "inner/../../secret.png", "out.png", "up/secret.png", "/etc/passwd", "file:///etc/passwd"]
)
def test_paths_out_of_the_roots_are_refused(access, text):
    with pytest.raises(ValueError, match=r"leads outside of .*media_roots"):
        access.image(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nothing.png", "no file 'nothing.png'"),
        ("inner/a.png/b.png", "no file"),
        ("", "is no path"),
        ("a\0.png", "is no path"),
        ("x" * 5000 + ".png", "too long"),
        ("inner", "not a regular file"),
        (17, "not int"),
        (None, "not NoneType"),
        ([], "not list"),
        ({}, "has none of bytes"),
        ({"bytes": None, "path": None}, "has none of bytes"),
        ({"base64": 5}, "must be text"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,????", "is not base64"),
        ("A" * 64 + "=====", "no file"),
        ("https://example.org/a.png", r"nothing is fetched from https://example.org"),
        ("s3://bucket/a.png", "nothing is fetched"),
        ("ftp://host/a.png", "nothing is fetched"),
    ],
)
def test_what_is_no_picture_of_a_row(access, value, message):
    with pytest.raises((ValueError, OSError), match=message):
        access.image(value)


def test_every_way_to_hold_a_picture_gives_the_same(access):
    text = base64.b64encode(PNG).decode()
    lines = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    ways = [PNG, bytearray(PNG), text, lines, f"data:image/png;base64,{text}", {"bytes": PNG, "path": None}]
    ways += [{"bytes": None, "path": "inner/a.png"}, {"base64": text}, "inner/a.png", open_image(PNG)]
    for way in ways:
        assert np.array_equal(open_image(access.image(way)), open_image(PNG)), str(way)[:40]


def test_videos_of_a_row(access):
    assert access.video("inner/a.png") == {"video": access.image("inner/a.png")}
    assert access.video({"video": PNG, "fps": 3}) == {"video": PNG, "fps": 3}
    assert access.video(["inner/a.png", PNG]) == {"video": [access.image("inner/a.png"), PNG]}
    with pytest.raises(ValueError, match="leads outside"):
        access.video(["inner/a.png", "../secret.png"])
    with pytest.raises(ValueError, match="5000 frames"):
        access.video(["inner/a.png"] * 5000)


def test_access_travels_and_refuses_bad_settings(access, tmp_path):
    assert pickle.loads(pickle.dumps(access)) == access
    with pytest.raises(ValueError, match=r"media_roots names .*secret\.png"):
        MediaAccess.of([tmp_path / "secret.png"])
    with pytest.raises(ValueError, match="give the host alone"):
        MediaAccess.of([tmp_path], ["https://example.org"])


# ---- fetching ----


class Site(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/a.png")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/a.png" else 404)
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_allowed_host_is_fetched_from_and_no_other(site, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    allowed = MediaAccess.of([tmp_path], ["127.0.0.1"])
    assert allowed.image(f"{site}/a.png") == PNG
    with pytest.raises(ValueError, match="nothing is fetched from http://localhost"):
        allowed.image(f"{site}/away")
    assert MediaAccess.of([tmp_path], ["127.0.0.1", "localhost"]).image(f"{site}/away") == PNG
    with pytest.raises(OSError, match="404"):
        allowed.image(f"{site}/nothing")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        fetch(f"{site}/a.png", allowed.url_hosts, most=10)
    with pytest.raises((ValueError, OSError), match=r"took longer than|timed out"):
        fetch(f"{site}/a.png", allowed.url_hosts, seconds=1e-9)
