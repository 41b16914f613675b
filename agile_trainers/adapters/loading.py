"""Finds adapters in a folder or on the Hub and continues one as the policy. Weights are read from safetensors only."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft import get_peft_model_state_dict as adapter_weights
from peft import set_peft_model_state_dict as set_adapter_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import AutoProcessor, PreTrainedModel
from transformers.utils import cached_file, logging
from trl.trainer.utils import create_model_from_path

from agile_trainers.adapters.copies import copy_adapter
from agile_trainers.adapters.critic import VALUE_HEAD, add_critic, keep_critic
from agile_trainers.adapters.folders import CONFIG, PICKLE, RECORD, WEIGHTS, check_no_links, read_record
from agile_trainers.adapters.lora_settings import (
    REPEATABLE,
    changes_base,
    check_one_policy,
    describe,
    differing_settings,
    layers,
    merged_config,
    padded,
)
from agile_trainers.adapters.roles import CRITIC, POLICY, REFERENCE, belongs_to, is_teacher
from agile_trainers.adapters.sharding import assign_parameter
from agile_trainers.adapters.untrusted import check_model_folder, check_patterns, hub_file, naming_folder
from agile_trainers.imports import find_model_folder, nearest_folder

logger = logging.get_logger(__name__)

HEAD = "model.safetensors"
"""File of AgileRL's value head, beside its adapters."""
_MOST_LAYERS = 1000
LAYOUTS = (
    {POLICY: "", REFERENCE: REFERENCE, CRITIC: CRITIC},
    {POLICY: "actor", REFERENCE: "reference", CRITIC: CRITIC},  # AgileRL's
)
"""Known folder layouts: role to subfolder."""
_BESIDE = [
    "agile_trainers.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab*",
    "merges.txt",
]  # fmt: skip
"""Further files that are downloaded from a Hub repository: the record and the tokenizer."""


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters of a folder."""

    source: str
    """The folder or Hub id that the user gave."""
    folder: Path
    """Local folder of the files."""
    folders: dict[str, Path]
    """Role to folder: always ``default``; ``ref`` and ``critic`` if they exist."""
    config: LoraConfig
    """The policy's configuration."""
    commit: str | None = None
    """The commit on the Hub; None for a local folder."""


@dataclass(frozen=True)
class OnBase:
    """A saved adapter, and the loaded base model to put it on instead of loading another."""

    adapters: SavedAdapters
    base: PreTrainedModel


def parent_of(saved: SavedAdapters | None, model: str) -> dict[str, Any] | None:
    """Return the record of the folder or Hub repository that a policy started from, its own parents included.

    Args:
        saved: The adapters that the policy started from, if any.
        model: The trainer's ``model``, read if ``saved`` is None: a fully trained model has a record too.

    Returns:
        The record, or None if there is none.

    Raises:
        CheckpointError: If a record exists but cannot be read.
    """
    if saved is None and not (model and (Path(model) / RECORD).is_file()):
        return None
    source, folder, commit = (model, Path(model), None) if saved is None else (saved.source, saved.folder, saved.commit)
    known = read_record(folder) if (folder / RECORD).is_file() else {}
    passed_on = ("algorithm", "environment", "global_step", "parent")
    return {"source": source, "commit": commit, **{name: known.get(name) for name in passed_on}}


def find_adapters(model: str, revision: str | None = None) -> SavedAdapters | None:
    """Find the adapters in a folder (of this library, PEFT or AgileRL) or Hub repository; None if there are none.

    Args:
        model: The trainer's ``model``.
        revision: Branch, tag or commit of a Hub repository.

    Raises:
        ValueError: If the folder holds neither an adapter nor a model, or its adapter is damaged, is no LoRA adapter, is
            stored as a pickle, or does not name its base model.
    """
    folder, commit = Path(model), None
    if folder.is_dir():
        layout = next((layout for layout in LAYOUTS if (folder / layout[POLICY] / CONFIG).is_file()), None)
        if layout is None:
            _check_is_model(folder)
            check_model_folder(model, revision)
            return None
    else:
        layout = LAYOUTS[0]
        if not hub_file(model, CONFIG, revision):
            check_model_folder(model, revision)
            return None
        wanted = [(Path(name) / file).as_posix() for name in layout.values() for file in (CONFIG, WEIGHTS)]
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*wanted, *_BESIDE]))
        commit = folder.name
    check_no_links(folder, list(layout.values()))
    check_model_folder(str(folder))
    folders = {role: folder / name for role, name in layout.items() if (folder / name / CONFIG).is_file()}
    return SavedAdapters(model, folder, folders, read_config(folders[POLICY], policy=True), commit)


def _check_is_model(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    raise ValueError(
        f"{folder} holds neither an adapter ({CONFIG}, or actor/{CONFIG} as AgileRL writes it) nor a model (config.json)."
        + (f" There are adapters in its subfolders: {', '.join(inside)}." if inside else "")
    )


def read_config(folder: Path, policy: bool = False) -> LoraConfig:
    """Read the configuration of an adapter, and check that training can continue from it.

    Args:
        folder: Folder of the adapter.
        policy: True for the first adapter on its base, whose initialization may change the base deterministically.

    Raises:
        ValueError: If training cannot continue from the adapter.
    """
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # PEFT raises different exceptions
        raise ValueError(f"{folder / CONFIG} is not a PEFT configuration: {type(error).__name__}: {error}.") from error
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"{folder} holds a {kind} adapter; only {PeftType.LORA.value} adapters can be continued.")
    _check_fields(folder / CONFIG, config)
    check_one_policy(config, str(folder / CONFIG))
    repeated = REPEATABLE if policy else ()
    if changes_base(config) and config.init_lora_weights not in repeated:
        raise ValueError(
            f"{folder} was made with init_lora_weights={config.init_lora_weights!r}, which changes the base below every "
            "other adapter. Convert it to a plain one with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).is_file():
            raise ValueError(
                f"{folder} has its weights in {PICKLE}, a pickle, which can run code when it is loaded; only {WEIGHTS} is "
                "read. If you trust its source, load it with PEFT and save it again."
            )
        raise ValueError(f"{folder} has {CONFIG} but no {WEIGHTS}; it is incomplete.")
    _check_rank(folder, config)
    config.inference_mode = False
    return config


def _check_fields(path: Path, config: LoraConfig) -> None:
    """Check the types of the settings that PEFT only computes with, or matches names against."""
    texts = ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save", "target_parameters")
    wrong = [name for name in texts if not _is_texts(getattr(config, name), alone=name in texts[:3])]
    wrong += [
        name for name in ("base_model_name_or_path", "revision") if not _is_texts(getattr(config, name), within=())
    ]
    for name in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, name)
        if not (value is None or (isinstance(value, dict) and all(_is_scale(one) for one in value.values()))):
            wrong.append(name)
    wrong += [name for name in ("r", "lora_alpha", "lora_dropout") if not _is_scale(getattr(config, name))]
    tokens = config.trainable_token_indices or []
    for one in tokens.values() if isinstance(tokens, dict) else [tokens]:
        if not isinstance(one, list) or not all(type(index) is int for index in one):
            wrong.append("trainable_token_indices")
    if config.layer_replication is not None and not _is_replication(config.layer_replication):
        wrong.append("layer_replication")
    if wrong:
        raise ValueError(
            f"{path} is damaged: {wrong[0]} is {ascii(getattr(config, wrong[0]))[:80]}, which PEFT does not write. Restore "
            "the file."
        )
    if config.megatron_config is not None:
        raise ValueError(
            f"{path} sets megatron_config, for which PEFT imports the module {ascii(config.megatron_core)[:80]}. No module "
            "that an adapter names is imported; remove megatron_config."
        )


def _is_replication(value: Any) -> bool:
    """Return whether a value is a list of ranges of layers, with as many layers in all as a model may have."""
    pairs = isinstance(value, list) and all(isinstance(one, (list, tuple)) and len(one) == 2 for one in value)
    if not pairs or not all(type(number) is int for one in value for number in one):
        return False
    return all(0 <= start < end for start, end in value) and sum(end - start for start, end in value) <= _MOST_LAYERS


def _is_texts(value: Any, *, alone: bool = True, within: Any = (list, tuple, set)) -> bool:
    if isinstance(value, within):
        return all(isinstance(one, str) for one in value)
    return value is None or (alone and isinstance(value, str))


def _is_scale(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _check_rank(folder: Path, config: LoraConfig) -> None:
    """Reject a rank that no weight has, before PEFT makes matrices of that size."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            sizes = [size for name in file.keys() for size in file.get_slice(name).get_shape()]  # noqa: SIM118
    except SafetensorError as error:
        raise _damaged(folder, error) from error
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if sizes and rank > max(sizes):
        raise ValueError(
            f"{folder / CONFIG} gives the adapter rank {rank}, but the largest dimension of a weight in {WEIGHTS} is "
            f"{max(sizes)}. The two files do not belong together."
        )


def _damaged(folder: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{folder / WEIGHTS} is damaged or incomplete: {error}.")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read an adapter's weights: parameter name to tensor.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        return load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise _damaged(folder, error) from error


def load_weights(model: PeftModel, adapter: str, weights: dict[str, torch.Tensor], source: Path) -> None:
    """Load weights into an adapter of the model; the names must match exactly.

    Raises:
        ValueError: If a weight is missing, unexpected or of another shape.
    """
    try:
        result = set_adapter_weights(model, weights, adapter_name=adapter)
        missing = [n for n in result.missing_keys if belongs_to(n, adapter)]
        # With embeddings that were resized, PEFT writes those of modules_to_save a second time under this name.
        unknown = [n for n in result.unexpected_keys if n.replace(".modules_to_save.", ".") not in {*weights} - {n}]
        wrong = [*(f"{n} is missing" for n in missing), *(f"{n} is not in the model" for n in unknown)]
    except RuntimeError as error:
        wrong = [line.strip() for line in str(error).splitlines()[1:]]
    except KeyError as error:
        wrong = [f"{error.args[0]} is missing"]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise ValueError(
            f"The adapter in {source} does not fit the model {model.get_base_model().name_or_path!r}: "
            f"{'; '.join(wrong[:3])}{more}."
        )


def load_policy(
    saved: SavedAdapters,
    *,
    base: PreTrainedModel | None = None,
    peft_config: PeftConfig | None = None,
    merge_lora_configs: bool = False,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
    **model_init_kwargs: Any,
) -> PeftModel:
    """Load the base model with the saved policy as its trainable adapter ``default``.

    Args:
        saved: See :func:`find_adapters`.
        base: The adapter's base model. Default: it is loaded.
        peft_config: The requested LoRA settings. Default: those of the adapter.
        merge_lora_configs: Extend the adapter to both settings, see :mod:`agile_trainers.adapters.lora_settings`.
        seed: Seed of new weights.
        autocast_adapter_dtype: PEFT's option of that name.
        **model_init_kwargs: Arguments of the base's ``from_pretrained``.

    Raises:
        ValueError: If the base cannot be found, the adapter does not fit it, or the settings differ.
    """
    base = load_base(saved, **model_init_kwargs) if base is None else base
    check_patterns(saved.config, base, saved.folders[POLICY])
    _check_rows(base, saved.config, saved.folders[POLICY])
    config, weights = copy.deepcopy(saved.config), read_weights(saved.folders[POLICY])
    different = {} if peft_config is None else _differences(base, saved, peft_config)
    if different and not merge_lora_configs:
        raise ValueError(
            f"peft_config differs from the LoRA settings of {saved.source}:\n{describe(different)}\nLeave peft_config unset "
            "to continue with the adapter's settings, or set merge_lora_configs=True to extend it to both."
        )
    if different and changes_base(config):
        raise ValueError(
            f"{saved.source} was made with init_lora_weights={config.init_lora_weights!r}, whose part of the base depends "
            f"on the LoRA settings, so it cannot be extended:\n{describe(different)}\nLeave peft_config unset."
        )
    if different:
        assert isinstance(peft_config, LoraConfig)
        config = merged_config(base, saved.config, peft_config)
    with torch.random.fork_rng(), naming_folder(saved.source):
        torch.manual_seed(seed)
        model = get_peft_model(base, config, autocast_adapter_dtype=autocast_adapter_dtype)
    if different:
        before, after = (layers(model.get_base_model(), each) for each in (saved.config, config))
        scalings = {name: layer.scaling / after[name].scaling for name, layer in before.items()}
        fresh = adapter_weights(model, adapter_name=POLICY, save_embedding_layers=False)
        weights = padded(weights, fresh, scalings)
        logger.warning(
            "merge_lora_configs: the adapter of %s now has rank %d (was %d), lora_alpha %s (was %s) and %d modules (was "
            "%d); it computes the same function. Resolved:\n%s",
            saved.source, config.r, saved.config.r, config.lora_alpha, saved.config.lora_alpha, len(after), len(before),
            describe(different),
        )  # fmt: skip
    load_weights(model, POLICY, weights, saved.folders[POLICY])
    return model


def load_tokenizer(saved: SavedAdapters, trust_remote_code: bool = False) -> Any:
    """The tokenizer that was saved with the policy, or None: the base's will do.

    Raises:
        ValueError: If it cannot be loaded.
    """
    if not (saved.folder / "tokenizer_config.json").is_file():
        return None
    with naming_folder(str(saved.folder)):
        return AutoProcessor.from_pretrained(
            saved.folder, truncation_side="left", padding_side="left", trust_remote_code=trust_remote_code
        )


def load_base(saved: SavedAdapters, **model_init_kwargs: Any) -> PreTrainedModel:
    """Load the base model that an adapter names, with as many rows of embeddings as the adapter was trained with.

    Raises:
        ValueError: If it names none, or that cannot be loaded.
    """
    name = saved.config.base_model_name_or_path
    if not name:
        raise ValueError(
            f"{saved.folders[POLICY] / CONFIG} does not name its base model. Add the folder or Hub id of the model that the "
            'adapter was trained on as "base_model_name_or_path".'
        )
    check_model_folder(name, saved.config.revision)  # which is that of an adapter without one
    try:
        with naming_folder(name):
            base = create_model_from_path(name, **{**model_init_kwargs, "revision": saved.config.revision})
    except OSError as error:
        raise ValueError(
            f"{saved.source} was trained on {name!r} (base_model_name_or_path in its {CONFIG}), which cannot be loaded: "
            f"{error}"
        ) from error
    rows, whole = _embedding_rows(base, saved.config, saved.folders[POLICY])
    # Rows that the file does not hold would be random ones.
    if rows > base.config.get_text_config().vocab_size and all(
        shape == [rows, base.get_input_embeddings().embedding_dim] for shape in whole.values()
    ):
        with torch.random.fork_rng():
            base.resize_token_embeddings(rows, mean_resizing=False)
    return base


def _embedding_rows(base: PreTrainedModel, config: LoraConfig, folder: Path) -> tuple[int, dict[str, list[int] | None]]:
    """Return how many rows an adapter needs of the embeddings of its base, which is more where tokens were added.

    Returns:
        The number, 0 if the adapter has nothing to do with them; and the shape of each embedding that its file holds
        whole, None for one that it does not hold.
    """
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        ends = ends[:1]
    names = [name for name, module in base.named_modules() if any(module is one for one in ends)]
    whole: dict[str, list[int] | None] = dict.fromkeys(names)
    indices = config.trainable_token_indices or []
    listed = indices.values() if isinstance(indices, dict) else [indices]
    rows = [index + 1 for one in listed for index in one]
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            name = next((n for n in names if key.startswith(f"base_model.model.{n}.")), None)
            if name is None:
                continue
            shape = file.get_slice(key).get_shape()
            if key.endswith(".lora_embedding_A"):
                rows.append(shape[1])
            elif key.endswith(".lora_B.weight"):
                rows.append(shape[0])
            elif key.endswith(".weight") and ".lora_" not in key:
                whole[name] = shape
                rows.append(shape[0])
    return max(rows, default=0), whole


def _check_rows(base: PreTrainedModel, config: LoraConfig, folder: Path) -> None:
    """Reject an adapter that was trained with more tokens than its base has.

    Raises:
        ValueError: If it was.
    """
    rows, _ = _embedding_rows(base, config, folder)
    own = base.config.get_text_config().vocab_size
    if rows > own:
        raise ValueError(
            f"The adapter in {folder} was trained with {rows} rows of embeddings, and its base {base.name_or_path!r} has "
            f"{own}: tokens were added. {WEIGHTS} must hold all rows of the embeddings and of the output head; save the "
            "adapter with save_pretrained(save_embedding_layers=True), or merge it into its base (PEFT's "
            "merge_and_unload) and save that, with the tokenizer."
        )


def _differences(base: PreTrainedModel, saved: SavedAdapters, peft_config: PeftConfig) -> dict[str, tuple[Any, Any]]:
    if not isinstance(peft_config, LoraConfig):
        raise ValueError(
            f"{saved.source} is a LoRA adapter, but peft_config is a {type(peft_config).__name__}. Pass a LoraConfig or "
            "leave it unset."
        )
    return differing_settings(base, saved.config, peft_config)


def load_frozen(model: PeftModel, name: str, folder: Path) -> None:
    """Load a saved adapter under a name, to be read and never trained, replacing one of that name.

    Args:
        model: The policy.
        name: ``"ref"`` or a teacher's.
        folder: Folder of the adapter.

    Raises:
        ValueError: If the adapter does not fit the model.
    """
    config = read_config(folder)
    check_patterns(config, model.get_base_model(), folder)
    _check_rows(model.get_base_model(), config, folder)
    config.lora_dropout = 0.0  # it is never trained
    if name in model.peft_config:
        model.delete_adapter(name)
    with naming_folder(str(folder)):
        model.add_adapter(name, config)
    load_weights(model, name, read_weights(folder), folder)
    model.set_requires_grad(name, False)


def restore_adapter(model: PeftModel, adapter: str, folder: Path) -> None:
    """Load the saved weights of an adapter into a model, which may be sharded.

    Raises:
        ValueError: If a weight is missing or unexpected.
    """
    own = [(name, p) for name, p in model.named_parameters() if belongs_to(name, adapter)]
    numbered = {name: torch.tensor(index) for index, (name, _) in enumerate(own)}
    # PEFT's names of the saved weights.
    named = adapter_weights(model, numbered, adapter_name=adapter, save_embedding_layers=False)
    weights = read_weights(folder)
    if different := sorted(named.keys() ^ weights.keys()):
        raise ValueError(
            f"{folder} holds another adapter than {adapter!r}: {', '.join(different[:3])} is in one of them only."
        )
    for name, index in named.items():
        assign_parameter(own[int(index)][1], weights[name])


def restore_left_out(model: Any, folder: Path, *, fsdp: bool) -> None:
    """Restore the adapters of a checkpoint that ``Trainer`` leaves out where there are several.

    Args:
        model: The policy.
        folder: Folder of the checkpoint.
        fsdp: True if FSDP shards the model.
    """
    if not isinstance(model, PeftModel) or all(file.parent == folder for file in folder.glob("*/adapter_config.json")):
        return
    if fsdp:  # `Trainer` restores the active one alone
        for adapter in filterfalse(is_teacher, model.peft_config):
            restore_adapter(model, adapter, folder if adapter == POLICY else folder / adapter)
    else:
        # Finding adapters in subfolders, `Trainer` leaves out the one beside them.
        model.load_adapter(str(folder), POLICY, is_trainable=True)


def start_critic(
    model: PeftModel,
    saved: SavedAdapters | None,
    start: str = "auto",
    *,
    layers: int | None = None,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
) -> None:
    """Add a critic (:func:`~agile_trainers.adapters.critic.add_critic`) and initialize it as ``start`` says.

    Args:
        model: The policy.
        saved: The adapters that the policy was loaded from, if any.
        start: ``"new"``: fresh weights. ``"policy"``: a copy of the policy's adapter. ``"saved"``: the folder's critic, or
            that of the model itself. ``"auto"``: the same if there is one, else ``"new"``, or ``"policy"`` if the policy's
            initialization changed the base (PiSSA, OLoRA).
        layers: Number of last layers that the critic adapts. Default: all.
        seed: Seed of new weights.
        autocast_adapter_dtype: PEFT's option of that name.

    Raises:
        ValueError: If there is no saved critic, or it does not fit the model.
    """
    folder = saved.folders.get(CRITIC) if saved is not None else None
    if CRITIC in model.peft_config and start in ("auto", "saved"):  # an earlier trainer of this object made it
        keep_critic(model, layers)
        return
    if start == "auto" and folder is None:
        # The policy's initialization took a part of the base away, so a new critic would start from a damaged model.
        start = "policy" if changes_base(model.peft_config[POLICY]) else "new"
    elif start == "auto":
        start = "saved"
    options: dict[str, Any] = {"layers": layers, "seed": seed, "autocast_adapter_dtype": autocast_adapter_dtype}
    if start != "saved":
        add_critic(model, **options)
        if start == "policy":
            copy_adapter(model, POLICY, CRITIC, partly=layers is not None)
        return
    if saved is None or folder is None:
        place = (
            "the model was not given as a folder or Hub id of adapters" if saved is None else f"{saved.source} has none"
        )
        raise ValueError(f"critic_start='saved': {place}. Use critic_start='policy' or 'new'.")
    config = read_config(folder)
    check_patterns(config, model.get_base_model(), folder)
    with naming_folder(str(folder)):
        add_critic(model, config=config, **options)
    load_weights(model, CRITIC, _critic_weights(saved, model), folder)
    logger.info("The critic starts from %s.", folder)


def _critic_weights(saved: SavedAdapters, model: PeftModel) -> dict[str, torch.Tensor]:
    """Read the saved critic's weights with its value head, which AgileRL stores outside the adapter."""
    weights = read_weights(saved.folders[CRITIC])
    if any(f".{VALUE_HEAD}." in name for name in weights):
        return weights
    beside = saved.folder / HEAD
    head = {n.removeprefix("v_head.summary."): w for n, w in (load_file(beside) if beside.is_file() else {}).items()}
    if not {"weight", "bias"} <= set(head):
        logger.warning(
            "%s has no value head as safetensors: the head starts at zero. AgileRL writes it to pytorch_model.bin, a "
            "pickle, which is not read; if you trust it, store it as model.safetensors beside it (safetensors' save_file of "
            "torch.load(..., weights_only=True)).",
            saved.source,
        )
        head = dict(model.get_base_model().value_head.original_module.state_dict())
    return weights | {f"base_model.model.{VALUE_HEAD}.{part}": head[part] for part in ("weight", "bias")}


def check_model(name: str, revision: str | None = None, *, option: str = "model_name_or_path") -> None:
    """Check that a model can be found, by its configuration.

    Args:
        name: A folder or Hub id, of a model or an adapter.
        revision: Revision of the Hub repository.
        option: Option that has the name, for the message.

    Raises:
        ValueError: If the model cannot be found.
    """
    folder = find_model_folder(name, option)
    if folder is not None:
        find_adapters(str(folder))
        return
    try:
        cached_file(name, "config.json", revision=revision)
    except OSError as error:
        if hub_file(name, CONFIG, revision):
            return
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"{option}={name!r} is not a folder{nearest_folder(Path(name)) or ','} and cannot be found on the Hub: "
            f"{reason}. Expected a folder with config.json or adapter_config.json, or a Hub id such as "
            "'Qwen/Qwen2.5-0.5B-Instruct'."
        ) from error
