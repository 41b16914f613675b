"""Encodes images once, and shows their features to a model in the place of its image tokens.

The encoder is frozen, so that the features of an image are the same in sampling, scoring and the update. A forward pass gets
token ids alone. A hook on the embeddings puts the features in their place, and the model's positions of several axes are
those that its own code gives an image, moved to where the image is.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from agile_trainers.types import Picture, located

SUPPORTED = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""Model types whose sampled, scored and trained log-probabilities of images ``make architectures`` compares."""
SERVED = tuple(name for name in SUPPORTED if name != "gemma3")
"""Model types whose images vLLM takes as features. Of Gemma 3, whose image tokens see each other, it takes pixels alone."""
LANGUAGE = ("language_model", "text_model")
"""Names of the part of such a model that is trained."""
_GRID = "image_grid_thw"
_UNLIKELY = -1e4
"""Logit of a token that is not sampled: its probability is 0, and its product with that 0, of the entropy, is finite."""


@dataclass(frozen=True)
class Shown:
    """The image tokens of a forward pass, in the order of its flattened rows."""

    features: torch.Tensor
    """(N, W)."""
    rows: torch.Tensor
    """(N,) int64."""
    columns: torch.Tensor
    """(N,) int64."""


@dataclass(frozen=True)
class ImageRun:
    """Consecutive image tokens of a conversation."""

    key: str
    """Name of the features, the same for the same image."""
    start: int
    features: torch.Tensor
    """(N, W)."""
    grid: torch.Tensor | None
    """(3,) int64, patches of the image over time, height and width; None if the model has positions of one axis."""


_encoding = threading.Lock()  # batches ahead are played in another thread
_shown: Shown | None = None  # in the forward pass that runs


def image_token_id(config: PretrainedConfig) -> int:
    """Return the placeholder of a model that reads images.

    Raises:
        ValueError: If the model is not supported.
    """
    if config.model_type not in SUPPORTED:
        raise ValueError(
            f"Images are not shown to {config.model_type!r}: only to {', '.join(SUPPORTED)}. For episodes of text, pass the "
            "processor's tokenizer as `processing_class`."
        )
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


class ImageReader:
    """Encodes images with a model's own encoder, and shows them to it. There is one for each model.

    Args:
        base: The model below the adapters.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base, self._model = base, base.base_model
        self.token_id = image_token_id(base.config)
        accepted = inspect.signature(base.forward).parameters
        self._takes_types = "token_type_ids" in accepted
        self._axes = getattr(self._model, "get_rope_index", None)
        self._width = base.get_input_embeddings().weight.shape[-1]
        base.get_input_embeddings().register_forward_hook(_put)
        language = next((getattr(self._model, name) for name in LANGUAGE if hasattr(self._model, name)), None)
        if language is not None and "deepstack_visual_embeds" in inspect.signature(language.forward).parameters:
            language.register_forward_pre_hook(_stack, with_kwargs=True)
        self.suppressed: list[int] = []
        """Tokens of the vocabulary that are never sampled."""
        self._suppress()

    def encode(self, picture: Picture) -> None:
        """Give a picture its features, if it has none."""
        with _encoding, torch.no_grad():
            if picture.features is None:
                self._encode(picture)

    def _encode(self, picture: Picture) -> None:
        parameters = inspect.signature(self._model.get_image_features).parameters
        device, dtype = self._base.device, next(one.dtype for _, one in self._encoder() if one.is_floating_point())
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in picture.inputs.items()
            if name in parameters and isinstance(value, torch.Tensor)
        }
        with torch.autocast(device.type, enabled=False):
            outputs: Any = self._model.get_image_features(**inputs)
        layers = [getattr(outputs, "pooler_output", outputs), *(getattr(outputs, "deepstack_features", None) or ())]
        flat = [_flat(layer) for layer in layers]
        if any(layer.shape != (picture.count, self._width) for layer in flat):
            raise ValueError(
                f"{type(self._base).__name__} encodes an image as {[tuple(layer.shape) for layer in flat]}, for "
                f"{picture.count} placeholders of width {self._width}: the processor belongs to another model."
            )
        picture.features, picture.offsets = torch.cat(flat, dim=1), self._offsets(picture)
        picture.inputs = {name: value for name, value in picture.inputs.items() if name == _GRID}

    def runs(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[ImageRun]:
        """Return the images of a conversation as features, in order. Text inside an image divides it."""
        found = []
        for picture, places in located(ids, pictures):
            self.encode(picture)
            assert picture.features is not None
            begins = [k for k, place in enumerate(places) if not k or place != places[k - 1] + 1]
            grid = picture.inputs[_GRID][0].cpu() if _GRID in picture.inputs else None
            for first, end in itertools.pairwise([*begins, len(places)]):
                key = f"{-picture.key:x}-{first}"
                found.append(ImageRun(key, places[first], picture.features[first:end], grid))
        return found

    def inputs(self, mask: torch.Tensor, shown: Shown, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a forward pass of padded rows takes beside ids, mask and plain positions.

        Args:
            mask: (R, S), 1 on tokens.
            shown: Its image tokens.
            offsets: (N, 4) int64, of each.
        """
        found = {}
        if self._axes is not None:
            found["position_ids"] = axis_positions(mask, shown.rows, shown.columns, offsets)
        if self._takes_types:
            types = torch.zeros_like(mask, dtype=torch.long)
            types[shown.rows, shown.columns] = 1
            found["token_type_ids"] = types
        return found

    def of_rows(
        self, rows: Sequence[tuple[Sequence[int], Sequence[Picture], int]], width: int, device: torch.device
    ) -> tuple[Shown, dict[str, torch.Tensor]] | None:
        """Return the images of left-padded rows, and the inputs of a forward pass; None without any image.

        Args:
            rows: For each the ids, the images, and the number of ids at the beginning whose keys and values are kept.
            width: Columns of the pass.
            device: Of the tensors.
        """
        if not any(pictures for _, pictures, _ in rows):
            return None
        longest = max(len(ids) for ids, _, _ in rows)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        features, cells, offsets = [], [], []
        for row, (ids, pictures, _) in enumerate(rows):
            mask[row, longest - len(ids) :] = 1
            for picture, places in located(ids, pictures):
                self.encode(picture)
                assert picture.features is not None and picture.offsets is not None
                cells.append(torch.tensor([(row, place + longest - len(ids)) for place in places]))
                features.append(picture.features)
                offsets.append(picture.offsets)
        row, column = torch.cat(cells).to(device).T
        offset, whole = torch.cat(offsets).to(device), mask.to(device)
        given = self.inputs(whole, Shown(whole, row, column), offset)
        new = torch.tensor([longest - len(ids) + kept for ids, _, kept in rows], device=device)[row] <= column
        shown = Shown(torch.cat(features).to(device)[new], row[new], column[new] - (longest - width))
        given = {name: value[..., longest - width :] for name, value in given.items()}
        if not len(shown.rows):
            given.pop("token_type_ids", None)
        return shown, given

    @contextmanager
    def showing(self, shown: Shown | None) -> Iterator[None]:
        """Show images to the model in the forward pass inside the block."""
        global _shown
        before, _shown = _shown, shown if shown is not None and len(shown.rows) else None
        try:
            yield
        finally:
            _shown = before

    def freeze(self) -> list[str]:
        """Freeze what is not the language part, and return the names of what was trainable."""
        trainable = []
        for name, parameter in self._encoder():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                trainable.append(name)
        return trainable

    def _encoder(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            if not name.startswith(LANGUAGE):
                yield name, parameter

    def _offsets(self, picture: Picture) -> torch.Tensor:
        """Return the offsets (count, 4) of a picture, as the model gives them for it alone."""
        if self._axes is None:
            return torch.tensor([[0, 0, 0, 1]]).expand(picture.count, 4)
        ids = torch.full((1, picture.count), self.token_id)
        grid = picture.inputs[_GRID].cpu()
        positions, delta = self._axes(ids, mm_token_type_ids=torch.ones_like(ids), image_grid_thw=grid)
        offsets = torch.cat([positions[:, 0].T, torch.zeros(picture.count, 1, dtype=torch.long)], dim=1)
        offsets[-1, 3] = picture.count + int(delta)
        return offsets

    def _suppress(self) -> None:
        """Give the tokens of images and videos a probability of 0 in every pass, so that none is sampled."""
        config: Any = self._base.config
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        head = self._base.get_output_embeddings()
        head = getattr(head, "base_layer", head)
        bias = head.weight.new_zeros(head.weight.shape[0]) if head.bias is None else head.bias.detach().clone()
        tokens = [token for name in names if (token := getattr(config, name, None)) is not None]
        self.suppressed = [token for token in tokens if token < len(bias)]
        bias[self.suppressed] = _UNLIKELY
        head._parameters.pop("bias", None)
        head.register_buffer("bias", bias, persistent=False)


def prepare_for_images(base: PreTrainedModel) -> ImageReader:
    """Prepare a model for images, once, and return its reader."""
    reader = reader_of(base)
    if reader is None:
        reader = vars(base)["_image_reader"] = ImageReader(base)
    return reader


def reader_of(base: PreTrainedModel) -> ImageReader | None:
    """Return the reader of a model that was prepared for images; None for others."""
    reader: ImageReader | None = vars(base).get("_image_reader")
    return reader


def vllm_options(model_type: str) -> dict[str, Any]:
    """Return the fields of ``vllm.EngineArgs`` with which an engine takes images, as features.

    It encodes none and leaves out the encoder, except that of Qwen3-VL, without which it would drop the features of later
    layers.

    Args:
        model_type: One of :data:`SERVED`.
    """
    return {
        "skip_tokenizer_init": False,  # vLLM reads the model's processor
        "enable_mm_embeds": True,
        "limit_mm_per_prompt": {"image": int(model_type == "qwen3_vl"), "video": 0},
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
    }


def axis_positions(
    mask: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Compute rotary positions of three axes.

    A token of text is one step after the token before it on each axis. The tokens of an image have their own offsets from
    where it begins, and the last one makes the steps to what follows.

    Args:
        mask: (R, S), 1 on tokens.
        rows: (N,) int64, of the image tokens.
        columns: (N,) int64.
        offsets: (N, 4) int64, on the three axes, and the steps.

    Returns:
        (3, R, S) int64.
    """
    steps = mask.long().clone()
    steps[rows, columns] = offsets[:, 3]
    positions = (steps.cumsum(dim=1) - steps).expand(3, *mask.shape).clone()
    positions[:, rows, columns] += offsets[:, :3].T
    return positions


def _flat(layer: Any) -> torch.Tensor:
    whole = layer if isinstance(layer, torch.Tensor) else torch.cat(list(layer))
    return whole.flatten(0, -2)


def _put(embeddings: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Put the features of images in the place of their tokens' embeddings."""
    if _shown is None:
        return output
    features = _shown.features[:, : output.shape[-1]].to(output.device, output.dtype)
    return output.index_put((_shown.rows.to(output.device), _shown.columns.to(output.device)), features)


def _stack(language: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hand over what a model adds at image tokens to the outputs of its first layers (DeepStack)."""
    if _shown is None:
        return args, kwargs
    embedded = kwargs["inputs_embeds"]
    width = embedded.shape[-1]
    mask = torch.zeros(embedded.shape[:2], dtype=torch.bool, device=embedded.device)
    mask[_shown.rows.to(mask.device), _shown.columns.to(mask.device)] = True
    levels = _shown.features[:, width:].to(embedded.device).split(width, dim=1)
    return args, {**kwargs, "visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}
