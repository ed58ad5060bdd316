"""Register the classes of models that installed packages bring for transformers: the entry points of `rlcore.model_classes`.

Importing this file imports neither torch nor transformers.
"""

from importlib.metadata import EntryPoint

from rlcore.installed import distribution_of, installed_entry_points
from rlcore.spi.errors import ModelError, Problem
from rlcore.time_limit import loading
from rlcore_torchkit.transformers_import import import_transformers

CLASS_GROUP = "rlcore.model_classes"
"""The group of entry points, each named like the `model_type` in config.json. It names a function without arguments that calls
`AutoConfig.register` and `AutoModelForCausalLM.register`."""


_registered: set[str] = set()
"""Functions that have been called in this process."""


def register_classes(model_type: str) -> None:
    """Call the functions that register the classes of `model_type`, once in a process. ModelError where one fails."""
    for point in installed_entry_points().entry_points.select(group=CLASS_GROUP, name=model_type):
        if point.value not in _registered:
            _register(point)
            _registered.add(point.value)


def registered_class(model_type: str) -> str | None:
    """Return the name of the causal language model's class that a package registers for `model_type`; None without one."""
    register_classes(model_type)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    return None if found is None else found.__name__


def _register(point: EntryPoint) -> None:
    owner = f"{point.value} of {' '.join(distribution_of(point))}"
    import_transformers()
    try:
        with loading(f"the classes {owner}"):
            point.load()()
    except Exception as error:  # a package may raise anything
        given = f"model_type {point.name}, whose classes {owner} cannot be registered: {type(error).__name__}: {error}"
        expected = "a function without arguments that registers them with transformers"
        remedy = "Repair or reinstall the package"
        raise ModelError([Problem(path=CLASS_GROUP, found=given, expected=expected, remedy=remedy)]) from error
