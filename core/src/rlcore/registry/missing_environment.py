"""The backend of the environment `python` where no program hands an environment over."""

from rlcore.registry.python_environment import PythonConfig
from rlcore.spi import ConfigError, Environment, EnvironmentContext, Problem


class MissingEnvironment(Environment):
    """Refuses to be built: ConfigError."""

    def __init__(self, context: EnvironmentContext, config: PythonConfig) -> None:  # noqa: ARG002
        expected = "an environment that a program hands over: rlcore.train(recipe, environment=…), also where a run is resumed"
        raise ConfigError([Problem(path="environment.name", found='"python", and none', expected=expected)])
