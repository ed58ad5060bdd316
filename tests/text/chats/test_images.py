"""Images in messages: their files, their faults, and their placeholders."""

import io
import time

import numpy as np
import pytest

from rlcore.config.model import ModelConfig
from rlcore.spi import DataError, ModelError
from rlcore_model_files.images import decode_image, load_image_processor
from rlcore_text.chats.images import Placeholders, content_fault, image_file, images_of, shown_message
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

pytest.importorskip("transformers.modeling_utils")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    return make_image_model(tmp_path_factory.mktemp("images") / "model", max_pixels=1024)


@pytest.fixture(scope="module")
def tokenizer(image_model):
    return load_tokenizer(ModelConfig(path=str(image_model)))


def png(width, height, color=(255, 0, 0)):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, format="PNG")
    return buffer.getvalue()


def user(*content):
    return [{"role": "user", "content": list(content)}]


def image(value):
    return {"type": "image", "image": value}


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.parametrize("size", [(16, 24), (9, 40), (3, 3), (300, 200)])  # the last is scaled down to 1,024 pixels
def test_there_are_as_many_placeholders_as_the_processor_makes_tokens(size, image_model, tokenizer):
    from transformers import AutoImageProcessor, AutoTokenizer

    grid = AutoImageProcessor.from_pretrained(image_model)(images=[Image.open(io.BytesIO(png(*size)))], return_tensors="np")[
        "image_grid_thw"
    ]
    shown = tokenizer.render_chat(user(text("a"), image(png(*size)), text("b")))
    own = AutoTokenizer.from_pretrained(image_model)
    pad = own.convert_tokens_to_ids("<|image_pad|>")
    assert tokenizer.encode(shown).count(pad) == int(grid.prod()) // 4
    assert shown.startswith("user: a<|vision_start|><|image_pad|>")
    assert "<|vision_end|>b" in shown


def test_each_image_has_its_own_number(tokenizer):
    shown = tokenizer.render_chat(user(image(png(8, 8)), image(png(16, 16))))
    assert [piece.count("<|image_pad|>") for piece in shown.split("<|vision_end|>")] == [1, 4, 0]


def test_what_may_be_an_image(tmp_path):
    file = png(8, 8)
    (tmp_path / "red.png").write_bytes(file)
    forms = [file, tmp_path / "red.png", {"bytes": file, "path": None}, {"bytes": None, "path": str(tmp_path / "red.png")}]
    assert images_of(user(*map(image, forms))) == (file,) * 4
    pixels = np.asarray(decode_image(image_file(decode_image(file))))
    assert np.array_equal(pixels, np.asarray(decode_image(file)))


def test_texts_alone_are_one_text():
    assert shown_message({"role": "user", "content": [text("a"), text("b")]}) == {"role": "user", "content": "ab"}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (3, "int"),
        ("a\ud800", "half a character"),
        ([text("a"), text("\udc00")], "part 1 has half a character"),
        (["a"], "part 0"),
        ([text("a"), {"type": "video"}], "part 1"),
        ([text(None)], "NoneType"),
        ([image(None)], "without"),
    ],
)
def test_content_that_is_none(content, fault):
    assert fault in content_fault(content)


def test_content_that_is_one():
    assert [content_fault(one) for one in ("a", [text("a"), image("a.png")])] == [None, None]


@pytest.mark.parametrize(
    ("value", "reason"),
    [("no.png", "no.png"), (b"none", "4 bytes"), (png(64, 64)[:60], "60 bytes"), (3, "int"), (png(3000, 2), "aspect ratio")],
)
def test_an_image_that_cannot_be_read(value, reason, tokenizer):
    with pytest.raises(DataError, match=reason):
        tokenizer.render_chat(user(image(value)))


def test_more_pixels_than_pillow_trusts(tokenizer, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="too large"):
        tokenizer.render_chat(user(image(png(64, 64))))


def test_a_placeholder_in_the_text_of_a_message_is_refused(tokenizer):
    with pytest.raises(DataError, match="2 placeholders"):
        tokenizer.render_chat(user(text("<|image_pad|>"), image(png(8, 8))))
    with pytest.raises(DataError, match="for 0 images"):
        tokenizer.render_chat([{"role": "user", "content": "<|image_pad|>"}])


def test_a_model_of_text_refuses_images(tmp_path):
    of_text = load_tokenizer(ModelConfig(path=str(make_model(tmp_path / "model"))))
    with pytest.raises(DataError, match="text alone"):
        of_text.render_chat(user(image(png(8, 8))))


def test_a_model_without_an_image_processor(tmp_path):
    with pytest.raises(ModelError, match="preprocessor_config"):
        load_image_processor(str(make_model(tmp_path / "model")), None, trust_remote_code=False)


def test_an_image_processor_with_code_of_its_own_is_refused_with_the_option_that_trusts_it(image_model, monkeypatch):
    def refuse(*_, trust_remote_code, **__):
        raise ValueError("... set the option `trust_remote_code=True` to remove this error.")

    monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"model\.trust_remote_code"):
        load_image_processor(str(image_model), None, trust_remote_code=False)


def test_an_image_processor_that_takes_too_long_is_named(image_model, monkeypatch):
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.2)
    monkeypatch.setattr("transformers.AutoImageProcessor.from_pretrained", lambda *_, **__: time.sleep(1000))
    with pytest.raises(ModelError, match=r"image processor .* 0\.2 s"):
        load_image_processor(str(image_model), None, trust_remote_code=False)


def test_a_processor_scales_by_its_own_merging():
    class Processor:
        merge_size = 3

        def get_number_of_image_patches(self, height, width, options):
            return height * width

    assert Placeholders(processor=Processor(), token="*").expanded("a*b", [png(6, 9)]) == "a" + "*" * 6 + "b"
