"""Checking and loading of Hugging Face causal language models. Importing this file imports neither torch nor transformers."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import listed
from rlcore.spi.context import ModelSpec
from rlcore.spi.errors import ModelError, Problem, RlcoreError
from rlcore.spi.weights import VALUE_HEAD_WEIGHT, Head
from rlcore_model_files.directory import model_problems
from rlcore_model_files.file_lock import file_lock
from rlcore_torchkit.architectures.architecture import Architecture
from rlcore_torchkit.architectures.decoders import decoder_problems, described_family, is_image_model
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.architectures.registered_classes import register_classes
from rlcore_torchkit.architectures.registry import NO_FAMILIES, Families, find_architecture
from rlcore_torchkit.huggingface.quantization import quantization_problems
from rlcore_torchkit.huggingface.safetensors_files import check_hub_files, not_finite, unknown_tensors
from rlcore_torchkit.transformers_import import import_transformers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)
_MAX_NAMED = 3
_MAX_SHOWN = 300
"""Characters of what transformers says."""


def architecture_problems(path: str, head: Head = "tokens", families: Families = NO_FAMILIES) -> list[Problem]:
    """Refuse another architecture and quantised weights, from the config.json of the model at `path` alone. `families`, here
    and below, are those that the caller computes besides those that are installed.

    Empty where there is no config.json that can be read, which is a problem whatever loads the model.
    """
    file = expanded(path) / CONFIG_FILE
    config = read_object(file)
    family = config if isinstance(config, Problem) else find_architecture(config, str(file), families)
    return [] if isinstance(config, Problem) else _config_problems(str(file), config, family, head)


def architecture_of(config: Any, families: Families = NO_FAMILIES) -> Architecture:
    """Return the family of a transformers config, whatever it ends in; ModelError where it is none that is installed."""
    path, content = str(getattr(config, "name_or_path", "")), config.to_dict()
    family = find_architecture(content, path, families)
    _raise_problems(_config_problems(path, content, family, "value"))
    assert isinstance(family, Architecture)
    return family


def standard_config(config: Any, families: Families = NO_FAMILIES) -> dict[str, Any]:
    """The content of a transformers config, under the keys that most families use; ModelError as for `architecture_of`."""
    return architecture_of(config, families).standard(config.to_dict())


def dims_of(config: Any, families: Families = NO_FAMILIES) -> ModelDims:
    """The sizes of a model, from its transformers config; ModelError as for `architecture_of`."""
    dims = ModelDims.of(standard_config(config, families))
    assert dims is not None  # transformers has a value for each
    return dims


def any_decoder_problems(spec: ModelSpec, head: Head = "tokens") -> list[Problem]:
    """`architecture_problems` for what trains any decoder: also models that no family describes are fine, where transformers
    has a class for them, but with a head of values."""
    file = expanded(spec.path) / CONFIG_FILE
    config = read_object(file)
    return [] if isinstance(config, Problem) else _any_decoder_problems(str(file), config, spec, head)


def _any_decoder_problems(path: str, config: dict[str, Any], spec: ModelSpec, head: Head) -> list[Problem]:
    family = described_family(config, path)
    if family is not None or head == "value":
        return _config_problems(path, config, family or find_architecture(config, path), head)
    problems = decoder_problems(config, path, trust_remote_code=spec.trust_remote_code)
    return [*problems, *quantization_problems(path, config)]


def load_config(spec: ModelSpec, head: Head = "tokens", *, any_decoder: bool = False, families: Families = NO_FAMILIES) -> Any:
    """The model's transformers config; ModelError where it cannot be had or its architecture is not supported. `any_decoder`
    says whether one that no family describes is."""
    architecture = any_decoder_problems(spec, head) if any_decoder else architecture_problems(spec.path, head, families)
    _raise_problems([*model_problems(spec.path), *architecture])
    import_transformers()
    from transformers import AutoConfig, PreTrainedConfig

    with model_errors(spec.path), quiet_transformers(), _code_in_turn() if spec.trust_remote_code else nullcontext():
        stored, _ = PreTrainedConfig.get_config_dict(spec.path, revision=spec.revision)
        if not expanded(spec.path).is_dir():  # on the Hub, before the classes that it needs are looked for
            _raise_problems(_stored_problems(stored, spec, head, families, any_decoder=any_decoder))
        register_classes(str(stored.get("model_type")))
        config = AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
        if spec.trust_remote_code:
            _copy_code(spec, config)
    _raise_problems(_stored_problems(config.to_dict(), spec, head, families, any_decoder=any_decoder))
    if head == "value":
        config.num_labels = 1
    return config


def _stored_problems(
    content: dict[str, Any], spec: ModelSpec, head: Head, families: Families, *, any_decoder: bool
) -> list[Problem]:
    """Return the problems of a config.json that was read from the Hub, or of a transformers config's content."""
    if any_decoder:
        return _any_decoder_problems(spec.path, content, spec, head)
    return _config_problems(spec.path, content, find_architecture(content, spec.path, families), head)


def load_model(
    spec: ModelSpec,
    *,
    dtype: "torch.dtype",
    device: "torch.device | str" = "cpu",
    any_decoder: bool = False,
    head: Head = "tokens",
) -> Any:
    """The transformers causal language model with packed attention, in `dtype`, in eval mode, on `device`. With the head
    "value" the sequence classifier with one label, whose head begins at zero where a language model's directory holds none.

    With `any_decoder` also one that no family describes. On device "meta" it has
    shapes and names but no values. Nothing is printed. ModelError where it cannot be loaded.
    """
    config = load_config(spec, head, any_decoder=any_decoder)
    import torch

    from rlcore_torchkit.layers.packed_attention import attention_of, register_packed_attention

    attention = attention_of(config, register_packed_attention())
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    options["trust_remote_code"] = spec.trust_remote_code
    if torch.device(device).type == "meta":
        return empty_model(config, spec.path, head, **options).eval()
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    with model_errors(spec.path), quiet_transformers():
        check_hub_files(spec)
        load = partial(model_class(config.to_dict(), head).from_pretrained, spec.path, config=config, revision=spec.revision)
        model, loading = _with_attention(load, options)
    if head == "value" and may_lack_value_head(config) and VALUE_HEAD_WEIGHT in loading["missing_keys"]:
        torch.nn.init.zeros_(model.get_parameter(VALUE_HEAD_WEIGHT))
        loading["missing_keys"] = set(loading["missing_keys"]) - {VALUE_HEAD_WEIGHT}
    unknown = set(loading["unexpected_keys"]) - ({"lm_head.weight"} if head == "value" else set())
    unfit = [*loading_problems(spec.path, loading), *unknown_tensors(unknown, config.to_dict(), spec.path)]
    _raise_problems([*unfit, *_untied_problems(spec.path, model)])
    model = model.eval().to(device)
    _raise_problems(list(islice(not_finite(dict(model.named_parameters()), spec.path), _MAX_NAMED)))
    return model


def empty_model(config: Any, path: str, head: Head = "tokens", **options: Any) -> Any:
    """Return the model of a transformers config without weights. ModelError names `path` where it cannot be built."""
    import torch

    with torch.device("meta"), model_errors(path), quiet_transformers():
        return _with_attention(partial(model_class(config.to_dict(), head).from_config, config), options)


def _with_attention(build: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Return what `build` makes with these options; with the class's own attention where it looks that up in its own table."""
    try:
        return build(**options)
    except KeyError as error:
        if not error.args or error.args[0] != options.get("attn_implementation"):
            raise
        return build(**{**options, "attn_implementation": "eager"})


def model_class(content: Mapping[str, Any], head: Head = "tokens") -> Any:
    """Return the class of transformers that builds the model with this config.json."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    if is_image_model(content):
        return AutoModelForImageTextToText
    return AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM


def may_lack_value_head(config: Any, families: Families = NO_FAMILIES) -> bool:
    """Return whether a directory with this transformers config may lack a value head, as a language model's does."""
    return not architecture_of(config, families).is_classifier(config.to_dict())


def checkpoint_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Hugging Face name to shape of all that a checkpoint of `model`, which may be on the meta device, consists of."""
    return {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model).items()}


def checkpoint_tensors(model: Any) -> dict[str, "Tensor"]:
    """Hugging Face name to tensor of all that a checkpoint of `model` consists of.

    transformers fuses experts in memory and splits them in checkpoints; a tied tensor counts once.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict()
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    return dict(revert_weight_conversion(model, state))


def loading_problems(path: str, loading: Mapping[str, Any]) -> list[Problem]:
    """Refuse tensors that the weights lack or hold in another shape, which transformers fills with random numbers."""
    missing, problems = sorted(loading["missing_keys"]), []
    if missing:
        problems.append(_problem(path, f"no {listed(missing, _MAX_NAMED)} in the weights", "every tensor of the architecture"))
    for name, found, expected in sorted(loading["mismatched_keys"])[:_MAX_NAMED]:
        problems.append(shape_problem(path, name, found, expected))
    return problems


def shape_problem(path: str, name: str, found: Sequence[int], expected: Sequence[int], by: str = "") -> Problem:
    """Return the problem of a tensor whose shape is not the one that config.json says, `by` these keys in words."""
    return _problem(path, f"{name} of shape {list(found)}", f"{list(expected)}, as config.json says{by}")


def _untied_problems(path: str, model: Any) -> Iterator[Problem]:
    """Refuse a separate head of a model with tie_word_embeddings, which transformers accepts."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and head is not None and head.weight is not embedding.weight:
        expected = "one tensor, or tie_word_embeddings = false in config.json"
        yield _problem(path, "a head that is not the embedding", expected, "Take config.json and weights of one model")


def _problem(path: object, found: str, expected: str, remedy: str = "") -> Problem:
    return Problem(path=str(path), found=found, expected=expected, remedy=remedy)


def _raise_problems(problems: list[Problem]) -> None:
    if problems:
        raise ModelError(problems)


def _config_problems(path: str, config: dict[str, Any], family: Architecture | Problem, head: Head) -> list[Problem]:
    problems = [family] if isinstance(family, Problem) else list(family.problems(config, path, head))
    return [*problems, *quantization_problems(path, config)]


def _code_in_turn() -> AbstractContextManager[None]:
    """Let one process at a time copy code that comes with a model: transformers writes the modules in place, and another
    process would import half of one."""
    from transformers import dynamic_module_utils

    lock = Path(dynamic_module_utils.HF_MODULES_CACHE) / ".rlcore.lock"
    return file_lock(lock, lambda: logger.info("waiting for another process that copies a model's code and holds %s", lock))


def _copy_code(spec: ModelSpec, config: Any) -> None:
    """Copy all code that the config names, so that loading its classes copies none. Whoever loads them reports failures."""
    from transformers.dynamic_module_utils import get_cached_module_file

    named = (getattr(config, "auto_map", None) or {}).values()
    for reference in {each for one in named for each in (one if isinstance(one, list) else [one]) if each is not None}:
        repository, _, name = reference.rpartition("--")
        with suppress(Exception):
            revision = spec.revision if repository in ("", spec.path) else None
            get_cached_module_file(repository or spec.path, f"{name.partition('.')[0]}.py", revision=revision)


@contextmanager
def model_errors(path: str) -> Iterator[None]:
    """ModelError for whatever transformers raises of a model's files, or where they are unreachable."""
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:  # classes of models fail on values of config.json with errors of any kind
        told = " ".join(str(error).split())[:_MAX_SHOWN]
        reason = told if told and not isinstance(error, LookupError) else f"{type(error).__name__}: {told}"
        is_local = expanded(path).is_dir()
        remedy = f"Check the values in {CONFIG_FILE}" if is_local else "Check the name, or that the Hub is reachable"
        raise ModelError([_problem(path, reason, "a model that transformers can load", remedy)]) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and only errors from transformers; its settings are restored."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
