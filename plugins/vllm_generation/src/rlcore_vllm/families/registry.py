"""vLLM's registry of models."""

from rlcore_vllm.engines import versions


def registered_classes() -> dict[str, str]:
    """Return the name of vLLM's own class for each architecture that it has."""
    versions.import_without_torchao()
    from vllm import ModelRegistry

    models = ModelRegistry.models
    return {name: str(getattr(models[name], "class_name", name)) for name in ModelRegistry.get_supported_archs()}


def look_at_models_here() -> None:
    """Have vLLM look at a model's class in this process, which then imports it anyway, instead of in one that imports vLLM."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
