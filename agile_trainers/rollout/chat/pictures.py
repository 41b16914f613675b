"""Turns images into the placeholders of a conversation and the inputs of an image encoder, with the model's processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from transformers.processing_utils import ProcessorMixin

from agile_trainers.envs.images import check_images, opened
from agile_trainers.types import Image, Message, Picture, images_of

_EXACT: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
_NOT_FOR_ENCODERS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Pictures:
    """Makes pictures, one for each image that is in use.

    Args:
        processor: The model's.
        token_id: The placeholder.

    Raises:
        ValueError: If the processor has no placeholder for an image, or writes more or fewer for an image beside another.
    """

    def __init__(self, processor: ProcessorMixin, token_id: int) -> None:
        self._processor: Any = processor
        self._token_id = token_id
        self._made = WeakValueDictionary[str, Picture]()
        self.mark: str = processor.image_token
        """The text of a chat template for an image."""
        tokenizer = self._processor.tokenizer
        self.special = {tokenizer.convert_tokens_to_ids(self.mark), token_id}
        """Tokens that a message's text may not spell out."""
        if tokenizer.unk_token_id in self.special:
            raise ValueError(f"The tokenizer has no token for {self.mark!r}, the processor's placeholder of an image.")
        self._check()

    def of(self, messages: Sequence[Message]) -> list[Picture]:
        """Return the pictures of the images in messages, in order.

        Raises:
            ImageError: If they are too many.
            ValueError: If the processor rejects an image.
        """
        images = images_of(messages)
        if images:
            check_images(messages)
        return [self._picture(image) for image in images]

    def expanded(self, text: str, pictures: Sequence[Picture]) -> str:
        """Replace the template's marks in a rendered conversation by the placeholders of its images.

        Raises:
            ValueError: If there are more or fewer marks than images.
        """
        pieces = text.split(self.mark)
        if len(pieces) != len(pictures) + 1:
            raise ValueError(
                f"The chat template writes {len(pieces) - 1} image(s) as {self.mark!r}, but the messages have "
                f"{len(pictures)}. Use the model's own template, and images in messages of roles for which it writes them."
            )
        return pieces[0] + "".join(one.text + piece for one, piece in zip(pictures, pieces[1:], strict=True))

    def _picture(self, image: Image) -> Picture:
        digest = image.digest
        picture = self._made.get(digest)
        if picture is None:
            picture = self._made[digest] = self._process(image)
        return picture

    def _process(self, image: Image) -> Picture:
        inputs = self._run([opened(image)])
        ids = inputs["input_ids"][0].tolist()
        encoder = {name: value for name, value in inputs.items() if name not in _NOT_FOR_ENCODERS}
        text = self._processor.tokenizer.decode(ids, **_EXACT)
        return Picture(-1 - int(image.digest[:15], 16), text, self._token_id, ids.count(self._token_id), encoder)

    def _run(self, images: list[Any]) -> Any:
        text = self.mark * len(images)
        try:
            return self._processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # an image of extreme proportions, for example
            raise ValueError(
                f"{type(self._processor).__name__} rejects an image of {images[0].size[0]} x {images[0].size[1]} pixels: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _check(self) -> None:
        import PIL.Image

        images = [PIL.Image.new("RGB", size) for size in ((64, 64), (128, 64))]
        together, *alone = (
            self._run(shown)["input_ids"][0].tolist().count(self._token_id)
            for shown in (images, *([image] for image in images))
        )
        if together != sum(alone):
            raise ValueError(
                f"{type(self._processor).__name__} writes other placeholders for an image when another is beside it: an "
                "earlier turn would change when the next image is shown. Choose another model, or pass the processor's "
                "tokenizer as `processing_class` for episodes of text."
            )
        if not alone[0]:
            raise ValueError(
                f"{type(self._processor).__name__} writes no placeholder (token {self._token_id}) for an image."
            )
